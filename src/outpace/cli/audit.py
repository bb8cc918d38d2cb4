"""`outpace audit`: is the output the target's?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from . import common

if TYPE_CHECKING:
    from rich.console import Console

    from ..assembly import Assembly
    from ..audit import Report, System
    from ..audit.report import Part, Sampled
    from ..generator import Generator


@common.with_sampling(temperature=0.8)
def audit(
    sampling: Mapping[str, Any],
    model: common.Model = "demo",
    drafter: common.DrafterName = None,
    k: Annotated[
        str | None,
        typer.Option(
            "-k",
            "--k",
            help="Tokens drafted per round, or 'auto'; by default the drafter's own, or 4.",
        ),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option("--verifier", help="Rule of outpace under audit; by default as generate."),
    ] = None,
    tree: common.TreeName = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", help="Who is audited: outpace, transformers, or an endpoint's URL."
        ),
    ] = "outpace",
    prompt_lookup: Annotated[
        int | None,
        typer.Option(
            "--prompt-lookup", min=1, help="transformers: n-grams propose so many tokens."
        ),
    ] = None,
    early_exit: Annotated[
        int | None, typer.Option("--early-exit", min=1, help="transformers: so many layers draft.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="The target's name at the endpoint.")
    ] = None,
    together: Annotated[
        int | None,
        typer.Option(
            "--together", min=1, help="Samples per request to the endpoint (n); by default 16."
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode", help="greedy, sampled or exact (repeatable); by default all that fit."
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-s", help="Sampled texts, over all prompts, at most.")
    ] = 4000,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", help="Length of a sampled text, by default 8; of a greedy one at T = 0, 64."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", "-p", help="How many prompts.")] = 4,
    prompt_file: common.PromptFile = None,
    false_alarm: Annotated[
        float, typer.Option("--false-alarm", help="How often a sound engine may be accused.")
    ] = 1e-4,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the first sample.")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a picture (png, svg, pdf).")
    ] = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    compile: common.Compile = None,
    quantize: common.Quantize = None,
    as_json: common.AsJson = False,
    no_color: common.NoColor = False,
) -> int:
    """Decide whether an engine's output is the target's own; exit code 1 if it is not."""
    import importlib.util

    from rich.console import Console

    from ..audit import audit as run
    from ..audit import scorers
    from ..audit.endpoint import check_sendable
    from ..audit.exact import check_rule
    from ..audit.hf import check_early_exit, generate_options
    from ..audit.plot import plot as draw
    from ..audit.run import check_modes
    from ..audit.sampled import check_samples
    from ..audit.statistics import check_false_alarm
    from ..models.loading import inspect_checkpoint
    from ..pictures import check_path
    from ..types import SamplingParams

    cold = sampling["temperature"] == 0
    length = tokens if tokens is not None else 64 if cold else 8
    params = SamplingParams(max_new_tokens=length, **sampling)
    check_modes(mode)
    if mode and params.greedy and set(mode) != {"greedy"}:
        raise OptionError("at temperature 0 there is only --mode greedy: raise --temperature")
    check_samples(samples)
    check_false_alarm(false_alarm)
    ours = engine == "outpace"
    given = {
        "--prompt-lookup": prompt_lookup,
        "--early-exit": early_exit,
        "--verifier": verifier,
        "--tree": tree,
        "--served-model": served_model,
        "--together": together,
        "-k": k,
    }
    _check_engine(engine, drafter, {name for name, value in given.items() if value is not None})
    drafted = None if k is None else common.draft_length(k)
    if not ours and isinstance(drafted, str):
        raise OptionError(f"-k {k} is about rounds of outpace, not {engine}: give a number")
    drafted = 4 if drafted is None and not ours else drafted
    if not ours and not params.transform_draft:
        raise OptionError(f"--target-alone is about drafts of outpace, not {engine}: leave it out")
    if engine == "transformers":
        if quantize is not None:
            raise OptionError(
                "transformers does not run our quantised target: leave --quantize out"
            )
        generate_options(params, ())
        if early_exit is not None:
            check_early_exit(early_exit, inspect_checkpoint(model).config)
    elif not ours:
        check_sendable(params)
    exact = "exact" in (mode or ())
    if exact and not ours:
        raise OptionError(f"--mode exact cannot enumerate {engine}: use --mode sampled")
    for package in ("scipy", "matplotlib") if plot else ("scipy",):
        if importlib.util.find_spec(package) is None:
            raise OptionError(f"an audit needs {package}: pip install 'outpace[audit]'")
    if plot is not None:
        if params.greedy or (mode and "sampled" not in mode):
            raise OptionError("--plot shows samples: add --mode sampled, at a temperature above 0")
        check_path(plot)
    texts = common.prompts_of(prompt_file, prompts)
    name = common.drafter_for(model, drafter, None)
    if not ours and (prompt_lookup is not None or early_exit is not None):
        name = None
    if ours and (name is None or drafted == 0):
        raise OptionError("nothing is drafted, so there is nothing to audit: give --drafter and -k")

    def check(assembly: Assembly) -> None:
        if exact:
            check_rule(assembly.verifier, params)
        assembly.check(params, texts)

    generator = common.load_with_bar(
        model,
        name,
        drafted,
        dtype,
        device,
        check=check,
        compile=compile,
        quantize=quantize,
        verifier=verifier,
        tree=tree,
        max_batch=16,
    )
    assert generator.tokenizer is not None
    ids = [generator.tokenizer.encode(text) for text in texts]
    system: Generator | System = generator
    if engine == "transformers":
        assert isinstance(drafted, int)
        system = _transformers(generator, model, name, drafted, prompt_lookup, early_exit)
    elif served_model is not None:
        system = _endpoint(generator, engine, served_model, together or 16)
    scorer, draft = scorers(generator)
    with common.progress_bars(no_color) as advance:
        report = run(
            system,
            ids,
            params,
            scorer=scorer,
            draft=draft,
            modes=mode or None,
            samples=samples,
            greedy_tokens=length if cold else 64,
            false_alarm=false_alarm,
            seed=seed,
            progress=advance,
        )
    if plot is not None:
        draw(report, plot)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        _print(report, Console(no_color=no_color, highlight=False))
    return 0 if report.sound else 1


def _check_engine(engine: str, drafter: str | None, given: Set[str]) -> None:
    """Whether what was given is for this engine."""
    url = engine.startswith(("http://", "https://"))
    if not url and engine not in ("outpace", "transformers"):
        raise OptionError(
            f"unknown engine {engine!r}: it is outpace, transformers, or a URL like "
            "http://localhost:8000/v1"
        )
    assistance = sorted(given & {"--prompt-lookup", "--early-exit"})
    if assistance and engine != "transformers":
        raise OptionError(f"{assistance[0]} goes with --engine transformers")
    if len(assistance) > 1 or (assistance and drafter not in (None, "none")):
        raise OptionError("--drafter, --prompt-lookup and --early-exit exclude each other")
    if engine == "transformers" and drafter not in (None, "none"):
        from ..drafters import Checkpoint, parse

        if type(parse(drafter)) is not Checkpoint:
            raise OptionError(
                f"transformers drafts with a model, not with {drafter!r}: give its folder or hub "
                "id, or --prompt-lookup or --early-exit"
            )
    if engine != "outpace" and (ours := sorted(given & {"--tree", "--verifier"})):
        raise OptionError(f"{ours[0]} is about rounds of outpace, not {engine}: leave it out")
    if "-k" in given and (url or "--prompt-lookup" in given):
        who = "the endpoint" if url else "--prompt-lookup"
        raise OptionError(f"-k says nothing to {who}, which has a number of its own: leave it out")
    if served := sorted(given & {"--served-model", "--together"} if not url else ()):
        raise OptionError(f"{served[0]} goes with an endpoint: give its URL as --engine")
    if url and "--served-model" not in given:
        raise OptionError("--served-model: by which name does the endpoint serve the target?")


def _transformers(
    generator: Generator,
    model: str,
    drafter: str | None,
    k: int,
    prompt_lookup: int | None,
    early_exit: int | None,
) -> System:
    from ..audit import TransformersSystem
    from ..audit.hf import load_causal_lm
    from ..models.loading import inspect_checkpoint

    target = generator.engine.target
    names = [model] if drafter is None or not k else [model, drafter]
    loaded = [load_causal_lm(inspect_checkpoint(n), target.dtype, target.device) for n in names]
    return TransformersSystem(
        loaded[0],
        assistant=loaded[1] if len(loaded) > 1 else None,
        prompt_lookup=prompt_lookup,
        early_exit=early_exit,
        k=k,
        eos=generator.eos_token_ids,
    )


def _endpoint(generator: Generator, url: str, served: str, together: int) -> System:
    from ..audit import EndpointSystem

    key = os.environ.get("OPENAI_API_KEY")
    eos = generator.eos_token_ids
    return EndpointSystem(url, served, eos=eos, together=together, key=key)


def _print(report: Report, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..audit.report import Sampled

    console.print(report.system, markup=False)
    sampled = report.parts.get("sampled")
    if isinstance(sampled, Sampled):
        _print_tests(sampled, console)
    lines = Table.grid(padding=(0, 2, 0, 0))
    for mode, part in report.parts.items():
        mark = Text("ok", "green") if part.sound else Text("FAIL", "red")
        lines.add_row(mark, mode, Text(part.summary()))
        for remark in _remarks(part):
            lines.add_row("", "", Text(remark))
    for mode, why in report.left_out.items():
        lines.add_row("-", mode, Text(f"left out: {why}"))
    console.print(lines)
    verdict = (
        "no difference from the target was found" if report.sound else "NOT the target's output"
    )
    console.print(f"[bold]{verdict}[/bold]")


def _remarks(part: Part) -> Iterator[str]:
    """What is to be said beyond the summary."""
    from ..audit.report import Sampled

    if not isinstance(part, Sampled):
        return
    yield from part.defects[1:]
    if part.borderline:
        yield f"{part.borderline} tokens are just beyond a filter's boundary, as by rounding"
    if part.repeated is not None:
        same, whole = part.repeated
        yield f"of {whole} seeds {same} gave the same text alone as together"


def _print_tests(part: Sampled, console: Console) -> None:
    from rich.table import Table

    from ..audit.report import worst_by_position

    table = Table()
    for head in ("position", "worst test", "samples", "G", "df", "p", "off by", "detects"):
        table.add_column(head, justify="left" if head == "worst test" else "right", no_wrap=True)
    for t in worst_by_position(part.tests):
        table.add_row(
            str(t.position),
            t.kind,
            str(t.samples),
            f"{t.statistic:.4g}",
            str(t.degrees),
            f"{t.p_value:.1g}",
            f"{t.distance:.3f}",
            f"{t.detectable:.3f}",
            style="red" if t.p_value < part.share else None,
        )
    console.print(table)
    console.print(
        f"a test decides at p < {part.share:.1e}, so that all of them accuse a sound engine "
        f"{part.false_alarm:g} of the time at most; df: degrees of freedom, off by: total "
        "variation beyond what chance makes, detects: the least that this test finds 9 times in 10",
        style="dim",
    )

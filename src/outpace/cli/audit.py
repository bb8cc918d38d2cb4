"""`outpace audit`: is the output the target's?"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from . import common

if TYPE_CHECKING:
    from rich.console import Console

    from ..assembly import Assembly
    from ..audit import Report, System
    from ..audit.report import Sampled
    from ..generator import Generator


@common.with_sampling(temperature=0.8)
def audit(
    sampling: Mapping[str, Any],
    model: common.Model = "demo",
    drafter: common.DrafterName = None,
    k: common.DraftLength = 4,
    verifier: common.VerifierName = "token",
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
        int, typer.Option("--together", min=1, help="Samples per request to the endpoint (n).")
    ] = 16,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode", help="greedy, sampled or exact (repeatable); by default all that fit."
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-s", help="Sampled texts, over all prompts, at most.")
    ] = 4000,
    tokens: Annotated[int, typer.Option("--tokens", help="Length of a sampled text.")] = 8,
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
    from rich.progress import Progress

    from ..audit import audit as run
    from ..audit import scorers
    from ..audit.hf import generate_options
    from ..audit.plot import plot as draw
    from ..audit.run import check_modes
    from ..audit.statistics import check_false_alarm
    from ..bench.prompts import held_out_prompts
    from ..types import SamplingParams
    from ..verifiers import make_verifier

    params = SamplingParams(max_new_tokens=tokens, **sampling)
    if prompts < 1 or samples < 1:
        raise OptionError("--prompts and --samples must be at least 1")
    check_modes(mode)
    if mode and params.greedy and set(mode) != {"greedy"}:
        raise OptionError("at temperature 0 there is only --mode greedy: raise --temperature")
    check_false_alarm(false_alarm)
    ours = engine == "outpace"
    _check_engine(engine, drafter, prompt_lookup, early_exit, served_model)
    if engine == "transformers":
        if quantize is not None:
            raise OptionError(
                "transformers does not run our quantised target: leave --quantize out"
            )
        generate_options(params, ())
    if mode and "exact" in mode and (not ours or make_verifier(verifier).coupled):
        whom = f"the verifier {verifier!r}" if ours else engine
        raise OptionError(f"--mode exact cannot enumerate {whom}: use --mode sampled")
    if plot is not None and (params.greedy or (mode and "sampled" not in mode)):
        raise OptionError("--plot shows samples: add --mode sampled, at a temperature above 0")
    for package in ("scipy", "matplotlib") if plot else ("scipy",):
        if importlib.util.find_spec(package) is None:
            raise OptionError(f"an audit needs {package}: pip install 'outpace[audit]'")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise OptionError(f"cannot write the plot to {plot}: there is no such folder")
    texts = common.read_prompts(prompt_file, prompts) if prompt_file else held_out_prompts(prompts)

    def check(assembly: Assembly) -> None:
        for text in texts:
            assembly.check(params, text)

    name = common.drafter_for(model, drafter)
    if not ours and (prompt_lookup is not None or early_exit is not None):
        name = None
    if ours and (name is None or not k):
        raise OptionError("nothing is drafted, so there is nothing to audit: give --drafter and -k")
    generator = common.load_with_bar(
        model,
        name,
        k,
        dtype,
        device,
        check=check,
        compile=compile,
        quantize=quantize,
        verifier=verifier,
        max_batch=16,
    )
    assert generator.tokenizer is not None
    ids = [generator.tokenizer.encode(text) for text in texts]
    system: Generator | System = generator
    if engine == "transformers":
        system = _transformers(generator, model, name, k, prompt_lookup, early_exit)
    elif served_model is not None:
        system = _endpoint(generator, engine, served_model, together)
    errors = Console(stderr=True, no_color=no_color)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        scorer, draft = scorers(generator)
        report = run(
            system,
            ids,
            params,
            scorer=scorer,
            draft=draft,
            modes=mode or None,
            samples=samples,
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


def _check_engine(
    engine: str,
    drafter: str | None,
    prompt_lookup: int | None,
    early_exit: int | None,
    served_model: str | None,
) -> None:
    url = engine.startswith(("http://", "https://"))
    if not url and engine not in ("outpace", "transformers"):
        raise OptionError(
            f"unknown engine {engine!r}: it is outpace, transformers, or a URL like "
            "http://localhost:8000/v1"
        )
    given = {"--prompt-lookup": prompt_lookup, "--early-exit": early_exit}
    said = [name for name, value in given.items() if value is not None]
    if said and engine != "transformers":
        raise OptionError(f"{said[0]} goes with --engine transformers")
    if len(said) > 1 or (said and drafter not in (None, "none")):
        raise OptionError("--drafter, --prompt-lookup and --early-exit exclude each other")
    if served_model is not None and not url:
        raise OptionError("--served-model goes with an endpoint: give its URL as --engine")
    if served_model is None and url:
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
    from ..audit.report import Sampled

    console.print(report.system)
    sampled = report.parts.get("sampled")
    if isinstance(sampled, Sampled):
        _print_tests(sampled, console)
    for mode, part in report.parts.items():
        mark = "[green]ok[/green]  " if part.sound else "[red]FAIL[/red]"
        console.print(f"{mark} {mode}: ", end="")
        console.print(part.summary(), markup=False)
        if isinstance(part, Sampled):
            for defect in part.defects[1:]:
                console.print(f"     {mode}: {defect}", markup=False)
            if part.borderline:
                console.print(
                    f"     {part.borderline} tokens lie just beyond a filter's boundary, where "
                    "rounding may put them"
                )
            if part.repeated is not None:
                same, whole = part.repeated
                console.print(f"     seeds: {same} of {whole} texts are the same alone as together")
    for mode, why in report.left_out.items():
        console.print(f"-    {mode}: left out, {why}", markup=False)
    verdict = (
        "no difference from the target was found" if report.sound else "NOT the target's output"
    )
    console.print(f"[bold]{verdict}[/bold]")


def _print_tests(part: Sampled, console: Console) -> None:
    from rich.table import Table

    from ..audit.report import worst_first

    table = Table(
        caption=f"each test decides at p < {part.share:.1e}: {part.false_alarm:g} for all of them; "
        "off: total variation beyond chance, seen: found 9 times in 10"
    )
    for head in ("position", "test", "samples", "G", "degrees", "p", "off", "seen"):
        table.add_column(head, justify="left" if head == "test" else "right", no_wrap=True)
    for t in worst_first(part.tests):
        table.add_row(
            str(t.position),
            t.kind,
            str(t.samples),
            f"{t.statistic:.1f}",
            str(t.degrees),
            f"{t.p_value:.2g}",
            f"{t.distance:.3f}",
            f"{t.detectable:.3f}",
            style="red" if t.p_value < part.share else None,
        )
    console.print(table)

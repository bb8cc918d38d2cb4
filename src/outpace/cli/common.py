"""What the commands share: options, loading with a bar, tables."""

from __future__ import annotations

import functools
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from ..assembly import Assembly
    from ..engine.control import Report
    from ..engine.stats import Stats
    from ..generator import Generator

Model = Annotated[
    str, typer.Option("--model", "-m", help="Checkpoint folder, hub id, or 'demo' (shipped).")
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        "-d",
        help="A name (see 'outpace drafters'), a draft model's folder or hub id, or 'none'; "
        "by default all that suit model and machine ('auto').",
    ),
]
DraftLength = Annotated[
    str,
    typer.Option(
        "-k", "--k", help="Tokens drafted per round; 0: plain; 'auto': as many as pay, every round."
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy decoding.")]
VerifierName = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        help="Rule for sampled requests: token, block, match, coupled, greedy; for trees also "
        "traversal, kseq, multipath; typical is lossy. By default token, for drawn trees "
        "traversal, match for drafts that are not drawn; coupled with a seed.",
    ),
]
TreeName = Annotated[
    str | None,
    typer.Option(
        "--tree",
        help="Trees instead of chains, for drafters that run a model: '4x2x1', 'sequoia:32', "
        "'dynamic:48,6', or a file; 'outpace tree' lists and draws them.",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="At most this many.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:N or mps.")]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Run passes as compiled C++ or CUDA graphs (Llama family); by default where possible.",
    ),
]
Quantize = Annotated[
    str | None, typer.Option("--quantize", help="Keep the target's weights as int8 or int4.")
]
PromptFile = Annotated[
    str | None,
    typer.Option("--prompt-file", help="JSON lines, each a string or an object with a 'prompt'."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours, no moving lines.")]


def _sampling(
    temperature: Temperature = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Nucleus mass in (0, 1]; 1 is off.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Keep the k most likely tokens.")
    ] = None,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Drop tokens less than this times the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1 repeats less.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Subtracted from tokens of the text.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="The same per occurrence.")
    ] = 0.0,
    no_repeat_ngram: Annotated[
        int | None, typer.Option("--no-repeat-ngram", help="No n tokens in a row twice.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=BIAS", help="Added to a logit (repeatable)."),
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option("--bad-word", help="Never in the text (repeatable).")
    ] = None,
    min_new_tokens: Annotated[
        int, typer.Option("--min-new-tokens", help="No end of text before so many.")
    ] = 0,
    json_schema: Annotated[
        str | None,
        typer.Option("--json-schema", help="A JSON schema the text is valid by, or its file."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="A regular expression that matches the text.")
    ] = None,
    grammar: Annotated[
        str | None, typer.Option("--grammar", help="File of a Lark grammar that makes the text.")
    ] = None,
    target_alone: Annotated[
        bool,
        typer.Option("--target-alone", help="Leave drafts out of penalties and constraints."),
    ] = False,
) -> dict[str, Any]:
    """Fields of `SamplingParams`."""
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "no_repeat_ngram": no_repeat_ngram,
        "logit_bias": dict(_bias(entry) for entry in logit_bias or ()),
        "bad_words": tuple(bad_word or ()),
        "min_new_tokens": min_new_tokens,
        "json_schema": _inline_or_file(json_schema),
        "regex": regex,
        "grammar": None if grammar is None else read_text(grammar, "the grammar"),
        "transform_draft": not target_alone,
    }


def _bias(entry: str) -> tuple[int, float]:
    token, _, value = entry.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise OptionError(f"--logit-bias takes ID=BIAS like 42=-5, not {entry!r}") from None


def _inline_or_file(schema: str | None) -> str | None:
    if schema is None or schema.lstrip().startswith(("{", "true")):
        return schema
    return read_text(schema, "the JSON schema")


def with_sampling(**defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command every option of sampling; it takes them as `sampling`, a mapping.

    Args:
        defaults: instead of the usual ones.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True, localns=_TYPES)
        options = get_type_hints(_sampling, include_extras=True)
        own = inspect.signature(command).parameters.values()
        shared = inspect.signature(_sampling).parameters.values()
        parameters = [p.replace(annotation=hints[p.name]) for p in own if p.name != "sampling"]
        for p in shared:
            default = defaults.get(p.name, p.default)
            parameters.append(p.replace(annotation=options[p.name], default=default))
        names = [p.name for p in shared]

        @functools.wraps(command)
        def wrapped(**given: Any) -> Any:
            sampling = _sampling(**{name: given.pop(name) for name in names})
            return command(sampling=sampling, **given)

        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        wrapped.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in kept}
        return wrapped

    return decorate


_TYPES = {"Mapping": Mapping, "Any": Any}


def drafter_for(model: str, drafter: str | None, default: str | None = "auto") -> str | None:
    """The drafter as given; by default whoever suits.

    Args:
        default: None where a single one is needed: the shipped draft for the shipped target.
    """
    if drafter is None:
        return default or ("demo-draft" if model == "demo" else None)
    return None if drafter == "none" else drafter


def draft_length(k: str) -> int | str:
    """A number where one was given; whether there is such a K is checked when it is loaded."""
    try:
        return int(k)
    except ValueError:
        return k


def load_with_bar(
    model: str,
    drafter: str | None,
    k: int | str | None,
    dtype: str | None,
    device: str | None,
    check: Callable[[Assembly], object] = lambda assembly: None,
    compile: bool | None = None,
    **options: Any,
) -> Generator:
    """`outpace.load` with a progress bar on a terminal, remarks on stderr.

    `check` sees the assembly before any weight is read.
    """
    from transformers.utils import logging as transformers_logging

    from ..assembly import Assembly

    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    wanted: Any = "auto" if compile is None else compile
    length = draft_length(k) if isinstance(k, str) else k
    assembly = Assembly(
        model, drafter, length, dtype=dtype, device=device, compile=wanted, **options
    )
    check(assembly)
    for remark in assembly.remarks:
        print(f"outpace: note: {remark}", file=sys.stderr)
    with (
        progress_bars(before="loading ") as advance,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", RuntimeWarning)
        generator = assembly.load(advance)
    for message in dict.fromkeys(str(w.message) for w in caught):
        print(f"outpace: note: {message}", file=sys.stderr)
    return generator


@contextmanager
def progress_bars(no_color: bool = False, before: str = "") -> Iterator[Callable[..., None]]:
    """`(what, done, total)` shown on stderr, a bar for each `what`; nothing without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, no_color=no_color)
    columns = (TextColumn(before + "{task.description}"), BarColumn(), TimeElapsedColumn())
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        tasks: dict[str, Any] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield advance


def read_text(path: str, what: str = "the prompt") -> str:
    """A prompt's text, or another's, from a file; '-' is standard input.

    Raises:
        OptionError: it cannot be read as UTF-8 text.
    """
    try:
        if path != "-":
            return Path(path).read_text(encoding="utf-8")
        if sys.stdin is None:
            raise OptionError(f"no {what.removeprefix('the ')}: standard input is closed")
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise OptionError(f"cannot read {what} from {path} ({reason}): check the path") from (error)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def describe(stats: Stats) -> str:
    """One line of what matters while tokens stream."""
    parts = [f"{stats.emitted} tokens", f"{stats.tokens_per_second:.0f} tokens/s"]
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} accepted")
        parts.append(f"{stats.tokens_per_pass:.2f} tokens per pass")
    return " · ".join(parts)


def print_stats(stats: Stats, console: Console, report: Report | None = None) -> None:
    """Every figure of the glossary, as a small table, and why it was drafted so."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    rows = [
        ("tokens", str(stats.emitted)),
        ("tokens/s", f"{stats.tokens_per_second:.1f}"),
        ("rounds (target passes)", str(stats.rounds)),
        ("tokens per pass", f"{stats.tokens_per_pass:.2f}"),
        ("rounds by K", _counts(dict(enumerate(stats.lengths)))),
        ("rounds by drafter", _counts(stats.drafters)),
        ("acceptance rate", percent(stats.acceptance_rate)),
        ("full-accept fraction", percent(stats.full_accept_fraction)),
        ("α by depth", " ".join(f"{a:.2f}" for a in stats.alpha) or "-"),
        ("c (draft step ÷ target pass)", f"{stats.draft_cost:.3f}" if stats.draft_cost else "-"),
        ("prefill", f"{stats.prefill_seconds:.3f} s"),
        ("draft", f"{stats.draft_seconds:.3f} s"),
        ("target", f"{stats.target_seconds:.3f} s"),
        ("rounds in all", f"{stats.round_seconds:.3f} s"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if report is not None:
        console.print(str(report), markup=False, highlight=False)


def _counts(counts: Mapping[Any, int]) -> str:
    """Of what there was how much."""
    return " · ".join(f"{name}: {count}" for name, count in counts.items() if count) or "-"


def prompts_of(path: str | None, count: int) -> list[str]:
    """Up to so many prompts of a file of JSON lines; without one held-out functions.

    Raises:
        OptionError: the file cannot be read, has none, or a line is no prompt.
    """
    from ..bench.prompts import held_out_prompts

    if count < 1:
        raise OptionError("--prompts must be at least 1")
    if path is None:
        return held_out_prompts(count)
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    texts = []
    for number, line in enumerate(lines[:count], 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        text = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise OptionError(
                f"line {number} of {Path(path).name} is neither a JSON string nor an object with "
                "a 'prompt' of text"
            )
        texts.append(text)
    if not texts:
        raise OptionError(f"{path} has no prompts")
    return texts

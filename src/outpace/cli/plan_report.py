"""A plan on the terminal: the machine, what each drafter promises, why, and what to run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner import Advice, Machine, Option, Plan


_DEPTHS = 8
"""To which α is printed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command was asked for.

    Attributes:
        options: of loading, which the command to run needs, too; a flag's value is empty.
    """

    model: str
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    tokens: int
    options: Mapping[str, str | None]


def asked_dict(asked: Asked, texts: Sequence[str], drafters: Sequence[str]) -> dict[str, Any]:
    """Ready for JSON."""
    return {
        "model": asked.model,
        "drafters": list(drafters),
        "prompts": len(texts),
        "max_new_tokens": asked.tokens,
        "quantize": asked.options["--quantize"],
    }


def print_plan(plan: Plan, asked: Asked, no_color: bool) -> None:
    from rich.console import Console

    from ..planner import terminal

    console = Console(no_color=no_color, highlight=False, markup=False)
    _print_machine(plan.machine, asked, console)
    for advice in plan.advices:
        _print_advice(plan, advice, asked, console)
    for batch in dict.fromkeys(advice.batch for advice in plan.advices):
        console.print()
        console.print(terminal(plan, batch))
    console.print()
    console.print(
        "Speedups are of decoding, prompts not counted, on prompts like these; intervals are 95 % "
        "over prompts and take times as known."
    )
    _print_commands(plan, asked, console)


def _print_machine(machine: Machine, asked: Asked, console: Console) -> None:
    from rich.table import Table

    from ..planner.machine import BATCHES

    said = [f"{asked.model} on {machine.device} in {machine.dtype}"]
    if machine.device == "cpu":
        said.append(f"{machine.threads} thread{'s' * (machine.threads > 1)}")
    said.append(f"a pass takes {1e3 * machine.passes(1, 1):.2f} ms")
    if machine.weight_bytes is not None and machine.bandwidth is not None:
        size = f"{machine.weight_bytes / 1e9:.2f} GB of weights"
        said.append(f"{size} at {machine.bandwidth / 1e9:.1f} GB/s")
    if machine.memory is not None and machine.free_memory is not None:
        free, total = machine.free_memory / 1e9, machine.memory / 1e9
        said.append(f"{free:.1f} of {total:.1f} GB of memory free")
    console.print(", ".join(said) + ".")
    table = Table(box=None, pad_edge=False, title="ms of a pass", title_justify="left")
    table.add_column("rows", justify="right")
    for batch in machine.batches:
        table.add_column(f"{batch} seq.", justify="right", no_wrap=True)
    for rows in sorted({rows for rows, _ in machine.passes.points}):
        times = [f"{1e3 * machine.passes(rows, batch):.2f}" for batch in machine.batches]
        table.add_row(str(rows), *times)
    console.print(table)
    if missing := ", ".join(str(b) for b in BATCHES if b > max(machine.batches)):
        console.print(f"Not timed for want of time (--seconds) or memory: {missing} sequences.")
    console.print(f"Times vary by {machine.spread:.0%}" + _quiet(machine.spread))


def _quiet(spread: float) -> str:
    """What that means."""
    if spread < 0.1:
        return "."
    return ": something else runs here. Measure again when the machine is quiet."


def _print_advice(plan: Plan, advice: Advice, asked: Asked, console: Console) -> None:
    from rich.table import Table

    from ..planner import reasons
    from ..planner.reasons import at_once

    console.print()
    console.print(f"Temperature {advice.temperature:g}, {at_once(advice.batch)}", style="bold")
    table = Table(box=None, pad_edge=False)
    heads = ("", "drafter", "K", "rule", "α", "c", "tokens", "price", "speedup", "95 %")
    for number, head in enumerate(heads):
        fold: Any = {"overflow": "fold", "min_width": 10} if number == 1 else {"no_wrap": True}
        table.add_column(head, justify="left" if number in (0, 1, 3) else "right", **fold)
    for option in shown(advice):
        best = option is advice.best
        table.add_row(*_row(option, best), style="bold green" if best else None)
    table.add_row("" if advice.best else "→", "plain", *[""] * 6, "1.00x", "")
    console.print(table)
    for option in shown(advice):
        if option.tree is None:
            console.print(_by_depth(plan, option))
    for sentence in reasons(plan, advice):
        console.print(f"· {sentence}")


def _by_depth(plan: Plan, option: Option) -> str:
    """How α falls with the depth of a draft, and what a step takes."""
    from ..planner import alphas_of

    survey = plan.survey_of(option)
    alphas = " ".join(f"{a:.2f}" for a in alphas_of(survey.texts(survey.longest))[:_DEPTHS])
    step = 1e3 * survey.added.step(option.batch)
    return f"{option.drafter}: α by depth {alphas or '-'}; a draft step takes {step:.2f} ms"


def shown(advice: Advice) -> list[Option]:
    """The best rule of each drafter, and of its tree."""
    first: dict[tuple[str, str | None], Option] = {}
    for option in advice.options:
        first.setdefault((option.drafter, option.tree), option)
    return list(first.values())


def _row(option: Option, best: bool) -> tuple[str, ...]:
    span = "-" if option.low is None else f"{option.low:.2f} to {option.high:.2f}"
    return (
        "→" if best else "",
        f"{option.drafter} {option.tree or ''}".rstrip(),
        str(option.k),
        option.rule if option.temperature else "-",
        f"{option.alpha:.2f}",
        f"{option.cost:.3f}",
        f"{option.tokens:.2f}",
        f"{option.price:.2f}",
        f"{option.speedup:.2f}x",
        span,
    )


def _print_commands(plan: Plan, asked: Asked, console: Console) -> None:
    console.print()
    console.print("Run:", style="bold")
    for advice in plan.advices:
        many = "" if advice.batch == 1 else f", {advice.batch} at once"
        note = f"  # {_promised(advice.best)}{many}"
        console.print("  " + command(asked, advice) + note, soft_wrap=True)
    if any(advice.best is not None for advice in plan.advices):
        console.print("Without -k, K follows from round to round from what pays, 0 included.")


def _promised(best: Option | None) -> str:
    if best is None:
        return "nothing pays"
    span = "" if best.low is None else f", {best.low:.2f} to {best.high:.2f}"
    return f"{best.speedup:.2f}x{span}"


def command(asked: Asked, advice: Advice) -> str:
    """What to type for a recommendation: on the command line, or in Python for several at once."""
    if advice.batch > 1:
        return _call(asked, advice)
    words = ["outpace", "generate", "-f", "PROMPT", "--model", asked.model]
    for option, value in _chosen(advice.best).items():
        words += [option, "none" if value is None else str(value)]
    if advice.temperature:
        words += ["-t", f"{advice.temperature:g}"]
    for option, given in asked.options.items():
        words += [] if given is None else [option, given] if given else [option]
    return shlex.join(words)


def _call(asked: Asked, advice: Advice) -> str:
    """The same in Python."""
    given: dict[str, Any] = {o.lstrip("-"): v for o, v in _chosen(advice.best).items()}
    for option, value in asked.options.items():
        name = option.removeprefix("--").removeprefix("no-")
        if value is not None:
            given[name] = value or not option.startswith("--no-")
    given["max_batch"] = advice.batch
    said = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"outpace.load({asked.model!r}, {said})"


def _chosen(best: Option | None) -> dict[str, str | int | None]:
    """What is recommended, as options of the command line; without dashes they are those of
    `outpace.load`."""
    if best is None:
        return {"--drafter": None}
    found: dict[str, str | int | None] = {"--drafter": best.drafter}
    found |= {"--tree": best.tree} if best.tree else {"-k": best.k}
    return found | ({"--verifier": best.rule} if best.temperature else {})

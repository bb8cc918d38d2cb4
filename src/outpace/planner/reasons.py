"""Why a plan says what it says, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .plan import Advice, Option, Plan


def reasons(plan: Plan, advice: Advice) -> list[str]:
    """What decided, the recommendation's first."""
    found, least = [], 1 + plan.margin
    if advice.best is not None:
        found += _chosen(advice.best)
        found += _rules(advice.best, advice.options)
    else:
        found.append(f"No drafter promises {least:.2f}x or more: do not speculate.")
    best = advice.best.drafter if advice.best is not None else None
    seen = {best}
    for option, pays in zip(advice.options, advice.break_even, strict=True):
        if option.drafter not in seen and option.speedup < least:
            found.append(_other(option, pays))
        seen.add(option.drafter)
    return found + _batches(plan.ceilings[advice.temperature], advice.batch, least)


def at_once(batch: int) -> str:
    """So many sequences, in words."""
    return "one sequence" if batch == 1 else f"{batch} sequences at once"


def name_of(option: Option) -> str:
    """A drafter with its tree, if it has one."""
    return option.drafter if option.tree is None else f"{option.drafter} with a tree"


def _chosen(best: Option) -> list[str]:
    found = [
        f"{name_of(best)}: a round emits {best.tokens:.2f} tokens and takes {best.price:.2f} plain "
        f"ones (c = {best.cost:.3f})."
    ]
    if best.low is None:
        found.append("From one prompt nothing can be said of others: give more of them.")
    elif best.low < 1:
        found.append(
            "The interval reaches below 1: on other prompts like these it may not pay. Give more."
        )
    return found


def _rules(best: Option, options: Sequence[Option]) -> list[str]:
    """The rules that were tried with the drafter."""
    if not best.temperature:
        return []
    tried = [o for o in options if o.drafter == best.drafter and o.tree == best.tree]
    if len(tried) < 2:
        return []
    each = ", ".join(f"{o.rule} {o.speedup:.2f}x (K = {o.k})" for o in tried)
    found = f"Rules: {each}."
    if any(o.rule == "coupled" for o in tried):
        found += " By coupled, seeded texts follow from target and seed alone."
    return [found]


def _other(option: Option, pays: tuple[int, float] | None) -> str:
    """Of a drafter that does not pay."""
    name, k = name_of(option), option.k
    if option.speedup >= 1:
        return f"{name} gains {option.speedup:.2f}x at most, less than can be relied on."
    said = f"{name} does not pay ({option.speedup:.2f}x): "
    if option.drafted < 0.5:
        return f"{said}it finds something to propose in {option.drafted:.0%} of the rounds only."
    said += f"a draft step costs {option.cost:.2f} of a pass"
    if pays is None:
        return f"{said}, so no draft would, were every token right."
    return (
        f"{said}. Drafting {pays[0]} would pay from α = {pays[1]:.2f} on, and with K = {k} it is "
        f"{option.alpha:.2f}."
    )


def _batches(ceilings: Mapping[int, float], batch: int, least: float) -> list[str]:
    """From which batch on nothing can pay."""
    for size in sorted(ceilings):
        rest = [value for other, value in ceilings.items() if other >= size]
        if size >= batch and max(rest) < least:
            return [
                f"From {at_once(size)} on nothing here would pay, if drafting took no time: "
                f"at most {max(rest):.2f}x."
            ]
    return []

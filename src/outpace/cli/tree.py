"""`outpace tree`: which trees there are, what they look like, and what they promise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from ..types import SamplingParams
from . import common

if TYPE_CHECKING:
    from rich.console import Console

    from ..generator import Generator
    from ..planner import Fit
    from ..trees import Builder
    from ..types import Tree


@dataclass(frozen=True, slots=True)
class _Shown:
    """A tree to draw.

    Attributes:
        title: what it is, in a few words.
        labels, weights: of its nodes.
    """

    tree: Tree
    title: str
    labels: list[str] | None = None
    weights: tuple[float, ...] | None = None


def tree(
    tree: Annotated[
        str | None, typer.Argument(help="As --tree takes it; without it, all are listed.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", help="Draft behind this text, and show the tokens."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="What it promises with this pair on this machine.")
    ] = False,
    model: common.Model = "demo",
    drafter: common.DrafterName = None,
    temperature: common.Temperature = 0.0,
    seed: common.Seed = 0,
    prompts: Annotated[
        int, typer.Option("--prompts", "-p", help="How many texts to measure on.")
    ] = 8,
    prompt_file: common.PromptFile = None,
    max_new_tokens: common.MaxNewTokens = 64,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the tree to this file, for --tree.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw it into this file (.png, .svg, ...).")
    ] = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    compile: common.Compile = None,
    quantize: common.Quantize = None,
    as_json: common.AsJson = False,
    no_color: common.NoColor = False,
) -> None:
    """List, draw and measure the trees that a draft may be."""
    from rich.console import Console

    from ..trees import SequoiaBuilder, StaticBuilder, draw, parse_tree, to_ranks

    console = Console(no_color=no_color, highlight=False, markup=False)
    if tree is None:
        _list(console, as_json)
        return
    builder = parse_tree(tree)
    SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
    measured = measure or isinstance(builder, SequoiaBuilder)
    name = common.drafter_for(model, drafter, None)
    _check(tree, builder, prompt, measured, max_new_tokens, name)
    _check_files(out, picture)
    found: dict[str, Any] = {"tree": tree}
    if prompt is None and not measured:
        assert isinstance(builder, StaticBuilder)
        shown = _Shown(builder.tree, tree)
    else:
        texts = common.prompts_of(prompt_file, prompts) if measured else [prompt or ""]
        generator = common.load_with_bar(
            model,
            name,
            None,
            dtype,
            device,
            compile=compile,
            quantize=quantize,
            tree="2x1" if measured else builder,
            max_batch=8,
        )
        if measured:
            fit = _measured(generator, builder, texts, temperature, max_new_tokens, no_color)
            shown = _promise(tree, fit)
            found |= _figures(fit)
        else:
            shown = _drafted(generator, texts[0], temperature, seed or 0)
    if out is not None:
        _write(out, shown.tree)
    if picture is not None:
        draw.picture(shown.tree, picture, shown.weights, shown.title, shown.labels)
    if as_json:
        shape = {"nodes": len(shown.tree), "depth": shown.tree.depth}
        print(json.dumps(found | shape | {"paths": to_ranks(shown.tree)}))
        return
    console.print(shown.title)
    console.print(draw.summary(shown.tree))
    console.print(draw.text(shown.tree, shown.labels, shown.weights), soft_wrap=True)
    if measured:
        _print(found, console)


def _check(
    tree: str, builder: Builder, prompt: str | None, measured: bool, tokens: int, name: str | None
) -> None:
    """Whether there is something to draw, before anything is loaded or measured."""
    from ..assembly import check_measurable
    from ..drafters import parse
    from ..trees import SequoiaBuilder, StaticBuilder

    if measured and prompt is not None:
        raise OptionError("--prompt shows one draft, --measure many texts: give one of them")
    if prompt is not None and not prompt:
        raise OptionError("the prompt is empty: give at least one token of text")
    fixed = isinstance(builder, StaticBuilder | SequoiaBuilder)
    if not fixed and (measured or prompt is None):
        how = "'outpace bench' measures it" if measured else "see one by --prompt"
        raise OptionError(f"{tree} has another shape in every round: {how}")
    if not measured:
        return
    if name is not None:
        check_measurable(parse(name))
    if builder.depth > tokens:
        raise OptionError(
            f"texts of {tokens} tokens are shorter than the tree is deep, {builder.depth}: raise "
            "--max-new-tokens"
        )


def _check_files(out: Path | None, picture: Path | None) -> None:
    """Whether they can be written, as far as can be told."""
    from ..pictures import check_path

    if picture is not None:
        check_path(picture)
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise OptionError(f"cannot write {out}: it is a folder, or there is no folder for it")


def _list(console: Console, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.table import Table

    from ..trees import tree_entries

    entries = tree_entries()
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries]))
        return
    table = Table(box=None, pad_edge=False)
    for head in ("tree", "what it is"):
        table.add_column(head, overflow="fold")
    for entry in entries:
        table.add_row(entry.usage, entry.summary)
    console.print(table)
    console.print(
        "draw: how children come about: top (the likeliest), without or with replacement; by "
        "default as suits --verifier. 'outpace tree 4x2x1' draws one, --prompt shows a draft."
    )


def _measured(
    generator: Generator,
    builder: Builder,
    texts: list[str],
    temperature: float,
    tokens: int,
    no_color: bool,
) -> Fit:
    from ..planner import fit_tree, promise
    from ..trees import SequoiaBuilder, StaticBuilder

    tokenizer = generator.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.encode(text) for text in texts]
    with common.progress_bars(no_color) as advance:
        how: dict[str, Any] = {"tokens": tokens, "tokenizer": tokenizer, "progress": advance}
        if isinstance(builder, SequoiaBuilder):
            how |= {"builder": builder, "temperatures": (temperature,)}
            return fit_tree(generator.engine, ids, **how)[0]
        assert isinstance(builder, StaticBuilder)
        return promise(generator.engine, ids, builder, temperature, **how)


def _promise(name: str, fit: Fit) -> _Shown:
    from ..trees import chances

    weights = chances(fit.choice.tree, fit.rates) if len(fit.choice.tree) else None
    return _Shown(fit.choice.tree, f"{name} at temperature {fit.temperature:g}", weights=weights)


def _figures(fit: Fit) -> dict[str, Any]:
    return {
        "temperature": fit.temperature,
        "tokens_per_round": fit.choice.tokens,
        "replayed": fit.replayed,
        "speedup": fit.choice.speedup,
        "rates": [list(row) for row in fit.rates],
        "chain_step_seconds": fit.costs.step,
        "draft_seconds": dict(fit.costs.draft),
        "target_seconds": dict(fit.costs.target),
    }


def _print(found: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table(caption="accepted, of the children of an accepted node, by their rank")
    for head in ("depth", *map(str, range(len(found["rates"][0])))):
        table.add_column(head, justify="right", no_wrap=True)
    for depth, row in enumerate(found["rates"], 1):
        table.add_row(str(depth), *(f"{rate:.2f}" for rate in row))
    console.print(table)
    for what in ("draft", "target"):
        points = sorted(found[f"{what}_seconds"].items())
        times = " · ".join(f"{rows}: {1e3 * seconds:.2f}" for rows, seconds in points)
        console.print(f"{what} pass by rows, ms: {times}")
    console.print(f"step of a chain, ms: {1e3 * found['chain_step_seconds']:.2f}")
    console.print(
        f"{found['tokens_per_round']:.2f} tokens per round expected ({found['replayed']:.2f} "
        f"replayed on the texts), {found['speedup']:.2f}x of plain decoding"
    )
    if found["speedup"] <= 1:
        console.print("It does not pay here: plain decoding is as fast.")


def _drafted(generator: Generator, prompt: str, temperature: float, seed: int) -> _Shown:
    """One draft behind a prompt, what was accepted marked."""
    from ..planner import one_round

    tokenizer = generator.tokenizer
    assert tokenizer is not None
    params = SamplingParams(temperature=temperature, seed=seed, eos_token_ids=())
    tokens, tree, path = one_round(generator.engine, tokenizer.encode(prompt), params)
    labels = [json.dumps(tokenizer.decode([t]), ensure_ascii=False)[1:-1] for t in tokens]
    labels = [f"{label} ✓" if i in path else label for i, label in enumerate(labels)]
    title = f"behind {json.dumps(prompt[-40:], ensure_ascii=False)}: {len(path)} accepted (✓)"
    return _Shown(tree, title, labels)


def _write(path: Path, tree: Tree) -> None:
    from ..trees import to_ranks

    try:
        path.write_text(json.dumps({"paths": to_ranks(tree)}) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path} ({error.strerror}): check the path") from error

"""The card and the loss curves that go with a published pair."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any, cast

from .corpus import HELD_OUT_MODULUS
from .demo import SHAPES, SHIPPED, STAGES, VOCAB_SIZE, prepare, published
from .loop import held_out_loss
from .teacher import TeachConfig


def export_pair(folder: Path) -> Path:
    """Write the card, its facts and the curves beside `folder/pair/{target,draft}`.

    Raises:
        OptionError: a stage has not been trained to its end.
    """
    data = prepare(folder / "corpus")
    out = folder / "pair"
    facts: dict[str, Any] = {}
    for name in SHIPPED:
        model = published(folder, name)
        facts[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "held_out_loss": held_out_loss(model, data.held_out, 512, rows=256),
        }
    plot_losses(out, out / "loss.png")
    characters = _characters_per_token(folder, data.held_out)
    efforts = {name: _effort(out / f"{name}.csv") for name in SHAPES}
    card = _card(facts, efforts, data, characters)
    (out / "README.md").write_text(card, encoding="utf-8")
    both = json.dumps({"models": facts, "training": efforts}, indent=1)
    (out / "card.json").write_text(both, encoding="utf-8")
    return out


def _read_log(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as handle:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(handle)]


def _effort(log: Path) -> dict[str, float]:
    rows = _read_log(log)
    seconds = sum(
        (b["tokens"] - a["tokens"]) / b["tokens_per_s"]
        for a, b in zip([{"tokens": 0.0}, *rows], rows, strict=False)
        if b["tokens"] > a["tokens"]
    )
    return {"steps": rows[-1]["step"], "tokens": rows[-1]["tokens"], "seconds": seconds}


def plot_losses(pair: Path, path: Path) -> None:
    """Training and held-out loss of every model that was trained, over tokens seen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SHAPES), figsize=(12, 3.4), sharey=True)
    for axis, name in zip(axes, SHAPES, strict=True):
        objective = "distillation objective" if name == "draft" else "next-token loss"
        rows = _read_log(pair / f"{name}.csv")
        axis.plot([r["tokens"] / 1e6 for r in rows], [r["train_loss"] for r in rows], lw=0.6)
        held = [r for r in rows if not math.isnan(r["held_out_loss"])]
        axis.plot([r["tokens"] / 1e6 for r in held], [r["held_out_loss"] for r in held], lw=1.6)
        axis.set(title=name, xlabel="tokens (millions)", ylim=(0, 6))
        axis.legend([objective, "held-out next-token loss"], frameon=False, fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("nats per token")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _characters_per_token(folder: Path, ids: Any) -> float:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "corpus" / "tokenizer")
    sample = [int(i) for i in ids[:50_000]]
    return len(tokenizer.decode(sample, skip_special_tokens=True)) / len(sample)


def _card(facts: dict[str, Any], efforts: dict[str, Any], data: Any, characters: float) -> str:
    teaching = cast(TeachConfig, STAGES["teach"])
    lines = [
        "# The shipped pair",
        "",
        "A target and a draft that complete Python, with one tokenizer, so that outpace runs with",
        "no download. They are small, they know nothing but the standard library's style, and",
        "they are for trying, testing and measuring speculative decoding. Do not use their code.",
        "",
        "| | parameters | held-out loss (nats per token) | bits per character |",
        "| --- | --- | --- | --- |",
    ]
    for name, fact in facts.items():
        bits = fact["held_out_loss"] / math.log(2) / characters
        lines.append(
            f"| {name} | {fact['parameters'] / 1e6:.1f}M | {fact['held_out_loss']:.3f} "
            f"| {bits:.3f} |"
        )
    lines += [
        "",
        f"Shape: Qwen3 (QK-norm, tied embeddings), byte-level BPE of {VOCAB_SIZE} tokens "
        f"({characters:.2f} characters per token on held-out text), bf16.",
        f"Target: {SHAPES['target']}. Draft: {SHAPES['draft']}.",
        "",
        "## Training",
        "",
        "`outpace train demo --out FOLDER` makes the pair again. The target's layers are those of",
        "a shallow model, stacked and trained on. The draft is distilled from the target (forward",
        "KL plus a tenth of cross entropy) on",
        f"{teaching.copied} rows of {teaching.length} tokens of the same data and "
        f"{teaching.generated} rows that the target",
        f"itself continued from {teaching.prompt} tokens, "
        f"at temperatures {', '.join(f'{t:g}' for t in teaching.temperatures)} in turn.",
        "",
        "| | steps | tokens | hours |",
        "| --- | --- | --- | --- |",
    ]
    for name, effort in efforts.items():
        lines.append(
            f"| {name} | {effort['steps']:.0f} | {effort['tokens'] / 1e6:.1f}M "
            f"| {effort['seconds'] / 3600:.1f} |"
        )
    lines += [
        "",
        "![loss](loss.png)",
        "",
        "## Data",
        "",
        f"The Python {data.python} standard library with its tests: {data.files} "
        f"files, {len(data.train) / 1e6:.1f}M training tokens. Licence of the source: the PSF",
        f"licence. One file in {HELD_OUT_MODULUS} (by a hash of its path) was never trained on:",
        "",
        ", ".join(f"`{p}`" for p in data.held_out_paths),
        "",
    ]
    return "\n".join(lines)

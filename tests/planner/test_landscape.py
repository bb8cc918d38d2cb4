"""The landscape is the formula at measured costs, and you are where your texts are."""

from __future__ import annotations

import io
from dataclasses import replace

import matplotlib
import pytest
from made_up import machine, survey
from rich.console import Console

from outpace import OptionError
from outpace.planner import (
    break_even,
    constant_price,
    landscape,
    picture,
    plan,
    speedup_iid,
    terminal,
    tokens_iid,
)
from outpace.planner.landscape import panels


def found():
    surveys = [
        survey("model", 0.8, 1.0),
        survey("model", 0.6, 1.0, temperature=0.8),
        survey("model", 0.65, 1.0, temperature=0.8, rule="block"),
        survey("ngram", 0.5, 0.0, offers=0.3, longest=8),
    ]
    return plan(machine(), surveys, (1, 4))


def test_values_are_the_formulas():
    field = landscape(constant_price(0.1), (0.0, 0.5, 1.0), (1, 4))
    assert field == [[speedup_iid(a, k, 0.1) for k in (1, 4)] for a in (0.0, 0.5, 1.0)]
    assert field[0][0] < 1 < field[2][1]
    even = break_even(constant_price(0.1), 4)
    assert landscape(constant_price(0.1), (even,), (4,))[0][0] == pytest.approx(1)


def test_a_point_stands_where_the_formula_gives_its_tokens():
    for panel in panels(found(), 1):
        for option in panel.points:
            assert tokens_iid(option.alpha, option.k) == pytest.approx(option.tokens)
    model = next(p for p in panels(found(), 1) if p.drafter == "model")
    assert [o.temperature for o in model.points] == [0.0, 0.8]
    (value,) = landscape(model.prices[0.0], (model.points[0].alpha,), (model.points[0].k,))
    assert value[0] == pytest.approx(model.points[0].speedup, rel=0.05)  # ends of texts are shorter


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written(suffix, tmp_path):
    path = tmp_path / f"landscape.{suffix}"
    picture(found(), path)
    head = path.read_bytes()[:400]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in path.read_bytes()
    if suffix == "svg":
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            picture(found(), path, 4, "a title")
        text = path.read_text()
        for word in ("model, T=0", "model, T=0.8", "ngram, T=0", "a title", "plain decoding"):
            assert word in text


def test_every_temperature_has_its_line_and_mark(tmp_path):
    temperatures = [0.0, 0.3, 0.6, 0.9, 1.2, 1.5]
    surveys = [replace(survey("model", 0.8, 0.1), temperature=t) for t in temperatures]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        picture(plan(machine(), surveys), tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert [f"T={t:g}: you, and 1x" in text for t in temperatures] == [True] * 6


def test_one_drafter_with_one_k_is_a_picture_too(tmp_path):
    alone = plan(machine(), [survey("short", 0.9, 0.5, longest=1)])
    picture(alone, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(OptionError, match="no plan for 3 sequences"):
        picture(found(), tmp_path / "x.png", 3)
    with pytest.raises(OptionError, match="suffix"):
        picture(found(), tmp_path / "x.doc")
    with pytest.raises(OptionError, match=r"no drafter 'nobody' was measured: choose from .*model"):
        terminal(found(), 1, "nobody")


def test_the_terminal_shows_where_you_are():
    out = io.StringIO()
    Console(file=out, width=100).print(terminal(found(), 1, "model"))
    text = out.getvalue()
    assert text.count("[") == 3  # two temperatures, and the line that says so
    assert "T=0.8" in text
    lines = [
        line.split() for line in text.splitlines() if line.startswith(("1.0", " 1.0", "  1.0"))
    ]
    assert float(lines[0][1].strip("[]")) == pytest.approx(2 / (1.02 + 0.1), abs=0.01)

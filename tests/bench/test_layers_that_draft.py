"""Which layers can draft: rates are those of the laws, the search finds what does nothing."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

import outpace
from checkpoints import build
from outpace.bench import layers
from outpace.bench.layers import choices
from outpace.cli.main import run
from outpace.models import MarkovModel
from outpace.models.config import LeanConfig
from outpace.models.lean import LeanDecoder

SHAPE = {"num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 60}
TEXTS = [[(7 * i) % 60 for i in range(40)], [(11 * i + 3) % 60 for i in range(25)]]


def decoder(idle: int):
    """A random model of which one layer adds nothing."""
    model = build("Llama", SHAPE)
    layer = model.model.layers[idle]
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        weight.data.zero_()
    weights = dict(model.state_dict())
    return LeanDecoder(LeanConfig.read(model.config.to_dict()), weights.__getitem__)


@pytest.mark.parametrize("idle", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_layer_that_does_nothing_is_the_first_to_go(idle, temperature):
    found = choices(decoder(idle), TEXTS, temperature)
    skips = [c for c in found if c.drafter.startswith("skip")]
    assert skips[0].drafter == f"skip:{idle}"
    assert skips[0].alpha == pytest.approx(1.0, abs=1e-4)
    assert all(a.alpha >= b.alpha for a, b in pairwise(skips))
    exits = [c for c in found if c.drafter.startswith("early")]
    assert [c.layers for c in exits] == [1, 2, 3]
    assert (exits[-1].alpha > 0.999) == (idle == 3)


def test_a_rate_is_the_overlap_of_the_laws():
    target = decoder(3)
    (chosen,) = (c for c in choices(target, TEXTS, 0.7) if c.drafter == "early-exit:2")
    rates = []
    for text in TEXTS:
        ids, at = torch.tensor([text]), torch.arange(len(text))[None]
        models = target, target.part(range(2))
        p, q = (
            (m.forward(ids, at, m.new_cache(1, 64), [0]).logits[0].double() / 0.7).softmax(-1)
            for m in models
        )
        rates += (1 - 0.5 * (p - q).abs().sum(-1)).tolist()
    assert chosen.alpha == pytest.approx(sum(rates) / len(rates), abs=1e-4)


def test_of_long_texts_some_rows_are_held(monkeypatch):
    """Rates are means over every n-th token then."""
    target, longer = decoder(3), [TEXTS[0], TEXTS[0][:38]]
    whole = choices(target, longer, 0.7)
    monkeypatch.setattr(layers, "_MOST_NUMBERS", 60 * 26)
    some = choices(target, longer, 0.7)
    assert [c.alpha for c in some] != [c.alpha for c in whole]
    assert some[0].alpha == pytest.approx(whole[0].alpha, abs=0.1)
    monkeypatch.setattr(layers, "_MOST_NUMBERS", 60 * 78)
    assert [c.alpha for c in choices(target, longer, 0.7)] == [c.alpha for c in whole]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(outpace.IncompatibleError, match="Llama family"):
        choices(MarkovModel.random(4, 1, 0), TEXTS)
    with pytest.raises(outpace.OptionError, match="no text"):
        choices(decoder(1), [[3]])


def test_the_command_names_drafters_that_work(pair, capsys):
    target = str(pair / "target")
    assert run(["layers", "--model", target, "-p", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["drafter"] for c in found[:2]] == ["early-exit:1", "early-exit:2"]
    plain = outpace.load(target).generate("for i", max_new_tokens=9, eos_token_ids=())
    for choice in found:
        fast = outpace.load(target, choice["drafter"], choice["k"])
        said = fast.generate("for i", max_new_tokens=9, eos_token_ids=())
        assert said.token_ids == plain.token_ids
    assert run(["layers", "--model", target, "-p", "1"]) == 0
    shown = capsys.readouterr().out
    assert "early-exit:1" in shown
    assert ("--drafter" in shown) != ("None of them" in shown)

"""Speculative decoding gives the bits of plain decoding: every logit of every emitted token.

Not texts that agree on most prompts, and not logits up to rounding: a single
differing bit fails. Greedy, and sampled with a seed where the rule is `match`.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, field

import pytest
import torch

from checkpoints import build, promised
from outpace import SamplingParams
from outpace.drafters import ModelDrafter
from outpace.engine import Engine, Stats
from outpace.errors import CompilerError
from outpace.kernels import SOURCES, load_library
from outpace.models import inspect_checkpoint, lean, load_model
from outpace.models.compiled import CompiledDecoder
from outpace.verifiers import CoupledVerifier, MatchVerifier, TokenVerifier

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 150,
    "hidden_size": 128,
    "intermediate_size": 200,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "num_hidden_layers": 2,
}
NOISE = 0.02
LENGTHS = (3, 40, 61, 63, 64, 65, 100, 125)
"""Of prompts: most texts cross a boundary at 64 or 128 positions, each somewhere else."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a draft that is the target with some noise on its weights."""
    folder, target = tmp_path_factory.mktemp("bits"), build("Qwen3", SHAPE)
    draft = copy.deepcopy(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + NOISE * torch.randn_like(parameter))
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    return folder


@pytest.fixture(params=[True, False], ids=["compiled", "lean"])
def compile(request):
    if request.param:
        try:
            load_library()
        except CompilerError as error:
            pytest.skip(str(error))
    return request.param


@dataclass
class Spoken:
    """What requests emitted: tokens, and the target's logits before each."""

    tokens: list[list[int]] = field(default_factory=list)
    logits: list[list[torch.Tensor]] = field(default_factory=list)


def run(engine: Engine, requests) -> Spoken:
    said, verify = Spoken(), engine.verify
    logits: dict[int, list[torch.Tensor]] = {}

    def spy(running, draft, scores):
        emissions = verify(running, draft, scores)
        for b, (request, e) in enumerate(zip(running, emissions, strict=True)):
            rows = [0, *(node + 1 for node in e.path)]
            logits.setdefault(id(request), []).extend(scores.logits[b, i].clone() for i in rows)
        return emissions

    engine.verify = spy
    submitted = [engine.submit(prompt, params) for prompt, params in requests]
    while engine.busy:
        engine.step()
    for request in submitted:
        said.tokens.append(request.emitted)
        said.logits.append(logits[id(request)][: len(request.emitted)])
    return said


def same(a: Spoken, b: Spoken) -> bool:
    return a.tokens == b.tokens and all(
        torch.equal(x, y)
        for one, other in zip(a.logits, b.logits, strict=True)
        for x, y in zip(one, other, strict=True)
    )


def requests_of(temperature: float, new: int):
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(0, 150, (length,), generator=generator).tolist(),
            SamplingParams(
                temperature=temperature, seed=i, max_new_tokens=new + i, eos_token_ids=()
            ),
        )
        for i, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.1], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [("float32", None), ("bfloat16", None), ("float32", "int8"), ("float32", "int4")],
    ids=["fp32", "bf16", "int8", "int4"],
)
def test_every_bit_is_that_of_plain_decoding(folders, compile, dtype, quantize, temperature):
    """K from 1 to 12, alone and eight at once: 20,000 tokens over the four formats."""
    target = load_model(
        inspect_checkpoint(folders / "target"), dtype, "cpu", compile=compile, quantize=quantize
    )
    draft = load_model(inspect_checkpoint(folders / "draft"), dtype, "cpu", compile=compile)
    assert isinstance(target, CompiledDecoder) == compile
    promised(target, 8, 13)
    requests = requests_of(temperature, 24)
    plain = run(Engine(target, verifier=MatchVerifier(), max_batch=1), requests)
    total = Stats()
    for k in range(1, 13):
        for max_batch, some in ((8, requests), (1, requests[k % 8 : k % 8 + 1])):
            engine = Engine(target, ModelDrafter(draft), k, MatchVerifier(), max_batch)
            fast = run(engine, some)
            expected = plain if max_batch == 8 else _one(plain, k % 8)
            assert same(fast, expected), (k, max_batch)
            total = total.merge(engine.stats)
    assert total.emitted > 2500
    assert 0.15 < total.acceptance_rate < 0.85  # both outcomes were there,
    assert len(total.alpha) > 6  # deep in the draft, too


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_coupled_texts_are_those_of_plain_decoding_by_races(folders, dtype, compile):
    sources = [inspect_checkpoint(folders / name) for name in ("target", "draft")]
    target, draft = (load_model(s, dtype, "cpu", compile=compile) for s in sources)
    promised(target, 8, 13)
    requests = requests_of(0.4, 24)
    plain = run(Engine(target, None, 0, CoupledVerifier(), max_batch=1), requests)
    for k, max_batch in ((1, 8), (4, 3), (7, 8)):
        engine = Engine(target, ModelDrafter(draft), k, CoupledVerifier(), max_batch)
        assert same(run(engine, requests), plain)
        assert 0.15 < engine.stats.acceptance_rate < 0.95


def _one(spoken: Spoken, i: int) -> Spoken:
    return Spoken([spoken.tokens[i]], [spoken.logits[i]])


def differs(target, draft, temperature=0.0, verifier=None):
    requests = requests_of(temperature, 16)
    plain = run(Engine(target, verifier=MatchVerifier(), max_batch=1), requests)
    engine = Engine(target, ModelDrafter(draft), 5, verifier or MatchVerifier(), 8)
    return not same(run(engine, requests), plain)


# --- it can fail ----------------------------------------------------------------------------


def test_without_padded_query_rows_bits_differ(tmp_path, monkeypatch):
    shape = SHAPE | {"head_dim": 256, "num_key_value_heads": 4}
    build("Qwen3", shape).save_pretrained(tmp_path)
    model = load_model(inspect_checkpoint(tmp_path), "float32", "cpu", compile=False)
    assert not differs(model, model)
    monkeypatch.setattr(lean, "query_padding", lambda rows, head_dim: 0)
    assert differs(model, model)


def test_with_kernels_that_count_rows_bits_differ(folders, tmp_path):
    try:
        load_library()
    except CompilerError as error:
        pytest.skip(str(error))
    shutil.copytree(SOURCES, tmp_path / "kernels")
    file = tmp_path / "kernels" / "linear.h"
    line = "const int64_t stretch = w.quantised() ? w.stretch : STRETCH;"
    source = file.read_text()
    assert source.count(line) == 1
    file.write_text(source.replace(line, line[:-1] + " / (rows == 1 ? 2 : 1);"))
    source = inspect_checkpoint(folders / "target")

    def load(name):
        return source.weights.load(name, torch.float32, CPU)

    broken = CompiledDecoder(source.lean, load, library=load_library(tmp_path / "kernels"))
    assert not differs(*[CompiledDecoder(source.lean, load)] * 2)
    assert differs(broken, broken)


def test_a_rule_with_draws_of_its_own_says_something_else(folders):
    """Token verification has the same law, but not the same text."""
    target, draft = (
        load_model(inspect_checkpoint(folders / n), "float32") for n in ("target", "draft")
    )
    assert not differs(target, draft, 0.8)
    assert differs(target, draft, 0.8, TokenVerifier())

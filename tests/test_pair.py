"""The shipped pair: greedy text is plain text, seeds are kept among neighbours, size is bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest

import outpace
from checkpoints import EXACT
from outpace.bench.prompts import held_out_prompts
from outpace.cli.main import run
from outpace.engine import engine
from outpace.models.loading import ASSETS, locate

shares_plain_ids = pytest.mark.xdist_group("plain_ids")
"""One process runs these, so that plain decoding runs once."""
GREEDY = {"max_new_tokens": 128, "eos_token_ids": ()}


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    return held_out_prompts(50)


@pytest.fixture(scope="session")
def plain_ids(prompts) -> list[tuple[int, ...]]:
    """Plain decoding, one prompt at a time, fp32."""
    plain = outpace.load("demo", dtype="float32", device="cpu")
    return [plain.generate(p, **GREEDY).token_ids for p in prompts]


def load(k: int, max_batch: int, dtype: str = "float32", **options) -> outpace.Generator:
    return outpace.load(
        "demo", "demo-draft", k, dtype=dtype, device="cpu", max_batch=max_batch, **options
    )


@shares_plain_ids
@pytest.mark.parametrize(("k", "count"), [(3, 50), (7, 12)])
def test_greedy_alone_equals_plain(prompts, plain_ids, k, count):
    fast = load(k, 1)
    texts = [fast.generate(p, **GREEDY).token_ids for p in prompts[:count]]
    assert texts == plain_ids[:count]
    assert fast.engine.stats.tokens_per_pass > 1.3


@shares_plain_ids
@pytest.mark.parametrize("tree", ["2x2x1", "chains:3,2", "dynamic:8,4", [[0, 0, 0], [1, 0], [2]]])
def test_greedy_with_trees_equals_plain(prompts, plain_ids, tree):
    """25600 tokens, in batches of eight."""
    fast = load(None, 8, tree=tree)
    params = outpace.SamplingParams(**GREEDY)
    texts = [r.token_ids for r in fast.generate(prompts, params=params)]
    assert texts == plain_ids
    assert fast.engine.stats.tokens_per_pass > 2


@shares_plain_ids
def test_greedy_in_ragged_batches_equals_plain(prompts, plain_ids):
    """50 prompts through 8 slots: they enter and leave at different times."""
    fast = load(4, 8)
    params = [
        outpace.SamplingParams(max_new_tokens=128 - 5 * (i % 7), eos_token_ids=())
        for i in range(len(prompts))
    ]
    results = fast.generate(prompts, params=params)
    for result, plain in zip(results, plain_ids, strict=True):
        assert result.token_ids == plain[: len(result.token_ids)]
        assert len(result.token_ids) >= 128 - 30


@shares_plain_ids
def test_a_rule_that_accepts_one_token_too_many_is_caught(prompts, plain_ids, monkeypatch):
    """Negative control of both tests above."""

    def generous(draft, top):
        return [
            accept_one_more(e, tree, ids)
            for e, tree, ids in zip(
                honest(draft, top), draft.trees, draft.tokens.tolist(), strict=True
            )
        ]

    def accept_one_more(emission, tree, ids):
        if len(emission.path) == len(tree):
            return emission
        path = [*emission.path, len(emission.path)]
        tokens = [*(ids[node] for node in path), emission.tokens[-1]]
        return replace(emission, path=path, tokens=tokens, logprobs=[0.0] * len(tokens))

    honest = engine.follow_top
    monkeypatch.setattr(engine, "follow_top", generous)
    fast = load(4, 1)
    differing = [
        fast.generate(p, **GREEDY).token_ids != plain
        for p, plain in zip(prompts[:5], plain_ids, strict=False)
    ]
    assert any(differing)


@pytest.mark.parametrize("dtype", EXACT)
def test_a_seeded_request_does_not_feel_its_neighbours(prompts, dtype):
    """Alone and among seven others: the same tokens, in bf16 too."""
    fast = load(4, 8, dtype)
    options = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 48, "eos_token_ids": ()}
    together = fast.generate(prompts[:8], seed=list(range(8)), **options)
    for i, result in enumerate(together):
        alone = fast.generate(prompts[i], seed=i, **options)
        assert alone.token_ids == result.token_ids
    other = fast.generate(prompts[0], seed=100, **options)
    assert other.token_ids != together[0].token_ids


def test_the_weights_are_small_and_the_card_lists_what_was_held_out():
    files = [f for f in ASSETS.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 64e6
    card = (ASSETS / "README.md").read_text(encoding="utf-8")
    for path in ("pdb.py", "wsgiref/validate.py", "asyncio/selector_events.py"):
        assert f"`{path}`" in card
    assert locate("demo-draft").is_dir()


def test_it_writes_python(prompts):
    """Sampled completions contain what Python is made of."""
    fast = load(4, 8)
    text = "".join(
        r.text for r in fast.generate(prompts[:8], temperature=0.8, seed=0, max_new_tokens=96)
    )
    for word in ("self", "return", "if ", "\n    ", "("):
        assert word in text


def test_the_demo_shows_both_and_says_whether_they_agree(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["demo", "def area(", "-n", "24", "--no-color"]) == 0
    out = capsys.readouterr().out
    assert "plain decoding" in out
    assert "speculative, K =" in out
    assert out.count("def area(") == 2
    assert "the same 24 tokens" in out
    assert "NOT" not in out
    assert max(len(line) for line in out.splitlines()) <= 100


def test_the_demo_samples_too(capsys):
    assert run(["demo", "def area(", "-n", "8", "-t", "0.8", "--no-color"]) == 0
    assert "the same law" in capsys.readouterr().out

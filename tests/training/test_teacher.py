"""Lessons: what the target writes and scores, resumed exactly, and handed out in batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import outpace
from checkpoints import write
from outpace.models.loading import inspect_checkpoint, load_model
from outpace.training.loop import TrainConfig
from outpace.training.teacher import Lessons, TeachConfig, lessons_of, teach

CONFIG = TeachConfig(copied=20, generated=6, length=24, prompt=8, top=5)
STREAM = np.random.default_rng(0).integers(0, 60, 24 * 40).astype(np.uint16)


@pytest.fixture
def model(tmp_path):
    options = {"vocab_size": 60, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 12}
    return write(tmp_path / "target", "Qwen3", options)


@pytest.fixture
def target(model, tmp_path):
    runner = load_model(inspect_checkpoint(str(tmp_path / "target")), dtype="float32")
    return outpace.Generator(runner, max_batch=4)


def test_rows_are_text_or_the_targets_own_and_laws_are_its_laws(model, target, tmp_path):
    steps = []
    assert teach(target, model, STREAM, CONFIG, tmp_path / "t", report=lambda r: steps.append(r))
    assert steps[-1]["step"] == CONFIG.steps
    lessons = Lessons(tmp_path / "t", CONFIG)
    text = STREAM.tobytes()
    assert all(lessons.tokens[i].tobytes() in text for i in range(20))
    for i in range(20, 26):
        assert lessons.tokens[i].tobytes() not in text
        prompt = lessons.tokens[i, :8]
        assert prompt.tobytes() in text
        result = target.generate(
            prompt.tolist(), temperature=0.8 * (i % 2), seed=i, max_new_tokens=17
        )
        assert result.token_ids == tuple(lessons.tokens[i, 8:].tolist())
    with torch.no_grad():
        tokens = torch.from_numpy(lessons.tokens[:, :-1].astype(np.int64))
        law = torch.log_softmax(model(input_ids=tokens).logits, -1)
    top = torch.from_numpy(lessons.top.astype(np.int64))
    stored = torch.from_numpy(lessons.log_p).float()
    assert (law.gather(-1, top) - stored).abs().max() < 0.05  # scored in bf16
    assert (law.topk(5).values - stored).abs().max() < 0.05


def test_interrupted_lessons_go_on(model, target, tmp_path):
    teach(target, model, STREAM, CONFIG, tmp_path / "whole")
    while not teach(target, model, STREAM, CONFIG, tmp_path / "parts", should_stop=lambda: True):
        pass
    whole, parts = Lessons(tmp_path / "whole", CONFIG), Lessons(tmp_path / "parts", CONFIG)
    for name in ("tokens", "top", "log_p"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))


def test_batches_visit_every_row_once_an_epoch(model, target, tmp_path):
    teach(target, model, STREAM, CONFIG, tmp_path)
    config = TrainConfig(steps=13, batch_tokens=48, length=24, long_length=24)
    batches = lessons_of(tmp_path, CONFIG, config)
    tokens = torch.cat([batches(step)[0] for step in range(13)]).tolist()
    assert sorted(tokens) == sorted(Lessons(tmp_path, CONFIG).tokens.tolist())
    assert [t.shape for t in batches(0)] == [(2, 25), (2, 24, 5), (2, 24, 5)]


def test_what_is_missing_or_other_is_refused(model, target, tmp_path):
    config = TrainConfig(steps=1, batch_tokens=48, length=24, long_length=24)
    with pytest.raises(outpace.OptionError, match="run the stage 'teach' first"):
        lessons_of(tmp_path / "none", CONFIG, config)
    teach(target, model, STREAM, CONFIG, tmp_path, should_stop=lambda: True)
    with pytest.raises(outpace.OptionError, match="not finished"):
        lessons_of(tmp_path, CONFIG, config)
    other = TeachConfig(copied=21, generated=6, length=24, prompt=8, top=5)
    with pytest.raises(outpace.CheckpointError, match="taught otherwise"):
        teach(target, model, STREAM, other, tmp_path)
    big = TeachConfig(copied=2100, generated=6, length=24, prompt=8, top=5)
    with pytest.raises(outpace.OptionError, match="asked"):
        teach(target, model, STREAM, big, tmp_path / "big")
    with pytest.raises(outpace.OptionError, match="prompt within"):
        TeachConfig(prompt=513)

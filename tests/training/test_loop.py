"""The training loop: it learns, it resumes exactly, it refuses what does not fit."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import outpace
from outpace.training.attention import causal_attention
from outpace.training.loop import TrainConfig, precision, train, windows
from outpace.training.muon import Muon, orthogonalised
from outpace.training.objectives import forward_kl, next_token

CONFIG = TrainConfig(
    steps=12,
    batch_tokens=64,
    length=16,
    long_length=32,
    warmup=3,
    evaluate_every=4,
    save_every=5,
    muon_lr=0.02,
    adamw_lr=0.02,
)
STREAM = np.tile(np.arange(24, dtype=np.uint16), 60)


def small_model(seed: int = 0):
    from checkpoints import build

    return build(
        "Qwen3",
        {"vocab_size": 24, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 12},
        seed,
    )


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def learn(model, folder, config: TrainConfig = CONFIG, **options) -> bool:
    """Train on the cycle, which is also what is held out."""
    return train(model, windows(STREAM, config), STREAM, config, folder, **options)


def test_it_learns_a_cycle(tmp_path):
    rows: list[dict[str, float]] = []
    assert learn(small_model(), tmp_path, report=rows.append)
    assert rows[-1]["train_loss"] < 0.5 * rows[0]["train_loss"]
    assert rows[-1]["held_out_loss"] < 0.6 * np.log(24)
    with (tmp_path / "log.csv").open() as handle:
        logged = list(csv.DictReader(handle))
    assert [float(r["step"]) for r in logged] == list(range(1, 13))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole, parts = small_model(), small_model()
    learn(whole, tmp_path / "whole")
    stops = iter([False, False, True])
    assert not learn(parts, tmp_path / "parts", should_stop=lambda: next(stops))
    fresh = small_model(seed=9)  # resuming brings its own weights
    assert learn(fresh, tmp_path / "parts")
    assert torch.equal(weights(whole), weights(fresh))


def test_another_configuration_is_refused(tmp_path):
    learn(small_model(), tmp_path, replace(CONFIG, steps=2))
    with pytest.raises(outpace.CheckpointError, match="another seed"):
        learn(small_model(), tmp_path, replace(CONFIG, seed=5))


def test_a_checkpoint_that_cannot_be_read_is_a_clear_error(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"half a file")
    with pytest.raises(outpace.CheckpointError, match="delete it to begin again"):
        learn(small_model(), tmp_path)


def test_a_run_that_decays_keeps_its_length(tmp_path):
    learn(small_model(), tmp_path)
    with pytest.raises(outpace.CheckpointError, match="has begun to decay"):
        learn(small_model(), tmp_path, replace(CONFIG, steps=40))


def test_learning_rate_warms_up_stays_and_decays():
    config = TrainConfig(steps=100, warmup=10, decay_fraction=0.2)
    factors = [config.learning_rate_factor(s) for s in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert set(factors[10:80]) == {1.0}
    assert all(a > b for a, b in pairwise(factors[80:]))
    assert factors[-1] == pytest.approx(0.05)


def test_every_window_is_visited_once_an_epoch():
    config = TrainConfig(steps=9, batch_tokens=40, length=10, long_length=10)
    stream = np.arange(10 * 41 + 1, dtype=np.uint16)
    count = (len(stream) - 1) // 10 - 1
    batch = windows(stream, config)
    rows = torch.cat([batch(s)[0] for s in range(count // 4)])
    starts = rows[:, 0].tolist()
    assert len(set(starts)) == count
    assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)


def test_forward_kl_against_the_definition():
    teacher, student = small_model(0), small_model(1)
    tokens = torch.randint(0, 24, (2, 9))
    with torch.no_grad():
        p = torch.log_softmax(teacher(input_ids=tokens[:, :-1]).logits, -1)
        q = torch.log_softmax(student(input_ids=tokens[:, :-1]).logits, -1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    log_p, top = p.topk(24, dim=-1)
    loss = forward_kl(data_weight=0.25)(student, tokens, top, log_p)
    assert loss.item() == pytest.approx((kl + 0.25 * next_token(student, tokens)).item(), rel=1e-4)
    assert forward_kl(0.0)(teacher, tokens, top, log_p).item() == pytest.approx(0, abs=1e-6)
    few = forward_kl(0.0)(student, tokens, top[..., :6], log_p[..., :6])
    assert 0.5 * kl < few < kl  # the rest is one outcome


def moved_by(optimizer: type, steps: int = 4, **options) -> torch.Tensor:
    """What a few steps on given gradients make of given matrices, one tall and one wide."""
    generator = torch.Generator().manual_seed(0)
    matrices = [
        torch.nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((48, 20), (20, 48))
    ]
    optim = optimizer(matrices, lr=0.02, weight_decay=0.1, **options)
    before = torch.cat([m.detach().flatten() for m in matrices])
    for _ in range(steps):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optim.step()
    return torch.cat([m.detach().flatten() for m in matrices]) - before


def test_muon_moves_as_torchs_own_does():
    theirs = moved_by(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    assert (moved_by(Muon) - theirs).norm() < 0.02 * theirs.norm()  # theirs iterates in bf16
    assert (moved_by(Muon, dtype=torch.bfloat16) - theirs).norm() < 0.005 * theirs.norm()
    assert (moved_by(Muon, momentum=0.8) - theirs).norm() > 0.1 * theirs.norm()


def test_orthogonalised_keeps_directions_and_levels_lengths():
    matrix = torch.randn(12, 30, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    levelled = u.T @ orthogonalised(matrix) @ v.T
    lengths = levelled.diagonal()
    assert (levelled - lengths.diag()).abs().max() < 1e-4
    assert lengths.min() > 0.6
    assert lengths.max() < 1.3
    assert torch.allclose(orthogonalised(matrix.T), orthogonalised(matrix).T, atol=1e-5)


@pytest.mark.parametrize("capable", [True, False])
def test_bf16_trains_only_where_the_hardware_has_it(monkeypatch, capable):
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx512_bf16": capable}, raising=False
    )
    with precision(torch.device("cpu")):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if capable else torch.float32)


def test_training_attention_is_causal_attention():
    q = torch.randn(2, 4, 7, 8)
    k, v = torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    got, _ = causal_attention(torch.nn.Identity(), q, k, v, None, 8**-0.5)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True
    )
    assert torch.allclose(got, want.transpose(1, 2), atol=1e-5)

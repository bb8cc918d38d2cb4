"""A prompt that was read in one slot is copied to others, and goes on with the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from running import append, text

from checkpoints import ADAPTED, LEAN
from outpace.engine import Engine
from outpace.models import MarkovModel, prefill
from outpace.types import SamplingParams

RUNNERS = [*((name, "auto") for name in ADAPTED | LEAN), *((name, False) for name in LEAN)]
NOBODY: Any = None
"""A model that cannot be run."""


@pytest.mark.parametrize(("name", "compile"), RUNNERS)
def test_a_copy_goes_on_as_the_slot_that_read_the_prompt(checkpoint, name, compile):
    model = replace(checkpoint(name), compile=compile).load()
    prompt, more = text(83), text(9, seed=1)
    shared, own = model.new_cache(3, 512), model.new_cache(3, 512)
    prefill(model, shared, 0, prompt)
    append(model, shared, 0, text(5, seed=2))  # what lies behind is not the prompt
    prefill(NOBODY, shared, 2, prompt)
    prefill(model, own, 2, prompt)
    assert shared.lengths == [88, 0, 83]
    for ids in (more[:4], more[4:]):
        assert torch.equal(append(model, shared, 2, ids), append(model, own, 2, ids))
    prefill(NOBODY, shared, 1, prompt)  # a copy is as good as what it was copied from
    shared.truncate(0, 82)
    shared.truncate(1, 0)
    shared.truncate(2, 0)
    for slot, other in ((1, prompt), (2, [*prompt, 1])):  # nobody holds it any more
        with pytest.raises(AttributeError):
            prefill(NOBODY, shared, slot, other)


class Counting(MarkovModel):
    """Counts the prompts that it reads."""

    prompts = 0

    def forward(self, *args, **options):
        self.prompts += options.get("logits") is False
        return super().forward(*args, **options)


def test_equal_prompts_are_read_once_and_texts_stay_what_they_are_alone():
    model = Counting(MarkovModel.random(5, 2, 0).table)
    params = [SamplingParams(temperature=1.0, max_new_tokens=6, seed=s) for s in range(8)]
    prompts = [[1, 2, 3]] * 4 + [[1, 2]] * 3 + [[4, 2, 3]]  # the last token is not read ahead

    def run(max_batch):
        engine = Engine(model, max_batch=max_batch)
        requests = [engine.submit(p, s) for p, s in zip(prompts, params, strict=True)]
        while engine.busy:
            engine.step()
        return [r.emitted for r in requests]

    together, read = run(8), model.prompts
    assert read == 3
    assert run(1) == together
    assert model.prompts == read + 8

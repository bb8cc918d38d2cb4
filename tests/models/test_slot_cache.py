"""The cache against a slow readable twin: one Python list of rows per slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outpace import ContextLengthError, OutpaceError
from outpace.models import SlotCache
from outpace.models import cache as cache_module

SLOTS = 3


def make(slots, capacity):
    """Two storage tensors of different shape; unused rows are -1."""
    return [torch.full((slots, capacity), -1), torch.full((slots, capacity, 2), -1.0)]


def write(cache, slots, rows):
    """What a forward pass does: reserve, then write `[B, T]` rows behind the lengths."""
    cache.reserve(slots, rows.shape[1])
    at = cache.row_indices(slots, rows.shape[1])
    cache.storage[0].view(-1)[at] = rows.flatten()
    cache.storage[1].view(-1, 2)[at] = rows.flatten()[:, None].float()


def held(cache, slot):
    if slot >= len(cache.storage[0]):  # never used, and without memory
        return []
    n = cache.lengths[slot]
    return cache.storage[0][slot, :n].tolist() if n else []  # an unused slot may have no memory


def filled(length, max_len=300):
    cache = SlotCache(SLOTS, max_len, make)
    write(cache, [1], torch.arange(length)[None])
    cache.commit(1, range(length))
    return cache


# --- one thing at a time --------------------------------------------------------------------


def test_a_pass_alone_commits_nothing():
    cache = filled(5)
    write(cache, [1], torch.tensor([[70, 71]]))
    assert held(cache, 1) == [0, 1, 2, 3, 4]
    assert cache.lengths == [0, 5, 0]
    assert cache.slots == SLOTS


@pytest.mark.parametrize("kept", [(), (0,), (0, 1, 2), (0, 2), (1, 3), (3,), (0, 1, 3)])
def test_a_path_is_gathered_in_place(kept):
    cache = filled(5)
    write(cache, [1], torch.tensor([[70, 71, 72, 73]]))
    cache.commit(1, kept)
    assert held(cache, 1) == [0, 1, 2, 3, 4, *(70 + i for i in kept)]


def test_the_next_pass_overwrites_what_was_dropped():
    cache = filled(2)
    write(cache, [1], torch.tensor([[70, 71, 72]]))
    cache.commit(1, (0, 2))
    write(cache, [1], torch.tensor([[80]]))
    cache.commit(1, (0,))
    assert held(cache, 1) == [0, 1, 70, 72, 80]


@pytest.mark.parametrize(("length", "left"), [(0, 0), (3, 3), (5, 5), (9, 5)])
def test_truncate_only_forgets(length, left):
    cache = filled(5)
    cache.truncate(1, length)
    assert held(cache, 1) == list(range(left))


def test_a_full_slot_says_so_and_stays_as_it_is():
    cache = filled(5, max_len=7)
    write(cache, [1], torch.tensor([[70, 71, 72]]))
    with pytest.raises(ContextLengthError, match=r"a slot of 7 positions is full: .* max_len"):
        cache.commit(1, (0, 1, 2))
    assert held(cache, 1) == [0, 1, 2, 3, 4]
    cache.commit(1, (0, 2))
    assert held(cache, 1) == [0, 1, 2, 3, 4, 70, 72]
    assert issubclass(ContextLengthError, OutpaceError)


def test_rows_past_the_end_of_a_slot_do_not_reach_the_next():
    """A block may stick out over `max_len` as long as it is not committed."""
    cache = filled(64, max_len=64)
    write(cache, [2], torch.tensor([[90]]))
    cache.commit(2, (0,))
    write(cache, [1], torch.arange(70, 80)[None])
    assert held(cache, 2) == [90]
    assert held(cache, 1) == list(range(64))


def test_growth_doubles_and_keeps_what_every_slot_holds():
    cache = filled(250, max_len=1000)
    capacities = []
    for start in range(250, 1000, 50):
        write(cache, [1], torch.arange(start, start + 50)[None])
        cache.commit(1, range(50))
        capacities.append(cache.capacity)
        assert all(t.shape[:2] == (2, cache.capacity) for t in cache.storage)  # slots 0 and 1
    assert held(cache, 1) == list(range(1000))
    assert sorted(set(capacities)) == [512, 1024]


def test_slots_get_memory_when_they_are_used():
    cache = SlotCache(5, 300, make)
    counts = []
    for slot in (0, 1, 2, 0, 4, 3):
        write(cache, [slot], torch.tensor([[slot, 10 + slot]]))
        cache.commit(slot, (0, 1))
        counts.append(len(cache.storage[0]))
    assert counts == [1, 2, 4, 4, 5, 5]
    assert [held(cache, s) for s in range(5)] == [
        [0, 10, 0, 10],
        *([s, 10 + s] for s in (1, 2, 3, 4)),
    ]
    assert cache.slots == 5


def test_a_commit_need_not_be_in_inference_mode():
    cache = SlotCache(2, 300, make)
    with torch.inference_mode():
        write(cache, [1], torch.tensor([[70, 71, 72]]))
    cache.commit(1, (0, 2))
    assert held(cache, 1) == [70, 72]


def test_a_small_cache_is_no_larger_than_it_may_get():
    assert SlotCache(1, 10, make).capacity == 64
    assert SlotCache(1, 65, make).capacity == 128
    assert SlotCache(1, 4096, make).capacity == 256


# --- any sequence of them -------------------------------------------------------------------


class AgainstLists(RuleBasedStateMachine):
    """Passes over several slots, commits, truncations, in any order; small buckets."""

    MAX_LEN = 30
    kind: type[SlotCache] = SlotCache

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(cache_module, "BUCKET", 4)
        self.patch.setattr(cache_module, "_FIRST_CAPACITY", 4)
        self.cache = self.kind(SLOTS, self.MAX_LEN, make)
        self.kept: list[list[int]] = [[] for _ in range(SLOTS)]
        self.last: list[list[int]] = [[] for _ in range(SLOTS)]  # rows of each one's last pass
        self.prompts: dict[int, list[int]] = {}
        self.next = 0

    def teardown(self):
        self.patch.undo()

    @rule(slots=st.permutations(range(SLOTS)), batch=st.integers(1, SLOTS), rows=st.integers(1, 9))
    def run(self, slots, batch, rows):
        tokens = torch.arange(self.next, self.next + batch * rows).view(batch, rows)
        self.next += batch * rows
        write(self.cache, slots[:batch], tokens)
        for slot, row in zip(slots, tokens.tolist(), strict=False):
            self.last[slot] = row

    @precondition(lambda self: not all(self.kept))
    @rule(data=st.data(), prompt=st.sampled_from([[-2], [-2, -3, -4, -5, -6], [-3] * 9]))
    def prefill(self, data, prompt):
        """From another slot that has read the same, or by a pass."""
        slot = data.draw(st.sampled_from([s for s in range(SLOTS) if not self.kept[s]]))
        known = prompt in self.prompts.values()
        assert self.cache.share(slot, prompt) == known
        if not known:
            write(self.cache, [slot], torch.tensor([prompt]))
            self.cache.commit(slot, range(len(prompt)))
            self.cache.remember(slot, prompt)
        self.kept[slot] = list(prompt)
        self.prompts[slot] = prompt
        self.last[slot] = []

    @precondition(lambda self: any(self.last))
    @rule(data=st.data())
    def commit(self, data):
        slot = data.draw(st.sampled_from([s for s in range(SLOTS) if self.last[s]]))
        kept = data.draw(st.sets(st.integers(0, len(self.last[slot]) - 1)).map(sorted))
        if len(self.kept[slot]) + len(kept) > self.MAX_LEN:
            with pytest.raises(ContextLengthError):
                self.cache.commit(slot, kept)
            return
        self.cache.commit(slot, kept)
        self.kept[slot] += [self.last[slot][i] for i in kept]
        self.last[slot] = []

    @precondition(lambda self: any(self.kept))
    @rule(data=st.data())
    def truncate(self, data):
        slot = data.draw(st.sampled_from([s for s in range(SLOTS) if self.kept[s]]))
        length = data.draw(st.integers(0, len(self.kept[slot]) + 1))
        self.cache.truncate(slot, length)
        del self.kept[slot][length:]
        if length < len(self.prompts.get(slot, ())):
            del self.prompts[slot]
        self.last[slot] = []

    @invariant()
    def holds_the_same(self):
        assert self.cache.lengths == [len(rows) for rows in self.kept]
        for slot, rows in enumerate(self.kept):
            assert held(self.cache, slot) == rows
            if rows:
                twice = self.cache.storage[1][slot, : len(rows)].tolist()
                assert twice == [[float(r), float(r)] for r in rows]


TestAgainstLists = AgainstLists.TestCase
TestAgainstLists.settings = settings(max_examples=60, stateful_step_count=30)


class CommitsThePrefix(SlotCache):
    def commit(self, slot, kept):
        super().commit(slot, range(len(kept)))


class LosesOnGrowth(SlotCache):
    def reserve(self, slots, rows):
        before = self.storage
        super().reserve(slots, rows)
        if self.storage is not before:
            self.storage = self._make(self.slots, self.capacity)


class KeepsWhatIsCommittedOnGrowth(SlotCache):
    def make_room(self, slots, needed):
        self.ends = list(self.lengths)
        super().make_room(slots, needed)


class MixesSlots(SlotCache):
    def row_indices(self, slots, rows):
        return super().row_indices(sorted(slots), rows)


class ForgetsTooMuch(SlotCache):
    def truncate(self, slot, length):
        super().truncate(slot, max(0, length - 1))


class RemembersWhatIsGone(SlotCache):
    def truncate(self, slot, length):
        prompt = self._prompts.get(slot)
        super().truncate(slot, length)
        if prompt is not None:
            self.remember(slot, prompt)


class SharesAnything(SlotCache):
    def share(self, slot, prompt):
        wanted = next((read for read in self._prompts.values() if read[:1] == prompt[:1]), prompt)
        return super().share(slot, wanted)


BROKEN = [
    CommitsThePrefix,
    LosesOnGrowth,
    KeepsWhatIsCommittedOnGrowth,
    MixesSlots,
    ForgetsTooMuch,
    RemembersWhatIsGone,
    SharesAnything,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_cache_differs_from_the_lists(broken):
    machine = type("Machine", (AgainstLists,), {"kind": broken})
    quick = settings(max_examples=600, stateful_step_count=30, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quick)

"""Past outputs: what is remembered and forgotten, what is on disk, who may read and write."""

from __future__ import annotations

import os
import threading
import time
import warnings
from contextlib import nullcontext
from random import Random

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from twins_of_text import SEP, Tokens, ends, followed, proposed, started

from outpace.drafters import memory as memory_module
from outpace.drafters.base import Context
from outpace.drafters.memory import LENGTHS, Memory
from outpace.drafters.suffix import SuffixDrafter
from outpace.errors import OptionError

V = 50
HEADER = 20
OUTPUTS = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 7, 8], [3, 4, 11, 12, 13, 14, 15]]


def serving(capacity: int = 256, file=None, vocab_size: int = V) -> Memory:
    memory = Memory(capacity, file)
    memory.serve(vocab_size)
    return memory


def held(memory: Memory) -> Tokens:
    """What a memory remembers, the oldest first."""
    past = memory.past
    first = max(0, past.count - past.capacity)
    return [past.tokens[i & (past.capacity - 1)] for i in range(first, past.count)]


def newest(memory: Memory, count: int) -> Tokens:
    """The last tokens of the last text, and what stands before them."""
    tokens = held(memory)
    while tokens and tokens[-1] == SEP:
        tokens.pop()
    return tokens[-count:]


def continuations(memory: Memory, run: Tokens, most: int) -> list[Tokens]:
    """What stood behind a run, the newest first."""
    past = memory.past
    positions = [at for at in past.after(run, 999) if past.matched(at, run, 99) == len(run)]
    return [past.continuation(at, most) for at in positions]


def stood(text: Tokens, run: Tokens, most: int) -> list[Tokens]:
    """The same from a plain list."""
    return [followed(text, at, most) for at in ends(text, run)]


# --- what is remembered ---------------------------------------------------------------------


class RemembersAll(Memory):
    """Twice the memory that was asked for."""

    def __init__(self, capacity, file=None):
        super().__init__(2 * capacity, file)


class ForgetsPrompts(Memory):
    """Outputs without the prompts they answer."""

    def add(self, tokens, prompt_length):
        super().add(tokens[prompt_length:], 0)


def check_remembered(seed: int, count: int, kind=Memory) -> None:
    random, memory, everything = Random(seed), kind(64), Tokens()
    memory.serve(V)
    for _ in range(count):
        tokens = [random.randrange(3) for _ in range(random.choice((1, 5, 30, 90)))]
        prompt = random.randrange(len(tokens) + 1)
        memory.add(tokens, prompt)
        if prompt < len(tokens):
            everything += [*tokens[max(0, prompt - LENGTHS[0]) :], SEP]
        kept = everything[-64:]
        assert held(memory) == kept
        for n in LENGTHS:
            run = [random.randrange(3) for _ in range(n)]
            assert continuations(memory, run, 5) == stood(kept, run, 5)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 20))
def test_the_newest_outputs_and_their_prompts_ends_are_remembered(seed, count):
    """Within the capacity, whatever came; what is oldest is gone."""
    check_remembered(seed, count)


@pytest.mark.parametrize("kind", [RemembersAll, ForgetsPrompts])
def test_a_wrong_memory_is_found_out(kind):
    with pytest.raises(AssertionError):
        check_remembered(0, 20, kind)


def test_a_prompt_leads_to_its_answer():
    memory = serving()
    memory.add([*range(20, 40), 1, 2, 3], 20)
    assert continuations(memory, [38, 39, 1], 9) == [[2, 3]]
    assert continuations(memory, [28], 2) == [[29, 30]]  # the prompt's last twelve
    assert continuations(memory, [27], 2) == []
    memory.add([1, 2, 3], 3)  # nothing was answered
    assert held(memory) == [*range(28, 40), 1, 2, 3, SEP]


def test_a_memory_without_room_is_refused():
    for capacity in (0, -1, 1.5, True):
        with pytest.raises(OptionError, match=r"capacity must be a whole number >= 1.*tokens of"):
            Memory(capacity)


# --- on disk --------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    return tmp_path / "new" / "outputs"


def drafts_of(memory: Memory) -> list:
    """What is drafted behind a few texts, by this memory alone."""
    drafter = started(SuffixDrafter(memory=memory), V)
    found = []
    for tail in ([3, 4], [20, 7, 8], [1, 2, 3], [13], [40]):
        context = Context(0, tail, len(tail))
        drafter.open(context)
        found.append(proposed(drafter, context, 6))
        drafter.close(0)
    return found


def test_what_was_kept_is_drafted_again(file):
    first = serving(file=file)
    for output in OUTPUTS:
        first.add(output, 1)
    again = serving(file=file)
    assert drafts_of(again) == drafts_of(first) != drafts_of(serving())
    assert [t for t in held(again) if t != SEP] == [t for output in OUTPUTS for t in output]
    assert file.stat().st_size == HEADER + 4 * len(held(first))


def test_a_file_is_read_once_by_the_first_engine(file):
    serving(file=file).add(OUTPUTS[0], 0)
    memory = serving(file=file)
    before = held(memory)
    memory.serve(V)
    assert held(memory) == before


@pytest.mark.parametrize("torn", [1, 2, 3])
def test_a_torn_token_is_cut_off(file, torn):
    first = serving(file=file)
    for output in OUTPUTS[:2]:
        first.add(output, 1)
    file.write_bytes(file.read_bytes()[:-torn])
    again = serving(file=file)
    assert (file.stat().st_size - HEADER) % 4 == 0
    assert continuations(again, [1, 2, 3], 9) == [[4, 5, 6]]
    again.add(OUTPUTS[2], 1)
    third = serving(file=file)
    assert continuations(third, [11, 12, 13], 9) == [[14, 15]]


@pytest.mark.parametrize("torn", [1, 4, 8, 10])
def test_behind_a_torn_text_no_other_goes_on(file, torn):
    first = serving(file=file)
    for output in OUTPUTS[:2]:
        first.add(output, 1)
    file.write_bytes(file.read_bytes()[:-torn])
    serving(file=file).add(OUTPUTS[2], 1)
    again = serving(file=file)
    assert continuations(again, [11, 12, 13], 9) == [[14, 15]]
    assert all(3 not in run for run in continuations(again, [7], 9))


@pytest.mark.parametrize("content", [b"x", b"{}" * 40, b"outpace-outputs1"])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    file = tmp_path / "notes"
    file.write_bytes(content)
    with pytest.raises(OptionError, match="notes is no file of past outputs: give another name"):
        Memory(64, file)
    assert file.read_bytes() == content


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "text").write_text("x")
    for file in (tmp_path, tmp_path / "text" / "below"):
        with pytest.raises(OptionError, match=r"cannot be kept in .* \(.+\): check the path"):
            Memory(64, file)


def test_another_vocabulary_is_refused(file):
    memory = serving(file=file)
    memory.add(OUTPUTS[0], 0)
    with pytest.raises(OptionError, match=f"vocabulary of {V} tokens.*60: give every vocabulary"):
        memory.serve(60)
    before = file.read_bytes()
    other = Memory(64, file)
    with pytest.raises(OptionError, match=f"vocabulary of {V} tokens.*60: give every target a"):
        other.serve(60)
    assert file.read_bytes() == before
    other.serve(V)
    assert held(other)[:6] == OUTPUTS[0]


def test_tokens_that_no_vocabulary_has_are_left_out(file):
    memory = serving(file=file)
    memory.add(OUTPUTS[0], 0)
    with file.open("r+b") as f:
        f.seek(HEADER + 3)
        f.write(b"\x70")
    assert held(serving(file=file))[:5] == OUTPUTS[0][1:]


def check_growth(file, kind=Memory) -> None:
    """The file has twice the capacity at most, and holds what is newest."""
    memory, rewritten, size = kind(64, file), 0, HEADER
    memory.serve(V)
    everything = Tokens()
    for i in range(100):
        output = [i % V, *range(1 + i % 7)] * (20 if i == 50 else 1)
        memory.add(output, 1)
        everything += [*output, SEP]
        now = file.stat().st_size
        assert now <= HEADER + 2 * 4 * 64
        assert now - size == 4 * (len(output) + 1) or now == HEADER + 4 * 64
        rewritten += now < size
        size = now
        if i % 7 == 0:
            kept = min(60, (size - HEADER) // 4 - 1)
            again = kind(64, file)
            again.serve(V)
            assert newest(again, kept) == everything[:-1][-kept:]
    assert rewritten > 5
    assert {path.name for path in file.parent.iterdir()} == {file.name, f"{file.name}.lock"}


def test_a_file_that_grows_is_written_anew_and_keeps_the_newest(file):
    check_growth(file)


class OnlyAppends(Memory):
    def _append(self, file, vocab_size, text):
        before, self.past.capacity = self.past.capacity, 2**30
        super()._append(file, vocab_size, text)
        self.past.capacity = before


class KeepsTheOldest(Memory):
    def _append(self, file, vocab_size, text):
        before = file.read_bytes()
        super()._append(file, vocab_size, text)
        if file.stat().st_size < len(before):
            file.write_bytes(before[: file.stat().st_size])


@pytest.mark.parametrize("kind", [OnlyAppends, KeepsTheOldest])
def test_a_file_that_is_kept_wrongly_is_found_out(file, kind):
    with pytest.raises(AssertionError):
        check_growth(file, kind)


# --- several threads ------------------------------------------------------------------------


def test_who_reads_sees_whole_texts_while_others_add(file):
    """Texts of four writers, each of runs that go up: nothing else is ever read."""
    memory = serving(256, file)

    def write(writer: int) -> None:
        for i in range(60):
            start = 12 * writer + i % 4
            memory.add(list(range(start, 12 * writer + 12)), 0)

    writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in writers:
        thread.start()
    reads = 0
    while any(thread.is_alive() for thread in writers) or reads == 0:
        for first in range(0, 48, 12):
            with memory.reading() as past:
                assert past.count == 0 or held(memory)[-1] == SEP
                behind = continuations(memory, [first + 6], 8)
            reads += 1
            assert all(run == list(range(first + 7, first + 12)) for run in behind)
    for thread in writers:
        thread.join()
    written = sum(13 - i % 4 for i in range(60)) * 4
    assert memory.past.count == written
    assert newest(serving(256, file), 250) == newest(memory, 250)


def waits(memory: Memory, lock) -> bool:
    """Whether what is added waits for who reads."""
    with lock:
        thread = threading.Thread(target=memory.add, args=([1, 2, 3], 0))
        thread.start()
        thread.join(0.05)
        waiting = thread.is_alive() and memory.past.count == 0
    thread.join()
    assert memory.past.count == 4
    return waiting


def test_what_is_added_waits_for_who_reads():
    memory = serving()
    assert waits(memory, memory.reading())
    assert not waits(serving(), serving().reading())  # another's is none


def test_who_is_interrupted_by_the_end_of_a_text_is_not_stopped(monkeypatch):
    """A garbage collector may end a stream, and add its text, wherever this thread is."""
    memory = serving()
    with memory.reading() as past:
        memory.add(OUTPUTS[0], 0)
        assert past.count == 0
    assert held(memory) == [*OUTPUTS[0], SEP]
    keep = memory._keep

    def interrupted(text):
        if len(text) == 6:
            memory.add(OUTPUTS[2], 0)
        keep(text)

    monkeypatch.setattr(memory, "_keep", interrupted)
    memory.add(OUTPUTS[1], 0)
    assert held(memory) == [*OUTPUTS[0], SEP, *OUTPUTS[1], SEP, *OUTPUTS[2], SEP]


def test_a_file_that_was_removed_is_begun_anew(file, monkeypatch):
    monkeypatch.chdir(file.parent.parent)
    memory = serving(file=file.relative_to(file.parent.parent))
    memory.add(OUTPUTS[0], 0)
    monkeypatch.chdir("/")
    file.unlink()
    memory.add(OUTPUTS[1], 0)
    assert held(serving(file=file)) == [*OUTPUTS[1], SEP]


def test_a_lock_that_cannot_be_had_is_refused_at_once(file, monkeypatch):
    serving(file=file)
    granted = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: not str(path).endswith(".lock") and granted(path, mode)
    )
    with pytest.raises(OptionError, match=r"\.lock is not to be written to"):
        Memory(256, file)


def check_processes(file, monkeypatch) -> None:
    """Of each process's texts the file has the last ones, whole and in order.

    A lock on a file is of whoever opened it, so threads with a memory each stand for processes.
    """
    monkeypatch.setattr(type(file), "replace", slow(type(file).replace))
    memories = [serving(64, file) for _ in range(3)]

    def write(writer: int) -> None:
        for i in range(40):
            memories[writer].add([writer, i, *range(1 + (writer + i) % 9)], 0)

    writers = [threading.Thread(target=write, args=(i,)) for i in range(3)]
    with warnings.catch_warnings(record=True) as said:
        for thread in writers:
            thread.start()
        for thread in writers:
            thread.join()
    assert not said
    tokens = np.fromfile(file, "<i4", offset=HEADER).tolist()
    del tokens[: tokens.index(SEP) + 1]  # may be the rest of one
    seen: dict[int, list[int]] = {i: [] for i in range(3)}
    while tokens:
        end = tokens.index(SEP)
        writer, i, *rest = tokens[:end]
        assert rest == list(range(1 + (writer + i) % 9))
        seen[writer].append(i)
        del tokens[: end + 1]
    assert any(seen.values())
    for numbers in seen.values():
        assert numbers == list(range(40))[40 - len(numbers) :]


def slow(replace):
    def replaced(*args):
        time.sleep(0.01)
        return replace(*args)

    return replaced


def test_processes_that_keep_theirs_in_one_file_take_turns(file, monkeypatch):
    check_processes(file, monkeypatch)


def test_processes_that_take_no_turns_are_found_out(file, monkeypatch):
    monkeypatch.setattr(memory_module, "_turn", nullcontext)
    with pytest.raises((AssertionError, ValueError)):
        check_processes(file, monkeypatch)


def test_a_file_that_another_process_begins_meanwhile_is_of_its_vocabulary(file, monkeypatch):
    """Between the first look at it and one's turn."""
    turn = memory_module._turn

    def late(path):
        monkeypatch.setattr(memory_module, "_turn", turn)
        serving(file=path, vocab_size=V + 1).add(OUTPUTS[0], 0)
        return turn(path)

    memory = Memory(256, file)
    monkeypatch.setattr(memory_module, "_turn", late)
    with pytest.raises(OptionError, match=f"a vocabulary of {V + 1} tokens, the target has {V}"):
        memory.serve(V)
    assert held(serving(file=file, vocab_size=V + 1)) == [*OUTPUTS[0], SEP]


def test_a_file_that_another_process_does_not_let_go_is_given_up(file, monkeypatch):
    monkeypatch.setattr(memory_module, "_PATIENCE", 0.05)
    first = serving(file=file)
    with FileLock(f"{file}.lock"):
        with pytest.raises(OptionError, match=r"another process has used .* let it finish"):
            serving(file=file)
        with pytest.warns(RuntimeWarning, match=r"no longer kept in .*lock"):
            first.add(OUTPUTS[0], 0)


def test_a_full_disk_costs_the_file_and_no_request(file):
    first = serving(file=file)
    first._file = file.with_name("full")
    first._file.symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning, match="no longer kept in .*full"):
        first.add(OUTPUTS[0], 0)
    first.add(OUTPUTS[1], 0)
    assert [t for t in held(first) if t != SEP] == [*OUTPUTS[0], *OUTPUTS[1]]

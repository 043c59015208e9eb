"""Hot buffers: the worked trace, and random calls beside a plain model of one buffer per index and row."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire.sparse.hot_slots import CLOCK_END, FoundSlots, HotSlots

INDEXES, ROWS, SIZE = 2, 3, 4  # of random calls


def swap_in(
    hot: HotSlots, rows: Sequence[int], positions: Sequence[Sequence[int]], newest: Sequence[int]
) -> FoundSlots:
    """One call of index 0, rows padded with -1."""
    width = max(map(len, positions))
    padded = [[*row, *[-1] * (width - len(row))] for row in positions]
    return hot.swap_in(0, np.int32(rows), np.array(padded, dtype=np.int32), np.int64(newest))


def order_of(hot: HotSlots, row: int = 0, index: int = 0) -> list[int]:
    """The slots of a buffer, the least recently used first."""
    return np.argsort(hot._stamp[index, row, 1 : hot.buffer_size + 1], kind="stable").tolist()


def loads_of(found: FoundSlots) -> list[tuple[int, int, int]]:
    return list(zip(found.row.tolist(), found.position.tolist(), found.slot.tolist(), strict=True))


def test_the_worked_trace() -> None:
    """A buffer of 4: the slots, the loads, and after each call the order of use: stale, loaded, hit."""
    hot, reserved = HotSlots(1, 1, 4), 4
    found = swap_in(hot, [0], [[0, 1, 2, 3]], [4])
    assert found.slots.tolist() == [[0, 1, 2, 3]] and order_of(hot) == [0, 1, 2, 3]
    for positions, newest, slots, loads, order in (
        ([1, 5, 4], 5, [1, reserved, 0], [(0, 4, 0)], [2, 3, 0, 1]),
        ([4, 0, 6], 6, [0, 2, reserved], [(0, 0, 2)], [3, 1, 2, 0]),
        ([2, 7, 0], 7, [3, reserved, 2], [(0, 2, 3)], [1, 0, 3, 2]),
    ):
        found = swap_in(hot, [0], [positions], [newest])
        assert found.slots.tolist() == [slots]
        assert loads_of(found) == loads
        assert order_of(hot) == order
    assert (hot.hit_tokens, hot.swapped_tokens) == (3, 7)


def test_a_context_that_is_read_whole_lies_in_order_until_it_outgrows_the_buffer() -> None:
    """Each token is copied once, to the slot of its number; the first one beyond overwrites the least recent."""
    hot = HotSlots(1, 2, 6)
    for newest in range(7):
        found = swap_in(hot, [1], [range(newest + 1)][-6:] if newest < 6 else [range(1, 7)], [newest])
        held = [*range(newest), 6] if newest < 6 else [*range(1, 6), 6]
        assert found.slots.tolist() == [held]
        assert loads_of(found) == ([(1, newest - 1, newest - 1)] if newest else [])
    assert loads_of(swap_in(hot, [1], [[2, 6, 7]], [7])) == [(1, 6, 0)]


def test_empty_calls() -> None:
    """No rows, and rows that select nothing but their newest token."""
    hot = HotSlots(1, 2, 4)
    assert hot.swap_in(0, np.zeros(0, np.int32), np.zeros((0, 3), np.int32), np.zeros(0, np.int64)).slots.shape == (
        0,
        3,
    )
    assert swap_in(hot, [0, 1], [[0], [0]], [0, 0]).slots.tolist() == [[4], [4]]
    assert (hot.hit_tokens, hot.swapped_tokens) == (0, 0)


def test_a_row_twice_and_more_than_the_buffer_are_refused() -> None:
    hot = HotSlots(1, 2, 4)
    with pytest.raises(AssertionError, match="twice"):
        swap_in(hot, [0, 0], [[0], [0]], [1, 1])
    with pytest.raises(AssertionError, match="wider"):
        swap_in(hot, [0], [range(5)], [9])


class Buffer:
    """One hot buffer, plainly: tokens in the order of their last use; slots of the same call by number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: OrderedDict[int, int | None] = OrderedDict((slot, None) for slot in range(size))

    def select(self, positions: Iterable[int], newest: int) -> tuple[dict[int, int], dict[int, int]]:
        """Slots of the selected positions, and those of them that were loaded."""
        old = {token: slot for slot, token in self.slots.items() if token is not None}
        wanted = [position for position in positions if position not in (-1, newest)]
        hits = {position: old[position] for position in wanted if position in old}
        stale = [slot for slot in self.slots if slot not in hits.values()]
        missing = [position for position in wanted if position not in old]
        loads = dict(zip(missing, stale, strict=False))
        self.slots.update({slot: position for position, slot in loads.items()})
        for group in (loads, hits):
            for slot in sorted(group.values()):
                self.slots.move_to_end(slot)
        return {newest: self.size} | hits | loads, loads


class Beside:
    """Hot slots and plain buffers, which get the same calls. Contexts grow a token a call."""

    def __init__(self, *, clock: int = 0) -> None:
        self.hot = HotSlots(INDEXES, ROWS, SIZE)
        if clock:
            self.hot._clock = [clock] * INDEXES
        self.buffers = [[Buffer(SIZE) for _ in range(ROWS)] for _ in range(INDEXES)]
        self.lengths = [0] * ROWS
        self.swapped = self.hits = 0

    def select(self, index: int, rows: Sequence[int], most: int, random: Random) -> None:
        """Each row selects some tokens, at most `most`."""
        positions = np.full((len(rows), most), -1, dtype=np.int32)
        newest = np.array([self.lengths[row] for row in rows], dtype=np.int64)
        for line, last in zip(positions, newest.tolist(), strict=True):
            count = random.randint(1, min(last + 1, most))
            line[:count] = random.sample(range(last + 1), count)
        found = self.hot.swap_in(index, np.array(rows, dtype=np.int32), positions, newest)
        loads: dict[tuple[int, int], int] = {}
        for place, row in enumerate(rows):
            selected = positions[place].tolist()
            slots, loaded = self.buffers[index][row].select(selected, int(newest[place]))
            assert found.slots[place].tolist() == [slots[each] if each >= 0 else 0 for each in selected]
            loads |= {(row, position): slot for position, slot in loaded.items()}
            self.swapped += len(loaded)
            self.hits += sum(each not in (-1, newest[place]) and each not in loaded for each in selected)
            self.lengths[row] += 1
        assert {each[:2]: each[2] for each in loads_of(found)} == loads
        assert len(found.row) == len(loads)
        self.check()

    def begin_again(self, row: int) -> None:
        self.hot.clear(np.array([row], dtype=np.int32))
        for buffers in self.buffers:
            buffers[row] = Buffer(SIZE)
        self.lengths[row] = 0
        self.check()

    def check(self) -> None:
        for index, buffers in enumerate(self.buffers):
            for row, buffer in enumerate(buffers):
                assert order_of(self.hot, row, index) == list(buffer.slots)
        assert (self.hot.swapped_tokens, self.hot.hit_tokens) == (self.swapped, self.hits)


def check_hot_slots(seed: int, calls: int = 150) -> None:
    """Random calls; with odd seeds the clock of the hot slots ends after a few."""
    random = Random(seed)
    beside = Beside(clock=CLOCK_END - 6 if seed % 2 else 0)
    for _ in range(calls):
        if random.random() < 0.05:
            beside.begin_again(random.randrange(ROWS))
        rows = random.sample(range(ROWS), random.randint(1, ROWS))
        beside.select(random.randrange(INDEXES), rows, random.randint(1, SIZE), random)


@pytest.mark.parametrize("seed", range(20))
def test_random_calls(seed: int) -> None:
    check_hot_slots(seed)


class HotSlotsMachine(RuleBasedStateMachine):
    """The same, drawn by hypothesis."""

    @initialize(late=st.booleans())
    def start(self, late: bool) -> None:
        self.beside = Beside(clock=CLOCK_END - 6 if late else 0)

    @rule(
        index=st.integers(0, INDEXES - 1),
        rows=st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1),
        most=st.integers(1, SIZE),
        random=st.randoms(use_true_random=False),
    )
    def select(self, index: int, rows: list[int], most: int, random: Random) -> None:
        self.beside.select(index, rows, most, random)

    @rule(row=st.integers(0, ROWS - 1))
    def begin_again(self, row: int) -> None:
        self.beside.begin_again(row)


TestHotSlots = HotSlotsMachine.TestCase
TestHotSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

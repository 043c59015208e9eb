"""MambaMachine: random operations on the slots of recurrent state, checked against a plain queue and a set."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest

from quire.errors import InvalidFree, OutOfPages
from quire.memory.allocator import MambaSlotAllocator
from quire.testing.choices import Choices


class MambaMachine:
    """`queue` is what is free, in the order of reuse; `out` what was handed out; `group` what is set aside."""

    OPERATIONS = ("alloc", "alloc", "free", "free", "wrong_free", "group", "clear")
    EVENTS = ("out of slots", "group is empty", "group refused", "unused slots came back", "taken")

    def __init__(self, choices: Choices) -> None:
        self.size = choices.between(2, 12)
        self.allocator = MambaSlotAllocator(self.size)
        self.queue = deque(range(1, self.size + 1))
        self.out: set[int] = set()
        self.group_slots: deque[int] | None = None
        self.happened: Counter[str] = Counter()

    def step(self, choices: Choices) -> None:
        operation = choices.one_of(self.OPERATIONS)
        getattr(self, operation)(choices)
        self.happened[operation] += 1
        self.check()

    # -- operations

    def alloc(self, choices: Choices) -> None:
        self._alloc(choices.between(0, 3))

    def free(self, choices: Choices) -> None:
        """Some slots in any order, as a list or as an array."""
        slots = self._some(choices)
        self.allocator.free(choices.one_of((slots, np.array(slots, dtype=np.int32), np.array(slots, dtype=np.int64))))
        self._freed(slots)

    def wrong_free(self, choices: Choices) -> None:
        """Slots that are not out, slot 0, one outside the pool or one named twice, beside right ones."""
        slots = self._some(choices)
        aside = self.group_slots or ()
        wrong = choices.one_of((0, -1, self.size + 1, 2**32 + 1, *self.queue, *aside, *slots))
        with pytest.raises(InvalidFree):
            self.allocator.free(np.array([*slots, wrong], dtype=np.int64))

    def group(self, choices: Choices) -> None:
        if self.group_slots is None:
            self._begin(choices.between(0, self.size // 2 + 1))
        else:
            self.allocator.alloc_group_end()
            self._end()

    def clear(self, choices: Choices) -> None:
        if choices.chance(30):
            self.allocator.clear()
            self.queue, self.out, self.group_slots = deque(range(1, self.size + 1)), set(), None

    # -- checks

    def check(self) -> None:
        allocator = self.allocator
        aside = 0 if self.group_slots is None else len(self.group_slots)
        assert allocator.available_size() == len(self.queue)
        assert allocator.num_set_aside == aside
        assert allocator.size == self.size
        assert np.flatnonzero(allocator.ids.is_out(np.arange(self.size + 1))).tolist() == sorted(self.out)
        assert len(self.queue) + len(self.out) + aside == self.size, "a slot is lost"

    # -- inside

    def _alloc(self, count: int) -> None:
        source = self.queue if self.group_slots is None else self.group_slots
        if count > len(source):
            with pytest.raises(OutOfPages) as caught:
                self.allocator.alloc(count)
            assert (caught.value.group, caught.value.wanted, caught.value.free) == ("state", count, len(source))
            self.happened["out of slots" if self.group_slots is None else "group is empty"] += 1
            return
        slots = self.allocator.alloc(count)
        assert slots.dtype == np.int32
        expected = [source.popleft() for _ in range(count)]
        assert slots.tolist() == expected
        slots[:] = 0  # the caller owns what it was given
        self.out |= set(expected)
        self.happened["taken"] += count > 0

    def _begin(self, count: int) -> None:
        if count > len(self.queue):
            with pytest.raises(OutOfPages):
                self.allocator.alloc_group_begin(count)
            self.happened["group refused"] += 1
            return
        self.allocator.alloc_group_begin(count)
        self.group_slots = deque(self.queue.popleft() for _ in range(count))

    def _end(self) -> None:
        assert self.group_slots is not None
        self.happened["unused slots came back"] += bool(self.group_slots)
        self.queue += self.group_slots
        self.group_slots = None

    def _freed(self, slots: list[int]) -> None:
        self.out -= set(slots)
        self.queue += slots

    def _some(self, choices: Choices) -> list[int]:
        rest = sorted(self.out)
        return [rest.pop(choices.below(len(rest))) for _ in range(min(len(rest), choices.below(4)))]


def run_mamba(seed: int, steps: int) -> Counter[str]:
    """A machine with that seed for that many steps; returns what has happened."""
    choices = Choices.seeded(seed)
    machine = MambaMachine(choices)
    for _ in range(steps):
        machine.step(choices)
    return machine.happened

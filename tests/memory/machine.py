"""AllocatorMachine: random operations on an allocator, checked against plain sets of free and taken page numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from quire.errors import InvalidFree, OutOfPages
from quire.memory.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from quire.testing.choices import Choices

OPERATIONS = ("alloc", "extend", "decode", "free", "free", "wrong_free", "group", "rows", "clear")


class AllocatorMachine:
    """Sequences own pages; `free` is the set of the others."""

    def __init__(self, choices: Choices) -> None:
        self.size = choices.one_of((1, 1, 2, 3, 4, 16))
        self.num_pages = choices.between(3, 20)
        sort = choices.chance(40)
        tokens = self.num_pages * self.size + choices.below(self.size)  # what is no whole page is left out
        self.allocator: BaseTokenToKVPoolAllocator = (
            TokenToKVPoolAllocator(tokens, need_sort=sort)
            if self.size == 1
            else PagedTokenToKVPoolAllocator(tokens, self.size, need_sort=sort)
        )
        self.free_pages = set(range(1, self.num_pages + 1))
        self.sequences: list[list[int]] = []  # slots of each
        self.in_group = False
        self.grouped: set[int] = set()
        self.happened: Counter[str] = Counter()

    def step(self, choices: Choices) -> None:
        operation = choices.one_of(OPERATIONS)
        getattr(self, operation)(choices)
        self.happened[operation] += 1
        self.check()

    # -- operations

    def alloc(self, choices: Choices) -> None:
        count = choices.between(0, self.num_pages // 2)
        slots = self._take(count, lambda: self.allocator.alloc(count * self.size))
        if slots is not None:
            assert all(page_slots(page, self.size) <= set(slots) for page in self._pages(slots))
            self.sequences += [sorted(page_slots(page, self.size)) for page in sorted(self._pages(slots))]

    def extend(self, choices: Choices) -> None:
        self.sequences += [[] for _ in range(choices.between(0, 2))]
        self._grow(
            choices, [choices.between(0, 2 * self.size + 1) for _ in self.sequences], self.allocator.alloc_extend
        )
        self.sequences = [slots for slots in self.sequences if slots]

    def decode(self, choices: Choices) -> None:
        self._grow(choices, [1] * len(self.sequences), self.allocator.alloc_extend)

    def free(self, choices: Choices) -> None:
        """Give back a sequence, naming every slot or one of each page."""
        if self.sequences:
            slots = self.sequences.pop(choices.below(len(self.sequences)))
            pages = self._pages(slots)
            self.allocator.free(np.array(slots if choices.chance(50) else slots[:: self.size]))
            if self.in_group:
                self.grouped |= pages
            else:
                self.free_pages |= pages

    def wrong_free(self, choices: Choices) -> None:
        """A page that is not out, the padding page or one outside the pool, beside a right one."""
        page = choices.one_of((0, -1, self.num_pages + 1, 2**32 + 1, *self.free_pages, *self.grouped))
        slots = [page * self.size + choices.below(self.size)]
        if self.sequences:
            slots.append(choices.one_of(self.sequences)[0])
        before = self._everything()
        with pytest.raises(InvalidFree):
            self.allocator.free(np.array(slots, dtype=np.int64))
        assert self._everything() == before

    def group(self, choices: Choices) -> None:
        if self.in_group:
            self.allocator.free_group_end()
            self.free_pages |= self.grouped
            self.grouped = set()
        else:
            self.allocator.free_group_begin()
        self.in_group = not self.in_group

    def rows(self, choices: Choices) -> None:
        """Sequences grow as rows of a table of pages, which gives back what it has."""
        table = np.zeros((len(self.sequences) + 1, self.num_pages + 4), dtype=np.int32)
        for row, slots in enumerate(self.sequences):
            pages = [slot // self.size for slot in slots[:: self.size]]
            table[row, : len(pages)] = pages
            assert self.allocator.pages_of_row(table, row, 1, len(pages)).tolist() == pages[1:]
        rows = np.array([row for row in range(len(self.sequences)) if choices.chance(70)], dtype=np.intp)
        before = np.array([len(self.sequences[row]) for row in rows], dtype=np.int64)
        if choices.chance(30):
            before = -(-before // self.size) * self.size  # none begins inside a page
        after = before + np.array([choices.between(0, 2 * self.size + 1) for _ in rows], dtype=np.int64)
        new = [int(count) for count in -(-after // self.size) - -(-before // self.size)]
        pages = self._take(sum(new), lambda: self.allocator.alloc_rows(table, rows, before, after) * self.size)
        self.sequences += [sorted(page_slots(slot // self.size, self.size)) for slot in pages or ()]

    def clear(self, choices: Choices) -> None:
        if choices.chance(20):
            self.allocator.clear()
            self.free_pages, self.sequences = set(range(1, self.num_pages + 1)), []
            self.in_group, self.grouped = False, set()

    # -- checks

    def check(self) -> None:
        assert self.allocator.num_free_pages == len(self.free_pages)
        assert self.allocator.available_size() == len(self.free_pages) * self.size
        out = set(np.flatnonzero(self.allocator.ids.is_out(np.arange(self.num_pages + 1))).tolist())
        owned = [self._pages(slots) for slots in self.sequences]
        assert out == set().union(*owned)
        assert sum(map(len, owned)) == len(out), "a page has two owners"
        assert out | self.free_pages | self.grouped == set(range(1, self.num_pages + 1))

    # -- inside

    def _grow(self, choices: Choices, counts: list[int], grow: Callable[[Any, Any, Any], Any]) -> None:
        before = [len(slots) for slots in self.sequences]
        after = [length + count for length, count in zip(before, counts, strict=True)]
        last = [slots[-1] if slots else -1 for slots in self.sequences]
        wanted = sum(-(-b // self.size) - -(-a // self.size) for a, b in zip(before, after, strict=True))
        slots = self._take(wanted, lambda: grow(before, after, last))
        for sequence, count in zip(self.sequences, counts, strict=True):
            if slots is not None:
                sequence += [slots.pop(0) for _ in range(count)]
                assert len({*sequence}) == len(sequence)
                for position, slot in enumerate(sequence):
                    assert slot % self.size == position % self.size, "a token is at the wrong offset of its page"
                    assert slot // self.size == sequence[position - position % self.size] // self.size
        assert not slots

    def _take(self, wanted: int, take: Callable[[], Any]) -> list[int] | None:
        """Allocate: exactly the wanted number of pages leave the free ones, or nothing changes."""
        if wanted > len(self.free_pages):
            before = self._everything()
            with pytest.raises(OutOfPages) as caught:
                take()
            assert (caught.value.wanted, caught.value.free) == (wanted, len(self.free_pages))
            assert self._everything() == before
            self.happened["out of pages"] += 1
            return None
        slots = take()
        assert slots.dtype == np.int32
        taken = self._pages(slots.tolist()) & self.free_pages
        assert len(taken) == wanted, "took pages that were not free, or not as many as needed"
        self.free_pages -= taken
        self.happened["taken"] += wanted > 0
        return list(slots.tolist())

    def _pages(self, slots: Iterable[int]) -> set[int]:
        return {slot // self.size for slot in slots}

    def _everything(self) -> tuple[object, ...]:
        allocator = self.allocator
        return allocator.num_free_pages, allocator.ids.is_out(np.arange(self.num_pages + 1)).tolist()


def page_slots(page: int, size: int) -> set[int]:
    return set(range(page * size, (page + 1) * size))


def run_allocator(seed: int, steps: int) -> Counter[str]:
    """A machine with that seed for that many steps; returns what has happened."""
    choices = Choices.seeded(seed)
    machine = AllocatorMachine(choices)
    for _ in range(steps):
        machine.step(choices)
    return machine.happened

"""SWAMachine: random operations on a two-sided allocator, checked against plain sets and one dictionary.

It runs over an allocator of its own, and over one that shares its pages and residency table with another group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire.errors import InvalidFree, InvalidInput, OutOfPages
from quire.memory.allocator import SWATokenToKVPoolAllocator, token_allocator
from quire.memory.residency import Column
from quire.testing.choices import Choices


def window_slots(allocator: SWATokenToKVPoolAllocator, slots: Any) -> np.ndarray:
    """Where these tokens are on the window side, by the map: -1 (no slot) is nowhere."""
    found, size = np.asarray(slots, dtype=np.int64), allocator.page_size
    return allocator.full_to_swa_page_mapping[found // size] * size + found % size


def free_swa(allocator: SWATokenToKVPoolAllocator, slots: Any) -> None:
    """Free the windows of the pages of these slots: a verb of the engine whose traces are recorded."""
    allocator.vacate(allocator.full_attn_allocator.pages_of(np.asarray(slots, dtype=np.int64)))


class SWAMachine:
    """`sequences` are slots of the full side; `windows` is page -> window page; the rest of either side is free."""

    OPERATIONS = ("alloc", "extend", "extend", "decode", "decode", "free", "free", "trim", "free_swa")
    OPERATIONS += ("free_swa", "free_swa_of_last", "free_swa_of_last", "wrong_free", "wrong_free_swa")
    OPERATIONS += ("take", "drop", "hand_over", "hand_over")
    OPERATIONS += ("group", "clear")

    EVENTS = ("full is short", "window is short", "no window to go on in", "taken", "shared table")

    def __init__(self, choices: Choices) -> None:
        self.size = choices.one_of((1, 1, 2, 3, 4, 16))
        self.num_pages = choices.between(2, 12)
        self.num_windows = choices.between(2, 12 if choices.chance(40) else max(2, self.num_pages // 2))
        self.shares_table = False
        sort = choices.chance(40)
        if choices.chance(50):
            full, swa = (n * self.size + choices.below(self.size) for n in (self.num_pages, self.num_windows))
            self.allocator = SWATokenToKVPoolAllocator(full, swa, self.size, need_sort=sort)
        else:
            self.allocator = self._over(choices, need_sort=sort)
            self.shares_table = True
        self.sequences: list[list[int]] = []
        self.windows: dict[int, int] = {}
        self.free_pages = set(range(1, self.num_pages + 1))
        self.free_windows = set(range(1, self.num_windows + 1))
        self.in_group = False
        self.grouped_pages: set[int] = set()
        self.grouped_windows: set[int] = set()
        self.happened: Counter[str] = Counter()
        self.happened["shared table"] += self.shares_table

    def step(self, choices: Choices) -> None:
        operation = choices.one_of(self.OPERATIONS)
        getattr(self, operation)(choices)
        self.happened[operation] += 1
        self.check()

    # -- operations

    def alloc(self, choices: Choices) -> None:
        count = choices.between(0, 1 + self.num_pages // 2)
        slots = self._allocate(count, count, lambda: self.allocator.alloc(count * self.size))
        if slots is not None:
            pages = slots[:: self.size]
            assert slots == [slot for first in pages for slot in range(first, first + self.size)]
            self._own(pages, pages)
            self.sequences += [list(range(first, first + self.size)) for first in pages]

    def extend(self, choices: Choices) -> None:
        self.sequences += [[] for _ in range(choices.between(0, 2))]
        counts = [choices.between(0, 2 * self.size + 1) for _ in self.sequences]
        self._grow_all(choices, counts, self.allocator.alloc_extend)
        self.sequences = [slots for slots in self.sequences if slots]

    def decode(self, choices: Choices) -> None:
        self._grow_all(choices, [1] * len(self.sequences), self.allocator.alloc_extend)

    def free(self, choices: Choices) -> None:
        """Give back a sequence, naming every slot or one of each page; some of its windows may be gone."""
        if self.sequences:
            slots = self.sequences.pop(choices.below(len(self.sequences)))
            self.allocator.free(np.array(slots if choices.chance(50) else slots[:: self.size], dtype=np.int32))
            self._give_back({slot // self.size for slot in slots})

    def trim(self, choices: Choices) -> None:
        """Give back a sequence's last pages."""
        if self.sequences:
            sequence = choices.one_of(self.sequences)
            keep = choices.between(0, len(sequence) // self.size) * self.size
            slots = sequence[keep:]
            self.allocator.free(np.array(slots, dtype=np.int32))
            self._give_back({slot // self.size for slot in slots})
            del sequence[keep:]
            self.sequences = [slots for slots in self.sequences if slots]

    def free_swa(self, choices: Choices) -> None:
        pages = self._some(choices, sorted(self.windows))
        slots = [page * self.size + choices.below(self.size) for page in pages]
        free_swa(self.allocator, slots)
        self._lose_windows(pages)

    def free_swa_of_last(self, choices: Choices) -> None:
        """The page in which a sequence would go on loses its window."""
        last = {slots[-1] // self.size for slots in self.sequences if len(slots) % self.size}
        if pages := sorted(last & set(self.windows)):
            page = choices.one_of(pages)
            free_swa(self.allocator, [page * self.size])
            self._lose_windows([page])

    def wrong_free(self, choices: Choices) -> None:
        """A page that is not out, the padding page or one outside the pool, beside a right one."""
        page = choices.one_of((0, -1, self.num_pages + 1, 2**32 + 1, *self.free_pages, *self.grouped_pages))
        slots = [page * self.size + choices.below(self.size)]
        slots += [other * self.size for other in self._some(choices, self._out())]
        for refused in (self.allocator.free, lambda slots: free_swa(self.allocator, slots)):
            with self._nothing_changes(), pytest.raises(InvalidFree):
                refused(np.array(slots, dtype=np.int64))

    def wrong_free_swa(self, choices: Choices) -> None:
        """A page that is out and has no window any more, beside one that has."""
        if unmapped := self._unmapped():
            slots = [page * self.size for page in (choices.one_of(unmapped), *sorted(self.windows)[:1])]
            with self._nothing_changes(), pytest.raises(InvalidFree):
                free_swa(self.allocator, slots)

    def take(self, choices: Choices) -> None:
        """Pages that are out get windows again."""
        pages = self._some(choices, self._unmapped())
        if self._allocate(0, len(pages), lambda: self.allocator.take(ids(pages))) is not None:
            self._own([], [page * self.size for page in pages])

    def drop(self, choices: Choices) -> None:
        """Any pages of the table lose the windows that they have."""
        pages = self._some(choices, list(range(1, self.num_pages + 1)))
        had = [page for page in pages if page in self.windows]
        assert self.allocator.table.present(ids(pages)).tolist() == [page in self.windows for page in pages]
        self.allocator.drop(ids(pages))
        self._lose_windows(had)

    def hand_over(self, choices: Choices) -> None:
        """Pages that have windows give them to others that have none."""
        pairs = list(
            zip(self._some(choices, sorted(self.windows)), self._some(choices, self._unmapped()), strict=False)
        )
        if pairs:
            self.allocator.table.move(ids([old for old, _ in pairs]), ids([new for _, new in pairs]))
            self.windows |= {new: self.windows.pop(old) for old, new in pairs}

    def group(self, choices: Choices) -> None:
        if self.in_group:
            self.allocator.free_group_end()
            self.free_pages |= self.grouped_pages
            self.free_windows |= self.grouped_windows
            self.grouped_pages, self.grouped_windows = set(), set()
        else:
            self.allocator.free_group_begin()
        self.in_group = not self.in_group

    def clear(self, choices: Choices) -> None:
        if choices.chance(20):
            self.allocator.clear()
            self.sequences, self.windows = [], {}
            self.free_pages = set(range(1, self.num_pages + 1))
            self.free_windows = set(range(1, self.num_windows + 1))
            self.in_group, self.grouped_pages, self.grouped_windows = False, set(), set()

    # -- checks

    def check(self) -> None:
        allocator = self.allocator
        windows = len(self.free_windows) * self.size
        assert allocator.swa_available_size() == windows
        assert allocator.full_available_size() == len(self.free_pages) * self.size
        assert allocator.available_size() == min(len(self.free_pages), len(self.free_windows)) * self.size
        assert (allocator.num_free, allocator.num_frames) == (len(self.free_windows), self.num_windows)
        out = self._out()
        assert np.flatnonzero(allocator.full_attn_allocator.ids.is_out(np.arange(self.num_pages + 1))).tolist() == out
        assert len(out) + len(self.free_pages) + len(self.grouped_pages) == self.num_pages
        used = np.flatnonzero(allocator.allocator.ids.is_out(np.arange(self.num_windows + 1))).tolist()
        assert used == sorted(self.windows.values()), "a window is lost or serves two pages"
        assert len(used) + len(self.free_windows) + len(self.grouped_windows) == self.num_windows
        self._check_map()

    def _check_map(self) -> None:
        *column, last = self.allocator.full_to_swa_page_mapping.tolist()
        assert last == -1
        assert column == [self.windows.get(page, 0) for page in range(len(column))]
        assert self.allocator.table.frame.tolist() == column
        slots = [-1] + [slot for sequence in self.sequences for slot in sequence]
        expected = [-1 if s == -1 else self.windows.get(s // self.size, 0) * self.size + s % self.size for s in slots]
        assert window_slots(self.allocator, slots).tolist() == expected

    # -- inside

    def _over(self, choices: Choices, *, need_sort: bool) -> SWATokenToKVPoolAllocator:
        """With pages in the table that this allocator never sees."""
        size = self.size
        table = Column("window", self.num_pages + choices.below(4), reclaims=True)
        full = token_allocator(self.num_pages * size, size, need_sort=need_sort)
        return SWATokenToKVPoolAllocator(
            full.size, self.num_windows * size, size, need_sort=need_sort, full=full, table=table
        )

    def _grow_all(self, choices: Choices, counts: list[int], grow: Callable[[Any, Any, Any], Any]) -> None:
        if choices.chance(60):  # otherwise some sequence may be unable to go on
            keep = [not (n and self._is_blocked(slots)) for slots, n in zip(self.sequences, counts, strict=True)]
        else:
            keep = [True] * len(counts)
        growing = [(s, n) for s, n, kept in zip(self.sequences, counts, keep, strict=True) if kept]
        before = [len(slots) for slots, _ in growing]
        after = [length + count for length, (_, count) in zip(before, growing, strict=True)]
        last = [slots[-1] if slots else -1 for slots, _ in growing]
        wanted = sum(pages_for(b, self.size) - pages_for(a, self.size) for a, b in zip(before, after, strict=True))
        blocked = any(count and self._is_blocked(slots) for slots, count in growing)
        slots = self._allocate(wanted, wanted, lambda: grow(before, after, last), blocked=blocked)
        if slots is None:
            return
        for (sequence, count), length in zip(growing, before, strict=True):
            sequence += [slots.pop(0) for _ in range(count)]
            self._check_offsets(sequence)
            first = pages_for(length, self.size) * self.size
            self._own(sequence[first :: self.size], sequence[first :: self.size])
        assert not slots

    def _is_blocked(self, sequence: list[int]) -> bool:
        return len(sequence) % self.size > 0 and sequence[-1] // self.size not in self.windows

    def _check_offsets(self, sequence: list[int]) -> None:
        for position, slot in enumerate(sequence):
            assert slot % self.size == position % self.size, "a token is at the wrong offset of its page"
            assert slot // self.size == sequence[position - position % self.size] // self.size

    def _allocate(self, pages: int, windows: int, take: Callable[[], Any], *, blocked: bool = False) -> Any:
        """What `take` returned, as a list; None where it had to refuse, and then nothing has changed."""
        if blocked:
            with self._nothing_changes(), pytest.raises(InvalidInput):
                take()
            self.happened["no window to go on in"] += 1
            return None
        short = None
        if windows > len(self.free_windows):
            short = "window", windows, len(self.free_windows)
        if pages > len(self.free_pages):
            short = "full", pages, len(self.free_pages)
        if short:
            with self._nothing_changes(), pytest.raises(OutOfPages) as caught:
                take()
            assert (caught.value.group, caught.value.wanted, caught.value.free) == short
            self.happened[f"{short[0]} is short"] += 1
            return None
        slots = take()
        self.happened["taken"] += windows > 0
        if slots is None:
            return []
        assert slots.dtype == np.int32
        return slots.tolist()

    def _own(self, first_slots: list[int], mapped_first_slots: list[int]) -> None:
        """These slots begin new pages: free ones until now. The second ones begin pages that got windows."""
        pages = [slot // self.size for slot in first_slots]
        assert len(set(pages)) == len(pages) and set(pages) <= self.free_pages, "took pages that were not free"
        self.free_pages -= set(pages)
        for slot in mapped_first_slots:
            page = slot // self.size
            window = int(self.allocator.full_to_swa_page_mapping[page])
            assert window in self.free_windows, "took a window that was not free"
            assert page not in self.windows
            self.free_windows.remove(window)
            self.windows[page] = window

    def _give_back(self, pages: set[int]) -> None:
        windows = {self.windows.pop(page) for page in pages if page in self.windows}
        if self.in_group:
            self.grouped_pages |= pages
            self.grouped_windows |= windows
        else:
            self.free_pages |= pages
            self.free_windows |= windows

    def _lose_windows(self, pages: list[int]) -> None:
        freed = {self.windows.pop(page) for page in pages}
        if self.in_group:
            self.grouped_windows |= freed
        else:
            self.free_windows |= freed

    def _out(self) -> list[int]:
        return sorted({slot // self.size for slots in self.sequences for slot in slots})

    def _unmapped(self) -> list[int]:
        return [page for page in self._out() if page not in self.windows]

    def _some(self, choices: Choices, items: list[int]) -> list[int]:
        """Up to three of them, in any order."""
        rest = list(items)
        return [rest.pop(choices.below(len(rest))) for _ in range(min(len(rest), choices.below(4)))]

    def _nothing_changes(self) -> NothingChanges:
        return NothingChanges(self)

    def everything(self) -> tuple[object, ...]:
        allocator = self.allocator
        return (
            allocator.full_to_swa_page_mapping.tolist(),
            allocator.full_available_size(),
            allocator.swa_available_size(),
            allocator.allocator.ids.is_out(np.arange(self.num_windows + 1)).tolist(),
            allocator.full_attn_allocator.ids.is_out(np.arange(self.num_pages + 1)).tolist(),
        )


class NothingChanges:
    """A block after which the allocator is as it was before."""

    def __init__(self, machine: SWAMachine) -> None:
        self.machine = machine

    def __enter__(self) -> None:
        self.before = self.machine.everything()

    def __exit__(self, *error: object) -> None:
        assert self.machine.everything() == self.before, "a refused operation has changed something"


def ids(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def pages_for(num_tokens: int, size: int) -> int:
    return len({position // size for position in range(num_tokens)})


def run_swa(seed: int, steps: int) -> Counter[str]:
    """A machine with that seed for that many steps; returns what has happened."""
    choices = Choices.seeded(seed)
    machine = SWAMachine(choices)
    for _ in range(steps):
        machine.step(choices)
    return machine.happened

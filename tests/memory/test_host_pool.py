"""Host slots by whole pages against a model of sets, and the pool's one mapping."""

from __future__ import annotations

import math
import mmap
import os
from contextlib import closing

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from quire.errors import HostMemoryError, InvalidInput, OutOfPages
from quire.memory.allocator.host import HostTokenToKVPoolAllocator
from quire.memory.host_pool import HostPool
from quire.memory.record import HEADER_BYTES, RecordFormat
from quire.spec.group import GroupSpec
from quire.spec.layout import DType, Field, PageLayout
from quire.spec.record_size import record_stride

PAGE_SIZES = (1, 4, 16, 64)
NUM_ROWS = 4


def nothing_of(rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of which none has a slot."""
    return np.full((rows, width), -1, dtype=np.int32), np.zeros(rows, dtype=np.int64)


class HostSlots(RuleBasedStateMachine):
    """Each row is a list of pages; a page that no row has is free. The model counts pages and knows no slot."""

    page_size = 1

    @initialize(num_pages=st.integers(1, 9), pages_per_row=st.integers(1, 5))
    def build(self, num_pages: int, pages_per_row: int) -> None:
        self.width = pages_per_row * self.page_size + self.page_size // 2
        self.pages_per_row = pages_per_row
        self.num_pages = num_pages
        self.allocator = HostTokenToKVPoolAllocator(num_pages * self.page_size, self.page_size, name="latents")
        self.slots, self.lengths = nothing_of(NUM_ROWS, self.width)
        self.pages: list[list[int]] = [[] for _ in range(NUM_ROWS)]

    @rule(row=st.integers(-1, NUM_ROWS), data=st.data())
    def grow(self, row: int, data: st.DataObject) -> None:
        have = len(self.pages[row]) * self.page_size if 0 <= row < NUM_ROWS else 0
        start = data.draw(st.integers(-1, have + 1))
        count = data.draw(st.integers(-1, 3 * self.page_size + 1))
        saved = self.slots.copy(), self.lengths.copy(), self.allocator.num_free_pages
        wanted = math.ceil((start + count) / self.page_size)
        free = self.num_pages - sum(map(len, self.pages))
        expected: type[Exception] | None = None
        if count <= 0:
            assert not len(self.ask(row, start, count))
            self.assert_same(*saved)
            return
        if not 0 <= row < NUM_ROWS or not 0 <= start <= have or wanted > self.pages_per_row:
            expected = InvalidInput
        elif wanted - len(self.pages[row]) > free:
            expected = OutOfPages
        if expected is not None:
            with pytest.raises(expected) as error:
                self.ask(row, start, count)
            if isinstance(error.value, OutOfPages):
                assert (error.value.group, error.value.free) == ("latents", free)
                assert error.value.wanted == wanted - len(self.pages[row])
                assert f"rows hold {self.num_pages - free}" in str(error.value)
            self.assert_same(*saved)
            return
        found = self.ask(row, start, count)
        assert found.dtype == np.int32 and len(found) == count
        whole = self.slots[row, : max(wanted * self.page_size, have)].tolist()
        for page in range(len(self.pages[row]), wanted):
            first = whole[page * self.page_size]
            assert first % self.page_size == 0
            self.pages[row].append(first // self.page_size)
        assert whole == [p * self.page_size + at for p in self.pages[row] for at in range(self.page_size)]
        assert found.tolist() == whole[start : start + count]
        found[:] = -7  # an owned copy: the row does not change with it

    @rule(row=st.integers(0, NUM_ROWS - 1), short=st.integers(0, 63))
    def release(self, row: int, short: int) -> None:
        """A request ends; what it knows of its length may lie anywhere in its last page."""
        length = int(self.lengths[row])
        known = length - min(short, self.page_size - 1) if length else 0
        slots = self.allocator.allocated_host_indices(self.slots, row, known)
        assert slots.dtype == np.int32
        assert slots.tolist() == [p * self.page_size + at for p in self.pages[row] for at in range(self.page_size)]
        self.allocator.free(slots)
        self.slots[row] = -1
        self.lengths[row] = 0
        self.pages[row] = []

    @rule(row=st.integers(0, NUM_ROWS - 1), length=st.integers(0, 1000))
    def look(self, row: int, length: int) -> None:
        """Lengths beyond what a row has, or is wide: nothing that is no slot comes out."""
        pages = self.pages[row][: math.ceil(length / self.page_size)]
        found = self.allocator.allocated_host_indices(self.slots, row, length)
        assert found.tolist() == [p * self.page_size + at for p in pages for at in range(self.page_size)]

    @rule(count=st.integers(0, 3))
    def take_pages(self, count: int) -> None:
        free = self.num_pages - sum(map(len, self.pages))
        if count > free:
            with pytest.raises(OutOfPages):
                self.allocator.alloc_page(count)
            return
        slots = self.allocator.alloc_page(count)
        assert slots.dtype == np.int32 and len(slots) == count * self.page_size
        taken = set((slots // self.page_size).tolist())
        assert len(taken) == count and not taken & {page for pages in self.pages for page in pages}
        self.allocator.free(slots)

    def ask(self, row: int, start: int, count: int) -> np.ndarray:
        return self.allocator.alloc_paged_token_slots(self.slots, self.lengths, row, start, count)

    def assert_same(self, slots: np.ndarray, lengths: np.ndarray, free: int) -> None:
        assert np.array_equal(self.slots, slots)
        assert np.array_equal(self.lengths, lengths)
        assert self.allocator.num_free_pages == free

    @invariant()
    def pages_are_whole_and_never_shared(self) -> None:
        if not hasattr(self, "pages"):
            return
        everyone = [page for pages in self.pages for page in pages]
        assert len(everyone) == len(set(everyone))
        assert all(1 <= page <= self.num_pages for page in everyone)
        assert self.allocator.num_free_pages == self.num_pages - len(everyone)
        assert self.lengths.tolist() == [len(pages) * self.page_size for pages in self.pages]
        for row, length in enumerate(self.lengths):
            assert (self.slots[row, length:] == -1).all() and (self.slots[row, :length] >= self.page_size).all()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slots_of_rows(page_size: int) -> None:
    machine = type(f"HostSlotsOf{page_size}", (HostSlots,), {"page_size": page_size})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


def test_a_prefill_of_100_tokens_leaves_28_slots_for_what_follows() -> None:
    allocator = HostTokenToKVPoolAllocator(5 * 64, 64)
    slots, lengths = nothing_of(2, 256)
    first = allocator.alloc_paged_token_slots(slots, lengths, 1, 0, 100)
    assert first.tolist() == list(range(64, 164))
    assert lengths.tolist() == [0, 128] and allocator.num_free_pages == 3
    for at in range(100, 128):
        assert allocator.alloc_paged_token_slots(slots, lengths, 1, at, 1).tolist() == [64 + at]
    assert allocator.num_free_pages == 3
    assert allocator.alloc_paged_token_slots(slots, lengths, 1, 128, 1).tolist() == [192]
    assert allocator.num_free_pages == 2
    with pytest.raises(OutOfPages, match=r"rows hold 3, row 1 of them 3"):
        allocator.alloc_paged_token_slots(slots, lengths, 0, 0, 129)


def test_a_length_that_is_no_number_of_pages_is_refused() -> None:
    allocator = HostTokenToKVPoolAllocator(8, 4)
    slots, lengths = nothing_of(1, 8)
    lengths[0] = 3
    with pytest.raises(InvalidInput, match="no number of pages"):
        allocator.alloc_paged_token_slots(slots, lengths, 0, 3, 1)
    with pytest.raises(InvalidInput):
        allocator.allocated_host_indices(slots, 0, -1)
    with pytest.raises(InvalidInput):
        allocator.allocated_host_indices(slots, -1, 4)
    assert allocator.num_free_pages == 2


# -- the pool


def group(name: str, numbers: int, page_size: int = 16) -> GroupSpec:
    field = Field(name="k", shape=(numbers,), dtype=DType.UINT8, layers=(0, 1), per=1)
    return GroupSpec(name=name, layout=PageLayout(page_size, (field,)))


GROUPS = (group("full", 100), group("latents", 4096), group("states", 3))


def test_rows_are_apart_aligned_and_all_that_was_reserved() -> None:
    with closing(HostPool(GROUPS, (7, 3, 1))) as pool:
        strides = [record_stride(one.layout.bytes_per_frame) for one in GROUPS]
        assert strides == [3264, 64 * 2048 + 4096, 192]
        starts = [pool.rows(index).ctypes.data for index in range(3)]
        sizes = [pool.rows(index).nbytes for index in range(3)]
        assert [pool.rows(index).shape for index in range(3)] == [(8, 3264), (4, strides[1]), (2, 192)]
        assert all(start % 4096 == 0 for start in starts)
        assert all(start + size <= after for start, size, after in zip(starts, sizes, starts[1:], strict=False))
        assert starts[-1] + sizes[-1] <= starts[0] + pool.num_bytes < starts[-1] + sizes[-1] + 4096
        assert pool.frames == (7, 3, 1)
        assert all(pool.rows(index).flags.writeable and not pool.rows(index).any() for index in range(3))
        assert pool.format(1) == RecordFormat.of(1, GROUPS[1].layout)
        assert all(pool.format(i).num_bytes <= stride for i, stride in enumerate(strides))
        # A large frame's row can go to a file as it is.
        assert pool.rows(1)[2].ctypes.data % 4096 == 0 and strides[1] % 4096 == 0
        assert HEADER_BYTES == 64


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_progress_ends_at_all_of_it(threads: int) -> None:
    seen: list[tuple[int, int]] = []
    frames = (20, 1300, 2)
    with closing(HostPool(GROUPS, frames, threads=threads, progress=lambda *now: seen.append(now))) as pool:
        assert seen[-1] == (pool.num_bytes, pool.num_bytes)
        assert len(seen) > 1 and [done for done, _ in seen] == sorted({done for done, _ in seen})


def resident(address: int, num_bytes: int) -> int:
    """Bytes that the system has behind these. The kernel joins neighbouring mappings, so it is asked for each page."""
    page = mmap.PAGESIZE
    first, last = address // page, -(-(address + num_bytes) // page)
    with open("/proc/self/pagemap", "rb") as entries:
        entries.seek(first * 8)
        found = np.frombuffer(entries.read((last - first) * 8), np.uint64)
    return int(np.count_nonzero(found >> np.uint64(62))) * page  # in memory, or swapped out


@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="this system does not say what a mapping holds")
def test_memory_is_there_when_the_pool_is_and_gone_when_it_is_closed() -> None:
    pool = HostPool(GROUPS, (100, 400, 2))
    rows = pool.rows(1)
    place = rows.ctypes.data, rows.nbytes
    assert resident(*place) >= rows.nbytes
    rows[:] = 1
    pool.close()
    pool.close()
    assert resident(*place) == 0
    assert not rows[0].any()  # a view is no crash, and keeps nothing


def test_what_progress_raises_ends_the_reservation() -> None:
    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        HostPool(GROUPS, (10, 1000, 1), progress=stop)


def test_memory_that_no_machine_has_is_refused() -> None:
    with pytest.raises(HostMemoryError, match="could not be reserved") as error:
        HostPool(GROUPS, (10, 2**40, 1))
    assert "--host-memory" in str(error.value)
    with pytest.raises(HostMemoryError):
        HostPool(GROUPS, (10, 2**60, 1))


def test_nothing_is_pinned_without_a_device() -> None:
    import torch

    with closing(HostPool(GROUPS, (1, 1, 1), pinned=True)) as pool:
        assert pool.pinned == torch.cuda.is_available()

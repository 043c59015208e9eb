"""Recorded allocator traces of another engine, replayed: the same slots, the same availability.

For single tokens every id agrees. For pages, the number of new pages, the offsets, which tokens share a page and what
is available agree after every operation; which free page comes next may not. The recorded engine sorts what was freed
as soon as an upper bound of the need (`tokens // page + sequences + 1`) exceeds the sorted part of its list; ours does
when the exact need does, so it sorts later. Pages are therefore compared through a one-to-one map.

Running out is `OutOfPages` here and an empty answer there. A recorded `free_segment`, a contiguous part of a row, is
our `free`, which finds the pages by itself.

Of two sides, the full side is compared likewise, both availabilities after every operation, and the number of tokens
that have a window. A recorded free of pages whose windows were gone names them apart; our `free` finds that out. Which
window a token gets is recorded for single tokens only, and compared through a one-to-one map: freed windows come back
in ascending order here and in the order of the tokens there. A decode that would have leaked was not recorded but
marked; ours is called, and refuses.

Of host slots the same is compared as of pages, and the length of each row. Page 0 is handed out there, not here.

Of states every id agrees. A recorded group that has used up what it set aside goes on with what is free; ours ends
first.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import OutOfPages
from quire.memory.allocator import (
    BaseTokenToKVPoolAllocator,
    MambaSlotAllocator,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from quire.memory.allocator.host import HostTokenToKVPoolAllocator
from tests.memory.swa_machine import free_swa, window_slots

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "alloc_ops_0.5.23.json.gz"

pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason=f"no recorded traces: {GOLDEN.name} is not beside the repo")


def cases(*names: str) -> list[dict[str, Any]]:
    if not GOLDEN.exists():
        return []
    with gzip.open(GOLDEN, "rt") as file:
        recorded = json.load(file)["cases"]
    return [case for case in recorded if case["allocator"] in names]


def case_id(case: dict[str, Any]) -> str:
    return f"page{case['page_size']}-seed{case['seed']}"


def build(case: dict[str, Any]) -> BaseTokenToKVPoolAllocator:
    if case["allocator"] == "TokenToKVPoolAllocator":
        return TokenToKVPoolAllocator(case["size"], need_sort=case["need_sort"])
    return PagedTokenToKVPoolAllocator(case["size"], case["page_size"], need_sort=case["need_sort"])


class Replay:
    """Runs recorded operations, translating the recorded page ids to ours."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.allocator = build(case)
        self.size = case["page_size"]
        self.ours: dict[int, int] = {0: 0, -1: -1}  # by recorded page; -1 is "no last slot"

    def run(self, entry: dict[str, Any]) -> bool:
        """One operation. Returns whether both ran out of pages; fails where they differ."""
        try:
            slots = self._apply(entry)
        except OutOfPages:
            assert entry["out"] is None, "we ran out, the recording did not"
            return True
        recorded = entry.get("out")
        assert (recorded is None) == (slots is None), "the recording ran out, we did not"
        if recorded is not None and slots is not None:
            self._compare(recorded, slots)
        return False

    def _apply(self, entry: dict[str, Any]) -> np.ndarray | None:
        match entry["op"]:
            case "alloc":
                return self.allocator.alloc(entry["n"])
            case "alloc_extend":
                last = self._translate(entry["last_loc"])
                return self.allocator.alloc_extend(
                    entry["prefix_lens"], entry["seq_lens"], last, entry["extend_num_tokens"]
                )
            case "alloc_decode":
                seq = np.array(entry["seq_lens"])  # one more token of each sequence
                return self.allocator.alloc_extend(seq - 1, seq, self._translate(entry["last_loc"]))
            case "free" | "free_segment":
                self._free(entry["idx"])
            case "free_group":
                self.allocator.free_group_begin()
                for slots in entry["lists"]:
                    self._free(slots)
                self.allocator.free_group_end()
            case other:
                raise AssertionError(f"unknown operation {other}")
        return None

    def _compare(self, recorded: list[int], slots: np.ndarray) -> None:
        assert len(recorded) == len(slots)
        if self.size == 1:
            assert recorded == slots.tolist()
        for theirs, ours in zip(recorded, slots.tolist(), strict=True):
            assert theirs % self.size == ours % self.size
            assert self.ours.setdefault(theirs // self.size, ours // self.size) == ours // self.size
        assert len(set(self.ours.values())) == len(self.ours), "two recorded pages are one of ours"

    def _translate(self, slots: list[int]) -> np.ndarray:
        return np.array([self.ours[slot // self.size] * self.size + slot % self.size for slot in slots], dtype=np.int64)

    def _free(self, slots: list[int]) -> None:
        self.allocator.free(self._translate(slots))
        for page in {slot // self.size for slot in slots}:
            del self.ours[page]


class ReplayTwoSides(Replay):
    """The same over a full and a window side, with a map of window slots beside that of pages."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.both = SWATokenToKVPoolAllocator(
            case["size"], case["size_swa"], case["page_size"], need_sort=case["need_sort"]
        )
        self.allocator = self.both  # type: ignore[assignment]
        self.size = case["page_size"]
        self.ours = {0: 0, -1: -1}
        self.windows: dict[int, int] = {}  # recorded window slot -> ours
        self.tokens: set[int] = set()  # our slots that hold one

    def _apply(self, entry: dict[str, Any]) -> np.ndarray | None:
        match entry["op"]:
            case "free_swa":
                slots = self._translate(entry["idx"])
                gone = set(window_slots(self.both, slots).tolist())
                free_swa(self.both, slots)
                self._forget_windows(gone)
            case "free_full+free":
                self._free(entry["full_only"] + entry["both"])
            case _:
                return super()._apply(entry)
        return None

    def _free(self, slots: list[int]) -> None:
        gone = set(window_slots(self.both, self._translate(slots)).tolist())
        pages = set((self._translate(slots) // self.size).tolist())
        super()._free(slots)
        self.tokens = {slot for slot in self.tokens if slot // self.size not in pages}
        self._forget_windows(gone)

    def _forget_windows(self, gone: set[int]) -> None:
        self.windows = {theirs: ours for theirs, ours in self.windows.items() if ours not in gone}

    def compare_windows(self, entry: dict[str, Any]) -> None:
        assert [self.both.full_available_size(), self.both.swa_available_size()] == entry["available"]
        if entry.get("swa_of_out"):
            ours = window_slots(self.both, self._translate(entry["out"])).tolist()
            self.windows |= dict(zip(entry["swa_of_out"], ours, strict=True))
            assert len(set(self.windows.values())) == len(self.windows), "two recorded windows are one of ours"
        if entry["op"].startswith("alloc") and entry["out"]:
            self.tokens |= set(self._translate(entry["out"]).tolist())
        if "mapping_nonzero" in entry:
            mapped = window_slots(self.both, sorted(self.tokens)) >= self.size
            assert np.count_nonzero(mapped) == entry["mapping_nonzero"][0]


@pytest.mark.parametrize("case", cases("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"), ids=case_id)
def test_a_recorded_trace(case: dict[str, Any]) -> None:
    replay = Replay(case)
    ran_out = 0
    for number, entry in enumerate(case["log"]):
        ran_out += replay.run(entry)
        assert replay.allocator.available_size() == entry["available"], f"after operation {number}, {entry['op']}"
    assert len(case["log"]) >= 160
    assert ran_out == sum(entry["op"].startswith("alloc") and entry["out"] is None for entry in case["log"])


@pytest.mark.parametrize("case", cases("SWATokenToKVPoolAllocator"), ids=case_id)
def test_a_recorded_trace_of_two_sides(case: dict[str, Any]) -> None:
    replay = ReplayTwoSides(case)
    ran_out = 0
    for entry in case["log"]:
        ran_out += replay.run(entry)
        replay.compare_windows(entry)
    assert len(case["log"]) >= 160
    assert ran_out == sum(entry["op"].startswith("alloc") and entry["out"] is None for entry in case["log"]) > 0


@pytest.mark.parametrize("case", cases("MambaSlotAllocator"), ids=lambda case: f"seed{case['seed']}")
def test_a_recorded_trace_of_states(case: dict[str, Any]) -> None:
    allocator = MambaSlotAllocator(case["size"])
    ran_out = 0

    def one() -> list[list[int]]:
        nonlocal ran_out
        try:
            return [allocator.alloc(1).tolist()]
        except OutOfPages:
            ran_out += 1
            return []

    for number, entry in enumerate(case["log"]):
        match entry["op"]:
            case "alloc":
                try:
                    assert allocator.alloc(entry["n"]).tolist() == entry["out"]
                except OutOfPages:
                    ran_out += 1
                    assert entry["out"] is None
            case "alloc_group":
                reserve = entry["reserve"] if entry["reserve"] <= allocator.available_size() else 0
                taken: list[list[int]] = []
                allocator.alloc_group_begin(reserve)
                for _ in range(min(reserve, entry["used"])):
                    taken += one()
                allocator.alloc_group_end()
                for _ in range(entry["used"] - reserve):
                    taken += one()
                assert taken == entry["out"]
            case "free":
                allocator.free(entry["idx"])
        assert allocator.available_size() == entry["available"], f"after operation {number}, {entry['op']}"
    assert len(case["log"]) >= 160 and ran_out > 20


@pytest.mark.parametrize("case", cases("MLATokenToKVPoolHost"), ids=case_id)
def test_a_recorded_trace_of_host_slots(case: dict[str, Any]) -> None:
    size, log = case["page_size"], case["log"]
    allocator = HostTokenToKVPoolAllocator(case["host_size"], size)
    num_rows = max(entry["req_pool_idx"] for entry in log) + 1
    rows = np.full((num_rows, case["host_size"]), -1, dtype=np.int32)
    lengths = np.zeros(num_rows, dtype=np.int64)
    ours: dict[int, int] = {}  # by recorded page
    for number, entry in enumerate(log):
        row = entry["req_pool_idx"]
        if entry["op"] == "free_request":
            held = allocator.allocated_host_indices(rows, row, int(lengths[row]))
            theirs = entry["freed"]
            allocator.free(held)
            rows[row], lengths[row] = -1, 0
        else:
            held = allocator.alloc_paged_token_slots(rows, lengths, row, entry["start_pos"], entry["num_tokens"])
            theirs = entry["out"]
        for recorded, slot in zip(theirs, held.tolist(), strict=True):
            assert recorded % size == slot % size
            assert ours.setdefault(recorded // size, slot // size) == slot // size
        assert len(set(ours.values())) == len(ours), "two recorded pages are one of ours"
        if entry["op"] == "free_request":
            for page in {slot // size for slot in theirs}:
                del ours[page]
        assert lengths[row] == entry["allocated_len"]
        assert allocator.available_size() == entry["available"], f"after operation {number}, {entry['op']}"
    assert len(log) >= 150


def test_every_recorded_allocator_is_replayed() -> None:
    """HiSparseTokenToKVPoolAllocator pairs logical pages with device buffers of a running request. Quire keeps all
    tokens of a running request on the device, and has no such allocator (docs/origins.md)."""
    replayed = ["TokenToKVPool", "PagedTokenToKVPool", "SWATokenToKVPool", "MambaSlot"]
    names = [f"{name}Allocator" for name in replayed] + ["MLATokenToKVPoolHost", "HiSparseTokenToKVPoolAllocator"]
    with gzip.open(GOLDEN, "rt") as file:
        assert {case["allocator"] for case in json.load(file)["cases"]} == set(names)

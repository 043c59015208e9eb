"""Selections: files, synthetic ones, and the optimum beside every choice that a small buffer could make."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from bench.sparse.drawn import drifting_selections, lru_hits

from quire.errors import InvalidInput
from quire.sim.selections import (
    HotHits,
    SelectionRecorder,
    Selections,
    optimal_hits,
)
from quire.sparse.hot_slots import HotSlots

SMALL = drifting_selections(0.7, context=6, top_k=3, steps=7, num_requests=2)


def best_by_trying(selections: Selections, buffer_size: int) -> int:
    """The most hits of one request, over all tokens that could be kept after each step."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for newest, row in zip(selections.newest.tolist(), selections.positions.tolist(), strict=True):
        wanted = frozenset(row) - {newest, -1}
        found: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            others = sorted(held - wanted)
            for count in range(min(len(others), buffer_size - len(wanted)) + 1):
                for kept in combinations(others, count):
                    after = wanted | frozenset(kept)
                    found[after] = max(found.get(after, 0), hits + len(held & wanted))
        best = found
    return max(best.values())


@pytest.mark.parametrize("buffer_size", [3, 4, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_the_best_of_all_choices(seed: int, buffer_size: int) -> None:
    selections = drifting_selections(0.6, context=7, top_k=3, steps=7, num_requests=2, seed=seed)
    each = [best_by_trying(selections.rows(selections.request == request), buffer_size) for request in range(2)]
    found = optimal_hits(selections, buffer_size)
    assert found.hit_tokens == sum(each) >= lru_hits(selections, buffer_size).hit_tokens
    assert found.hit_tokens + found.swapped_tokens == int((selections.positions != selections.newest[:, None]).sum())


def test_selections_drift_and_the_buffer_holds_more_of_slow_ones() -> None:
    """The table of docs/reference/selections.md: LRU and the optimum at buffers of 1, 2 and 4 times the selection."""
    rates = {
        drift: [
            (round(lru_hits(found, size).rate, 2), round(optimal_hits(found, size).rate, 2))
            for size in (256, 512, 1024)
        ]
        for drift in (0.8, 0.95, 0.99)
        for found in [drifting_selections(drift, context=4096, top_k=256, steps=120)]
    }
    assert rates == {
        0.8: [(0.51, 0.51), (0.61, 0.72), (0.69, 0.80)],
        0.95: [(0.75, 0.75), (0.85, 0.90), (0.89, 0.91)],
        0.99: [(0.88, 0.88), (0.95, 0.96), (0.96, 0.96)],
    }


def test_files(tmp_path: Path) -> None:
    """What was saved is read; another file is refused."""
    path = tmp_path / "selections.npz"
    SMALL.save(path)
    found = Selections.load(path)
    assert np.array_equal(found.positions, SMALL.positions) and np.array_equal(found.newest, SMALL.newest)
    assert sum(len(call.step) for call in found.calls()) == len(SMALL.step)
    for content in (b"", b"no archive"):
        path.write_bytes(content)
        with pytest.raises(InvalidInput, match="has no selections"):
            Selections.load(path)
    np.savez(path, format=np.int32(2))
    with pytest.raises(InvalidInput, match="another version"):
        Selections.load(path)


def test_nothing_selected() -> None:
    empty = SMALL.rows(np.zeros(len(SMALL.step), dtype=np.bool_))
    assert lru_hits(empty, 4) == optimal_hits(empty, 4) == HotHits(0, 0)
    with pytest.raises(InvalidInput, match="drift"):
        drifting_selections(1.5, context=8, top_k=2, steps=2)


def test_what_is_recorded_is_what_was_asked() -> None:
    """Calls through a recorder give the selections again; a row that begins again is another request."""
    recorder = SelectionRecorder(HotSlots(1, 2, 4))
    recorder.clear(np.arange(2, dtype=np.int32))
    for call in SMALL.calls():
        recorder.swap_in(0, call.request, call.positions, call.newest.astype(np.int64))
    found = recorder.selections()
    for name in ("step", "index", "request", "newest", "positions"):
        assert np.array_equal(getattr(found, name), getattr(SMALL, name))
    assert recorder.hit_tokens == lru_hits(SMALL, 4).hit_tokens
    recorder.clear(np.int32([1]))
    recorder.swap_in(0, np.int32([1]), np.int32([[0]]), np.int64([1]))
    assert recorder.selections().request[-1] == 2
    assert recorder.selections().positions[-1].tolist() == [0, -1, -1]
    assert len(SelectionRecorder(HotSlots(1, 2, 4)).selections().step) == 0

"""Drawn selections of an indexer, and the hits of hot buffers on any selections."""

from __future__ import annotations

import numpy as np

from quire.sim.selections import DriftingSelections, HotHits, Selections
from quire.sparse.hot_slots import HotSlots


def drifting_selections(
    drift: float, *, context: int, top_k: int, steps: int, num_requests: int = 1, seed: int = 0
) -> Selections:
    """Those of `DriftingSelections` for one index. The context grows by a token per step from `context` tokens on."""
    drawn = DriftingSelections(drift, num_rows=num_requests, context=context + steps, top_k=top_k, seed=seed)
    rows = np.arange(num_requests, dtype=np.int32)
    drawn.begin(rows)
    found = [drawn.select(rows, np.full(num_requests, context + step, dtype=np.int64)) for step in range(steps)]
    request, step_of = np.tile(rows, steps), np.repeat(np.arange(steps), num_requests)
    positions, newest = (np.concatenate(each) for each in zip(*found, strict=True))
    columns = step_of, np.zeros_like(step_of), request, newest, positions
    return Selections(*(column.astype(np.int32, copy=False) for column in columns))


def lru_hits(selections: Selections, buffer_size: int) -> HotHits:
    """The hits of `HotSlots`, each request in a row of its own."""
    hot = HotSlots(selections.num_indexes, selections.num_requests, buffer_size)
    for call in selections.calls():
        hot.swap_in(int(call.index[0]), call.request, call.positions, call.newest.astype(np.int64))
    return HotHits(hot.hit_tokens, hot.swapped_tokens)

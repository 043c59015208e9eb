"""Sequences that grow and end on few frames: bounds of pages and selections, against loops over all keys."""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.kernels.batch import PagedBatch
from quire.kernels.page_bounds import PageBounds
from quire.spec.pages import pages_for

FRAMES, DIM, SCALE = 24, 6, 0.4


def limits_of(query: torch.Tensor, keys: torch.Tensor) -> list[float]:
    """Per head, the limit of a page with `keys` `[n, kv_heads, dim]` for `query` `[heads, dim]`, by the definition."""
    group = len(query) // keys.shape[1]
    low, high = keys.double().amin(0), keys.double().amax(0)
    found = []
    for head, row in enumerate(query.double()):
        kv = head // group
        found.append(torch.maximum(row * low[kv], row * high[kv]).sum().item())
    return found


def check_bounds(seed: int) -> None:
    """Twenty steps of chunks that begin and end inside pages, on frames that are used again and again."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    size = int(rng.choice([1, 4, 16, 64]))
    dtype = (torch.float32, torch.bfloat16)[rng.integers(2)]
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    bounds = PageBounds(*(torch.full((FRAMES + 1, kv_heads, DIM), torch.nan, dtype=dtype) for _ in range(2)))
    free = list(range(1, FRAMES + 1))
    running: list[tuple[list[int], torch.Tensor]] = []
    for _ in range(20):
        if running and rng.random() < 0.3:
            frames, _ = running.pop(int(rng.integers(len(running))))
            free += frames
        if len(running) < 4 and rng.random() < 0.6:
            running.append(([], torch.zeros(0, kv_heads, DIM, dtype=dtype)))
        step, starts, stops = [], [], []
        for index, (frames, keys) in enumerate(running):
            count = int(rng.choice([1, 1, rng.integers(1, 3 * size + 1)]))
            needed = pages_for(len(keys) + count, size) - len(frames)
            if needed <= len(free):
                frames += [free.pop(int(rng.integers(len(free)))) for _ in range(needed)]
                running[index] = (frames, torch.cat((keys, torch.randn(count, kv_heads, DIM).to(dtype))))
                step.append(index)
                starts.append(len(keys))
                stops.append(len(keys) + count)
        if step:
            batch = PagedBatch.of(_table(running, step), np.array(starts), np.array(stops), size)
            new = [running[i][1][start:] for i, start in zip(step, starts, strict=True)]
            padding = torch.full((int(rng.integers(3)), kv_heads, DIM), torch.nan, dtype=dtype)
            bounds.write(batch, torch.cat([*new, padding]))
        for frames, keys in running:
            for page, frame in enumerate(frames):
                own = keys[page * size : (page + 1) * size]
                assert torch.equal(bounds._low[frame], own.amin(0)), "the minimum"
                assert torch.equal(bounds._high[frame], own.amax(0)), "the maximum"
        present = [i for i, (frames, _) in enumerate(running) if frames]
        if present:
            _check_selection(bounds, running, present, size, group, int(rng.integers(1, 5)))


def _table(running: list[tuple[list[int], torch.Tensor]], present: list[int]) -> np.ndarray:
    """Page tables; entries beyond a sequence's pages are stale."""
    table = np.full((len(present), max(len(running[i][0]) for i in present) + 1), FRAMES, dtype=np.int32)
    for row, index in enumerate(present):
        table[row, : len(running[index][0])] = running[index][0]
    return table


def _check_selection(
    bounds: PageBounds,
    running: list[tuple[list[int], torch.Tensor]],
    present: list[int],
    size: int,
    group: int,
    most: int,
) -> None:
    contexts = np.array([len(running[i][1]) for i in present])
    batch = PagedBatch.of(_table(running, present), contexts - 1, contexts, size)
    kv_heads = running[present[0]][1].shape[1]
    query = torch.randn(len(present), kv_heads * group, DIM)
    found = bounds.select(query, batch, most, SCALE)
    for row, index in enumerate(present):
        keys = running[index][1]
        positions = [p for p in found[row].tolist() if p >= 0]
        assert positions == sorted(set(positions)), "in the order of positions, once each"
        pages = sorted({p // size for p in positions})
        assert positions == [p for p in range(len(keys)) if p // size in pages], "whole pages, and nothing beyond"
        count = pages_for(len(keys), size)
        assert len(pages) == min(most, count)
        assert count - 1 in pages, "the newest page"
        limits = [limits_of(query[row], keys[p * size : (p + 1) * size]) for p in range(count - 1)]
        totals = [sum(math.exp(SCALE * each[head]) for each in limits) for head in range(len(query[row]))]
        shares = [
            sum(math.exp(SCALE * limit) / total for limit, total in zip(each, totals, strict=True)) for each in limits
        ]
        others = [shares[p] for p in range(count - 1) if p not in pages]
        chosen = [shares[p] for p in pages if p < count - 1]
        assert not (others and chosen) or min(chosen) >= max(others) - 1e-5, "the pages with the highest shares"

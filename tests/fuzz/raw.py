"""All data of a cache, to see whether an operation has changed any of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from quire.cache import KVCache
from quire.cache.groups import PagedGroup
from quire.cache.states import GroupCache
from quire.offload import offload_of
from quire.spec.ids import Tier

_ALL = slice(None)


@dataclass(slots=True)
class RawData:
    """Compared as a whole, or part by part. It has no clocks and counters."""

    tree: object
    requests: object
    groups: list[object]
    rest: object


def raw_data(cache: KVCache) -> RawData:
    """O(pages + nodes)."""
    parts, tree, rows, holds = cache.parts, cache.tree, cache.rows, cache.parts.holds
    nodes = [*tree.all_roots(), *tree.nodes()]
    edges = [
        (n, n.parent or not n.evicted, n.key, n.run, n.depth, n.leases, n.level, n.held, (*n.children,)) for n in nodes
    ]
    tiers = [(tree.is_here(n), tree.num_copies(n)) for n in nodes] if offload_of(cache).tiers is not None else None
    sums = (tree.num_pages, tree.num_protected, tree.num_shared, tree.num_below, len(tree.hidden_roots))
    live = [(kv, kv.lease.num_pages) for kv in rows.live.values()]
    lengths = (rows.num_allocated.tobytes(), rows.num_committed.tobytes())
    retired = holds.fences.waiting
    waits = [
        (
            each.pages.tolist(),
            each.lease,
            [(p.group, *map(bytes, (p.unpinned, p.frames))) for p in each.released],
        )
        for each in retired
    ]
    return RawData(
        (edges, [lease.node for lease in holds.leases()], sums, tiers),
        (live, rows.pages.tobytes(), lengths),
        [_group(group, holds.readers(group.index, Tier.DEVICE).tolist()) for group in parts.groups],
        (parts.pages.ids.is_out(_ALL).tobytes(), parts.pages.num_free_pages, waits),
    )


def _group(group: GroupCache, held: list[int]) -> object:
    table = group.table
    arrays: list[npt.NDArray[Any]] = [
        table.mapping,
        table.state,
        table.pins,
        table.ticket,
        group.frames.allocator.ids.is_out(_ALL),
    ]
    if isinstance(group, PagedGroup):
        arrays.append(group.first)
        unsettled = []
    else:
        arrays += [group._frame, group._draft_frames, group._source, group._previous_frame, group._previous_pages]
        unsettled = [[(each.num_pages, each.frame) for each in some] for some in group._unsettled]
    counts = (table.num_idle, table.num_pinned, group.num_free, group.num_evictable)
    return [array.tobytes() for array in arrays], counts, unsettled, held

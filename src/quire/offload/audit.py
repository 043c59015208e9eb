"""The invariants of the tiers below the device, which `quire.cache.audit` checks too.

a node is on the device as a whole, with its parents; if it is not, it has copies; copies are of its first pages
host frames out = those of pages + those of transfers + quarantined + still read
pins of a host frame = holds on it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from quire.cache.audit import Snapshot
from quire.offload.host_groups import HostGroup
from quire.offload.prefetcher import Prefetcher
from quire.offload.tiering import Tiering
from quire.prefix.node import Node
from quire.spec.ids import Tier
from quire.tiers.transfer import Lane


def tier_faults(tiers: Tiering, prefetcher: Prefetcher, snapshot: Snapshot) -> Iterator[str]:
    """One line for each violated invariant."""
    yield from _nodes(snapshot, snapshot.parts.tree.queued(Tier.HOST))
    saved = [part for move, moving in tiers.moving.items() if move.lane is Lane.SAVE for part in moving.parts]
    for host in tiers.hosts:
        taken = [part.host for part in saved if part.group == host.index]
        moving = np.concatenate([prefetcher.host_frames(host.index), *taken])
        yield from _frames(snapshot, host, moving.tolist())


def _nodes(snapshot: Snapshot, queued: set[Node]) -> Iterator[str]:
    tree, table = snapshot.parts.tree, snapshot.parts.frames
    device, host = table.anchor(Tier.DEVICE).frame, table.anchor(Tier.HOST).frame
    for node, pages in snapshot.edges:
        here, copies = tree.is_here(node), tree.num_copies(node)
        if len({bool(device[page]) for page in pages}) > 1:
            yield f"a node of {len(pages)} pages is on the device in part"
        if here and node.parent is not None and not tree.is_here(node.parent):
            yield f"a node of {len(pages)} pages is on the device and its parent is not"
        if not here and copies != len(pages):
            yield f"a node has {copies} copies of {len(pages)} pages that are nowhere else"
        if np.count_nonzero(host[pages]) != copies:
            yield f"a node of {len(pages)} pages has copies after a page without one"
        ends = copies and not any(map(tree.num_copies, node.children.values()))
        if not node.level and ends and node not in queued:
            yield f"copies of {copies} pages can never be given up"


def _frames(snapshot: Snapshot, host: HostGroup, moving: list[int]) -> Iterator[str]:
    column = host.table.frame.tolist()
    resident = [page for page, frame in enumerate(column) if frame]
    used = sorted([column[page] for page in resident] + moving + [*host.quarantined, *host.still_read])
    out = host.allocator.ids.is_out(slice(None)).nonzero()[0].tolist()
    name = f"host group '{host.name}'"
    if host.are_page_ids:  # `quire.cache.audit` checks their owners
        if odd := [page for page in resident if column[page] != page]:
            yield f"{name}: page {odd[0]} has a frame that is not its id"
    elif used != out:
        owners = f"{len(resident)} are pages', {len(moving)} moves', {len(host.quarantined)} set aside"
        yield f"{name}: {len(out)} frames are out, {owners}"
    if host.num_free + len(out) != host.num_frames:
        yield f"{name}: {host.num_free} free + {len(out)} out != {host.num_frames} frames"
    cached = set(snapshot.cached)
    if not set(resident) <= cached:
        yield f"{name}: page {min(set(resident) - cached)} is not cached and has a frame"
    if host.whole:
        wrong = np.flatnonzero((host.table.frame != 0) != (snapshot.parts.frames.anchor(Tier.HOST).frame != 0))
        if len(wrong):
            yield f"{name}: page {wrong[0]} has a copy in one group and none in another"
        return
    readers = Counter(snapshot.parts.holds.readers(host.index, Tier.HOST).tolist())
    pins = host.table.pins.tolist()
    unequal = [page for page, count in enumerate(pins) if count != readers[page]]
    if unequal:
        yield f"{name}: page {unequal[0]} has {pins[unequal[0]]} pins and {readers[unequal[0]]} moves that read it"
    queued = host.table.ticket.nonzero()[0].tolist()
    idle = [page for page in resident if not readers[page]]
    if queued != idle:
        yield f"{name}: page {min(set(queued) ^ set(idle))} is idle or not, which is wrong"

"""The laws of the tiers below the device, as `quire.cache.audit` checks them.

a node is on the device as a whole, and its parents are with it     a prefix is loaded from its front
one that is not has copies; copies are of a node's first pages      what is loaded is there
host frames out = pages' + moves' + quarantined + left              every frame has exactly one owner
a host frame's pins are the moves that read it, and who keeps it or counts on it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from quire.cache.host_groups import HostGroup
from quire.cache.picture import Picture
from quire.spec.ids import Tier

_ALL = slice(None)


def below_device(picture: Picture) -> list[int]:
    """Pages of the tree that are not on the device."""
    tree = picture.cache.tree
    return [page for node, pages in picture.tree.edges if not tree.is_here(node) for page in pages]


def tier_laws(picture: Picture) -> Iterator[str]:
    """What is broken, law by law."""
    yield from _nodes(picture)
    tiers = picture.cache.tiers
    assert tiers is not None
    for host in tiers.hosts:
        yield from _frames(picture, host)


def _nodes(picture: Picture) -> Iterator[str]:
    tree, table = picture.cache.tree, picture.cache.frames
    device, host = table.anchor(Tier.DEVICE).frame, table.anchor(Tier.HOST).frame
    for node, pages in picture.tree.edges:
        here, copies = tree.is_here(node), tree.num_copies(node)
        if len({bool(device[page]) for page in pages}) > 1:
            yield f"a node of {len(pages)} pages is on the device in part"
        if here and node.parent is not None and not tree.is_here(node.parent):
            yield f"a node of {len(pages)} pages is on the device and its parent is not"
        if not here and copies != len(pages):
            yield f"a node has {copies} copies of {len(pages)} pages that are nowhere else"
        if np.count_nonzero(host[pages]) != copies:
            yield f"a node of {len(pages)} pages has copies behind a page without one"
        ends = copies and not any(map(tree.num_copies, node.children.values()))
        if not node.level and ends and node not in picture.queued_lower:
            yield f"copies of {copies} pages can never be given up"


def _frames(picture: Picture, host: HostGroup) -> Iterator[str]:
    tiers, cache = picture.cache.tiers, picture.cache
    assert tiers is not None
    column = host.column.tolist()
    resident = [page for page, frame in enumerate(column) if frame]
    moving = tiers.host_frames_of_moves(host.index).tolist()
    if cache.prefetcher is not None:
        moving += cache.prefetcher.host_frames(host.index).tolist()
    used = sorted([column[page] for page in resident] + moving + host.quarantined + host.left)
    out = host.frames.is_out(_ALL).nonzero()[0].tolist()
    name = f"host group '{host.name}'"
    if used != out:
        yield f"{name}: {len(out)} frames are out, {len(resident)} are pages', {len(moving)} moves', " + (
            f"{len(host.quarantined)} set aside"
        )
    if host.num_free + len(out) != host.num_frames:
        yield f"{name}: {host.num_free} free + {len(out)} out != {host.num_frames} frames"
    cached = set(picture.tree.cached)
    if not set(resident) <= cached:
        yield f"{name}: page {min(set(resident) - cached)} is not cached and has a frame"
    if host.whole:
        odd = np.flatnonzero((host.column != 0) != (cache.frames.anchor(Tier.HOST).frame != 0))
        if len(odd):
            yield f"{name}: page {odd[0]} has a copy in one group and none in another"
        return
    idle_frames = host.table.idle
    assert idle_frames is not None
    readers = Counter(tiers.readers(host.index, on_device=False).tolist())
    readers.update(cache.retention.readers(host.index, Tier.HOST).tolist())
    if cache.prefetcher is not None:
        readers.update(cache.prefetcher.readers(host.index).tolist())
    pins = idle_frames.pins.tolist()
    wrong = [page for page, count in enumerate(pins) if count != readers[page]]
    if wrong:
        yield f"{name}: page {wrong[0]} has {pins[wrong[0]]} pins and {readers[wrong[0]]} moves that read it"
    queued = idle_frames.ticket.nonzero()[0].tolist()
    idle = [page for page in resident if not readers[page]]
    if queued != idle:
        yield f"{name}: page {min(set(queued) ^ set(idle))} is idle or not, which is wrong"

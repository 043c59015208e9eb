"""The laws of the tiers below the device, as `quire.cache.audit` checks them.

a node that is here has parents that are; one that is not is kept   a prefix is loaded from its front
a page is kept, as the tree counts it, where it has host frames     what is loaded is there
host frames out = pages' + moves' + quarantined + left              every frame has exactly one owner
a host frame's pins are the moves that read it, and who keeps it or counts on it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from quire.cache.picture import Picture
from quire.offload.host_groups import HostGroup
from quire.offload.prefetcher import Prefetcher
from quire.offload.tiering import Tiering
from quire.prefix.node import Node
from quire.spec.ids import Tier

_ALL = slice(None)


def tier_laws(tiers: Tiering, prefetcher: Prefetcher, picture: Picture) -> Iterator[str]:
    """What is broken, law by law."""
    yield from _nodes(picture, picture.cache.tree.queued_lower())
    for host in tiers.hosts:
        moving = tiers.host_frames_of_moves(host.index).tolist() + prefetcher.host_frames(host.index).tolist()
        yield from _frames(picture, host, moving)


def _nodes(picture: Picture, queued: set[Node]) -> Iterator[str]:
    for node, pages in picture.tree.edges:
        if node.here and node.parent is not None and not node.parent.here:
            yield f"a node of {len(pages)} pages is on the device and its parent is not"
        if not node.here and node.kept != len(pages):
            yield f"a node has {node.kept} copies of {len(pages)} pages that are nowhere else"
        if not 0 <= node.kept <= len(pages):
            yield f"a node has {node.kept} copies of {len(pages)} pages"
        if not node.level and node.kept and not node.num_kept and node not in queued:
            yield f"copies of {node.kept} pages can never be given up"
    for node in (*picture.tree.roots, *[node for node, _ in picture.tree.edges]):
        children = node.children.values()
        if node.num_here != sum(child.here for child in children):
            yield f"a node counts {node.num_here} children on the device, which is not so"
        if node.num_kept != sum(child.kept > 0 for child in children):
            yield f"a node counts {node.num_kept} children with copies, which is not so"


def _frames(picture: Picture, host: HostGroup, moving: list[int]) -> Iterator[str]:
    column = host.column.tolist()
    resident = [page for page, frame in enumerate(column) if frame]
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
    if host.shelf is None:
        kept = sorted(page for node, pages in picture.tree.edges for page in pages[: node.kept])
        if kept != sorted(resident):
            odd = min(set(kept) ^ set(resident))
            yield f"{name}: page {odd} {'is kept and has no' if odd in kept else 'is not kept and has a'} frame"
        return
    readers: Counter[int] = Counter()
    for holder in picture.cache.parts.audits.holders:
        readers.update(holder.readers(host.index, Tier.HOST).tolist())
    pins = host.shelf.pins(_ALL).tolist()
    wrong = [page for page, count in enumerate(pins) if count != readers[page]]
    if wrong:
        yield f"{name}: page {wrong[0]} has {pins[wrong[0]]} pins and {readers[wrong[0]]} moves that read it"
    shelved = host.shelf.on_shelf(_ALL).nonzero()[0].tolist()
    idle = [page for page in resident if not readers[page]]
    if shelved != idle:
        yield f"{name}: page {min(set(shelved) ^ set(idle))} is on the shelf or not, which is wrong"

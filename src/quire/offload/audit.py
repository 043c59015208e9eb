"""The invariants of the tiers below the device: a source of slices for the audit (`quire.cache.audit`).

a node is on the device as a whole, with its parents; if it is not, it has copies; copies are of its first pages
host frames out = those of pages + those of transfers + quarantined + still read
pins of a host frame = holds on it
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quire.cache.audit import AuditedFrames, Auditor
from quire.offload.host_groups import HostGroup
from quire.offload.prefetcher import Prefetcher
from quire.offload.tiering import Tiering
from quire.prefix.node import Node
from quire.spec.ids import Ids, Tier
from quire.tiers.transfer import Lane


def tier_faults(tiers: Tiering, prefetcher: Prefetcher, auditor: Auditor) -> Iterator[str]:
    """The faults of the tree and of the host's frames."""
    for nodes in auditor.nodes():
        for node in nodes:
            if node.parent is not None:
                yield from _node(auditor, node, node.parent)
        yield ""
    parts = auditor.parts
    copies = parts.frames.anchor(Tier.HOST).frame
    for host in tiers.hosts:
        name = f"host group '{host.name}'"
        frames = _on_host(tiers, prefetcher, auditor, host, name)
        yield from auditor.tables(frames)
        if not host.are_page_ids:
            yield from auditor.used(frames)
        lost = (host.table.frame != 0) & (auditor.owner == 0)
        if lost.any() and auditor.is_whole:
            yield f"{name}: page {int(lost.argmax())} is not cached and has a frame"
        if host.whole and len(odd := np.flatnonzero((host.table.frame != 0) != (copies != 0))):
            yield f"{name}: page {int(odd[0])} has a copy in one group and none in another"
        yield ""


def _node(auditor: Auditor, node: Node, parent: Node) -> Iterator[str]:
    tree, table, pages = auditor.parts.tree, auditor.parts.frames, node.pages
    here, copies = tree.is_here(node), tree.num_copies(node)
    on_device = int(np.count_nonzero(table.anchor(Tier.DEVICE).frame[pages]))
    if on_device not in (0, len(pages)):
        yield f"a node of {len(pages)} pages is on the device in part"
    if here and not tree.is_here(parent):
        yield f"a node of {len(pages)} pages is on the device and its parent is not"
    if not here and copies != len(pages):
        yield f"a node has {copies} copies of {len(pages)} pages that are nowhere else"
    if np.count_nonzero(table.anchor(Tier.HOST).frame[pages]) != copies:
        yield f"a node of {len(pages)} pages has copies after a page without one"
    if not node.level and copies and not any(map(tree.num_copies, node.children.values())):
        auditor.leaves[Tier.HOST].append(node)


def _on_host(tiers: Tiering, prefetcher: Prefetcher, auditor: Auditor, host: HostGroup, name: str) -> AuditedFrames:
    def carried() -> list[int]:
        saves = [moving for move, moving in tiers.moving.items() if move.lane is Lane.SAVE]
        saved = [part.host for moving in saves for part in moving.parts if part.group == host.index]
        moving = np.concatenate([prefetcher.host_frames(host.index), *saved])
        return [*moving.tolist(), *host.quarantined, *host.still_read]

    def readers() -> Ids:
        return auditor.parts.holds.readers(host.index, Tier.HOST)

    return AuditedFrames(name, host, carried, readers)

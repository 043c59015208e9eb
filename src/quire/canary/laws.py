"""Laws that hold between any two steps and cost a few comparisons: they are checked after each step of a server."""

from __future__ import annotations

import numpy as np

from quire.cache.offload import CacheParts


def broken_law(parts: CacheParts) -> str:
    """The first law that does not hold, or "". O(groups + rows)."""
    tree, rows, pages = parts.tree, parts.rows, parts.pages
    if not 0 <= tree.num_shared <= tree.num_protected <= tree.num_pages:
        counts = f"{tree.num_pages} pages are cached, {tree.num_protected} protected and {tree.num_shared} shared"
        return f"the tree miscounts: {counts}"
    if not 0 <= pages.num_free_pages <= pages.num_pages - tree.num_pages:
        return f"{pages.num_free_pages} pages are free and {tree.num_pages} cached, of {pages.num_pages}"
    for group in parts.groups:
        free, cached, kept = group.num_free, group.num_cached, len(group.quarantined)
        if min(free, cached) < 0 or free + cached + kept > group.num_frames:
            owners = f"{free} frames are free, {cached} cached and {kept} quarantined"
            return f"group '{group.name}': {owners}, of {group.num_frames}"
        if not 0 <= group.num_evictable <= cached:
            return f"group '{group.name}': {group.num_evictable} frames are evictable, of {cached} cached ones"
        if group.table.frame[0]:
            return f"group '{group.name}': the padding page is bound to frame {int(group.table.frame[0])}"
    if len(rows.live) + len(rows.free) != len(rows.serials):
        return f"{len(rows.live)} rows run and {len(rows.free)} are free, of {len(rows.serials)}"
    if np.count_nonzero(rows.num_committed > rows.num_allocated):
        row = int((rows.num_committed > rows.num_allocated).argmax())
        return (
            f"row {row}: {int(rows.num_committed[row])} tokens are committed, {int(rows.num_allocated[row])} allocated"
        )
    return ""

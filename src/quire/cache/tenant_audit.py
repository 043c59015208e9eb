"""The audit of tenants: each is counted what the tree, the rows and the table say. See `quire.cache.audit`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quire.cache.audit import Auditor
from quire.cache.running import Lengths
from quire.cache.tenants import Tenants
from quire.spec.ids import Ids

_PAGES = 1 << 15  # pages of a table in a slice


def tenant_faults(tenants: Tenants, auditor: Auditor) -> Iterator[str]:
    """Each fault in words, and "" at the end of a slice. Sums are compared where nothing has changed meanwhile."""
    rows, tree = auditor.parts.rows, auditor.parts.tree
    for kv in rows.live.values():
        mine, counted = tenants.number(kv.namespace), int(tenants.of_row[kv.row])
        if counted != mine:
            yield f"row {kv.row} is that of tenant '{tenants.name(mine)}', and counted to '{tenants.name(counted)}'"
        yield from _of_others(tenants, rows.page_ids(kv), mine)
    yield ""
    unheld = np.zeros(tenants.num_tenants, dtype=np.int64)
    for nodes in auditor.nodes():
        for node in nodes:
            mine = tenants.number(node.namespace)
            if node.tenant != mine:
                yield f"an edge of tenant '{tenants.name(mine)}' is counted to '{tenants.name(node.tenant)}'"
            yield from _of_others(tenants, node.pages, mine)
            unheld[mine] += node.num_pages * (not node.level and tree.is_here(node))
        yield ""
    yield from _differing(tenants, auditor, "cached pages without leases", tenants.num_unheld, unheld)
    for column in tenants.tables:
        used, idle = np.zeros_like(unheld), np.zeros_like(unheld)
        for start in range(0, len(column.frame), _PAGES):
            at = slice(start, start + _PAGES)
            used += tenants.owners.counts(start + np.flatnonzero(column.frame[at]))
            idle += tenants.owners.counts(start + np.flatnonzero(column.ticket[at]))
            yield ""
        yield from _differing(tenants, auditor, f"frames of '{column.name}'", column.frames_by, used)
        yield from _differing(tenants, auditor, f"idle frames of '{column.name}'", column.idle_by.sum(axis=0), idle)


def _of_others(tenants: Tenants, pages: Ids, mine: int) -> Iterator[str]:
    """The first of a tenant's pages that is counted to another one."""
    others = pages[tenants.owners.of_page[pages] != mine]
    if len(others):
        counted = tenants.name(int(tenants.owners.of_page[others[0]]))
        yield f"page {others[0]} is that of tenant '{tenants.name(mine)}', and counted to '{counted}'"


def _differing(tenants: Tenants, auditor: Auditor, what: str, kept: Lengths, found: Lengths) -> Iterator[str]:
    for tenant in np.flatnonzero(kept != found)[:1].tolist() if auditor.is_whole else ():
        yield f"tenant '{tenants.name(tenant)}': {kept[tenant]} {what} are counted, and there are {found[tenant]}"

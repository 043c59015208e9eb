"""Outline: the prefixes of a tree that are largest and most used, and what each namespace has. It has no tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.prefix.forecast import Forecast
from quire.prefix.radix_cache import RadixCache

MOST_NODES = 10_000
"""Nodes that one look visits, those near the roots first: some 15 ms."""

_MOST_BRANCHES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """An edge with all below it. `parent` is the place of the branch that it is in, -1 for a root. `depth` pages are
    before its edge, which has `own_pages`. `pages` are of all, `device_pages` of these on the device; `hits` are
    requests that ended in it, and `leases` are held in it now. `kind` is what the eviction policy takes its edge for,
    and by `chance` it is used again, mostly within `expected_s` seconds; None if the policy does not know."""

    parent: int
    namespace: int
    depth: int
    own_pages: int
    pages: int
    device_pages: int
    hits: int
    leases: int
    children: int
    kind: str
    chance: float | None
    expected_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceUse:
    """What a namespace has in the tree, as a `Branch`. `tenant` is "" where there are none."""

    adapter: str
    salt: str
    tenant: str
    pages: int
    device_pages: int
    hits: int
    leases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Branches behind those that they are in. Unless it is `whole`, the tree has more nodes, and counts are too low."""

    page_size: int
    num_nodes: int
    whole: bool
    namespaces: tuple[NamespaceUse, ...]
    branches: tuple[Branch, ...]


def outline_of(tree: RadixCache, most_nodes: int = MOST_NODES, most_branches: int = _MOST_BRANCHES) -> Outline:
    """Look at up to `most_nodes` nodes: the `most_branches` with most pages, and as many with most hits. Changes
    nothing. O(nodes visited)."""
    roots = list(tree.roots.values())
    nodes, above, levels, whole = list(roots), [-1] * len(roots), [0], True
    while levels[-1] < len(nodes):
        levels.append(len(nodes))
        for at in range(levels[-2], levels[-1]):
            if children := nodes[at].children:
                room = max(0, most_nodes - len(nodes))
                whole &= len(children) <= room
                nodes += [*children.values()][:room]
                above += [at] * min(room, len(children))
    pages = [node.num_pages for node in nodes]
    here = [count if tree.is_here(node) else 0 for node, count in zip(nodes, pages, strict=True)]
    sums = np.array([pages, here, [node.hits for node in nodes], [node.leases for node in nodes]], dtype=np.int64)
    parents = np.array(above, dtype=np.intp)
    for begin, end in reversed(list(pairwise(levels))[1:]):
        np.add.at(sums.T, parents[begin:end], sums.T[begin:end])
    first, chosen = len(roots), set[int]()
    for counts in (sums[0, first:], sums[2, first:]):  # one above another comes before it, also where both are equal
        chosen.update((first + np.argsort(-counts, kind="stable")[:most_branches]).tolist())
    places = {at: place for place, at in enumerate(sorted(chosen))}
    owner = {root.namespace: at for at, root in enumerate(roots)}
    branches = [
        Branch(
            parent=places.get(above[at], -1),
            namespace=owner[nodes[at].namespace],
            depth=nodes[at].depth,
            own_pages=pages[at],
            children=len(nodes[at].children),
            **_forecast(tree.policy.forecast(nodes[at])),
            **_counts(sums[:, at]),
        )
        for at in places
    ]
    namespaces = [
        NamespaceUse(
            adapter=root.namespace.adapter,
            salt=root.namespace.salt,
            tenant=tree.tenants.name(root.tenant),
            **_counts(sums[:, at]),
        )
        for at, root in enumerate(roots)
    ]
    return Outline(
        page_size=tree.page_size,
        num_nodes=len(nodes) - len(roots),
        whole=whole,
        namespaces=tuple(namespaces),
        branches=tuple(branches),
    )


def _forecast(found: Forecast | None) -> dict[str, Any]:
    if found is None:
        return {"kind": "", "chance": None, "expected_s": None}
    return {"kind": found.kind, "chance": round(found.chance, 3), "expected_s": round(found.seconds, 1)}


def _counts(sums: npt.NDArray[np.int64]) -> dict[str, Any]:
    return dict(zip(("pages", "device_pages", "hits", "leases"), sums.tolist(), strict=True))

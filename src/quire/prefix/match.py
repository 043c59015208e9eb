"""How far a prompt is cached (`Match`), and where and why it differs from what is cached (`Divergence`).

prompt   |-- cached --|-- evicted --|-- evicted --|-- part of a page --|-- new ----
         live edges     evicted edges, with the       the same tokens as a page that
                        eviction that made it         is or was cached, then another
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from quire.prefix.node import ID_BYTES, TOKEN_BYTES, Node, common_pages, join_ids
from quire.spec.events import Namespace
from quire.spec.ids import Ids

_NO_PAGES: Ids = np.empty(0, dtype=np.int32)
_LONG = 1 << 13  # tokens: a longer prompt is compared with its first edge in place, before it is copied

# Every admission pays for these searches, so they are bounded.
_MOST_COMPARED = 64  # pages compared where a prompt diverges
_MOST_NAMESPACES = 512  # roots, the oldest first; there may be one for each salt
_MOST_FOLLOWED = 8  # namespaces with the same first page, at most


@dataclass(slots=True, eq=False)
class Match:
    """How far a prefix is cached, until the tree's `version` changes. `pages` are read-only ids of the matched pages.
    `path` are their nodes, the last one perhaps matched in part. The first `num_here` pages are on the device."""

    namespace: Namespace
    pages: Ids
    num_pages: int
    path: list[Node]
    version: int
    num_here: int

    def num_evictable(self, num_pages: int) -> int:
        """How many of the first `num_pages` pages are on the device and held by no lease now."""
        end = first = min(num_pages, self.num_here)
        for node in reversed(self.path):
            if node.level:
                break
            first = min(first, node.depth)
        return end - first


class Insertion(NamedTuple):
    """`pages` are now the pages of the inserted tokens. `duplicates` are pages of the caller that the tree did not
    take, because their tokens were cached already: the caller still owns them."""

    pages: Ids
    duplicates: Ids


class Evicted(NamedTuple):
    """Pages `removed` from the tree, which the caller owns now, and the number of others that left the tier only."""

    removed: Ids
    num_moved: int


def find(root: Node | None, tokens: Ids, page_size: int) -> tuple[Ids, list[Node]]:
    """The pages of the longest cached prefix, and their nodes, the last perhaps in part. O(edges + bytes compared)."""
    path: list[Node] = []
    if root is None:
        return _NO_PAGES, path
    page_bytes, children = page_size * TOKEN_BYTES, root.children
    end = len(tokens) * TOKEN_BYTES // page_bytes * page_bytes
    if len(tokens) > _LONG:
        first = children.get(tokens[:page_size].tobytes())
        if first is None:
            return _NO_PAGES, path
        if 2 * len(first.key) > end and _begins_with(tokens, first.key):
            path.append(first)
            children, skipped = first.children, len(first.key)
            if end - skipped < page_bytes:
                return first.pages, path
            tokens, end = tokens[skipped // TOKEN_BYTES :], end - skipped
    data = tokens.tobytes()
    runs = [node.run for node in path]
    at = 0
    while at < end:
        child = children.get(data[at : at + page_bytes])
        if child is None:
            break
        key = child.key
        path.append(child)
        if not data.startswith(key, at):
            runs.append(child.run[: common_pages(data, at, key, page_bytes) // page_bytes * ID_BYTES])
            break
        runs.append(child.run)
        at += len(key)
        children = child.children
    return join_ids(runs), path


def _begins_with(tokens: Ids, key: bytes) -> bool:
    """Whether contiguous tokens begin with `key`, compared in place."""
    if not tokens.flags.c_contiguous or len(key) > tokens.nbytes:
        return False
    return key.startswith(tokens.data.cast("B")[: len(key)])


@dataclass(frozen=True, slots=True)
class Divergence:
    """`evicted` counts the pages that follow the match, by evicted edge. `common` tokens after these, less
    than a page, equal the start of a page that is or was cached there. `elsewhere` is the other namespace that caches
    most of the prompt, and the number of pages; None if no other namespace has its first page."""

    evicted: tuple[tuple[int, Node], ...]
    common: int
    elsewhere: tuple[Namespace, int] | None


def find_divergence(roots: Mapping[Namespace, Node], match: Match, tokens: Ids, page_size: int) -> Divergence:
    """Follow `tokens` through evicted edges from the end of its current `match`. O(evicted pages of the prompt)."""
    root = roots.get(match.namespace)
    unit = page_size * TOKEN_BYTES
    end, next_pages = _end_of(root, match, unit)
    rest = tokens[match.num_pages * page_size :]
    data = rest[:page_size].tobytes()
    if end is not None and data in end.evicted:
        data = rest.tobytes()
    at = 0
    evicted: list[tuple[int, Node]] = []
    node = end
    while node is not None:
        edge = node.evicted.get(data[at : at + unit])
        if edge is None:
            next_pages += islice(node.evicted, _MOST_COMPARED)
            break
        common = common_pages(data, at, edge.key, unit)
        evicted.append((common // unit, edge))
        at += common
        next_pages = [] if common == len(edge.key) else [edge.key[common : common + unit]]
        node = end = edge if common == len(edge.key) else None
    page = data[at : at + unit]
    common = max(_most_common(page, next_pages), _most_common(page, [end.tail] if end is not None else []))
    first = tokens[:page_size].tobytes()
    others = (other for other in islice(roots.values(), _MOST_NAMESPACES) if other is not root)
    alike = islice((other for other in others if first in other.children), _MOST_FOLLOWED)
    found = [(other.namespace, len(find(other, tokens, page_size)[0])) for other in alike]
    elsewhere = max(found, key=lambda entry: entry[1], default=None)
    return Divergence(tuple(evicted), common, elsewhere)


def _end_of(root: Node | None, match: Match, unit: int) -> tuple[Node | None, list[bytes]]:
    """The node at whose end a match ends (None inside an edge), and the cached pages that follow."""
    last = match.path[-1] if match.path else root
    if last is None:
        return None, []
    whole = match.num_pages - last.depth
    if whole < last.num_pages:
        return None, [last.key[whole * unit : (whole + 1) * unit]]
    return last, list(islice(last.children, _MOST_COMPARED))


def _most_common(page: bytes, others: list[bytes]) -> int:
    """The longest common start, in tokens, of `page` and one of these pages of equal length."""
    width = len(others[0]) // TOKEN_BYTES if others else 0
    count = min(len(page) // TOKEN_BYTES, width)
    if not count:
        return 0
    table = np.frombuffer(b"".join(others), dtype=np.int32).reshape(len(others), width)[:, :count]
    own = np.frombuffer(page, dtype=np.int32, count=count)
    near = table[table[:, 0] == own[0]]
    return int(np.logical_and.accumulate(near == own, axis=1).sum(axis=1).max()) if len(near) else 0

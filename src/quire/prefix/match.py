"""Match, Insertion, Evicted: the results of the tree's methods; `find`, the search for a prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.prefix.node import ID_BYTES, TOKEN_BYTES, Node, common_pages, join_ids
from quire.spec.events import Namespace
from quire.spec.ids import Ids

_NO_PAGES: Ids = np.empty(0, dtype=np.int32)
_LONG = 1 << 13  # tokens: a longer prompt is compared with its first edge in place, before it is copied


@dataclass(slots=True, eq=False)
class Match:
    """How far a prefix is cached. Valid until the tree's `version` changes; `RadixCache.lease` pins its pages. `pages`
    are read-only ids of the matched pages, in order. `path` are their nodes; the last one may be matched in part. The
    first `num_here` pages are on the device."""

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
    """`pages` hold the inserted tokens now. `duplicates` are pages of the caller that the tree did not take, because
    their tokens were cached already: the caller still owns them."""

    pages: Ids
    duplicates: Ids


class Evicted(NamedTuple):
    """Pages `removed` from the tree, which the caller owns now, and how many others left the tier only."""

    removed: Ids
    num_moved: int


def find(root: Node | None, tokens: Ids, page_size: int) -> tuple[Ids, list[Node]]:
    """The pages of the longest cached prefix of `tokens`, and their nodes; the last one may be matched in part.
    O(edges + bytes compared)."""
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

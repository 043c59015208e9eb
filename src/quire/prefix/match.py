"""Match, Insertion, Evicted: what the tree answers, and how a match is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.prefix.node import ID_BYTES, TOKEN_BYTES, Node, common_pages, join_ids
from quire.spec.events import Namespace
from quire.spec.ids import Ids

_NO_PAGES: Ids = np.empty(0, dtype=np.int32)
_LONG = 1 << 13  # tokens: more are worth a look at the first edge before they are copied


@dataclass(slots=True, eq=False)
class Match:
    """How far a prefix is cached. A snapshot: valid until the tree changes; `RadixCache.lease` makes it last.

    `pages` are the page ids of the matched pages, in order, not to be written. `path` holds the nodes they come from,
    the last one possibly matched in part. The first `num_here` pages are on the device.
    """

    namespace: Namespace
    pages: Ids
    num_pages: int
    path: list[Node]
    version: int
    num_here: int

    def num_evictable(self, num_pages: int) -> int:
        """How many of the first `num_pages` pages are on the device and held by no lease now; leases hold from the root
        on."""
        end = first = min(num_pages, self.num_here)
        for node in reversed(self.path):
            if node.level:
                break
            first = min(first, node.depth)
        return end - first


class Insertion(NamedTuple):
    """What `RadixCache.insert` did: the pages that now stand for the inserted tokens, and the caller's pages that were
    not taken because those tokens were cached already (the caller still owns these)."""

    pages: Ids
    duplicates: Ids


class Evicted(NamedTuple):
    """Ids of pages that are `removed` from the tree, and how many others have left the tier and stay in the tree."""

    removed: Ids
    num_moved: int


def find(root: Node | None, tokens: Ids, page_size: int) -> tuple[Ids, list[Node]]:
    """The pages of the longest prefix of `tokens` below a root, in order, and the nodes they come from, the last one
    possibly matched in part. O(edges + bytes compared)."""
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
    """Whether the tokens begin with `key`, compared where they are."""
    if not tokens.flags.c_contiguous or len(key) > tokens.nbytes:
        return False
    return key.startswith(tokens.data.cast("B")[: len(key)])

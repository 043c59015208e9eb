"""Parting: where a prompt leaves what is cached, and what is known of what would have come next.

prompt   |-- cached --|-- evicted --|-- evicted --|-- part of a page --|-- new ----
         live edges     ghosts, each with the         the same tokens as a page that
                        eviction that made it         is or was cached, then another
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from quire.prefix.ghosts import Eviction, Holder
from quire.prefix.node import Node
from quire.prefix.token_bytes import TOKEN_BYTES, common_pages
from quire.spec.events import Namespace
from quire.spec.ids import Ids

_MOST_COMPARED = 64  # continuations at the parting that are looked at: this is paid at every admission


@dataclass(frozen=True, slots=True)
class Parting:
    """`matched` pages are cached. The pages after them were `evicted`, in runs, each by one eviction. Behind these,
    `common` tokens, less than a page, are as in a page that is or was cached there. `elsewhere` names the namespace in
    which most of the prompt is cached, and how many of its pages, if that is more than here."""

    matched: int
    evicted: tuple[tuple[int, Eviction], ...]
    common: int
    elsewhere: tuple[Namespace, int] | None


def find_parting(root: Node | None, tokens: Ids, page_size: int, others: Iterable[Node]) -> Parting:
    """Follow `tokens` below `root`, through cached edges and then through ghosts. O(edges + bytes compared).

    `others` are roots of other namespaces that may hold the same tokens.
    """
    data, unit = tokens.tobytes(), page_size * TOKEN_BYTES
    end: Holder | None
    at, end, next_keys = _follow_nodes(root, data, unit)
    matched = at // unit
    evicted: list[tuple[int, Eviction]] = []
    holder: Holder | None = end
    while holder is not None:
        ghost = holder.ghosts.get(data[at : at + unit])
        if ghost is None:
            next_keys += list(islice(holder.ghosts, _MOST_COMPARED))
            break
        common = common_pages(data, at, ghost.key, unit)
        evicted.append((common // unit, ghost.eviction))
        at += common
        next_keys = [] if common == len(ghost.key) else [ghost.key[common : common + unit]]
        holder = end = ghost if common == len(ghost.key) else None
    page = data[at : at + unit]
    common = max(_most_common(page, next_keys), _most_common(page, [end.tail] if end is not None else []))
    return Parting(matched, tuple(evicted), common, _elsewhere(others, data, unit))


def _follow_nodes(root: Node | None, data: bytes, unit: int) -> tuple[int, Node | None, list[bytes]]:
    """The bytes that are cached, the node at whose end that is (None inside an edge), and the pages that come next."""
    at, node = 0, root
    if node is None:
        return 0, None, []
    while True:
        child = node.children.get(data[at : at + unit])
        if child is None:
            return at, node, list(islice(node.children, _MOST_COMPARED))
        if not data.startswith(child.key, at):
            common = common_pages(data, at, child.key, unit)
            return at + common, None, [child.key[common : common + unit]]
        at += len(child.key)
        node = child


def _most_common(page: bytes, keys: list[bytes]) -> int:
    """The most tokens that `page`, which may be short, begins with in common with one of these, all of one length."""
    width = len(keys[0]) // TOKEN_BYTES if keys else 0
    count = min(len(page) // TOKEN_BYTES, width)
    if not count:
        return 0
    table = np.frombuffer(b"".join(keys), dtype=np.int32).reshape(len(keys), width)[:, :count]
    same = table == np.frombuffer(page, dtype=np.int32, count=count)
    return int(np.logical_and.accumulate(same, axis=1).sum(axis=1).max())


def _elsewhere(others: Iterable[Node], data: bytes, unit: int) -> tuple[Namespace, int] | None:
    found = [(root.namespace, _follow_nodes(root, data, unit)[0] // unit) for root in others]
    return max(found, key=lambda entry: entry[1], default=None)

"""Eviction policies: which cached leaf goes first. One class of a line or two each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.errors import InvalidInput
from quire.prefix.node import Node


class EvictionPolicy(Protocol):
    """Orders leaves: the smallest key is evicted first. A key may change only while the node is leased."""

    def key(self, node: Node) -> tuple[int, ...]:
        """The node's place in the order."""


class LRU:
    """Least recently used."""

    def key(self, node: Node) -> tuple[int, ...]:
        return (node.last_used,)


class LFU:
    """Least often hit, then least recently used."""

    def key(self, node: Node) -> tuple[int, ...]:
        return (node.hits, node.last_used)


class SLRU:
    """Segmented: what was hit at most once goes before what was hit twice; least recently used within each."""

    def key(self, node: Node) -> tuple[int, ...]:
        return (int(node.hits >= 2), node.last_used)


class FIFO:
    """First stored, first out."""

    def key(self, node: Node) -> tuple[int, ...]:
        return (node.created,)


class MRU:
    """Most recently used first: for loops longer than the pool."""

    def key(self, node: Node) -> tuple[int, ...]:
        return (-node.last_used,)


class FILO:
    """Last stored, first out."""

    def key(self, node: Node) -> tuple[int, ...]:
        return (-node.created,)


class Priority:
    """Lowest request priority first, then least recently used."""

    def key(self, node: Node) -> tuple[int, ...]:
        return (node.priority, node.last_used)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "slru": SLRU,
    "fifo": FIFO,
    "mru": MRU,
    "filo": FILO,
    "priority": Priority,
}


def eviction_policy(name: str) -> EvictionPolicy:
    """The policy of that name. Raises InvalidInput, listing the names there are."""
    if name not in POLICIES:
        raise InvalidInput(f"unknown eviction policy '{name}'.", fix=f"use one of {', '.join(POLICIES)}.")
    return POLICIES[name]()

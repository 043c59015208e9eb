"""The recorded vectors beside the repository, and a radix tree over an allocator that replays their operations."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.memory.allocator import token_allocator
from quire.prefix.evict import Order
from quire.prefix.node import Lease, Node
from quire.prefix.policy import EvictionPolicy
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
NAMESPACE = Namespace()

needs_golden = pytest.mark.skipif(
    not GOLDEN.exists(), reason="no recorded vectors: shared/golden is not beside the repo"
)


def load(name: str) -> Any:
    with gzip.open(GOLDEN / f"{name}.json.gz", "rt") as file:
        return json.load(file)


def result_of(recorded: Any, impl: str) -> list[dict[str, Any]]:
    """The log of one implementation."""
    log: list[dict[str, Any]] = next(result["log"] for result in recorded["results"] if impl in result["impls"])
    return log


def ids(tokens: list[int]) -> Ids:
    return np.array(tokens, dtype=np.int32)


@dataclass(slots=True)
class Use:
    """What the recorded engine's policies sort by."""

    last: int = 0
    hits: int = 0
    priority: int = 0


@dataclass(slots=True)
class Uses:
    """The recorded engine's uses of Quire's nodes. They differ from Quire's:

    - A match that ends inside an edge counts as a use of the whole edge. Quire: of the matched part (020).
    - A hit is an insertion, counted on every node of its path, new ones included. Quire: a lease, counted where the
      path ends, and inherited by the parent when the node is evicted (020).
    - A new node has the priority of its insertion, and a use does not change the priority of what was split off.
    """

    of: dict[Node, Use] = field(default_factory=dict)
    clock: int = 0

    def on(self, node: Node) -> Use:
        return self.of.setdefault(node, Use())


RECORDED_ORDERS: dict[str, Callable[[Use], tuple[float, ...]]] = {
    "lru": lambda use: (use.last,),
    "lfu": lambda use: (use.hits, use.last),
    "slru": lambda use: (use.hits >= 2, use.last),
    "priority": lambda use: (use.priority, use.last),
}


def recorded_order(policy: str, uses: Uses) -> EvictionPolicy:
    order = RECORDED_ORDERS[policy]
    return Order(lambda node: order(uses.on(node)))


class Replay:
    """Quire's tree over Quire's allocator. With `uses`, it keeps the recorded engine's record of uses.

    The recorded engine evicts whole leaves, Quire exactly what is asked for (002). So an eviction first takes what was
    asked for, and then what the recorded engine took beyond that: both trees have the same content again.
    """

    def __init__(self, page_size: int, num_tokens: int, policy: EvictionPolicy, uses: Uses | None = None) -> None:
        self.size = page_size
        self.tree = RadixCache(page_size, policy)
        self.slots = token_allocator(num_tokens, page_size, name="pages")
        self.locks: dict[int, Lease] = {}
        self.uses = uses
        self.num_beyond = 0  # evictions in which the recorded engine took more than was asked for

    def run(self, op: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
        """One operation; the result has the form of the recorded `entry`."""
        key = ids(op.get("key", []))
        key = key[: len(key) // self.size * self.size]
        match op["op"]:
            case "match":
                found: dict[str, Any] = {"len": self.match(key)}
            case "lock":
                found = {"len": self.match(key)}
                self.locks[op["id"]] = self.pin(key, found["len"] // self.size)
            case "unlock":
                self.tree.release(self.locks.pop(op["id"]))
                found = {}
            case "evict":
                found = {"evicted": [self.evict(op["n"], entry["evicted"][0])]}
            case "insert" | "insert_dup" if not len(key):
                return {"skipped": True}
            case "insert" | "insert_dup":
                found = self._insert(op, key, entry)
            case other:
                raise AssertionError(f"unknown operation {other}")
        return found | {"state": self._state()}

    def _state(self) -> dict[str, list[int]]:
        tree, size = self.tree, self.size
        assert self.slots.available_size() + tree.num_pages * size == self.slots.size
        return {
            "avail": [self.slots.available_size()],
            "evictable": [tree.num_evictable * size],
            "protected": [tree.num_protected * size],
        }

    def match(self, key: Ids) -> int:
        """Match and use a prefix. Returns its tokens."""
        match = self.tree.match(NAMESPACE, key)
        ends_at = match.path[-1] if match.path else None
        lease = self.tree.lease(match)
        self.use(lease.node, ends_at)
        self.tree.release(lease)
        return match.num_pages * self.size

    def pin(self, key: Ids, num_pages: int) -> Lease:
        return self.tree.pin_path(self.tree.match(NAMESPACE, key), num_pages)

    def evict(self, num_tokens: int, recorded: int) -> int:
        """Returns the tokens that were evicted."""
        wanted, evictable = -(-num_tokens // self.size), self.tree.num_evictable
        evicted = self.tree.evict(wanted)
        assert len(evicted) == min(wanted, evictable)
        beyond = recorded // self.size - len(evicted)
        if beyond > 0:
            self.num_beyond += 1
            evicted = np.concatenate((evicted, self.tree.evict(beyond)))
        self.slots.free(evicted * self.size)
        return len(evicted) * self.size

    def grow(self, lease: Lease, key: Ids, new_slots: Ids, priority: int = 0) -> None:
        """Insert the last `len(new_slots)` tokens of a key, whole pages, behind a lease."""
        match = self.tree.match(NAMESPACE, key)
        ends_at = match.path[-1] if match.path else None
        inserted = self.tree.insert(lease, key[len(key) - len(new_slots) :], new_slots[:: self.size] // self.size)
        self.slots.free(inserted.duplicates * self.size)
        self.use(lease.node, ends_at, hits=1, priority=priority)

    def _insert(self, op: dict[str, Any], key: Ids, entry: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"matched": self.match(key) if op["op"] == "insert" else 0}
        lease = self.pin(key, found["matched"] // self.size)
        other = self.tree.pin(lease.node)  # with a second lease, new pages get a node of their own, as recorded
        lease.priority = op.get("priority", 0)
        missing = len(key) - found["matched"]
        if missing > (free := self.slots.available_size()):
            found["evicted_for_space"] = [self.evict(missing - free, entry.get("evicted_for_space", [0])[0])]
        if missing > self.slots.available_size():
            found["oom"] = True
        else:
            found["prefix_len"] = self.tree.match(NAMESPACE, key).num_pages * self.size
            self.grow(lease, key, self.slots.alloc(missing) if missing else key[:0], lease.priority)
        self.tree.release(lease)
        self.tree.release(other)
        return found

    def use(self, node: Node, ends_at: Node | None, *, hits: int = 0, priority: int | None = None) -> None:
        """Record a use of the path to `node`, which a lease holds, and of the rest of the edge that it ends in."""
        if self.uses is None:
            return
        self.uses.clock += 2
        path: list[Node] = []
        above: Node | None = node
        while above is not None:
            path.append(above)
            above = above.parent
        if ends_at is not None and ends_at.parent in path and ends_at not in path:
            upper = ends_at.parent
            self.uses.of[upper] = Use(0, self.uses.on(ends_at).hits, self.uses.on(ends_at).priority)
            self.uses.on(ends_at).last = self.uses.clock - 1  # before what the operation made
            self.tree.release(self.tree.pin(ends_at))  # it is queued under its new key
        for each in path:
            use = self.uses.on(each)
            use.last = self.uses.clock
            use.hits += hits
            if priority is not None:
                use.priority = max(use.priority, priority)

"""A cache over a host and a store, in time that is only counted: bytes move when the test says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.cache.request_kv import RequestKV
from quire.cache.tier_settings import TierSettings
from quire.spec.ids import Ids
from quire.testing.plans import small_plan
from quire.tiers.break_even import BreakEven
from quire.tiers.moves import Link
from quire.tiers.virtual_mover import VirtualMover
from tests.tiers.array_copies import ArrayCopies
from tests.tiers.dict_store import DictStore

PAGE_SIZE = 4
AMPLE = 1 << 30


class BelowDevice:
    """`cache` has `num_pages` pages of four tokens on the device and `host_pages` on the host, for one group. Every
    move takes a second of `now`."""

    def __init__(
        self,
        num_pages: int,
        host_pages: int,
        *,
        store: DictStore | None = None,
        most_bytes: Mapping[Link, int] | None = None,
        **settings: Any,
    ) -> None:
        self.now = 0.0
        self.copies = ArrayCopies(((0, 1),), (8,), num_device=num_pages, num_host=host_pages)
        self.mover = VirtualMover(
            self.copies,
            store,
            seconds=lambda: self.now,
            bandwidths={},
            latency=dict.fromkeys(Link, 1.0),
            **({} if most_bytes is None else {"most_bytes": most_bytes}),
        )
        told = TierSettings(
            host_frames=(host_pages,),
            record_bytes=(self.copies.bytes_of(0),),
            mover=self.mover,
            break_even=BreakEven(lambda: self.now),
            stores=store is not None,
            **{"always": True, **settings},
        )
        self.cache = KVCache(small_plan(num_pages, PAGE_SIZE), tiers=told, seconds=lambda: self.now, eviction="lru")
        assert self.cache.tiers is not None
        self.tiers = self.cache.tiers

    def pass_time(self, seconds: float = 1.0) -> None:
        """Bytes that are due arrive."""
        self.now += seconds
        self.cache.settle_moves()

    def come_to_rest(self) -> None:
        """All bytes arrive, and what was condemned is gone."""
        self.cache.settle_moves()
        while not self.mover.idle:
            self.pass_time()
        self.cache.audit()

    def compute(self, tokens: Ids, *, name: str = "") -> RequestKV:
        """A request that has computed all of `tokens` and goes on."""
        kv = self.cache.begin(tokens, label=name)
        self.cache.extend([kv], [len(tokens) - kv.num_cached])
        self.cache.commit(kv, tokens)
        return kv

    def cached(self, *prompts: Ids) -> None:
        """Compute prompts one after the other, and let copies of them arrive below."""
        for tokens in prompts:
            self.cache.finish(self.compute(tokens), tokens)
            self.come_to_rest()

    def leave_device(self) -> None:
        """All that is cached and has a copy is below the device only."""
        evicted = self.cache.tree.evict_device(AMPLE, "", lambda node: node.kept)
        self.tiers.left_device(evicted.moved)
        self.cache._give_back(evicted.removed)
        self.cache.audit()

    def spoil_host(self, page: int) -> None:
        """Flip a byte of the page's host record."""
        self.copies.host[0][self.tiers.hosts[0].column[page], -8] ^= 1


def prompt(seed: int, num_pages: int, *, after: Sequence[int] = ()) -> Ids:
    """Whole pages of tokens and one token more, behind others."""
    drawn = np.random.default_rng(seed).integers(0, 1000, num_pages * PAGE_SIZE + 1 - len(after), dtype=np.int32)
    return np.concatenate((np.array(after, dtype=np.int32), drawn))

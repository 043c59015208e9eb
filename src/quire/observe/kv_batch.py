"""KvBatch: events of the cache as vLLM puts them on the wire, which Dynamo, llm-d and Ray's router read.

    batch   [seconds since 1970, [event, ...], rank]
    event   {"type": "BlockStored", ...}; fields with defaults are left out while they have these

A block is a page, and its hash the last 8 bytes of the page's key, as an unsigned number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from quire.spec.events import AllCleared, CacheEvent, Namespace, PagesStored
from quire.spec.ids import Tier

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
"""Where readers expect copies of each tier to be; a device of any kind is GPU."""


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event):
    """Consecutive pages of one prefix can be reused from `medium`. `parent_block_hash` is None at the beginning of a
    prompt. `extra_keys` has an entry for each block, as vLLM hashes them; `cache_salt` is what readers filter by."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class BlockRemoved(_Event):
    """Pages can no longer be reused from `medium`."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """Nothing is cached any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in order."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int = 0


class KvBatches:
    """Makes batches of an engine's events. `seed` gives the hash before the first page of a namespace. `kind` is what
    readers are told of the memory, None if there is one kind alone."""

    def __init__(self, page_size: int, seed: Callable[[Namespace], bytes], kind: str | None = None) -> None:
        self._page_size = page_size
        self._seed = seed
        self._kind, self._group = kind, None if kind is None else 0
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[CacheEvent]) -> bytes:
        """One batch. Computes hashes that were not read before."""
        return self._encoder.encode(KvBatch(time.time(), self.events(events)))

    def events(self, events: Sequence[CacheEvent]) -> list[KvEvent]:
        """Events as readers get them. Computes hashes that were not read before."""
        return [self._event(each) for each in events]

    def _event(self, event: CacheEvent) -> KvEvent:
        if isinstance(event, AllCleared):
            return AllBlocksCleared()
        hashes, medium = [block_hash(each) for each in event.hashes], MEDIA[event.tier]
        if not isinstance(event, PagesStored):
            return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=self._group)
        namespace, parent = event.namespace, event.parent
        is_first = parent == self._seed(namespace)
        adapter, salt = namespace.adapter or None, namespace.salt or None
        extra: list[tuple[str, ...] | None] | None = None
        if adapter or (salt and is_first):
            own = (adapter,) if adapter else None
            extra = [own] * len(hashes)
            if salt and is_first:
                extra[0] = (*(own or ()), salt)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if is_first else block_hash(parent),
            token_ids=np.frombuffer(event.tokens, np.int32).tolist(),
            block_size=self._page_size,
            lora_id=None,
            medium=medium,
            lora_name=adapter,
            extra_keys=extra,
            group_idx=self._group,
            kv_cache_spec_kind=self._kind,
            cache_salt=salt,
        )


def block_hash(key: bytes) -> int:
    """The number of a page on the wire."""
    return int.from_bytes(key[-8:], "big")

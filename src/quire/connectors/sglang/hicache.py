"""QuireHiCache: a `dynamic` backend of SGLang's HiCache on any store of Quire's.

Each host pool has a scope of its own in one store: model, weights, element type, page size, order of bytes and ranks.
So a process reads only what has the bytes that it would have computed. SGLang calls from its own threads:

    batch_exists      leading pages that are there
    batch_get_v1      pages into the host pool, with one copy; the first that is missing or damaged ends a read
    batch_set_v1      True also for pages that another process writes now: one False ends SGLang's backup
    *_v2              the same for the pools of hybrid models, by their policies
    get, set, ...     the interface v0, by flat copies of pages; both read each other's records

It never answers with bytes that fail their check, and waits for a store no longer than its deadline.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from threading import Thread
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from quire.connectors.checked_store import CLOSE_S, CheckedStore
from quire.connectors.counters import CountGrowth
from quire.connectors.lookup_log import LookupLog
from quire.connectors.settings import HiCacheSettings
from quire.connectors.sglang.facts import check_server, facts_of, weight_version, weights_of
from quire.connectors.sglang.metrics import report
from quire.connectors.sglang.pool_pages import Payload, PoolPages
from quire.errors import InvalidInput
from quire.tiers.store import Answer
from quire.tiers.stores.registry import open_store

logger = logging.getLogger(__name__)

_KV = str(PoolName.KV)
_OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1"}


class _Pool(NamedTuple):
    """A registered host pool: its pages, and their records."""

    pages: PoolPages
    records: CheckedStore
    growth: CountGrowth


class QuireHiCache(HiCacheStorage):  # type: ignore[misc]  # sglang has no types here
    """Created by SGLang's factory from `--hicache-storage-backend-extra-config`; see `HiCacheSettings`."""

    def __init__(self, config: Any, _: Any = None) -> None:
        """Open the store. Raises InvalidInput, RefusedCombination or StoreError, which end the start of the server."""
        extra = config.extra_config or {}
        settings = HiCacheSettings.read({name: value for name, value in extra.items() if name not in _OF_SGLANG})
        check_server(config, adapters=settings.adapters)
        self._config, self._settings, self._weights = config, settings, weights_of(settings.weights)
        self._version = weight_version()
        self._pools: dict[str, _Pool] = {}
        self._log = None if settings.log is None else LookupLog(settings.log)
        self._store = open_store(settings.store, capacity=settings.store_size, direct=settings.direct)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of keys and values."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, _KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def _register(self, pool: Any, name: str) -> None:
        """Raises RefusedCombination for a pool that cannot be stored."""
        if name in self._pools and self._pools[name].pages.pool is pool:
            return  # that of keys and values, as one of a hybrid model's
        pages = PoolPages(pool, name)
        records = CheckedStore(
            self._store,
            facts_of(self._config, pages, self._weights),
            {0: pages.payload_bytes},
            deadline_s=self._settings.deadline_s,
            threads=self._settings.threads,
            log=self._log,
        )
        self._pools[name] = _Pool(pages, records, CountGrowth(records))

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the first pages are there."""
        return _leading(self._exists(_KV, keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool; whether each arrived. None does after the first that did not."""
        return self._get(_KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Write pages of the host pool; whether each is in the store, or being written to it."""
        return self._set(_KV, keys, host_indices)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """`batch_get_v1` of several pools, by their names."""
        return {each.name: self._get(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """`batch_set_v1` of several pools, by their names."""
        return {each.name: self._set(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Prefixes that all pools can restore, by their policies, and the pages of each. Whole groups limit none."""
        kv_pages = self.batch_exists(keys)
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for each in pool_transfers or ():
            if each.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                pages = self._pages_of_groups(each)
            else:
                last = 0 if each.hit_policy == PoolHitPolicy.ALL_PAGES else max(1, len(each.keys or ()))
                lengths = _restorable(self._exists(str(each.name), keys[:kv_pages]), last)
                restorable = [length for length in restorable if length in lengths]
                pages = max(lengths, default=0)
            if pages:
                hits[each.name] = pages
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _pages_of_groups(self, asked: PoolTransfer) -> int:
        """Pages that the leading whole groups of a pool's keys cover."""
        found = _leading(self._exists(str(asked.name), asked.keys or []))
        return int(found // max(1, asked.group_pages) * asked.block_pages)

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self._exists(_KV, [key]) == [True]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read one page, flat, into a tensor of its size, or a new one of bytes; None if it is not there."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """`get` of several pages, up to the first that is not there."""
        pool = self._pool(_KV)
        if pool is None:
            return [None] * len(keys)
        pages = target_locations or [torch.empty(pool.pages.flat_bytes, dtype=torch.uint8) for _ in keys]
        fits = [page.is_contiguous() and page.nbytes == pool.pages.flat_bytes for page in pages]
        wanted = keys[: _leading(fits)]
        found = _load(pool, wanted, [pool.pages.flat(page) for page in pages[: len(wanted)]])
        return [*pages[:found], *[None] * (len(keys) - found)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write one page, flat."""
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write several pages, flat; whether all are in the store, or being written to it."""
        pool, pages = self._pool(_KV), values if values is not None else target_locations
        if pool is None or any(page.nbytes != pool.pages.flat_bytes for page in pages):
            return False
        return all(_save(pool, keys, [pool.pages.flat(page.contiguous()) for page in pages]))

    def clear(self) -> None:
        """Remove the records of this process's pools; those of other models, weights and ranks stay."""
        for pool in self._pools.values():
            pool.records.clear()

    def get_stats(self) -> None:
        """SGLang asks for it in its loop, with --enable-metrics."""
        for name, pool in self._pools.items():
            report(name, pool.growth, is_off=weight_version() != self._version)

    def close(self) -> None:
        """Let calls end, and close the store; one that hangs is left to the process's end."""

        def end() -> None:
            for pool in self._pools.values():
                pool.records.close()
            self._store.close()

        ends = Thread(target=end, daemon=True)
        ends.start()
        ends.join(2 * CLOSE_S)

    def _pool(self, name: str) -> _Pool | None:
        """A registered pool, while the weights are those of its records."""
        if weight_version() == self._version:
            return self._pools.get(name)
        logger.error("weights have changed: nothing is stored or found until HiCache's storage is attached again")
        return None

    def _exists(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Which pages are there; none of a pool that was not registered."""
        pool = self._pool(name)
        if pool is None:
            return [False] * len(keys)
        pages = [_key(key) for key in keys]
        answers = pool.records.submit_exists(pages).wait()
        pool.records.counts.add(misses=answers.count(Answer.MISS))
        if self._log is not None:
            self._log.looked_up(pool.records.scope, "", zip(pages, answers, strict=True))
        return [answer is Answer.HIT for answer in answers]

    def _get(self, name: str, keys: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        pool, rows = self._pool_and_rows(name, keys, host_indices)
        if pool is None:
            return [False] * len(keys)
        payloads = [pool.pages.incoming(row) for row in rows]
        found = _load(pool, keys, payloads)
        for row, payload in zip(rows[:found], payloads, strict=False):
            pool.pages.arrived(row, payload)
        return [at < found for at in range(len(keys))]

    def _set(self, name: str, keys: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        pool, rows = self._pool_and_rows(name, keys, host_indices)
        return [False] * len(keys) if pool is None else _save(pool, keys, [pool.pages.outgoing(row) for row in rows])

    def _pool_and_rows(
        self, name: str, keys: list[str], host_indices: torch.Tensor | None
    ) -> tuple[_Pool | None, list[int]]:
        """The pool, and the first row of each page in it. No pool if there is none, or it has not a page for each key,
        as when SGLang has shortened one of both."""
        pool = self._pool(name)
        rows = [] if host_indices is None else host_indices.tolist()
        if pool is None or len(rows) != len(keys) * pool.pages.page_size:
            logger.error("SGLang asks for %d pages of pool '%s' with %d rows", len(keys), name, len(rows))
            return None, []
        return pool, rows[:: pool.pages.page_size]


def _load(pool: _Pool, keys: Sequence[str], payloads: Sequence[Payload]) -> int:
    """How many pages arrived, up to the first that is missing or bad."""
    answers = pool.records.submit_load([_key(key) for key in keys], payloads).wait()
    return _leading(answer is Answer.HIT for answer in answers)


def _save(pool: _Pool, keys: Sequence[str], payloads: Sequence[Payload]) -> list[bool]:
    """Which pages are in the store, or being written to it by another process."""
    answers = pool.records.submit_save([_key(key) for key in keys], payloads).wait()
    return [answer in (Answer.HIT, Answer.PENDING) for answer in answers]


def _key(key: str) -> tuple[bytes, int]:
    """SGLang's key of a page, 64 hexadecimal digits. Raises InvalidInput for any other."""
    if not re.fullmatch("[0-9a-fA-F]{64}", key):
        raise InvalidInput(f"SGLang's key of a page has 64 hexadecimal digits, and this one is {key[:80]!r}.")
    return bytes.fromhex(key), 0


def _leading(found: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, found))


def _restorable(found: Sequence[bool], last: int) -> set[int]:
    """Lengths of prefixes whose `last` pages, or all if 0, are there."""
    run, lengths = 0, set()
    for length, is_there in enumerate(found, 1):
        run = run + 1 if is_there else 0
        if run >= min(last or length, length):
            lengths.add(length)
    return lengths

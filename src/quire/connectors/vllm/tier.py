"""QuireTier: a store of Quire as a secondary tier of vLLM. It may miss, and never gives bytes that fail their check.

    lookup         is the record there? asked in the background (`lookups`); vLLM asks again meanwhile
    submit_load    read records into rows of vLLM's primary tier, and check them there. vLLM uses a row only if its
                   record was good; the others it looks up again, and computes. No request fails
    submit_store   seal rows and write them. vLLM keeps the rows until it is done, so a store that hangs holds at most
                   `save_share` of them; what comes then is refused

All methods run in the scheduler's thread, and none waits, but `drain_jobs` and `shutdown`, which vLLM calls to wait.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from threading import Condition
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from quire.connectors.checked_store import CheckedStore, Key
from quire.connectors.vllm import metrics
from quire.connectors.vllm.compat import check_version, chunks_of, engine_config
from quire.connectors.vllm.identity import identity_of
from quire.connectors.vllm.lookups import Lookups
from quire.connectors.vllm.workers import Workers
from quire.errors import StoreError
from quire.settings.setting import parse_bytes
from quire.tiers.store import Answer

logger = init_logger(__name__)

PIECE_BYTES = 32 << 20  # each has the deadline of one call


class QuireTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """`type` "QuireTier", `module_path` "quire.connectors.vllm"."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        store: str,
        store_size: int | str | None = None,
        weights: str = "",
        deadline_s: float = 2.0,
        save_share: float = 0.25,
        threads: int = 4,
        locality: str | None = None,
        adapters: bool = False,
        serves_after_reset: bool = False,
        untested_vllm: bool = False,
    ) -> None:
        """`store` is the URL of a store, `store_size` its limit, `weights` the identity of the model's weights if they
        are not in files. Raises RefusedCombination for what cannot be keyed, and StoreError."""
        check_version(may_be_untested=untested_vllm)
        more = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        self.locality = None if locality is None else Locality(locality)
        self._rows: Any = np.asarray(primary_kv_view).view(np.uint8)
        num_rows, row_bytes = self._rows.shape
        self._piece = max(1, PIECE_BYTES // row_bytes)
        self._most_saving = max(1, int(num_rows * save_share))
        config = engine_config()
        identity = identity_of(config, offloading_spec, row_bytes, weights=weights, adapters=adapters)
        self._store = CheckedStore.open(
            store,
            identity,
            {group: row_bytes for group in range(len(offloading_spec.config.groups))},
            capacity=None if store_size is None else parse_bytes(store_size),
            deadline_s=deadline_s,
            threads=threads,
        )
        self._deadline_s, self._serves_after_reset = deadline_s, serves_after_reset
        self._lookups = Lookups(self._exist, deadline_s)
        self._workers = {True: Workers("quire-load", 2), False: Workers("quire-save", 1)}
        self._changed = Condition()
        self._in_flight: Counter[bool] = Counter()  # rows of loads (True) and saves
        self._finished: deque[tuple[TransferJob, JobResult]] = deque()
        self._counted: Counter[str] = Counter()
        self._refused = 0
        self._is_stopping = self._is_off = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        found = False if self._is_off else self._lookups.of(req_context.req_id, key)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.end(req_context.req_id)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=True)

    def submit_store(self, job_metadata: TransferJob) -> None:
        waiting = self._in_flight[False]
        if self._is_off or (waiting and waiting + len(job_metadata.keys) > self._most_saving):
            self._refused += len(job_metadata.keys)
            self._finished.append((job_metadata, JobResult(job_metadata.job_id, success=False)))
        else:
            self._submit(job_metadata, is_load=False)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Records that could not be loaded are missed from now on, for their request."""
        results = []
        while self._finished:
            job, result = self._finished.popleft()
            results.append(result)
            if job.is_promotion and not result.success:
                self._lookups.miss(job.req_context.req_id, set(job.keys).difference(result.successful_keys or ()))
        return results

    def drain_jobs(self) -> None:
        """vLLM resets its caches, which it does when weights change: then no saved record may be served any more."""
        self._stop()
        self._wait(None)
        self._is_stopping = False
        if not self._serves_after_reset:
            self._is_off = True
            logger.warning(
                "vLLM's cache was reset, so the weights may be others than those of the store: it is neither read nor "
                'written until a restart. Set "serves_after_reset": true in the tier if resets never follow new weights.'
            )

    def shutdown(self) -> None:
        """Raises StoreError if a call to the store does not end; then vLLM leaves its memory mapped."""
        self._is_off = True
        self._stop()
        is_idle = self._wait(2 * self._deadline_s)
        self._rows = None
        for workers in self._workers.values():
            workers.close(0.1)
        self._lookups.close(0.1)
        if not is_idle:
            raise StoreError("the store does not answer, and rows of the primary tier are in use.")
        self._store.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    def get_stats(self) -> Any:
        counts = Counter(self._store.counts)
        counts.update(expired=self._lookups.expired, refused=self._refused)
        grown, self._counted = counts - self._counted, counts
        return metrics.stats(grown)

    # -- other threads

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        return [answer is Answer.HIT for answer in self._store.exists([_key(key) for key in keys])]

    def _submit(self, job: TransferJob, *, is_load: bool) -> None:
        with self._changed:
            self._in_flight[is_load] += len(job.keys)
        self._workers[is_load].run(lambda: self._run(job, is_load=is_load))

    def _run(self, job: TransferJob, *, is_load: bool) -> None:
        began, keys, good = time.monotonic(), list(job.keys), []
        try:
            rows, move = chunks_of(job), self._store.load if is_load else self._store.save
            for start in range(0, len(keys), self._piece):
                if self._is_stopping:
                    break
                some = keys[start : start + self._piece]
                found = move([_key(key) for key in some], [self._rows[row] for row in rows[start : start + len(some)]])
                good += [key for key, answer in zip(some, found, strict=True) if answer in _DONE[is_load]]
                if is_load and Answer.RETRY in found:
                    break  # each piece after it would wait as long
        finally:
            result = JobResult(job.job_id, len(good) == len(keys), good, time.monotonic() - began)
            with self._changed:
                self._in_flight[is_load] -= len(keys)
                self._finished.append((job, result))
                self._changed.notify_all()

    def _stop(self) -> None:
        self._is_stopping = True

    def _wait(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._in_flight.values()), timeout_s)


_DONE = {True: {Answer.HIT}, False: {Answer.HIT, Answer.PENDING}}


def _key(key: bytes) -> Key:
    """vLLM's key of a chunk: the hash of its last block, 32 bytes or fewer, and its group."""
    block = get_offload_block_hash(key)
    return (block if len(block) == 32 else hashlib.sha256(block).digest()), get_offload_group_idx(key)

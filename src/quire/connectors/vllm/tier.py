"""QuireTier: a store of Quire as a secondary tier of vLLM. It may miss, and never gives bytes that fail their check.

    lookup         is the record there? asked in the background (`lookups`); vLLM asks again in the next step
    submit_load    records are read into rows of vLLM's primary tier and checked there. vLLM uses the rows whose record
                   is good; it looks up the others again, misses them, and computes. No request fails
    submit_store   rows are sealed and written. vLLM pins a row until then, so that a store that hangs would pin all of
                   them: what comes while `save_share` of the rows are pinned is refused

All methods are for the scheduler's thread. None waits for the store, but `drain_jobs` and `shutdown`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from quire.connectors.checked_store import CheckedStore, ChunkKey
from quire.connectors.counters import CountGrowth
from quire.connectors.job import Job
from quire.connectors.settings import QuireTierSettings
from quire.connectors.vllm import metrics
from quire.connectors.vllm.compat import check_version, chunks_of, engine_config
from quire.connectors.vllm.facts import facts_of
from quire.connectors.vllm.lookups import Lookups
from quire.errors import StoreError
from quire.tiers.store import Answer

logger = init_logger(__name__)

PIECE_BYTES = 32 << 20  # a load or save is cut into pieces, which several threads move
_MOST_TOUCHED = 1024


class _Moving(NamedTuple):
    """A load or save of vLLM's, in pieces."""

    job: TransferJob
    pieces: list[tuple[list[bytes], Job]]
    began: float
    done: tuple[Answer, ...]  # the answers of a piece that count as success


class QuireTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """`type` "QuireTier", `module_path` "quire.connectors.vllm"."""

    medium = base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """`options` are `QuireTierSettings`. Raises RefusedCombination for what cannot be keyed, InvalidInput, and
        StoreError."""
        settings = QuireTierSettings.read(options)
        check_version(may_be_untested=settings.untested_vllm)
        more = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        self._rows: Any = np.asarray(primary_kv_view).view(np.uint8)  # [chunks, bytes]
        num_rows, row_bytes = self._rows.shape
        self._chunks_in_piece = max(1, PIECE_BYTES // row_bytes)
        self._most_saving = max(1, int(num_rows * settings.save_share))
        self._store = CheckedStore.open(
            settings.store,
            facts_of(engine_config(), offloading_spec, row_bytes, weights=settings.weights, adapters=settings.adapters),
            {getattr(group, "group_id", at): row_bytes for at, group in enumerate(offloading_spec.config.groups)},
            capacity=settings.store_size,
            deadline_s=settings.deadline_s,
            threads=settings.threads,
            log=settings.log,
        )
        self._lookups = Lookups(lambda keys: self._store.submit_exists(keys, _key))
        self._moving: dict[int, _Moving] = {}
        self._num_saving = self._num_refused = 0
        self._used: dict[bytes, None] = {}  # since the last touch, in the order of prompts
        self._touch: Job | None = None
        self._growth = CountGrowth(self._store)
        self._serves_after_reset = settings.serves_after_reset
        self._is_off = False

    # -- lookups

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        """Save new chunks alone."""
        return base.RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: base.ReqContext) -> base.LookupResult:
        """Whether the record is there, or RETRY until the store has said so."""
        found = False if self._is_off else self._lookups.of(req_context.req_id, key)
        return base.LookupResult.RETRY if found is None else base.LookupResult.HIT if found else base.LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Ask for the keys of this step."""
        self._lookups.flush()
        if self._used and (self._touch is None or self._touch.poll() is not None) and not self._is_off:
            self._touch = self._store.submit_touch([_key(key) for key in self._used])
            self._used = {}

    def touch(self, keys: Collection[bytes], req_context: base.ReqContext) -> None:
        """Records of prompts that vLLM found in memory count as used, too (vLLM 0.29 and 0.30)."""
        if len(self._used) < _MOST_TOUCHED:
            self._used.update(dict.fromkeys(keys))

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        """Drop the answers for a request."""
        self.touch(getattr(req_context, "_offload_key_positions", ()), req_context)  # since vLLM 0.31
        since, found = self._lookups.end(req_context.req_id)
        if self._store.log is not None:
            answers = ((_key(key), answer) for key, answer in found.items())
            self._store.log.looked_up(self._store.scope, req_context.req_id, answers, since)

    # -- loads and saves

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read records into rows."""
        self._submit(job_metadata, self._store.submit_load, (Answer.HIT,))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Save rows, unless too many are waiting."""
        count = len(job_metadata.keys)
        is_refused = self._is_off or (self._num_saving and self._num_saving + count > self._most_saving)
        self._num_saving += count
        if is_refused:
            self._num_refused += count
            self._moving[job_metadata.job_id] = _Moving(job_metadata, [], time.monotonic(), ())
        else:
            self._submit(job_metadata, self._store.submit_save, (Answer.HIT, Answer.PENDING))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended since the last call, with the keys that succeeded."""
        return [
            self._end(moving)
            for moving in list(self._moving.values())
            if all(piece.poll() is not None for _, piece in moving.pieces)
        ]

    def drain_jobs(self) -> None:
        """vLLM resets its caches, as it does when weights change. Then no saved record may be served any more."""
        for moving in self._moving.values():
            for _, piece in moving.pieces:
                piece.wait()
        if not self._serves_after_reset:
            self._is_off = True
            logger.warning(
                "vLLM's caches were reset, so its weights may be others than those of the store: it is not used until "
                'a restart. Set "serves_after_reset": true in the tier if no reset follows new weights.'
            )

    def shutdown(self) -> None:
        """Save what is waiting. Raises StoreError if the store hangs; then vLLM leaves its memory mapped."""
        self._is_off = True
        hangs = not self._store.close()
        self._moving.clear()
        self._rows = None
        if hangs:
            raise StoreError("the store hangs, with rows of the primary tier in use.")

    # -- metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, base.OffloadingMetricMetadata]:
        """The counters, for vLLM's front end."""
        return metrics.definitions()

    def get_stats(self) -> Any:
        """What the counters have grown by."""
        more = {"misses": self._lookups.num_missed, "refused": self._num_refused}
        return metrics.stats(*self._growth.since(more), is_off=self._is_off)

    # -- internals

    def _submit(self, job: TransferJob, move: Callable[..., Job], done: tuple[Answer, ...]) -> None:
        keys, rows, each, began = list(job.keys), chunks_of(job), self._chunks_in_piece, time.monotonic()
        pieces = [
            (some, move([_key(key) for key in some], [self._rows[row] for row in rows[at : at + each]]))
            for at, some in ((at, keys[at : at + each]) for at in range(0, len(keys), each))
        ]
        self._moving[job.job_id] = _Moving(job, pieces, began, done)

    def _end(self, moving: _Moving) -> JobResult:
        """The result of a job whose pieces have ended. Records that could not be loaded are missing for its request."""
        job = moving.job
        answers = {key: answer for keys, piece in moving.pieces for key, answer in zip(keys, piece.wait(), strict=True)}
        good = [key for key, answer in answers.items() if answer in moving.done]
        if job.is_promotion:
            self._lookups.loaded(job.req_context.req_id, answers)
        else:
            self._num_saving -= len(job.keys)
        del self._moving[job.job_id]
        return JobResult(job.job_id, len(good) == len(job.keys), good, time.monotonic() - moving.began)


def _key(key: bytes) -> ChunkKey:
    """vLLM's key of a chunk: the hash of its last block, 32 bytes or fewer, and its group."""
    block = base.get_offload_block_hash(key)
    return (block if len(block) == 32 else hashlib.sha256(block).digest()), base.get_offload_group_idx(key)

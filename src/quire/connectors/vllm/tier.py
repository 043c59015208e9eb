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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from quire.connectors.checked_store import CheckedStore, ChunkKey, Job
from quire.connectors.lookup_log import LookupLog
from quire.connectors.settings import QuireTierSettings
from quire.connectors.vllm import metrics
from quire.connectors.vllm.compat import check_version, chunks_of, engine_config
from quire.connectors.vllm.facts import facts_of
from quire.connectors.vllm.lookups import Lookups
from quire.errors import StoreError
from quire.settings.setting import without_secrets
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

    medium = Medium.STORAGE

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
        logger.info(
            "Quire's tier stores in %s, scope %s: %s",
            without_secrets(settings.store),
            self._store.scope.hex(),
            self._store.facts,
        )
        self._lookups = Lookups(self._exist, settings.deadline_s)
        self._moving: dict[int, _Moving] = {}
        self._num_saving = 0
        self._used: dict[bytes, None] = {}  # since the last touch, in the order of prompts
        self._touch: Job | None = None
        self._counts: Counter[str] = Counter()  # what the store does not count
        self._reported: Counter[str] = Counter()
        self._serves_after_reset = settings.serves_after_reset
        self._is_off = False

    # -- lookups

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Save new chunks alone."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Whether the record is there, or RETRY until the store has said so."""
        found = False if self._is_off else self._lookups.of(req_context.req_id, key)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Ask for the keys of this step."""
        self._lookups.flush()
        if self._used and (self._touch is None or self._touch.poll() is not None) and not self._is_off:
            self._touch = self._store.submit_touch([_key(key) for key in self._used])
            self._used = {}

    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Records of prompts that vLLM found in memory count as used, too (vLLM 0.29 and 0.30)."""
        if len(self._used) < _MOST_TOUCHED:
            self._used.update(dict.fromkeys(keys))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Drop the answers for a request."""
        self.touch(getattr(req_context, "_offload_key_positions", ()), req_context)  # since vLLM 0.31
        since, found = self._lookups.end(req_context.req_id)
        if self._store.log is not None:
            _log_lookups(self._store.log, self._store.scope, req_context.req_id, found, since)

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
            self._counts["refused"] += count
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
        self._lookups.close(0.1)
        hangs = not self._store.close()
        self._moving.clear()
        self._rows = None
        if hangs:
            raise StoreError("the store hangs, with rows of the primary tier in use.")

    # -- metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The counters, for vLLM's front end."""
        return metrics.definitions()

    def get_stats(self) -> Any:
        """What the counters have grown by."""
        counts = Counter(self._store.counts) + self._lookups.counts + self._counts
        counts.update({f"bad {reason}": count for reason, count in dict(self._store.bad).items()})
        grown, self._reported = counts - self._reported, counts
        return metrics.stats(grown)

    # -- internals

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        """On the thread of lookups."""
        return [answer is Answer.HIT for answer in self._store.exists([_key(key) for key in keys])]

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
        good: list[bytes] = []
        lost: list[bytes] = []
        for keys, piece in moving.pieces:
            for key, answer in zip(keys, piece.wait(), strict=True):
                (good if answer in moving.done else lost).append(key)
            self._counts["expired"] += piece.answers.count(Answer.RETRY) if piece.expired else 0
        if job.is_promotion:
            self._lookups.miss(job.req_context.req_id, lost)
        else:
            self._num_saving -= len(job.keys)
        del self._moving[job.job_id]
        return JobResult(job.job_id, len(good) == len(job.keys), good, time.monotonic() - moving.began)


def _log_lookups(log: LookupLog, scope: bytes, request: str, found: Mapping[bytes, bool | None], since: float) -> None:
    """Write what a request looked up, a line for each group."""
    by_group: dict[int, list[tuple[ChunkKey, bool | None]]] = {}
    for key, is_there in found.items():
        by_group.setdefault(get_offload_group_idx(key), []).append((_key(key), is_there))
    for asked in by_group.values():
        first = len(list(takewhile(itemgetter(1), asked)))
        log.looked_up(scope, request, [key for key, _ in asked], first, since)


def _key(key: bytes) -> ChunkKey:
    """vLLM's key of a chunk: the hash of its last block, 32 bytes or fewer, and its group."""
    block = get_offload_block_hash(key)
    return (block if len(block) == 32 else hashlib.sha256(block).digest()), get_offload_group_idx(key)

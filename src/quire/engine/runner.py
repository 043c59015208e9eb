"""ModelRunner: turns a batch into tensors, runs the model on the pools, and draws."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.cache import KVCache, RunningBatch
from quire.engine.messages import TokenLogprobs
from quire.engine.sampler import Drawn, Sampler
from quire.kernels.batch import PagedBatch
from quire.kernels.planner import AttentionPlanner
from quire.kernels.state import StateBatch
from quire.memory.page_table import DevicePageTables
from quire.memory.pool import Pool
from quire.models.hf import LoadedModel
from quire.plan.budget import MemoryPlan
from quire.scheduler.batch import Batch, Work
from quire.scheduler.request import Request
from quire.spec.ids import Ids
from quire.spec.pages import pages_for


@dataclass(frozen=True, slots=True)
class Step:
    """A launched step. `sampled` are the batch's works that draw a token, in the order of `drawn`'s rows. `began` is
    when it was launched, by `time.perf_counter`, and `waits` says that it waits for bytes from below the device."""

    batch: Batch
    fence: int
    sampled: tuple[Work, ...]
    drawn: Drawn | None
    rows: dict[str, int]
    began: float
    waits: bool

    def row_of(self, request: Request) -> int:
        """The row of `drawn` that holds this request's token."""
        return self.rows[request.request_id]

    def wait(self) -> list[int | None]:
        """Wait for the device: the token of each work of the batch, None for those that drew none."""
        tokens = iter(self.drawn.tokens.tolist() if self.drawn is not None else ())
        return [next(tokens) if work.samples else None for work in self.batch.works]

    def logprobs(self) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities by request id, of the requests that asked."""
        if self.drawn is None:
            return {}
        rows = ((work, self.drawn.row_logprobs(row)) for row, work in enumerate(self.sampled))
        return {work.request.request_id: found for work, found in rows if found is not None}


def build_pools(plan: MemoryPlan, device: torch.device) -> tuple[Pool, ...]:
    """The device's memory: a pool for each group. Raises PlanError where it is not to be had."""
    return tuple(Pool(group.layout, plan.frames_of(index), device=device) for index, group in enumerate(plan.groups))


class ModelRunner:
    """Runs on the pools' tensors. `launch` returns at once where the device computes on its own."""

    def __init__(
        self, model: LoadedModel, cache: KVCache, sampler: Sampler, device: torch.device, pools: tuple[Pool, ...]
    ) -> None:
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._device = device
        self.pools = pools
        following = [at for at, group in enumerate(cache.groups) if not group.reach.carried]
        self._planners = [AttentionPlanner() for _ in pools]
        self._place = {group: place for place, group in enumerate(following)}
        rows, width = cache.plan.max_requests, cache.plan.pages_per_row
        self._tables = DevicePageTables(len(following), rows, width, device=device)
        built = sum(pool.num_bytes for pool in self.pools)
        assert built == cache.plan.pool_bytes, f"built {built} bytes, planned {cache.plan.pool_bytes}"

    @torch.inference_mode()
    def launch(self, batch: Batch, previous: Step | None) -> Step:
        """Start a step. `previous` is the step in flight, whose tokens this one's may continue."""
        began = time.perf_counter()
        works = batch.works
        starts = np.array([work.start for work in works], dtype=np.int64)
        counts = np.array([work.count for work in works], dtype=np.int64)
        offsets = np.cumsum(counts)
        positions = np.arange(int(offsets[-1])) + np.repeat(starts - (offsets - counts), counts)
        sampled = tuple(work for work in works if work.samples)
        rows = offsets[[work.samples for work in works]] - 1
        fence = self._cache.open_fence()
        try:
            requests = self._cache.rows.batch([work.kv for work in works])
            self._tables.apply(self._cache.rows.page_table_changes())
            loads = tuple({load for work in works for load in work.kv.loads})
            waits = not all(load.done for load in loads)
            for pool in self.pools:
                pool.arriving = loads
            batches = [self._of_group(requests, starts, counts, group) for group in range(len(self.pools))]
            logits = self._model.forward(
                self._input_ids(batch, offsets, previous),
                torch.from_numpy(positions).to(self._device, non_blocking=True),
                batches,
                self.pools,
                torch.from_numpy(rows).to(self._device, non_blocking=True),
            )
            drawn = self._sampler.draw(logits, [work.request for work in sampled]) if sampled else None
        except BaseException:
            self._cache.close_fence(fence)
            raise
        finally:
            for pool in self.pools:
                pool.arriving = ()
        row_of = {work.request.request_id: row for row, work in enumerate(sampled)}
        return Step(batch, fence, sampled, drawn, row_of, began, waits)

    def _of_group(
        self, requests: RunningBatch, starts: np.ndarray, counts: np.ndarray, group: int
    ) -> PagedBatch | StateBatch:
        """Where one group's frames for this step are."""
        ends = starts + counts
        pieces = self._cache.launch(group, requests, ends)
        if pieces is not None:
            return StateBatch(_starts(pieces.lengths), pieces.sources, pieces.targets)
        return PagedBatch(
            query_starts=_starts(counts),
            context_lens=ends.astype(np.int32),
            frames=self._frames(requests, ends, group),
            slots=self._cache.rows.slots(requests, starts, ends, group),
            page_size=self._cache.page_size,
            planner=self._planners[group],
            ids=requests.rows,
        )

    def _frames(self, requests: RunningBatch, ends: np.ndarray, group: int) -> Ids:
        """The page tables of a batch on the host, where reading is planned. Where that is the device, they are its own;
        a device elsewhere has its own too, for kernels that read pages by row, and is not waited for here."""
        if self._device.type != "cpu":
            return self._cache.rows.page_table(requests, ends, group)
        width = pages_for(int(ends.max(initial=1)), self._cache.page_size)
        frames: Ids = self._tables.rows(self._place[group], torch.from_numpy(requests.rows), width).numpy()
        return frames

    def _input_ids(self, batch: Batch, offsets: np.ndarray, previous: Step | None) -> Tensor:
        """Token ids of the batch, int64 `[tokens]`; those that only the device knows yet are copied there."""
        ids = np.zeros(int(offsets[-1]), dtype=np.int64)
        future: list[tuple[int, int]] = []
        for work, end in zip(batch.works, offsets.tolist(), strict=True):
            known = work.request.tokens[work.start : work.start + work.count]
            ids[end - work.count : end - work.count + len(known)] = known
            if len(known) < work.count:
                assert previous is not None, "a token is pending and no step is in flight"
                future.append((end - 1, previous.row_of(work.request)))
        tensor = torch.from_numpy(ids).to(self._device, non_blocking=True)
        if future:
            assert previous is not None and previous.drawn is not None
            where, row = torch.tensor(future, device=self._device).T
            tensor[where] = previous.drawn.tokens[row]
        return tensor


def _starts(counts: np.ndarray) -> Ids:
    """Where each run of rows begins, and where the last one ends."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts

"""ModelRunner: turns a step into tensors, runs the model on the pools, and draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.cache import KVCache
from quire.cache.running import Lengths, Rows
from quire.engine.device.frame_staging import ComputeStream
from quire.engine.device.graphs import DecodeGraphs
from quire.engine.device.logit_changes import limit
from quire.engine.device.page_tables import DevicePageTables
from quire.engine.device.sampler import Drawn, Readback, Sampler
from quire.engine.device.warm_up import Pads, warm_up
from quire.engine.host_memory import host_memory
from quire.engine.messages import TokenLogprobs
from quire.errors import OutOfPages
from quire.kernels.backend import DEFAULT, AttentionBackend
from quire.kernels.batch import Builds, PagedBatch, derive
from quire.kernels.moves import Pieces
from quire.kernels.state import StateBatch
from quire.loop import ForwardPart, Launched
from quire.memory.backing import Backing, backing_of
from quire.memory.pool import Pool
from quire.models.forward import RunningForward, slots_of
from quire.models.hf import LoadedModel
from quire.offload import offload_of
from quire.plan.budget import MemoryPlan, format_bytes
from quire.plan.devices import MOVE_BYTES
from quire.plan.host import check_cpu_pools
from quire.scheduler.step import Step
from quire.sparse.coordinator import hot_buffers_of
from quire.spec.ids import Ids
from quire.spec.layout import PageLayout
from quire.spec.pages import pages_for
from quire.tiers.transfer import Transfer
from quire.upload import Upload, to_device

_NO_POOLS: Mapping[int, Pool] = {}
_UNTOUCHED = partial(backing_of, touched=False)


@dataclass(slots=True, eq=False)
class LaunchedForward(Launched):
    """A launched step, with its draws on the device. Its clock is `time.perf_counter`."""

    drawn: Drawn | None
    batches: Sequence[PagedBatch | StateBatch]
    readback: Readback

    def wait(self) -> Lengths:
        """No later step is waited for."""
        found = self.readback.wait()
        return np.empty(0, dtype=np.int64) if found is None else found.tokens.numpy()

    def logprobs(self, order: Rows | None = None) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities of drawn tokens by request id, for requests that ask for them, in this order of draws."""
        found: dict[str, list[TokenLogprobs]] = {}
        if self.drawn is None or not self.drawn.reported:
            return found
        drawn = self.readback.wait()
        assert drawn is not None
        reported = drawn.logprobs()
        for row in sorted(reported) if order is None else order.tolist():
            if row in reported:
                request = self.step.requests[int(self.step.drawers[row])]
                found.setdefault(request.request_id, []).append(reported[row])
        return found


def build_pools(
    plan: MemoryPlan,
    device: torch.device,
    built: Mapping[int, Pool] = _NO_POOLS,
    *,
    backs: Callable[[int, torch.device], Backing] = _UNTOUCHED,
) -> tuple[Pool, ...]:
    """Allocate the device's memory: a pool for each group, but for groups whose pools are `built`. `backs` has the
    memory of so many bytes, by default not touched yet. Raises PlanError if there is too little, and HostMemoryError if
    the host lacks the memory for pools on a CPU, which would show only later."""
    if device.type == "cpu":
        check_cpu_pools(plan.pool_bytes + plan.feature_bytes, host_memory())
    if (arena := plan.arena) is None:

        def made(index: int, layout: PageLayout) -> Pool:
            count, size = plan.frames_of(index) + 1, layout.bytes_per_frame
            own = backs(count * size, device)
            return Pool(layout, rows=own.tensor.view(count, size), backing=own)

        pools = tuple(built.get(index) or made(index, group.layout) for index, group in enumerate(plan.groups))
        assert sum(pool.num_bytes for pool in pools) == plan.pool_bytes, "pools of other sizes than planned"
        return pools
    shared = backs(arena.budget, device)
    rows = (
        shared.tensor.as_strided((plan.frames_of(index) + 1, stride), (stride, 1), arena.origin(index))
        for index, stride in enumerate(arena.strides)
    )
    return tuple(Pool(group.layout, rows=own, backing=shared) for group, own in zip(plan.groups, rows, strict=True))


class ModelRunner:
    """Runs on the pools' tensors. `launch` returns at once if the device computes asynchronously."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        sampler: Sampler,
        device: torch.device,
        pools: tuple[Pool, ...],
        backend: AttentionBackend = DEFAULT,
        compute: ComputeStream | None = None,
        largest_graph: int = 0,
        warm_ups: Sequence[Pads] = (),
    ) -> None:
        """Computes `warm_ups`, and captures CUDA graphs of up to `largest_graph` requests; 0 for none."""
        self.parts: tuple[ForwardPart, ...] = ()
        """What follows each step of requests, in this order."""
        self.model = model
        self._cache = cache
        self._sampler = sampler
        self._device = device
        self._compute = compute
        self.pools = pools
        self.backend = backend
        self._derives = device.type != "cpu" and hot_buffers_of(pools) is None
        self._loading = offload_of(cache).ahead.loads
        self._following = [at for at, group in enumerate(cache.groups) if not group.reach.in_place]
        self._asked: list[Builds | None] = [None] * len(pools)  # what layers derived from the batches of the last step
        self._slots: dict[int, Pieces] = {}  # key: group, once drafts were moved
        self._frames: dict[int, list[tuple[Pieces, int]]] = {}  # once frames were, with how many move at once
        self._upload = Upload(device, 1 << 16)
        self._inference = torch.inference_mode()
        rows, width = cache.plan.max_requests, cache.plan.pages_per_row
        self.tables = DevicePageTables(len(self._following), rows, width, device=device, moves=backend.moves)
        cache.parts.moved.append(self.move_frames)
        if warm_ups:
            warm_up(self, warm_ups)
        self.graphs: DecodeGraphs | None = None
        if largest_graph:
            self.graphs = DecodeGraphs(self, largest_graph)
            self.graphs.capture()

    def launch(self, step: Step, previous: LaunchedForward | None) -> LaunchedForward:
        """Start a step. `previous` is the step in flight, whose tokens this one may continue."""
        began = time.perf_counter()
        fence = self._cache.open_fence()
        self.mark()
        waits = False
        try:
            for load in self._loads(step) if self._loading else ():
                waits |= not load.done
                load.wait()
            with self._inference:
                drawn, batches = self._forward(step, previous)
                readback = Readback(drawn, self._device)
        except BaseException:
            self._cache.close_fence(fence)
            raise
        return LaunchedForward(step, fence, began, waits, drawn, batches, readback)

    def _forward(
        self, step: Step, previous: LaunchedForward | None
    ) -> tuple[Drawn | None, list[PagedBatch | StateBatch]]:
        """Send the arrays of a step and launch its forward pass. Its draws."""
        graph = self.graphs.find(step) if self.graphs is not None else None
        for part in self.parts:
            part.preparing(step)
        upload, device = self._upload, self._device
        with upload:
            changes = self.tables.sent(self._cache.rows.page_table_changes())
            future = self._future(step, previous) if len(step.future) else None
            batches = self._batches(step)
            placed = self.graphs.placed(graph, step, batches) if self.graphs is not None else None
            if placed is None:
                ids, positions = to_device(step.tokens, device), to_device(step.positions, device)
                rows = to_device(step.draws, device)
                if self._derives:
                    self._derive(batches)
            places = step.places if len(step.draws) else None
            prepared = self._sampler.prepare(places, device, step.proposals) if places is not None else None
        self.tables.apply(changes)
        if placed is not None:
            ids = placed.take()
        if future is not None:
            ids[future[0]] = future[1][future[2]]
        running = RunningForward(self.pools, batches)
        for part in self.parts:
            part.before_forward(step, running)
        if placed is not None:
            logits = placed.replay()
        else:
            logits = self.model.run(running, ids, positions, rows)
            if self._derives:
                self._asked = [batch.builds if isinstance(batch, PagedBatch) else None for batch in batches]
        drawn = None
        if places is not None:
            if limits := self._limits(step, previous):
                assert prepared is not None
                prepared.adjusted = [*prepared.adjusted, *limits]
            drawn = self._sampler.draw(logits, places, step.proposals, prepared)
        for part in self.parts:
            part.after_forward(step, running, drawn)
        return drawn, batches

    def _limits(self, step: Step, previous: LaunchedForward | None) -> list[Callable[[Tensor], None]]:
        """What leaves only those tokens in the logits that parts allow."""
        found = [allowed for part in self.parts if (allowed := part.allowed(step, previous)) is not None]
        return [limit(rows, bits, self._device) for rows, bits in found]

    def _derive(self, batches: Sequence[PagedBatch | StateBatch]) -> None:
        """Derive what layers asked for in the last step, so that it is sent with the rest. Not on a CPU, where nothing
        is sent, and not with hot buffers, where some of it follows what layers compute."""
        for batch in batches:
            if isinstance(batch, PagedBatch):
                batch.slots_on(self._device)
        derive(batches, self._asked, self._device)

    def move(self, launched: LaunchedForward, sources: Rows, targets: Rows) -> None:
        """What a step has written at the flat places `sources` belongs at `targets` of it: drafts that were right."""
        for group, (pool, batch) in enumerate(zip(self.pools, launched.batches, strict=True)):
            assert isinstance(batch, PagedBatch), "states are of chains"
            if group not in self._slots:
                self._slots[group] = slots_of(pool)
            places = (to_device(batch.slots[rows].astype(np.int64), pool.device) for rows in (sources, targets))
            self.backend.moves.move(self._slots[group], *places)
        for part in self.parts:
            part.moved(launched.step, launched.batches, sources, targets)
        self.mark()

    def move_frames(self, group: int, sources: Ids, targets: Ids) -> None:
        """Copy frames of a group behind all launched steps, through at most `MOVE_BYTES`. No frame is among both.
        Raises OutOfPages if the device lacks these: then nothing counts as moved."""
        if group not in self._frames:
            rows = self.pools[group].rows
            parts = [rows[None, :, None, at : at + MOVE_BYTES] for at in range(0, rows.shape[1], MOVE_BYTES)]
            self._frames[group] = [
                (Pieces.of([(0, each)], each.shape[3]), MOVE_BYTES // each.shape[3]) for each in parts
            ]
        try:
            for pieces, some in self._frames[group]:
                for start in range(0, len(sources), some):
                    both = (each[start : start + some].astype(np.int64) for each in (sources, targets))
                    self.backend.moves.move(pieces, *(to_device(each, self._device) for each in both))
        except torch.OutOfMemoryError:
            held_by = f"the device has no {format_bytes(MOVE_BYTES)} to copy frames through"
            name = self._cache.groups[group].name
            raise OutOfPages(group=name, wanted=len(sources), free=0, held_by=held_by) from None
        finally:
            self.mark()

    def mark(self) -> None:
        """Copies between tiers that begin from now on follow what was launched until now: at a launch all before it,
        at another time also the step in flight."""
        if self._compute is not None:
            self._compute.mark()

    def _loads(self, step: Step) -> tuple[Transfer, ...]:
        """Loads to the device that are in flight for the requests of a step."""
        return tuple({load for kv in [kv for kv in step.batch.kvs if kv.loads] for load in kv.loads})

    def _batches(self, step: Step) -> list[PagedBatch | StateBatch]:
        """Where each group's frames for this step are."""
        requests, ends, cache = step.batch, step.ends, self._cache
        slots = cache.rows.slots_in(self._following, requests, step.starts, None if step.is_decode else ends)
        width = pages_for(int(np.maximum.reduce(ends, initial=1)), cache.page_size)
        query_starts, context_lens = step.offsets.astype(np.int32), ends.astype(np.int32)
        found: list[PagedBatch | StateBatch] = []
        for group in range(len(self.pools)):
            pieces = cache.launch(group, requests, ends, step.draw_counts)
            if pieces is not None:
                single = step.is_decode and len(pieces.lengths) == len(step)  # one row each
                starts = query_starts if single else _starts(pieces.lengths)
                found.append(StateBatch(starts, pieces.sources, pieces.targets, moves=self.backend.moves))
                continue
            place = self._following.index(group)
            found.append(
                PagedBatch(
                    query_starts=query_starts,
                    context_lens=context_lens,
                    frames=self.tables.frames(place, requests.rows, width),
                    slots=slots[place],
                    page_size=cache.page_size,
                    ids=requests.rows,
                    parents=step.parents,
                    backend=self.backend,
                    table=self.tables.step(place, requests.rows),
                )
            )
        return found

    def pads(self, size: int) -> list[PagedBatch | StateBatch]:
        """A batch of `size` pads of each group."""
        nothing = Pads([], [])
        return [batch.padded(size) for batch in self.padding(nothing)]

    def padding(self, pads: Pads) -> list[PagedBatch | StateBatch]:
        """The batch of each group whose sequences are all in frame 0."""
        cache, count = self._cache, len(pads.news)
        contexts = np.array(pads.contexts, dtype=np.int32)
        starts = _starts(np.array(pads.news, dtype=np.int32))
        frames = np.zeros((count, pages_for(int(contexts.max(initial=1)), cache.page_size)), dtype=np.int32)
        rows = np.full(count, self.tables.pad_row, dtype=np.int64)
        zeros = np.zeros(count, dtype=np.int32)
        found: list[PagedBatch | StateBatch] = []
        for group in range(len(self.pools)):
            if group not in self._following:
                found.append(StateBatch(starts, zeros, zeros, pads=count, moves=self.backend.moves))
                continue
            found.append(
                PagedBatch(
                    query_starts=starts,
                    context_lens=contexts,
                    frames=frames,
                    slots=np.zeros(int(starts[-1]), dtype=np.int32),
                    page_size=cache.page_size,
                    parents=pads.parents if pads.branches else None,
                    backend=self.backend,
                    table=self.tables.step(self._following.index(group), rows),
                )
            )
        return found

    def _future(self, step: Step, previous: LaunchedForward | None) -> tuple[Tensor, Tensor, Tensor]:
        """Which rows of the step continue tokens that only the device has yet: the rows int64, the tokens of the step
        before, and which of these they are, int64."""
        assert previous is not None and previous.drawn is not None, "a token is pending and no step is in flight"
        rows, draws = (to_device(array, self._device) for array in (step.future, step.continued(previous.step)))
        return rows, previous.drawn.tokens, draws


def _starts(counts: np.ndarray) -> Ids:
    """Where each run of rows begins, and where the last one ends."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts

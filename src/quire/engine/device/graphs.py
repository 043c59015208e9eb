"""DecodeGraphs: CUDA graphs of decode steps, one for each of some batch sizes; a smaller batch is padded.

    host      arrays of the padded batch | take: one copy to their addresses | replay
    graph     embeddings, layers on pools and page tables -> logits           all that it reads is at fixed addresses
    eager     tokens of the step before, sampling, readback                   before and behind the graph

A pad is a sequence of one token in frame 0, whose page table is the row of zeros. It writes there, and reads what it
has written: frame 0 is no request's, and rows of a batch do not read each other.

Has not run on a GPU: tests record the operators of a pass on a device in Python, and compute them again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.batch import Builds, PagedBatch, derive
from quire.kernels.state import StateBatch
from quire.models.forward import RunningForward
from quire.plan.devices import graph_bytes
from quire.scheduler.step import Step
from quire.upload import FixedUpload, OtherShapes, Upload, refusing_arrays, to_device

if TYPE_CHECKING:
    from quire.engine.device.runner import ModelRunner

logger = logging.getLogger(__name__)

_WARM_UPS = 2
"""Eager passes before a capture: kernels are compiled in the first, and libraries allocate their memory."""
_MISFITS = 8
"""Steps whose arrays have other shapes, after which a graph that was never replayed is dropped."""
_LOG_S = 2.0

Batches = Sequence[PagedBatch | StateBatch]
_Longs = npt.NDArray[np.int64]
_NONE: _Longs = np.zeros(0, dtype=np.int64)


def graph_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes up to `most`, which is one: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64 and so on. Above 8, less than a third
    of a batch is padding."""
    found, power = {1, 2, 4, most}, 8
    while power < most:
        found |= {power, power + power // 2}
        power *= 2
    return tuple(sorted(size for size in found if size <= most))


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGraph:
    """A captured decode step of `size` rows: the arrays that it reads, what layers derive from its batches, and the
    logits float32 `[size, vocabulary]` that it writes, which are valid until any graph is replayed."""

    size: int
    graph: torch.cuda.CUDAGraph
    inputs: FixedUpload
    asked: Sequence[Builds | None]
    logits: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PlacedStep:
    """A step of `rows` rows whose arrays are on their way to `graph`."""

    graph: DecodeGraph
    sent: Tensor
    rows: int

    def take(self) -> Tensor:
        """Copy the arrays to where the graph reads them. Returns the tokens among them, int64 `[size]`, which may be
        changed before `replay`."""
        self.graph.inputs.take(self.sent)
        return self.graph.inputs.tensors[0]

    def replay(self) -> Tensor:
        """The logits of its rows."""
        self.graph.graph.replay()
        return self.graph.logits[: self.rows]


class DecodeGraphs:
    """The graphs of `steps`, for batches of at most `most` rows, in at most `graph_bytes`.

    Graphs are captured anew when the weights were replaced; pools and page tables never are. Steps of a size whose
    capture fails are eager. Owns the memory of the graphs.
    """

    def __init__(self, steps: ModelRunner, most: int) -> None:
        self._steps = steps
        self._sizes, self._most_bytes = graph_sizes(most), graph_bytes(most, steps.model.spec.vocab_size)
        self._device = steps.model.device
        # One for all: libraries keep memory for each stream that they have seen.
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._graphs: dict[int, DecodeGraph] = {}
        self._logits: Tensor | None = None  # the largest graph's; others copy theirs there
        self._captured_from = -1
        self._num_bytes = self._replays = self._pads = self._captures = 0
        self._eager: Counter[str] = Counter()
        self._refused: dict[int, str] = {}
        self._misfits: Counter[int] = Counter()
        self._fits: set[int] = set()  # sizes that were replayed

    def find(self, step: Step) -> DecodeGraph | None:
        """The graph of a step, captured if need be; None if the step is eager, which is counted by reason."""
        size = next((size for size in self._sizes if size >= len(step)), 0)
        reason = "" if size else "more requests than the largest graph"
        if not step.is_decode:
            reason = "prompts"
        elif self._captured_from != self._steps.model.num_changes:
            self.capture()
        if reason or size not in self._graphs:
            self._eager[reason or "no graph of this size"] += 1
            return None
        return self._graphs[size]

    def placed(self, graph: DecodeGraph | None, step: Step, batches: Batches) -> PlacedStep | None:
        """A step whose arrays are sent to its graph (`to_device`); None if it is eager: it has none, or its arrays have
        other shapes than those at the capture, which is counted."""
        if graph is None:
            return None
        inputs, size = graph.inputs, graph.size
        try:
            with inputs.collecting():
                _place(step.tokens, step.positions, size, self._device)
                derive([batch.padded(size) for batch in batches], graph.asked, self._device)
        except OtherShapes as error:
            logger.debug("a decode step of %d requests is eager: %s", len(step), error)
            self._eager["arrays of other shapes"] += 1
            self._misfits[size] += 1
            if self._misfits[size] == _MISFITS and size not in self._fits:
                del self._graphs[size]
                self._refuse(size, f"arrays of its steps have other shapes ({error})")
            return None
        self._fits.add(size)
        self._replays += 1
        self._pads += size - len(step)
        return PlacedStep(graph, to_device(inputs.packed, self._device), len(step))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first: smaller ones use its memory again."""
        began = said = time.perf_counter()
        self._graphs.clear()
        self._logits = None
        self._refused.clear()
        self._misfits.clear()
        self._captured_from, self._num_bytes = self._steps.model.num_changes, 0
        pool = torch.cuda.graph_pool_handle()
        for number, size in enumerate(reversed(self._sizes)):
            try:
                made, more = self._capture(size, pool)
            except (OtherShapes, RuntimeError) as error:  # the model reads the device, say, or finds no memory
                self._refuse(size, f"{type(error).__name__}: {error}".splitlines()[0])
                if isinstance(error, torch.OutOfMemoryError):
                    continue
                break  # others would fail alike
            taken = self._num_bytes + more
            if taken > self._most_bytes:
                self._refuse(size, f"it takes {taken:,} bytes, and {self._most_bytes:,} are planned")
                del made
                pool = torch.cuda.graph_pool_handle()
                torch.cuda.empty_cache()
                continue
            self._graphs[size], self._num_bytes = made, taken
            if self._logits is None:
                self._logits = made.logits
            if time.perf_counter() - said > _LOG_S:
                said = time.perf_counter()
                logger.info("captured CUDA graphs: %d of %d", number + 1, len(self._sizes))
        self._captures += 1
        logger.info(
            "captured %d CUDA graphs of up to %d requests in %.1f s, with %.1f MiB",
            *(len(self._graphs), max(self._graphs, default=0), time.perf_counter() - began, self._num_bytes / 2**20),
        )

    def counters(self) -> dict[str, Any]:
        """Sizes and bytes of the graphs, replays and pads in them, eager steps by reason, how often all were captured,
        and by size why there is no graph."""
        return {
            "sizes": sorted(self._graphs),
            "bytes": self._num_bytes,
            "planned_bytes": self._most_bytes,
            "replays": self._replays,
            "pads": self._pads,
            "eager": dict(self._eager),
            "captures": self._captures,
            "refused": {str(size): why for size, why in self._refused.items()},
        }

    def _refuse(self, size: int, why: str) -> None:
        self._refused[size] = why
        logger.warning("no CUDA graph of %d requests: %s", size, why)

    def _reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def _capture(self, size: int, pool: Any) -> tuple[DecodeGraph, int]:
        """A graph of pads alone: what it computes does not matter, but where. And the bytes that it takes."""
        device, current, steps = self._device, torch.cuda.current_stream(self._device), self._steps
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            asked = self._warm_up(size)

            def fill() -> tuple[Batches, tuple[Tensor, Tensor, Tensor]]:
                batches, given = steps.pads(size), _place(_NONE, _NONE, size, device)
                derive(batches, asked, device)
                return batches, given

            inputs = FixedUpload(device, fill)
            with inputs.collecting(), _OnlyUploads():  # type: ignore[no-untyped-call]
                batches, given = fill()
            inputs.take(to_device(inputs.packed, device))
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # memory of eager passes, also of other graphs, is no part of what is measured
        before = self._reserved()
        # Threads of tiers use the device meanwhile, which is no part of this. After a capture that failed, torch leaves
        # its stream the current one.
        with (
            torch.cuda.stream(current),
            refusing_arrays(),
            torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            logits = steps.model.run(RunningForward(steps.pools, batches), *given)
            if self._logits is not None:  # a graph whose result is kept would leave its memory to no other one
                logits = self._logits[:size].copy_(logits)
        return DecodeGraph(size, graph, inputs, asked, logits), self._reserved() - before

    def _warm_up(self, size: int) -> list[Builds | None]:
        """Eager passes of pads; what layers derive from their batches."""
        steps = self._steps
        before = steps.backend.fallbacks.copy()
        for number in range(_WARM_UPS):
            batches, upload = steps.pads(size), Upload(self._device, 1 << 16)
            with upload:
                given = _place(_NONE, _NONE, size, self._device)
            with _refusing_waits() if number else nullcontext():
                steps.model.run(RunningForward(steps.pools, batches), *given)
        if fallbacks := steps.backend.fallbacks - before:
            raise OtherShapes(f"torch's operators compute attention ({', '.join(fallbacks)})")
        return [batch.builds if isinstance(batch, PagedBatch) else None for batch in batches]


class _OnlyUploads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What layers derive from a batch of a graph is what the host sends, at addresses that stay. What operators compute
    of it would be computed elsewhere for the next step, and a replay would read memory that was freed: OtherShapes."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        is_view = all(returned.alias_info is not None for returned in function._schema.returns)
        if isinstance(found, Tensor) and found.is_cuda and (function._schema.is_mutable or not is_view):
            raise OtherShapes(f"layers compute what they derive from a batch on the device ({function})")
        return found


@contextmanager
def _refusing_waits() -> Iterator[None]:
    """What waits for the device inside the block raises RuntimeError. In a capture it would too, but that leaves
    torch's allocator in the state of a capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _place(tokens: _Longs, positions: _Longs, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and the rows that draw, of a padded batch, int64 `[size]` each."""
    padded = np.zeros((2, size), dtype=np.int64)
    padded[0, : len(tokens)], padded[1, : len(positions)] = tokens, positions
    return to_device(padded[0], device), to_device(padded[1], device), to_device(np.arange(size), device)

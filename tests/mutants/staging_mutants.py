"""Mistakes of copies between tiers that run beside the steps of a device: each is an order that is not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quire.canary.canary import Canary
from quire.engine.device.frame_staging import ComputeStream, FrameStaging, StagedCopy, StagedFrames
from quire.engine.device.runner import ModelRunner
from quire.memory import pinned
from quire.memory.pinned import PinnedSlices
from quire.tiers.executor import TransferExecutor
from quire.tiers.transfer import Transfer
from tests.mutants.mutants import Patch, mutant


@mutant("staging", "a step reads pages that are still being loaded")
def steps_do_not_follow_loads(patch: Patch) -> None:
    patch.setattr(StagedCopy, "order", lambda self, layer: None)


@mutant("staging", "a step reads later layers of pages that are still being loaded")
def steps_follow_the_first_layers_alone(patch: Patch) -> None:
    real = StagedCopy.order

    def order(self: StagedCopy, layer: int) -> None:
        real(self, layer)
        self._followed = len(self._events)

    patch.setattr(StagedCopy, "order", order)


@mutant("staging", "a step begins only when the last layer of its pages has come")
def steps_follow_all_layers_at_once(patch: Patch) -> None:
    patch.setattr(StagedCopy, "order", lambda self, layer: self._compute.stream.wait_event(self._events[-1]))


@mutant("staging", "the host takes a load for complete when its first layers have come")
def the_host_waits_for_the_first_layers(patch: Patch) -> None:
    patch.setattr(StagedCopy, "wait", lambda self: self._events[0].synchronize())


@mutant("pinned", "CUDA refuses copies of neighbours that were registered by two calls")
def copies_cross_slices(patch: Patch) -> None:
    patch.setattr(StagedFrames, "_within_slices", lambda self, runs: runs)


@mutant("pinned", "the memory of a closed engine stays locked")
def slices_stay_registered(patch: Patch) -> None:
    patch.setattr(PinnedSlices, "close", lambda self: None)


@mutant("pinned", "neighbouring slices share a page of the system, which CUDA refuses to register twice")
def slices_share_a_page(patch: Patch) -> None:
    patch.setattr(pinned, "_SYSTEM_PAGE", 64)


@mutant("staging", "a load counts as done while it is queued, and later steps read its pages too early")
def loads_are_done_when_they_are_queued(patch: Patch) -> None:
    patch.setattr(StagedCopy, "wait", lambda self: None)


@mutant("staging", "a save takes what a page had before its drafts were moved")
def copies_do_not_follow_steps(patch: Patch) -> None:
    patch.setattr(ComputeStream, "mark", lambda self: None)


@mutant("staging", "a page is saved before the drafts that were accepted have been moved into it")
def moved_drafts_are_not_marked(patch: Patch) -> None:
    real = ModelRunner.move

    def move(self: ModelRunner, *given: object) -> None:
        with Patch.context() as inside:
            inside.setattr(ModelRunner, "mark", lambda self: None)
            real(self, *given)  # type: ignore[arg-type]

    patch.setattr(ModelRunner, "move", move)


@mutant("staging", "tiers wait for the default stream, on which nothing runs when steps are captured on another one")
def the_default_stream_is_taken_for_that_of_steps(patch: Patch) -> None:
    real = ComputeStream.__init__

    def init(self: ComputeStream, device: torch.device) -> None:
        real(self, device)
        self.stream = torch.cuda.default_stream(device)

    patch.setattr(ComputeStream, "__init__", init)


@mutant("staging", "a record is sealed, and stored, before its bytes have arrived")
def saves_are_complete_when_they_are_queued(patch: Patch) -> None:
    @contextmanager
    def copying(self: FrameStaging, copied: torch.cuda.Event) -> Iterator[None]:
        if self.compute.marked is not None:
            self._stream.wait_event(self.compute.marked)
        copied.record(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    patch.setattr(FrameStaging, "copying", copying)


@mutant("staging", "records of a load that failed half way are reused while a copy reads them")
def a_failed_copy_is_not_waited_for(patch: Patch) -> None:
    @contextmanager
    def copying(self: FrameStaging, copied: torch.cuda.Event) -> Iterator[None]:
        if self.compute.marked is not None:
            self._stream.wait_event(self.compute.marked)
        with torch.cuda.stream(self._stream):
            yield
        copied.record(self._stream)

    patch.setattr(FrameStaging, "copying", copying)


@mutant("staging", "the host waits for the bytes of each layer, and the device for the host")
def steps_begin_before_loads_are_queued(patch: Patch) -> None:
    real = TransferExecutor._queue

    def queue(self: TransferExecutor, transfer: Transfer, ends: object, is_good: bool) -> Iterator[None]:
        transfer.are_good = is_good
        yield
        yield from real(self, transfer, ends, is_good)  # type: ignore[arg-type]

    patch.setattr(TransferExecutor, "_queue", queue)


@mutant("staging", "a load overwrites cached frames while the canary reads them")
def loads_do_not_follow_the_canary(patch: Patch) -> None:
    real = Canary.__init__

    def init(self: Canary, *args: Any, follow: Callable[[], None], **kwargs: Any) -> None:
        real(self, *args, **kwargs)

    patch.setattr(Canary, "__init__", init)

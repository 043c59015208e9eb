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
from quire.memory.frame_copies import FrameCopies
from quire.memory.pinned import PinnedSlices
from quire.tiers.transfer import Transfer
from tests.mutants.mutants import Patch, mutant


@mutant("staging", "a step reads pages that are still being loaded")
def steps_do_not_follow_loads(patch: Patch) -> None:
    patch.setattr(StagedCopy, "order", lambda self: None)


@mutant("staging", "a step waits for loads that it does not read")
def steps_follow_all_loads(patch: Patch) -> None:
    real, queued = StagedCopy.__init__, []

    def init(self: StagedCopy, copied: torch.cuda.Event, compute: ComputeStream) -> None:
        real(self, copied, compute)
        queued.append(copied)

    def order(self: StagedCopy) -> None:
        for copied in queued:
            self._compute.stream.wait_event(copied)

    patch.setattr(StagedCopy, "__init__", init)
    patch.setattr(StagedCopy, "order", order)


@mutant("staging", "a step reads pages that were loaded in several copies when the first of them has come")
def steps_follow_the_first_copy_alone(patch: Patch) -> None:
    real = Transfer.arrived
    patch.setattr(Transfer, "arrived", lambda self, queued: real(self, queued[:1]))


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


@mutant("staging", "the host waits for bytes that are not queued yet, and the device for the host")
def steps_begin_before_loads_are_queued(patch: Patch) -> None:
    real = FrameCopies.__init__

    def init(self: FrameCopies, *given: Any, queues: bool = False) -> None:
        real(self, *given)

    patch.setattr(FrameCopies, "__init__", init)


@mutant("staging", "a load overwrites cached frames while the canary reads them")
def loads_do_not_follow_the_canary(patch: Patch) -> None:
    real = Canary.__init__

    def init(self: Canary, *args: Any, follow: Callable[[], None], **kwargs: Any) -> None:
        real(self, *args, **kwargs)

    patch.setattr(Canary, "__init__", init)

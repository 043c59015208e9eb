"""Mistakes of CUDA graphs of decode steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire import upload
from quire.engine.device import graphs
from quire.engine.device.graphs import DecodeGraphs, PlacedStep
from quire.kernels.batch import PagedBatch
from quire.kernels.triton import tasks
from quire.upload import FixedUpload
from tests.mutants.mutants import Patch, mutant


@mutant("graphs", "a graph reads the arrays of its capture in every step")
def inputs_are_those_of_the_capture(patch: Patch) -> None:
    patch.setattr(FixedUpload, "take", lambda self, sent: None)


@mutant("graphs", "a replayed step begins with the tokens of a pad, not with those that the step before has drawn")
def tokens_are_taken_from_a_copy(patch: Patch) -> None:
    real = PlacedStep.take
    patch.setattr(PlacedStep, "take", lambda self: real(self).clone())


@mutant("graphs", "pads write to a frame that a request has")
def pads_write_to_a_request(patch: Patch) -> None:
    real = PagedBatch.padded

    def padded(self: PagedBatch, size: int) -> PagedBatch:
        found = real(self, size)
        found.slots[self.num_rows :] = self.page_size
        return found

    patch.setattr(PagedBatch, "padded", padded)


@mutant("plans of fixed sizes", "a batch with more tasks of attention than that of the capture lacks the last ones")
def plans_have_the_sizes_of_a_step(patch: Patch) -> None:
    patch.setattr(tasks._Space, "of", lambda num_rows, blocks: None)


@mutant("graphs", "a replayed step gives the draws of the batch's first request to all")
def one_row_is_replayed(patch: Patch) -> None:
    def replay(self: PlacedStep) -> Tensor:
        self.graph.graph.replay()
        return self.graph.logits[:1].expand(self.rows, -1).clone()

    patch.setattr(PlacedStep, "replay", replay)


@mutant("graphs", "a replay runs beside the steps, and reads keys that the step before still writes")
def replays_run_on_another_stream(patch: Patch) -> None:
    real = PlacedStep.replay

    def replay(self: PlacedStep) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return real(self)

    patch.setattr(PlacedStep, "replay", replay)


@mutant("graphs", "each replayed step sends its arrays in a copy of its own")
def inputs_are_sent_alone(patch: Patch) -> None:
    def sent(array: Any, device: torch.device) -> Tensor:
        if array.dtype != np.uint8:
            return upload.to_device(array, device)
        other = upload.Upload(device, array.nbytes)
        found = other.place(array)
        other.send()
        return found

    patch.setattr(graphs, "to_device", sent)


@mutant("graphs of other weights", "graphs compute with weights that were replaced")
def weights_are_those_of_the_capture(patch: Patch) -> None:
    real = DecodeGraphs.capture

    def capture(self: DecodeGraphs) -> None:
        if not self._graphs:
            real(self)

    patch.setattr(DecodeGraphs, "capture", capture)


@mutant("plans of fixed sizes", "a row reads some keys twice, or not at all, where runs that are shared find no space")
def tasks_without_space_are_cut_off(patch: Patch) -> None:
    patch.setattr(tasks._Space, "holds", lambda self, found: True)
    real = tasks._filled
    patch.setattr(tasks, "_filled", lambda array, length: real(array[:length], length))


@mutant("plans of fixed sizes", "a row with one part is taken from memory that no part was written to")
def whole_rows_have_no_part(patch: Patch) -> None:
    real = tasks._Tasks.places
    patch.setattr(tasks._Tasks, "places", lambda self, num_rows, *, whole=True: real(self, num_rows))

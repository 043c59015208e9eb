"""Mistakes of steps on a device that is not the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire import upload
from quire.cache.running import Lengths
from quire.engine.device import filters, sampler
from quire.engine.device.filters import Filters
from quire.engine.device.runner import ModelRunner
from quire.engine.device.sampler import Readback, _Draws
from quire.engine.device.token_counts import TokenCounts
from quire.spec.ids import Ids
from quire.upload import Upload
from tests.mutants.mutants import Patch, mutant


@mutant("uploads", "each copy of a step's arrays waits for the device")
def arrays_are_sent_from_pageable_memory(patch: Patch) -> None:
    patch.setattr(Upload, "place", lambda self, array: torch.from_numpy(array.copy()).to(self.device))


@mutant("uploads", "a step reads what was in memory before its arrays")
def placed_arrays_are_not_sent(patch: Patch) -> None:
    def send(self: Upload) -> None:
        self._used, self._pinned = 0, None

    patch.setattr(Upload, "send", send)


@mutant("uploads", "arrays that follow one of an odd size are read by a kernel at an address it cannot load from")
def arrays_are_not_aligned(patch: Patch) -> None:
    patch.setattr(upload, "_ALIGNED", 8)


@mutant("readbacks", "a client gets the tokens of a step before the device has computed them")
def tokens_are_read_before_they_arrive(patch: Patch) -> None:
    patch.setattr(Readback, "wait", lambda self: self._drawn)


@mutant("readbacks", "the device idles while the host schedules, because each step is told a step late")
def a_step_waits_for_the_next_one(patch: Patch) -> None:
    def wait(self: Readback) -> Any:
        torch.cuda.synchronize()
        return self._drawn

    patch.setattr(Readback, "wait", wait)


@mutant("device sampling", "a launch waits for its own draws")
def tokens_are_copied_at_launch(patch: Patch) -> None:
    patch.setattr(sampler, "to_host", lambda tensor: tensor.cpu())


@mutant("device sampling", "each step with top-p waits for the device to say how many candidates there are")
def filters_branch_on_the_device(patch: Patch) -> None:
    real = Filters._look_at_all

    def look_at_all(self: Filters, *given: Any) -> None:
        if not bool(given[3].all()):
            real(self, *given)

    patch.setattr(Filters, "_look_at_all", look_at_all)


@mutant("device sampling", "a flat distribution is cut to its thousand likeliest tokens")
def no_row_is_looked_at_as_a_whole(patch: Patch) -> None:
    patch.setattr(Filters, "_look_at_all", lambda *given: None)


@mutant("filters by counting", "top-p on a GPU keeps one token too few where a sum meets the share")
def a_share_is_met_before_it_is(patch: Patch) -> None:
    real = filters._weighed
    patch.setattr(filters, "_weighed", lambda keys, weights, most: real(keys, weights, most - 1))


@mutant("filters by counting", "on a GPU top-p is a share of all tokens, and not of those that top-k has kept")
def top_p_is_of_all(patch: Patch) -> None:
    real = filters.least_of_all

    def least(scores: Tensor, probabilities: Tensor, top_k: Tensor, top_p: Tensor, *, limits: bool) -> Tensor:
        whole = torch.full_like(top_k, scores.shape[1])
        found = real(scores, probabilities, whole, top_p, limits=False)
        return torch.maximum(found, real(scores, probabilities, top_k, torch.ones_like(top_p), limits=limits))

    patch.setattr(filters, "least_of_all", least)


@mutant("device sampling", "requests draw the same noise in each step on a device")
def noise_is_that_of_the_first_token(patch: Patch) -> None:
    real = _Draws.noise

    def noise(self: _Draws, outputs: Lengths, proposal: Any, device: torch.device) -> Any:
        return real(self, outputs if device.type == "cpu" else outputs * 0, proposal, device)

    patch.setattr(_Draws, "noise", noise)


@mutant("copies of steps", "each array that layers read is a copy of its own")
def arrays_of_layers_are_not_sent_with_the_step(patch: Patch) -> None:
    patch.setattr(ModelRunner, "_derive", lambda self, batches: None)


@mutant("penalties", "penalties count drafts that were wrong for the rest of a request")
def drafts_are_counted_for_good(patch: Patch) -> None:
    def ahead(self: TokenCounts, tokens: Ids) -> TokenCounts:
        self.advance(tokens)
        return self

    patch.setattr(TokenCounts, "ahead", ahead)


@mutant("penalties", "a token that comes back is counted as a new one")
def a_token_is_counted_once_for_each_time(patch: Patch) -> None:
    def enter(self: TokenCounts, token: int) -> None:
        at = int(self.ids.searchsorted(token))
        self.ids, self.counts = np.insert(self.ids, at, token), np.insert(self.counts, at, 1)

    patch.setattr(TokenCounts, "_enter", enter)

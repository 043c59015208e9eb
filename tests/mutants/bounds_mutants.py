"""Mistakes in bounds of pages and in the selection by them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels import page_bounds
from quire.kernels.batch import PagedBatch
from quire.kernels.page_bounds import PageBounds
from tests.mutants.mutants import Patch, mutant


@mutant("bounds", "a frame that is used again has the bounds of another request's keys, and its page is read for ever")
def bounds_outlive_their_page(patch: Patch) -> None:
    real = page_bounds._written

    def written(batch: PagedBatch, device: torch.device) -> page_bounds._WrittenPages:
        found = real(batch, device)
        return replace(found, begun=torch.ones_like(found.begun))

    patch.setattr(page_bounds, "_written", written)


@mutant("bounds", "a chunk that begins inside a page hides the page's earlier keys")
def every_step_begins_its_pages(patch: Patch) -> None:
    real = page_bounds._written

    def written(batch: PagedBatch, device: torch.device) -> page_bounds._WrittenPages:
        found = real(batch, device)
        return replace(found, begun=torch.zeros_like(found.begun))

    patch.setattr(page_bounds, "_written", written)


@mutant("bounds", "pages are chosen by the lowest products, so that those that attention needs are not read")
def the_minimum_is_taken_for_the_maximum(patch: Patch) -> None:
    real = PageBounds._shares
    patch.setattr(PageBounds, "_shares", lambda own, *given: real(PageBounds(own._high, own._low), *given))


@mutant("bounds", "a row does not see its own token and those before it")
def the_newest_page_competes(patch: Patch) -> None:
    def readable(shares: Tensor, newest: Tensor) -> Tensor:
        numbers = torch.arange(shares.shape[1], device=shares.device)
        return shares.masked_fill(numbers > newest, float("-inf"))

    patch.setattr(page_bounds, "_readable", readable)


@mutant("bounds", "a short request reads fewer pages, in place of which it selected pages that it does not have")
def pages_beyond_the_context_compete(patch: Patch) -> None:
    patch.setattr(page_bounds, "_readable", lambda shares, newest: shares.scatter(1, newest, float("inf")))

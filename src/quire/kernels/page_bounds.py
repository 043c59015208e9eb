"""Selection of pages by the bounds of their keys: the elementwise minimum and maximum of the keys of a page.

The bounds give a limit that no product of a query and a key of the page exceeds. Rows read the pages with the highest
limits, in relation to other pages of the same head, so their attention is approximate: lossy, unlike all else here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import PagedBatch
from quire.spec.pages import pages_for
from quire.upload import to_device

_MOST_BOUNDS = 4096
"""Pages whose bounds are gathered at once, unless one sequence has more."""


class PageBounds:
    """The bounds of one call: `low` and `high` are `[frames, kv_heads, dim]`, a pool's layers.

    Bounds are those of all keys that were written to a page since its first token was. A rejected draft stays in them,
    which makes a limit higher than it need be.
    """

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self._low = low
        self._high = high

    def write(self, batch: PagedBatch, key: Tensor) -> None:
        """Include the new keys of a step, `[T, kv_heads, dim]` as a reader sees them, in the bounds of their pages."""
        pages = batch.derived("written pages", lambda batch: _written(batch, key.device))
        keys = key[pages.rows]
        for bounds, found, combined in (
            (self._low, keys.amin(1), torch.minimum),
            (self._high, keys.amax(1), torch.maximum),
        ):
            found = found.to(bounds.dtype)
            both = combined(found, bounds[pages.frames])
            bounds.index_copy_(0, pages.frames, torch.where(pages.begun, both, found))

    def select(self, query: Tensor, batch: PagedBatch, most: int, scale: float) -> Tensor:
        """The positions that each row reads, int64 `[R, n]`, -1 for none: those of the page of the newest token and of
        the `most` - 1 other pages with the highest shares, in the order of positions.

        `query` is `[R, heads, dim]`, and `batch` has one row for each of its R sequences. A page's share is the softmax
        of its limits, times `scale`, among the other pages of a head, summed over heads.
        """
        size, device = batch.page_size, query.device
        contexts = batch.derived("contexts", lambda batch: to_device(batch.context_lens.astype(np.int64), device))
        width = pages_for(int(batch.context_lens.max()), size)
        if width > most:
            pages = self._best_pages(query * scale, batch, (contexts - 1).unsqueeze(1) // size, most)
        else:
            pages = torch.arange(width, device=device).expand(len(query), -1)
        positions = (pages.unsqueeze(-1) * size + torch.arange(size, device=device)).flatten(1)
        return positions.masked_fill(positions >= contexts.unsqueeze(1), -1)

    def _best_pages(self, query: Tensor, batch: PagedBatch, newest: Tensor, most: int) -> Tensor:
        """Page numbers `[R, most]` in ascending order; a row with fewer pages has numbers beyond its `newest` page."""
        frames = batch.derived("frames of bounds", lambda batch: _frames(batch, query.device))
        size = max(1, _MOST_BOUNDS // frames.shape[1])
        blocks = [slice(start, start + size) for start in range(0, len(query), size)]
        shares = torch.cat([self._shares(query[rows], frames[rows], newest[rows]) for rows in blocks])
        pages: Tensor = _readable(shares, newest).topk(most, dim=1).indices
        return pages.sort(dim=1).values

    def _shares(self, query: Tensor, frames: Tensor, newest: Tensor) -> Tensor:
        """Float32 `[R, n]` of the pages in `frames` `[R, n]` before the `newest`, for scaled queries
        `[R, heads, dim]`."""
        kv_heads, dim = self._low.shape[1:]
        grouped = query.view(len(query), kv_heads, -1, dim).float()
        high, low = (bounds[frames].float().permute(0, 2, 3, 1) for bounds in (self._high, self._low))
        limits = torch.matmul(grouped.clamp_min(0), high) + torch.matmul(grouped.clamp_max(0), low)
        others = torch.arange(frames.shape[1], device=frames.device) < newest
        return limits.masked_fill(~others[:, None, None], float("-inf")).softmax(-1).sum((1, 2))


def _readable(shares: Tensor, newest: Tensor) -> Tensor:
    """`shares` `[R, n]` with none beyond the `newest` page `[R, 1]` of a row, which comes before all others."""
    numbers = torch.arange(shares.shape[1], device=shares.device)
    return shares.masked_fill(numbers > newest, float("-inf")).scatter(1, newest, float("inf"))


@dataclass(frozen=True, slots=True, eq=False)
class _WrittenPages:
    """The pages that a step writes to."""

    rows: Tensor  # int64 [pages, n], flat rows of each page; the last one is repeated
    frames: Tensor  # int64 [pages]
    begun: Tensor  # bool [pages, 1, 1], whether the page has earlier tokens


def _written(batch: PagedBatch, device: torch.device) -> _WrittenPages:
    batch.refuse_trees("attention to selected pages")
    frames, offsets = np.divmod(batch.slots[: batch.num_rows].astype(np.int64), batch.page_size)
    is_first = offsets == 0
    is_first[batch.query_starts[:-1][np.diff(batch.query_starts) > 0]] = True
    firsts = np.flatnonzero(is_first)
    ends = np.append(firsts[1:], len(frames))
    rows = np.minimum(firsts[:, None] + np.arange((ends - firsts).max(initial=1)), ends[:, None] - 1)
    begun = (offsets[firsts] > 0)[:, None, None]
    return _WrittenPages(*(to_device(array, device) for array in (rows, frames[firsts], begun)))


def _frames(batch: PagedBatch, device: torch.device) -> Tensor:
    """The frames of all pages, int64 `[R, n]`; frame 0 beyond a sequence's pages."""
    lengths = -(-batch.context_lens.astype(np.int64) // batch.page_size)
    numbers = np.arange(lengths.max())
    return to_device(np.where(numbers < lengths[:, None], batch.frames[:, : len(numbers)], 0).astype(np.int64), device)

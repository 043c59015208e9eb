"""Reach: which cached pages a request that resumes after page n still reads.

The same functions decide how far a prefix matches, what a request pins, what it may give up early and how much of a
group it holds, so a new kind of attention is one class here.

    pages of a prefix     0    1    2    3    4    5      resuming after page 5 (n = 6) reads
    Full                  x    x    x    x    x    x      all of them
    Window                               x    x    x      those that hold one of the last w - 1 tokens
    Chunk                           |    x    x    x      those of the chunk that position n * page_size lies in
    State                                          x      the last: the state after it is in its frame
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from quire.errors import UnsupportedModel
from quire.spec.group import ReachSpec
from quire.spec.ids import Bools
from quire.spec.pages import pages_for


class Reach(Protocol):
    """Pure functions over the pages of one prefix, page 0 first."""

    whole: bool
    """Whether every page is read for ever, so that no page loses its frame before it leaves the tree."""
    carried: bool
    """Whether a request carries one frame along that it rewrites, instead of writing one frame for each page."""

    def resumable(self, resident: Bools) -> Bools:
        """Per page: whether a request may resume right after it, given which pages are resident."""

    def needed(self, num_pages: int) -> range:
        """The pages that a request with `num_pages` whole pages behind it still reads."""

    def held(self, num_pages: int) -> int:
        """The frames that a request of up to `num_pages` pages needs to go on, a token at a time."""


class Full:
    """Everything before is read: one hole ends the prefix."""

    whole = True
    carried = False

    def resumable(self, resident: Bools) -> Bools:
        """True up to the first page that is not resident."""
        return np.logical_and.accumulate(resident)

    def needed(self, num_pages: int) -> range:
        """All of them."""
        return range(num_pages)

    def held(self, num_pages: int) -> int:
        """All of them."""
        return num_pages


class Window:
    """A token at position p reads keys `p - window < k <= p`: of a prefix, its last `window - 1` tokens are read."""

    whole = False
    carried = False

    def __init__(self, window: int, page_size: int) -> None:
        self.window = window
        self.page_size = page_size

    def resumable(self, resident: Bools) -> Bools:
        """True where the pages that hold the last `window - 1` tokens are resident."""
        ends = np.arange(1, len(resident) + 1)
        return _unbroken(resident, np.maximum(0, ends * self.page_size - self.window + 1) // self.page_size)

    def needed(self, num_pages: int) -> range:
        """From the page that holds token `num_pages * page_size - window + 1` on."""
        return range(max(0, num_pages * self.page_size - self.window + 1) // self.page_size, num_pages)

    def held(self, num_pages: int) -> int:
        """The pages of a window behind a page's end, and the page that is being filled or begun."""
        return min(num_pages, pages_for(self.window - 1, self.page_size) + 1)


class Chunk:
    """A token reads the keys of its own chunk of `tokens` tokens, counted from position 0."""

    whole = False
    carried = False

    def __init__(self, tokens: int, page_size: int) -> None:
        self.tokens = tokens
        self.page_size = page_size

    def resumable(self, resident: Bools) -> Bools:
        """True where the pages back to the start of the next token's chunk are resident; at a chunk's end, always."""
        ends = np.arange(1, len(resident) + 1)
        starts = ends * self.page_size // self.tokens * self.tokens
        return _unbroken(resident, np.where(starts == ends * self.page_size, ends, starts // self.page_size))

    def needed(self, num_pages: int) -> range:
        """From the page that holds the start of the next token's chunk on; none at a chunk's end."""
        end = num_pages * self.page_size
        start = end // self.tokens * self.tokens
        return range(num_pages if start == end else start // self.page_size, num_pages)

    def held(self, num_pages: int) -> int:
        """The pages of a chunk; where chunks begin inside pages, also those that its ends share with its neighbours."""
        return min(num_pages, pages_for(self.tokens, self.page_size) + 2 * (self.tokens % self.page_size > 0))


class State:
    """All that was read is folded into one state; a page's frame holds the state after its last token."""

    whole = False
    carried = True

    def resumable(self, resident: Bools) -> Bools:
        """True where a state was left."""
        return resident.copy()

    def needed(self, num_pages: int) -> range:
        """The last page."""
        return range(max(0, num_pages - 1), num_pages)

    def held(self, num_pages: int) -> int:
        """The one it rewrites."""
        return 1


def _unbroken(resident: Bools, firsts: np.ndarray) -> Bools:
    """Per page i: whether all pages from `firsts[i]` to i are resident."""
    last_hole = np.maximum.accumulate(np.where(resident, -1, np.arange(len(resident))))
    unbroken: Bools = last_hole < firsts
    return unbroken


_KINDS: dict[str, Callable[[ReachSpec, int], Reach]] = {
    "full": lambda spec, page_size: Full(),
    "window": lambda spec, page_size: Window(spec.tokens, page_size),
    "chunk": lambda spec, page_size: Chunk(spec.tokens, page_size),
    "state": lambda spec, page_size: State(),
}


def reach_of(spec: ReachSpec, page_size: int) -> Reach:
    """The behaviour of a group's reach in pages of that size. Raises UnsupportedModel for a kind that is not known."""
    make = _KINDS.get(spec.kind)
    if make is None:
        raise UnsupportedModel(f"a group has reach '{spec.kind}'; this version knows {', '.join(sorted(_KINDS))}.")
    return make(spec, page_size)

"""Reach: which cached pages a request that resumes after page n still reads. Each kind of attention has one class.

pages of a prefix     0    1    2    3    4    5      resuming after page 5 (n = 6) reads
Full                  x    x    x    x    x    x      all of them
Window                               x    x    x      those that hold one of the last w - 1 tokens
Chunk                           |    x    x    x      those of the chunk that position n * page_size lies in
State                                          x      the last: the state after it is in its frame
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.errors import UnsupportedModel
from quire.spec.group import ReachSpec
from quire.spec.ids import Bools
from quire.spec.pages import pages_for

Counts = TypeVar("Counts", int, NDArray[np.int64])
"""A count of pages, or an array of counts."""


class Reach(ABC):
    """Pure functions over the pages of one prefix. `tokens` is the width of a window or a chunk."""

    whole = False
    """Whether every page is always read, so that a page keeps its frame for as long as it is in the tree."""
    in_place = False
    """Whether a request updates one frame in place, instead of writing one frame for each page."""

    def __init__(self, tokens: int, page_size: int) -> None:
        self.tokens = tokens
        self.page_size = page_size

    @abstractmethod
    def first(self, num_pages: Counts) -> Counts:
        """The first page that a request still reads after `num_pages` whole pages; `num_pages` if it reads none."""

    @abstractmethod
    def held(self, num_pages: int) -> int:
        """The most frames that a request of up to `num_pages` pages needs when it decodes token by token."""

    def needed(self, num_pages: int) -> range:
        """The pages that a request still reads after `num_pages` whole pages."""
        return range(self.first(num_pages), num_pages)

    def resumable(self, resident: Bools) -> Bools:
        """Per page of a prefix: whether a request may resume right after it, from the resident pages."""
        at = np.arange(len(resident))
        last_hole = np.maximum.accumulate(np.where(resident, -1, at))
        return last_hole < self.first(at + 1)


class Full(Reach):
    """Every earlier page is read: one missing page ends the prefix."""

    whole = True

    def first(self, num_pages: Counts) -> Counts:
        return 0 * num_pages

    def held(self, num_pages: int) -> int:
        return num_pages


class Window(Reach):
    """A token at position p reads keys `p - window < k <= p`: the last `window - 1` tokens of a prefix, and itself."""

    def first(self, num_pages: Counts) -> Counts:
        passed = num_pages * self.page_size - self.tokens + 1
        return (passed > 0) * passed // self.page_size

    def held(self, num_pages: int) -> int:
        # The pages of a window that ends with a page, and the page that is being filled or started.
        return min(num_pages, pages_for(self.tokens - 1, self.page_size) + 1)


class Chunk(Reach):
    """A token reads the keys of its own chunk, counted from position 0."""

    def first(self, num_pages: Counts) -> Counts:
        return num_pages * self.page_size // self.tokens * self.tokens // self.page_size

    def held(self, num_pages: int) -> int:
        # The pages of a chunk; where chunks begin inside pages, also the two that it shares with its neighbours.
        return min(num_pages, pages_for(self.tokens, self.page_size) + 2 * (self.tokens % self.page_size > 0))


class State(Reach):
    """All tokens are folded into one state; a page's frame holds the state after its last token."""

    in_place = True

    def first(self, num_pages: Counts) -> Counts:
        return num_pages - (num_pages > 0)

    def held(self, num_pages: int) -> int:
        return 1


_KINDS: dict[str, type[Reach]] = {"full": Full, "window": Window, "chunk": Chunk, "state": State}


def reach_of(spec: ReachSpec, page_size: int) -> Reach:
    """The reach of a group with pages of `page_size` tokens. Raises UnsupportedModel for an unknown kind."""
    make = _KINDS.get(spec.kind)
    if make is None:
        raise UnsupportedModel(f"a group has reach '{spec.kind}'; this version has {', '.join(sorted(_KINDS))}.")
    return make(spec.tokens, page_size)

"""Reach: which cached pages a request that resumes after page n still reads.

The same two functions decide how far a prefix matches, what a request pins and what it may free early, so a new kind of
attention is one class here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from quire.errors import UnsupportedModel
from quire.spec.group import ReachSpec
from quire.spec.ids import Bools


class Reach(Protocol):
    """Two pure functions over the pages of one prefix, page 0 first."""

    def resumable(self, resident: Bools) -> Bools:
        """Per page: whether a request may resume right after it, given which pages are resident."""

    def needed(self, num_pages: int) -> range:
        """The pages that a request with `num_pages` pages behind it still reads."""


class Full:
    """Everything before is read: one hole ends the prefix."""

    def resumable(self, resident: Bools) -> Bools:
        """True up to the first page that is not resident."""
        return np.logical_and.accumulate(resident)

    def needed(self, num_pages: int) -> range:
        """All of them."""
        return range(num_pages)


_KINDS: dict[str, Callable[[ReachSpec], Reach]] = {"full": lambda spec: Full()}


def reach_of(spec: ReachSpec) -> Reach:
    """The behaviour of a group's reach. Raises UnsupportedModel for a kind this version does not know."""
    make = _KINDS.get(spec.kind)
    if make is None:
        raise UnsupportedModel(f"a group has reach '{spec.kind}'; this version knows {', '.join(sorted(_KINDS))}.")
    return make(spec)

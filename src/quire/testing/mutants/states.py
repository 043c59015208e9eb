"""Mistakes with groups of which a request carries one frame along."""

from __future__ import annotations

from quire.prefix.shelf import Rank, Shelf
from quire.testing.mutants import field
from quire.testing.mutants.registry import Patch, mutant


@mutant("cache", field.PINS)
def the_source_is_not_pinned(patch: Patch) -> None:
    """The state that a request begins on is dropped before its first step has read it."""
    real = Shelf.pin
    patch.setattr(
        Shelf, "pin", lambda self, pages, rank=Rank.PASSED: None if rank is Rank.USED else real(self, pages, rank)
    )

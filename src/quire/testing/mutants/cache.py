"""Mistakes of the cache: what ends, what waits for steps in flight, what runs out."""

from __future__ import annotations

from quire.cache.groups import WholeGroup
from quire.testing.mutants import field
from quire.testing.mutants.registry import Patch, mutant


@mutant("cache", field.STUCK)
def evictable_pages_do_not_count(patch: Patch) -> None:
    """A request that would fit after eviction is refused."""
    patch.setattr(WholeGroup, "num_evictable", property(lambda group: 0))

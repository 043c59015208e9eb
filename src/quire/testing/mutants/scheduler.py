"""Mistakes of the scheduler: who is preempted, who waits for whom, what is promised."""

from __future__ import annotations

from quire.cache.carried import CarriedGroup
from quire.errors import OutOfPages
from quire.prefix.shelf import Rank
from quire.testing.mutants import field
from quire.testing.mutants.registry import Patch, mutant


@mutant("scheduler", field.STUCK)
def a_checkpoint_is_not_optional(patch: Patch) -> None:
    """A request dies because there is no frame for an optional checkpoint."""
    real = CarriedGroup._spare

    def spare(group: CarriedGroup, rank: Rank) -> int:
        found = real(group, rank)
        if not found:
            raise OutOfPages(group=group.name, wanted=1, free=0)
        return found

    patch.setattr(CarriedGroup, "_spare", spare)

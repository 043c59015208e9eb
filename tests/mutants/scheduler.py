"""Mistakes of the scheduler: which request is preempted, which waits for which, what is promised."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.cache.admission import Admission
from quire.cache.states import StateGroup
from quire.errors import OutOfPages
from quire.plan.budget import MemoryPlan
from quire.scheduler.scheduler import Scheduler
from quire.spec.rank import Rank
from tests.mutants import field
from tests.mutants.registry import Patch, mutant


@mutant("scheduler", field.AHEAD)
def scheduler_commits_what_is_launched(patch: Patch) -> None:
    """The scheduler commits what it has launched, and others reuse what is not computed yet."""
    real = Scheduler.settle

    def settle(scheduler: Scheduler, step: Any, *drawn: Any) -> Any:
        ahead = [min(request.num_launched, request.num_tokens) for request in step.requests]
        step.counts = np.array(ahead, dtype=np.int64) - step.starts
        step._ends = None  # of the counts before
        return real(scheduler, step, *drawn)

    patch.setattr(Scheduler, "settle", settle)


@mutant("scheduler", field.STUCK)
def preempt_the_first(patch: Patch) -> None:
    """The oldest request is preempted first, and two requests throw each other out for ever."""
    patch.setattr(Scheduler, "_victim", lambda scheduler: scheduler._rows.running[0])


@mutant("scheduler", field.STUCK)
def leaders_may_be_waiting(patch: Patch) -> None:
    """Two requests with one prefix wait for each other, and neither is ever admitted."""

    def admit(scheduler: Scheduler, next_step: Any) -> bool:
        def leader(request: Any, hit: Any) -> Any:
            for other in scheduler.waiting:
                if other is not request and other.tokens[0] == request.tokens[0]:
                    return other, None
            return None

        patch.setattr(scheduler._leaders, "of", leader)
        return real(scheduler, next_step)

    real = Scheduler._admit
    patch.setattr(Scheduler, "_admit", admit)


@mutant("scheduler", field.ESTIMATE)
def the_limit_and_the_allocator_disagree(patch: Patch) -> None:
    """A request is admitted that the pool can never hold, and waits for ever."""
    patch.setattr(MemoryPlan, "pages_of", lambda plan, num_tokens: (num_tokens - 1) // plan.page_size)


@mutant("scheduler", field.STALE)
def preemption_makes_output_prompt(patch: Patch) -> None:
    """What a request had answered before it was preempted counts as its prompt and is not sent."""
    real = Scheduler._preempt

    def preempt(scheduler: Scheduler, request: Any) -> None:
        real(scheduler, request)
        request.max_tokens -= request.num_outputs
        request.num_prompt_tokens = request.num_tokens

    patch.setattr(Scheduler, "_preempt", preempt)


@mutant("scheduler", field.STUCK)
def chunks_are_not_cut_to_the_window_pool(patch: Patch) -> None:
    """A prompt longer than the window pool waits for ever."""
    patch.setattr(Admission, "at_once", lambda self, kv, count: count)


@mutant("scheduler", field.STUCK)
def a_checkpoint_is_not_optional(patch: Patch) -> None:
    """A request dies because there is no frame for an optional checkpoint."""
    real = StateGroup._spare

    def spare(group: StateGroup, row: int, rank: Rank) -> int:
        found = real(group, row, rank)
        if not found:
            raise OutOfPages(group=group.name, wanted=1, free=0)
        return found

    patch.setattr(StateGroup, "_spare", spare)

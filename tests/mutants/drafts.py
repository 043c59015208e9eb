"""Mistakes with drafts that fuzzing meets: what is cached, what is kept, and what is freed of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.scheduler.rows import RunningRows
from quire.scheduler.scheduler import Scheduler
from tests.mutants import field
from tests.mutants.registry import Patch, mutant


@mutant("scheduler", field.AHEAD)
def unverified_drafts_are_cached(patch: Patch) -> None:
    """What was computed for drafts is cached before they are verified, and other requests read it."""
    real = Scheduler.settle

    def settle(scheduler: Scheduler, step: Any, *drawn: Any) -> Any:
        rows = scheduler._rows
        for at in (step.draw_counts > 1).nonzero()[0].tolist():
            row = int(step.batch.rows[at])
            if step.batch.kvs[at].alive:
                scheduler._cache.commit(step.batch.kvs[at], rows.tokens[row, : rows.launched[row]].copy())
        return real(scheduler, step, *drawn)

    patch.setattr(Scheduler, "settle", settle)


@mutant("scheduler", field.DRAFTS)
def the_first_draft_counts_as_right(patch: Patch) -> None:
    """The first draft of each step is taken without a look at what was drawn in its place."""
    real = Scheduler.settle

    def settle(scheduler: Scheduler, step: Any, tokens: Any, kept: Any = None) -> Any:
        for work in (step.draw_counts > 1).nonzero()[0].tolist():
            first = int(np.searchsorted(step.drawers, work))
            tokens[first] = step.tokens[step.draws[first] + 1]
            kept[work] = max(kept[work], 2)
        return real(scheduler, step, tokens, kept)

    patch.setattr(Scheduler, "settle", settle)


@mutant("scheduler", field.DRAFTS)
def a_rejection_is_counted_a_step_late(patch: Patch) -> None:
    """A request goes on after drafts that were rejected."""
    real = RunningRows._advance
    patch.setattr(RunningRows, "_advance", lambda self, *given, several: real(self, *given, several=False))


@mutant("scheduler", field.LEAK)
def pages_of_drafts_leak(patch: Patch) -> None:
    """The pages that a request holds beyond its last token, for drafts, are lost when it ends."""
    real = KVCache.finish

    def finish(cache: KVCache, kv: Any, tokens: Any = None, **more: Any) -> None:
        if tokens is not None and cache.plan.speculation is not None:
            allocated = cache.rows.num_allocated
            allocated[kv.row] = min(allocated[kv.row], max(len(tokens), 1))
        real(cache, kv, tokens, **more)

    patch.setattr(KVCache, "finish", finish)


@mutant("scheduler", field.STUCK)
def more_room_is_asked_for_than_was_promised(patch: Patch) -> None:
    """A request about as long as fits waits for ever for room that it never uses."""
    real = Scheduler._fits

    def fits(scheduler: Scheduler, request: Any, hit: Any) -> bool:
        most, request.max_tokens = request.max_tokens, request.max_tokens + scheduler._per_step
        found = real(scheduler, request, hit)
        request.max_tokens = most
        return found

    patch.setattr(Scheduler, "_fits", fits)

"""Mistakes with windows and states that engines of this kind have shipped, in the cache and above it."""

from __future__ import annotations

from quire.cache.groups import PagedGroup
from quire.cache.request_kv import RequestKV
from quire.cache.states import StateGroup
from quire.memory.residency import Column
from quire.scheduler.rows import Leaders
from quire.spec.rank import Rank
from tests.mutants.mutants import Patch, mutant

# -- windows


@mutant("idle", "windows are dropped tail first, so that every conversation loses the end it would resume on")
def windows_go_tail_first(patch: Patch) -> None:
    real = Column.unpin
    patch.setattr(Column, "unpin", lambda self, pages, rank=Rank.PASSED: real(self, pages[::-1], rank))


@mutant("idle", "what a long prompt has passed outlives the ends of all other conversations")
def all_windows_are_worth_the_same(patch: Patch) -> None:
    real = Column._raise_rank
    patch.setattr(Column, "_raise_rank", lambda self, pages, rank: real(self, pages, Rank.MARKED))


@mutant("reuse", "a window pool that is full of cached windows admits no request")
def cached_windows_count_as_taken(patch: Patch) -> None:
    patch.setattr(PagedGroup, "num_evictable", property(lambda group: 0))


# -- states


@mutant("reuse", "checkpoints take the frames that requests need to run")
def checkpoints_take_the_last_frame(patch: Patch) -> None:
    def spare(group: StateGroup, row: int, rank: Rank) -> int:
        if not group.num_free and not group.evict(1, rank):
            return 0
        return int(group.frames.allocator.alloc(1)[0])

    patch.setattr(StateGroup, "_spare", spare)


@mutant("reuse", "the one state there is stays pinned by the request that would begin on it, and it waits for ever")
def no_state_is_taken_over(patch: Patch) -> None:
    patch.setattr(StateGroup, "_takeable", lambda self, rows: rows[:0])


@mutant("reuse", "prompts that share a prefix compute it again and again, since no state is stored where they diverge")
def no_state_where_prompts_part(patch: Patch) -> None:
    real = RequestKV.mark_ends

    def mark(kv: RequestKV, *ends: int) -> None:
        real(kv, *ends)
        kv.marks = {n: rank for n, rank in kv.marks.items() if rank is not Rank.USED}

    patch.setattr(RequestKV, "mark_ends", mark)


@mutant("reuse", "requests that come together and share a prefix each compute it, since no state is left for them")
def a_leader_does_not_hear_who_waits(patch: Patch) -> None:
    patch.setattr(Leaders, "of", lambda self, request, hit: None)


@mutant("reuse", "no test would see that checkpoints are skipped")
def skipped_checkpoints_are_not_counted(patch: Patch) -> None:
    patch.setattr(StateGroup, "skipped", property(lambda self: 0, lambda self, value: None), raising=False)

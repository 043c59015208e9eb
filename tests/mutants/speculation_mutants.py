"""Mistakes with drafts: reserves, verification, draws after drafts, trees, states, n-grams, the governor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.cache.growth import Growth
from quire.cache.running import Lengths, Rows
from quire.cache.states import StateGroup
from quire.engine.device import sampler
from quire.engine.device.runner import LaunchedForward, ModelRunner
from quire.engine.device.sampler import _Draws
from quire.plan import budget, settings
from quire.plan.configurator import RecurrentPoolConfigurator
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import DraftRows
from quire.scheduler.step import Step, StepRows
from quire.spec import speculation
from quire.spec.ids import Bools
from quire.speculative import ngram, speculator, verify
from quire.speculative.governor import Governor
from quire.speculative.ngram import NgramDrafter
from quire.speculative.verify import Accepted
from tests.mutants.mutants import Patch, mutant

# -- reserves


@mutant("reserves", "a step verifies one token less than was asked for")
def a_step_lacks_a_token(patch: Patch) -> None:
    real = speculation.get_alloc_len_per_decode
    patch.setattr(budget, "get_alloc_len_per_decode", lambda *given: max(1, real(*given) - 1))


@mutant("reserves", "a request is admitted that fits until its last steps compute drafts")
def the_reserve_is_of_one_step(patch: Patch) -> None:
    real = speculation.get_alloc_reserve_per_decode
    for module in (speculation, settings):
        patch.setattr(module, "get_alloc_reserve_per_decode", lambda *given: real(*given) // 2)


@mutant("rows", "drafts at the end of the context are written into the row of the next request")
def rows_end_at_the_context(patch: Patch) -> None:
    patch.setattr(budget, "get_req_to_token_extra_context_len", lambda *given: 0)


@mutant("reserves", "a request whose prompt is about as long as fits waits for ever for room that it never uses")
def room_beyond_the_end_is_waited_for(patch: Patch) -> None:
    real = Scheduler._fits

    def fits(self: Scheduler, request: Request, hit: Any) -> bool:
        most, request.max_tokens = request.max_tokens, request.max_tokens + self._per_step
        found = real(self, request, hit)
        request.max_tokens = most
        return found

    patch.setattr(Scheduler, "_fits", fits)


@mutant("reserves", "a step with fewer drafts than the one before gives pages back that its request still holds")
def fewer_drafts_shrink_the_allocation(patch: Patch) -> None:
    def up_to(growth: Growth, kvs: Any, rows: Rows, lengths: Any) -> None:
        growth._to(kvs, rows, np.minimum(np.asarray(lengths), growth._rows.width * growth._size))

    def draft(self: Scheduler, batch: Any, counts: Lengths, *rest: Any) -> None:
        self._per_step = max(2, 1 + int(counts.max(initial=0)))
        real(self, batch, counts, *rest)

    real = Scheduler.draft
    patch.setattr(Scheduler, "draft", draft)
    patch.setattr(Growth, "up_to", up_to)


@mutant("drafts", "pages that were reserved for drafts and hold no token are lost when their request ends")
def tails_leak(patch: Patch) -> None:
    real = KVCache.finish

    def finish(cache: KVCache, kv: Any, tokens: Any = None, **more: Any) -> None:
        allocated = cache.rows.num_allocated
        if tokens is not None and cache.plan.speculation is not None:
            allocated[kv.row] = min(allocated[kv.row], max(len(tokens), 1))
        real(cache, kv, tokens, **more)

    patch.setattr(KVCache, "finish", finish)


# -- verification


def _accepted(patch: Patch, change: Callable[[Lengths, Lengths], Lengths]) -> None:
    def accepted(tokens: Any, draws: Any, draw_counts: Lengths, *rest: Any) -> Accepted:
        found = verify.accepted_draws(tokens, draws, draw_counts, *rest)
        return found._replace(kept=change(found.kept, draw_counts))

    patch.setattr(speculator, "accepted_draws", accepted)


@mutant("drafts", "the first draft of each step is taken as it was proposed, and never verified")
def the_first_draft_is_not_verified(patch: Patch) -> None:
    def settle(self: Scheduler, step: Step, tokens: Lengths, kept: Any = None) -> Any:
        for work in (step.draw_counts > 1).nonzero()[0].tolist() if kept is not None else ():
            first = int(np.searchsorted(step.drawers, work))
            tokens[first] = step.tokens[step.draws[first] + 1]
            kept[work] = max(kept[work], 2)
        return real(self, step, tokens, kept)

    real = Scheduler.settle
    patch.setattr(Scheduler, "settle", settle)


@mutant("drafts", "a draft is rejected a step too late: what is kept is what was right in the step before")
def rejections_are_one_step_late(patch: Patch) -> None:
    before: list[Lengths] = []

    def late(kept: Lengths, draw_counts: Lengths) -> Lengths:
        before.append(kept)
        if len(before) > 1 and len(before[-2]) == len(kept):
            kept = np.where(draw_counts > 0, np.clip(before[-2], 1, draw_counts), 0)
        return kept

    _accepted(patch, late)


@mutant("drafts", "no draft is ever kept, so speculation only costs")
def right_drafts_are_rejected(patch: Patch) -> None:
    _accepted(patch, lambda kept, draw_counts: np.minimum(kept, 1))


@mutant("steps", "drafts are cached before it is known whether they are right, and other requests read them")
def drafts_are_cached(patch: Patch) -> None:
    real = Scheduler.settle

    def settle(self: Scheduler, step: Step, *drawn: Any) -> Any:
        rows = self._rows
        for at in (step.draw_counts > 1).nonzero()[0].tolist():
            kv, row = step.batch.kvs[at], int(step.batch.rows[at])
            if kv.alive:
                self._cache.commit(kv, rows.tokens[row, : rows.launched[row]])
        return real(self, step, *drawn)

    patch.setattr(Scheduler, "settle", settle)


@mutant("steps", "drafts go beyond the end of their request")
def drafts_have_no_limit(patch: Patch) -> None:
    real = DraftRows.room

    def room(self: DraftRows, batch: StepRows) -> Lengths:
        assert self._config is not None
        return np.where(real(self, batch) > 0, self._config.num_steps, 0)

    patch.setattr(DraftRows, "room", room)


@mutant(
    "rejection", "after a rejected draft the token is drawn from all that is likely, so likely tokens come too often"
)
def the_residual_is_the_target(patch: Patch) -> None:
    patch.setattr(sampler, "_residual", lambda target, draft: target.clone())


@mutant("rejection", "a draft is accepted as often as it is likely, however often it is drafted")
def the_chance_of_the_draft_is_ignored(patch: Patch) -> None:
    patch.setattr(sampler, "_chance", lambda target, draft: target.double())


# -- draws after drafts


@mutant("draws", "a token that is repeated among drafts is not penalised")
def penalties_see_no_drafts(patch: Patch) -> None:
    patch.setattr(Request, "tokens_before", lambda self, place: self.tokens)


@mutant("draws", "a request ends before its min_tokens, where its stop token is drawn after a draft")
def min_tokens_are_ignored_after_a_draft(patch: Patch) -> None:
    real = _Draws.to_adjust

    def to_adjust(self: _Draws, outputs: Lengths) -> list[int]:
        follows = np.diff(outputs, prepend=outputs[:1]) == 1
        return [row for row in real(self, outputs) if not follows[row]]

    patch.setattr(_Draws, "to_adjust", to_adjust)


@mutant("draws", "a request goes on behind its stop token, if that was drafted")
def stop_tokens_in_drafts_are_ignored(patch: Patch) -> None:
    real = StepRows.stopping

    def stopping(self: StepRows, owners: Rows, tokens: Lengths, outputs: Lengths) -> Bools:
        last = np.append(np.diff(owners) > 0, True)
        found: Bools = real(self, owners, tokens, outputs) & last
        return found

    patch.setattr(StepRows, "stopping", stopping)


@mutant("draws", "each token of a step comes with the log-probabilities of another one")
def log_probabilities_are_in_another_order(patch: Patch) -> None:
    real = LaunchedForward.logprobs
    patch.setattr(
        LaunchedForward, "logprobs", lambda self, order=None: {n: t[::-1] for n, t in real(self, order).items()}
    )


# -- trees


@mutant("trees", "what was computed for a right branch is not moved, and later tokens read that of a wrong one")
def accepted_rows_are_not_moved(patch: Patch) -> None:
    patch.setattr(ModelRunner, "move", lambda self, launched, sources, targets: None)


@mutant("trees", "a branch is computed at positions after those of the branch before it")
def positions_of_a_tree_are_its_rows(patch: Patch) -> None:
    real = DraftRows.branch

    def branch(self: DraftRows, step: Step, *drafts: Any) -> None:
        rows = step.positions.copy()
        real(self, step, *drafts)
        step.positions = rows

    patch.setattr(DraftRows, "branch", branch)


@mutant("trees", "tokens of a right branch come with the log-probabilities of a wrong one")
def log_probabilities_are_of_the_first_branch(patch: Patch) -> None:
    real = LaunchedForward.logprobs
    patch.setattr(LaunchedForward, "logprobs", lambda self, order=None: real(self))


# -- states


@mutant("states of drafts", "requests wait although there is room, since no state was planned for drafts")
def no_states_are_planned_for_drafts(patch: Patch) -> None:
    patch.setattr(RecurrentPoolConfigurator, "_drafted", property(lambda self: 0))


@mutant("states of drafts", "a request goes on with the state after a draft that was rejected")
def the_state_of_a_rejected_draft_is_kept(patch: Patch) -> None:
    real = StateGroup.settle

    def settle(self: StateGroup, row: int, num_tokens: int) -> None:
        real(self, row, num_tokens + (self._position[row] < num_tokens < self._position[row] + self._num_drafts))
        self._position[row] = max(self._position[row], num_tokens)

    patch.setattr(StateGroup, "settle", settle)


@mutant("states of drafts", "the state of a request that goes on is handed to another one")
def the_accepted_state_is_freed(patch: Patch) -> None:
    real = StateGroup.settle

    def settle(self: StateGroup, row: int, num_tokens: int) -> None:
        before = int(self._frame[row])
        real(self, row, num_tokens)
        if self._frame[row] != before:
            self.frames.allocator.free(self._frame[row : row + 1].copy())

    patch.setattr(StateGroup, "settle", settle)


# -- drafters


@mutant("n-grams", "what a tenant was answered is proposed to another, who can tell by the time that it takes")
def n_grams_cross_namespaces(patch: Patch) -> None:
    patch.setattr(ngram, "_space_of", lambda namespace: 0)


@mutant("n-grams", "what was flushed is proposed still")
def n_grams_outlive_a_flush(patch: Patch) -> None:
    patch.setattr(NgramDrafter, "clear", lambda self, namespace: None)


@mutant("n-grams", "what was flushed of one tenant is proposed still")
def n_grams_outlive_a_flush_of_their_namespace(patch: Patch) -> None:
    patch.setattr(ngram._History, "delete", lambda self, space: None)


@mutant("n-grams", "a flush of one tenant deletes the history of all")
def a_flush_of_a_namespace_deletes_all_n_grams(patch: Patch) -> None:
    clear = NgramDrafter.clear
    patch.setattr(NgramDrafter, "clear", lambda self, namespace: clear(self, None))


@mutant("governor", "drafts that are never right are computed for ever, and the engine is slower than without")
def the_governor_never_gives_up(patch: Patch) -> None:
    patch.setattr(Governor, "limits", lambda self, rows, serials: np.full(len(rows), self._most, dtype=np.int64))


@mutant("governor", "a search that finds no draft costs nothing, so it is made before each step of prose")
def searches_are_free(patch: Patch) -> None:
    real = Governor.measured
    patch.setattr(Governor, "measured", lambda self, num, drafts, seconds, _=0.0: real(self, num, drafts, seconds))

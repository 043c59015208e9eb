"""Mistakes with steps that draw several tokens and keep some of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.cache.states import StateGroup
from quire.scheduler import rows
from quire.scheduler.request import Request
from quire.scheduler.rows import RunningRows
from quire.scheduler.speculation import DraftRows
from quire.scheduler.step import Step, StepRows
from tests.mutants.mutants import Patch, mutant


@mutant("steps", "what was computed for a draft that did not come true is cached as if it had")
def drafts_that_failed_settle(patch: Patch) -> None:
    real = RunningRows._advance

    def advance(self: RunningRows, of: StepRows, live: Any, settled: Any, kept: Any, drawn: Any, **more: Any) -> None:
        settled += drawn - kept
        real(self, of, live, settled, kept, drawn, **more)

    patch.setattr(RunningRows, "_advance", advance)


@mutant("steps", "a request goes on behind the drafts that did not come true, and leaves a hole")
def launched_is_not_taken_back(patch: Patch) -> None:
    real = RunningRows._advance
    patch.setattr(
        RunningRows, "_advance", lambda self, *given, several: real(self, *given, several=False), raising=True
    )


@mutant("steps", "a request that ends inside its drafts answers with what came behind its end")
def tokens_behind_the_end_are_kept(patch: Patch) -> None:
    real = rows._end

    def end(of: Any, owners: Any, tokens: Any, within: Any, stops: Any, ends: Any, kept: Any) -> Any:
        return real(of, owners, tokens, within, stops, ends, kept.copy())

    patch.setattr(rows, "_end", end)


@mutant("steps", "who takes a row over while a step is in flight gets the tokens of who had it before")
def a_row_keeps_no_owner(patch: Patch) -> None:
    real = RunningRows.settle

    def settle(self: RunningRows, step: Step, *drawn: Any) -> Any:
        step.batch.serials = np.where(
            self.serials[step.batch.rows] > 0, self.serials[step.batch.rows], step.batch.serials
        )
        return real(self, step, *drawn)

    patch.setattr(RunningRows, "settle", settle)


@mutant("steps", "what a request carries has gone on with drafts that did not come true")
def a_state_goes_on_with_all_drafts(patch: Patch) -> None:
    real = StateGroup.settle

    def settle(self: StateGroup, row: int, num_tokens: int) -> None:
        real(self, row, num_tokens)
        self._frame[row], self._draft_frames[row, -1] = self._draft_frames[row, -1], self._frame[row]

    patch.setattr(StateGroup, "settle", settle)


@mutant("steps", "what a request carries does not hear which drafts came true")
def a_state_stays_where_it_was(patch: Patch) -> None:
    patch.setattr(StateGroup, "settle", lambda self, row, num_tokens: None)


@mutant("steps", "drafts that were computed once are computed again, behind what came true")
def drafts_are_never_forgotten(patch: Patch) -> None:
    patch.setattr(DraftRows, "remove", lambda self, rows: None)


@mutant("steps", "a preempted request comes back with the drafts of who has its row now")
def drafts_stay_in_the_row(patch: Patch) -> None:
    real = RunningRows.unbind

    def unbind(self: RunningRows, request: Request) -> None:
        drafts = self.drafts
        remove, drafts.remove = drafts.remove, lambda rows: None  # type: ignore[method-assign]
        real(self, request)
        drafts.remove = remove  # type: ignore[method-assign]

    patch.setattr(RunningRows, "unbind", unbind)


@mutant("steps", "a request goes on while it is not known which of its drafts came true")
def several_may_be_pending(patch: Patch) -> None:
    real = RunningRows.ready

    def ready(self: RunningRows, of: StepRows) -> Any:
        of.most_pending[:] = 99
        return real(self, of)

    patch.setattr(RunningRows, "ready", ready)


@mutant("steps", "the token behind a draft is drawn one place too early")
def draws_are_one_too_early(patch: Patch) -> None:
    real = RunningRows._tokens_of

    def tokens_of(self: RunningRows, *given: Any) -> Step:
        step = real(self, *given)
        several = step.draw_counts[step.drawers] > 1
        step.draws = step.draws - several
        return step

    patch.setattr(RunningRows, "_tokens_of", tokens_of)


@mutant("steps", "a step that decodes as the last one ends no request, also where one has its last token")
def every_repeated_step_is_a_middle_one(patch: Patch) -> None:
    real = RunningRows.step

    def step(self: RunningRows, batch: StepRows, counts: Any = None) -> Step:
        again = self.decodes_again(batch)
        made = real(self, batch, counts)
        made.is_middle |= again
        return made

    patch.setattr(RunningRows, "step", step)


@mutant("steps", "requests decode again although the tokens of the last step are not known")
def steps_repeat_in_flight(patch: Patch) -> None:
    real = RunningRows.decodes_again

    def decodes_again(rows: RunningRows, batch: StepRows) -> bool:
        in_flight, batch.in_flight = batch.in_flight, 0
        try:
            return real(rows, batch)
        finally:
            batch.in_flight = in_flight

    patch.setattr(RunningRows, "decodes_again", decodes_again)

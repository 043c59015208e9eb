"""Mistakes with grammars: rows of masks, drafts that are taken back, tokens of the step in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher

from quire.grammar import part
from quire.grammar.matcher import Matcher
from quire.loop.part import Launched
from quire.scheduler.step import Step
from quire.spec.ids import Ids
from tests.mutants.mutants import Patch, mutant


@mutant("grammars", "a draw gets the mask of its neighbour")
def masks_are_of_other_rows(patch: Patch) -> None:
    real = part.GrammarPart._fill

    def fill(self: part.GrammarPart, step: Step, previous: Launched | None) -> object:
        found = real(self, step, previous)
        return found if found is None else (found[0], found[1][::-1].copy())

    patch.setattr(part.GrammarPart, "_fill", fill)


@mutant("grammars", "drafts that were rejected stay in the state of their request")
def drafts_are_not_taken_back(patch: Patch) -> None:
    real = Matcher.visit

    def visit(
        self: Matcher,
        tokens: Sequence[int],
        parents: Sequence[int] | None,
        at: Callable[[int], object] = lambda place: None,
    ) -> list[bool]:
        found = real(self, tokens, parents, at)
        if tokens and found[0] and not self.state.is_stopped():
            self.state.try_consume_tokens([tokens[0]])
        return found

    patch.setattr(Matcher, "visit", visit)


@mutant("grammars", "with overlap a mask is that before the token that is still on the device")
def the_pending_token_is_left_out(patch: Patch) -> None:
    real = Matcher.advance

    def advance(self: Matcher, outputs: Ids, more: Sequence[int] = ()) -> None:
        real(self, outputs)

    patch.setattr(Matcher, "advance", advance)


@mutant("grammars", "all sequences with one grammar are in the same state")
def states_are_shared(patch: Patch) -> None:
    def init(self: Matcher, start: LLMatcher, eos: frozenset[int]) -> None:
        self.state, self.num_outputs, self.has_ended, self._eos = start, 0, False, eos
        self.num_masks, self.mask_s, self.is_quick = 0, 0.0, None

    patch.setattr(Matcher, "__init__", init)


@mutant("slow grammars", "masks that are computed together are never timed")
def slow_masks_hide_among_quick_ones(patch: Patch) -> None:
    real = part.GrammarPart._fill_together

    def fill(self: part.GrammarPart, quick: Any, bits: Ids) -> None:
        real(self, quick, bits)
        for matcher, *_ in quick:
            matcher.is_quick = True

    patch.setattr(part.GrammarPart, "_fill_together", fill)

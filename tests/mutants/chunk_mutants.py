"""Mistakes with chunks of prompts beside requests that decode."""

from __future__ import annotations

from typing import Any

from quire.scheduler.chunk_budget import ChunkBudget
from quire.scheduler.step import Step
from tests.mutants.mutants import Patch, mutant


@mutant("chunks", "requests that decode stall behind prompts, whatever their target")
def the_budget_of_prompts_is_ignored(patch: Patch) -> None:
    patch.setattr(ChunkBudget, "take", lambda budget, start, count, most: min(count, most))


@mutant("chunks", "no prompt advances while decodes alone take as long as the target")
def prompts_starve_beside_decodes(patch: Patch) -> None:
    real = ChunkBudget.begin

    def begin(budget: ChunkBudget, *given: Any) -> None:
        real(budget, *given)
        budget.spent = budget._cost is not None and budget._budget_s <= 0

    patch.setattr(ChunkBudget, "begin", begin)


@mutant("chunks", "the time of a step is taken for that of the one after it, and no target is kept")
def costs_are_learned_from_other_steps(patch: Patch) -> None:
    real = ChunkBudget.measured
    last: list[float] = []

    def measured(budget: ChunkBudget, step: Step, seconds: float) -> None:
        real(budget, step, last[-1] if last else seconds)
        last.append(seconds)

    patch.setattr(ChunkBudget, "measured", measured)

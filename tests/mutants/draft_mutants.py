"""Mistakes with a draft model on the pages of its target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quire.engine.draft_model import ModelDrafter
from tests.mutants.mutants import Patch, mutant


@mutant("draft models", "after drafts that were all right, the draft reads what another request left in a slot")
def the_last_accepted_draft_is_not_computed(patch: Patch) -> None:
    real = ModelDrafter.propose

    def propose(drafter: ModelDrafter, drafting: Any) -> Any:
        drafter._computed[drafting.batch.rows] = drafting.known - 1
        return real(drafter, drafting)

    patch.setattr(ModelDrafter, "propose", propose)


@mutant("draft models", "pages that were filled without drafts are cached without what the draft computes of them")
def steps_without_drafts_are_not_followed(patch: Patch) -> None:
    real = ModelDrafter.follow

    def follow(drafter: ModelDrafter, step: Any) -> None:
        if step.computes_prompts:
            real(drafter, step)
        else:
            drafter._computed[step.batch.rows] = step.ends

    patch.setattr(ModelDrafter, "follow", follow)


@mutant("draft models", "what the draft computed of drafts that were rejected counts as that of the tokens drawn there")
def rejected_drafts_count_as_computed(patch: Patch) -> None:
    real = ModelDrafter.follow
    patch.setattr(
        ModelDrafter,
        "follow",
        lambda drafter, step: real(drafter, replace(step, draw_counts=np.maximum(step.draw_counts, 2))),
    )

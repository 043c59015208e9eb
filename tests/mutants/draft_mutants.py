"""Mistakes with a draft model on the pages of its target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quire.engine.draft_head import HeadDrafter
from quire.engine.draft_model import ModelDrafter
from quire.models.draft_head import LoadedHead
from quire.models.mtp import MtpHead
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

    def follow(drafter: ModelDrafter, step: Any, *others: Any) -> None:
        if step.computes_prompts:
            real(drafter, step, *others)
        else:
            drafter._computed[step.batch.rows] = step.ends

    patch.setattr(ModelDrafter, "follow", follow)


@mutant("draft models", "what the draft computed of drafts that were rejected counts as that of the tokens drawn there")
def rejected_drafts_count_as_computed(patch: Patch) -> None:
    real = ModelDrafter.follow
    patch.setattr(
        ModelDrafter,
        "follow",
        lambda drafter, step, *others: real(
            drafter, replace(step, draw_counts=np.maximum(step.draw_counts, 2)), *others
        ),
    )


@mutant("draft heads", "the last row of a page is computed with a token of another request, not with the drawn one")
def the_drawn_token_is_not_read(patch: Patch) -> None:
    real = HeadDrafter.follow
    patch.setattr(HeadDrafter, "follow", lambda drafter, step, target, drawn: real(drafter, step, target, None))


@mutant("draft heads", "what the head computed of its own drafts counts as that of the tokens drawn there")
def drafts_of_a_head_count_as_computed(patch: Patch) -> None:
    real = HeadDrafter.follow

    def follow(drafter: HeadDrafter, step: Any, *others: Any) -> None:
        real(drafter, step, *others)
        drafted = step.draw_counts > 1
        drafter._computed[step.batch.rows[drafted]] = step.ends[drafted]

    patch.setattr(HeadDrafter, "follow", follow)


@mutant("prediction layers", "a prediction layer reads embedding and hidden state in the order of another family")
def embedding_and_hidden_state_are_swapped(patch: Patch) -> None:
    real = MtpHead.forward

    def forward(head: MtpHead, embeddings: Any, features: Any, positions: Any) -> Any:
        head.config.mtp_hidden_states_first = True
        try:
            return real(head, embeddings, features, positions)
        finally:
            del head.config.mtp_hidden_states_first

    patch.setattr(MtpHead, "forward", forward)


@mutant("prediction layers", "drafts are made of what the model computed, not of what its prediction layer did")
def drafts_do_not_follow_each_other(patch: Patch) -> None:
    real = LoadedHead.run

    def run(head: LoadedHead, running: Any, tokens: Any, features: Any, positions: Any) -> Any:
        real(head, running, tokens, features, positions)
        return features

    patch.setattr(LoadedHead, "run", run)

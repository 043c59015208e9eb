"""Mistakes with a draft model on the pages of its target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quire.engine.device import draft_head, draft_model
from quire.engine.device.draft_head import HeadDrafter
from quire.engine.device.draft_model import ModelDrafter
from quire.models.draft_head import LoadedHead
from quire.models.mtp import MtpHead
from quire.speculative.drafter import BestFirst
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
    real = ModelDrafter.after_forward

    def follow(drafter: ModelDrafter, step: Any, *others: Any) -> None:
        if step.computes_prompts:
            real(drafter, step, *others)
        else:
            drafter._computed[step.batch.rows] = step.ends

    patch.setattr(ModelDrafter, "after_forward", follow)


@mutant("draft models", "what the draft computed of drafts that were rejected counts as that of the tokens drawn there")
def rejected_drafts_count_as_computed(patch: Patch) -> None:
    real = ModelDrafter.after_forward
    patch.setattr(
        ModelDrafter,
        "after_forward",
        lambda drafter, step, *others: real(
            drafter, replace(step, draw_counts=np.maximum(step.draw_counts, 2)), *others
        ),
    )


@mutant("draft heads", "the last row of a page is computed with a token of another request, not with the drawn one")
def the_drawn_token_is_not_read(patch: Patch) -> None:
    real = HeadDrafter.after_forward
    patch.setattr(HeadDrafter, "after_forward", lambda drafter, step, target, drawn: real(drafter, step, target, None))


@mutant("draft heads", "what the head computed of its own drafts counts as that of the tokens drawn there")
def drafts_of_a_head_count_as_computed(patch: Patch) -> None:
    real = HeadDrafter.after_forward

    def follow(drafter: HeadDrafter, step: Any, *others: Any) -> None:
        real(drafter, step, *others)
        drafted = step.draw_counts > 1
        drafter._computed[step.batch.rows[drafted]] = step.ends[drafted]

    patch.setattr(HeadDrafter, "after_forward", follow)


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


# -- trees


@mutant("draft trees", "after a right branch the head reads what it kept of a wrong one")
def what_a_head_keeps_is_not_moved(patch: Patch) -> None:
    patch.setattr(HeadDrafter, "moved", lambda drafter, step, batches, sources, targets: None)


@mutant("draft trees", "pages that a right branch fills have what the draft computes after all branches before it")
def branches_are_followed_as_a_chain(patch: Patch) -> None:
    for module in (draft_model, draft_head):
        patch.setattr(module, "parents_of", lambda step, at, starts: None)


@mutant("draft trees", "a branch is drafted at positions after those of the branch before it")
def positions_of_drafted_branches_are_their_rows(patch: Patch) -> None:
    real = draft_model.DraftLayers.running

    def running(layers: Any, requests: Any, starts: Any, ends: Any, parents: Any = None) -> Any:
        return real(layers, requests, starts, ends, parents)[0], real(layers, requests, starts, ends)[1]

    patch.setattr(draft_model.DraftLayers, "running", running)


@mutant("best first", "the children of an unlikely token are computed in place of likely ones")
def children_are_as_likely_as_without_their_parents(patch: Patch) -> None:
    real = BestFirst.grow

    def grow(tree: BestFirst, at: Any, tokens: Any, scores: Any) -> None:
        before, tree._scores = tree._scores, np.where(np.isfinite(tree._scores), 0, tree._scores)
        real(tree, at, tokens, scores)
        tree._scores = np.where(np.isfinite(before), before, tree._scores)

    patch.setattr(BestFirst, "grow", grow)

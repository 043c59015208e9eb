"""Mistakes with the log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from quire.cache import KVCache
from quire.engine.prompt_logprobs import PromptLogprobsPart
from quire.loop import StepResult
from quire.models.hf import LoadedModel
from quire.scheduler.step import Step
from tests.mutants.mutants import Patch, mutant


@mutant("prompts", "a score is that of another position, so that an evaluation ranks answers at random")
def logits_are_of_the_position_before(patch: Patch) -> None:
    real = PromptLogprobsPart._stretches_of

    def found(part: PromptLogprobsPart, step: Step) -> Iterator[Any]:
        for each in real(part, step):
            yield replace(each, row=max(0, each.row - 1))

    patch.setattr(PromptLogprobsPart, "_stretches_of", found)


@mutant("prompts", "a prompt that is cached has no scores")
def what_is_cached_is_not_computed(patch: Patch) -> None:
    real = KVCache.match
    patch.setattr(KVCache, "match", lambda cache, tokens, *space, **limits: real(cache, tokens, *space))


@mutant("prompts", "a request that was preempted is told some scores twice, and all behind them are shifted")
def what_was_reported_is_reported_again(patch: Patch) -> None:
    real = PromptLogprobsPart.settling

    def settling(part: PromptLogprobsPart, result: StepResult) -> None:
        asking = list(part._asking)
        real(part, result)
        for request in asking:
            if request in part._asking:
                request.most_cached = 0

    patch.setattr(PromptLogprobsPart, "settling", settling)


@mutant("prompts", "scores of a model that scales or caps its logits are those of another model")
def logits_are_those_of_the_output_layer(patch: Patch) -> None:
    real = LoadedModel.more_logits

    def logits(model: LoadedModel, running: Any, rows: Any) -> Any:
        if model._decoder is not None:
            return real(model, running, rows)
        return model.module.get_output_embeddings()(running.output.last_hidden_state[0][rows]).float()

    patch.setattr(LoadedModel, "more_logits", logits)

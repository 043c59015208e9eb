"""What an engine adds to speculation: a draft model on the target's pages, and samplers that keep what drafts need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.engine.config import EngineConfig
from quire.engine.device.draft_head import HeadDrafter
from quire.engine.device.draft_model import DraftLayers, ModelDrafter
from quire.engine.device.sampler import Sampler
from quire.engine.speculation_grammar import GrammarDrafts
from quire.loop import Part
from quire.models.draft_head import LoadedHead, load_head
from quire.models.hf import LoadedModel, load_model
from quire.spec.speculation import STANDARD
from quire.speculative.part import Speculation
from quire.speculative.speculator import speculator_of

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


def load_draft(config: EngineConfig, target: LoadedModel) -> LoadedModel | LoadedHead | None:
    """The draft model or head of this configuration, on the target's device and in its dtype; None if it has none.

    Raises what `load_model`, `load_head` and `load_mtp` raise.
    """
    speculation = config.speculative_config
    if speculation is not None and speculation.method == "mtp":
        from quire.models.mtp import load_mtp  # older versions of transformers lack what it imports

        return load_mtp(target, config.revision)
    if speculation is None or speculation.model is None:
        return None
    if speculation.method != "draft_model":
        is_eagle3 = speculation.method == "eagle3"
        return load_head(speculation.model, target, eagle3=is_eagle3, revision=speculation.revision)
    return load_model(
        speculation.model,
        dtype=target.spec.dtype.value,
        device=target.device,
        max_length=config.max_model_len,
        revision=speculation.revision,
        pack=config.pack_weights,
    )


def speculation_parts(engine: EngineCore) -> Iterator[Part]:
    """The part that drafts and verifies; none without speculation."""
    speculator = speculator_of(engine.config.speculative_config, engine.plan, engine.drafter)
    if speculator is not None:
        rejects = _rejects(engine.config)
        revision = GrammarDrafts(engine.grammars, rejects=rejects, follows=engine.drafter is not None)
        yield Speculation(speculator, engine.scheduler, engine.runner.move, revision)


def drafter_of(engine: EngineCore) -> ModelDrafter | HeadDrafter | None:
    """The drafts of a model that follows each step on the same pages; None without one."""
    speculation = engine.plan.speculation
    if engine.draft is None:
        return None
    assert speculation is not None, "a draft without a plan for its steps"
    layers = DraftLayers(len(engine.model.spec.calls), engine.cache, engine.pools, engine.backend)
    shared = (
        speculation,
        layers,
        sampler_of(engine.config, engine.eos_token_ids, drafts=True),
        engine.cache,
        engine.scheduler.tokens,
    )
    if isinstance(engine.draft, LoadedHead):
        return HeadDrafter(engine.draft, *shared)
    return ModelDrafter(engine.draft, *shared)


def sampler_of(config: EngineConfig, eos_token_ids: tuple[int, ...], *, drafts: bool = False) -> Sampler:
    """The sampler of an engine, or of its `drafts`."""
    keeps = drafts and _rejects(config)
    return Sampler(eos_token_ids, config.seed, keeps_probabilities=keeps, reports_logprobs=not drafts)


def _rejects(config: EngineConfig) -> bool:
    """Whether drafts are verified by rejection sampling."""
    speculation = config.speculative_config
    return speculation is not None and speculation.rejection_sample_method == STANDARD

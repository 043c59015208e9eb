"""What an engine adds to speculation: a draft model on the target's pages, and samplers that keep what drafts need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.running import Lengths
from quire.engine.config import EngineConfig
from quire.engine.device.draft_head import HeadDrafter
from quire.engine.device.draft_model import DraftLayers, ModelDrafter
from quire.engine.device.sampler import Sampler
from quire.grammar.matcher import Matcher
from quire.grammar.part import GrammarPart
from quire.kernels.native.ngrams import native_ngrams
from quire.loop import Part
from quire.models.draft_head import LoadedHead, load_head
from quire.models.hf import LoadedModel, load_model
from quire.scheduler.step import StepRows
from quire.spec.ids import Bools, Ids
from quire.spec.speculation import STANDARD
from quire.speculative.drafter import Drafts
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
    config, drafter = engine.config, engine.drafter
    revision = GrammarDrafts(engine.grammars, rejects=_rejects(config), follows=drafter is not None)
    made = (config.speculative_config, engine.plan, drafter, engine.scheduler, engine.runner.move, revision)
    yield from speculator_of(*made, native_ngrams)


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


@dataclass(frozen=True)
class GrammarDrafts:
    """Drafts of requests with a grammar, as a `Revision`: what it forbids is cut off, and tokens that it forces are
    added to chains.

    With `rejects`, drafts may be drawn again by rejection sampling, whose other draws depend on the draft: so the first
    forbidden one stays, which is never accepted. With `follows`, the drafter computes what it has proposed, and other
    tokens may only come behind that.
    """

    part: GrammarPart
    rejects: bool
    follows: bool

    @property
    def is_used(self) -> bool:
        """Whether any request has a grammar."""
        return self.part.is_used

    def revise(self, batch: StepRows, room: Lengths, drafts: Drafts | None) -> Drafts | None:
        """The drafts of these requests, at most `room[i]` tokens ahead; None for none."""
        at = (batch.terms["constrained"] & (room > 0)).nonzero()[0]
        if not len(at):
            return drafts
        width = int(room.max()) if drafts is None else max(drafts.tokens.shape[1], int(room.max()))
        tokens = np.zeros((len(batch), width), dtype=np.int32)
        counts = np.zeros(len(batch), dtype=np.int64)
        parents = None
        if drafts is not None:
            counts = drafts.counts.copy()
            tokens[:, : drafts.tokens.shape[1]] = drafts.tokens
            if drafts.parents is not None:
                parents = np.full(tokens.shape, -1, dtype=np.int32)
                parents[:, : drafts.parents.shape[1]] = drafts.parents
        for row in at.tolist():
            request = batch.requests[row]
            with self.part.timed(request) as matcher:
                if matcher is None:
                    continue
                matcher.advance(request.output_tokens)
                if matcher.has_ended or matcher.state.is_error():
                    continue
                own = tokens[row, : counts[row]].tolist()
                if parents is None:
                    chain = self._chain(matcher, own, int(room[row]))
                    counts[row] = len(chain)
                    tokens[row, : len(chain)] = chain
                else:
                    kept = matcher.visit(own, parents[row, : counts[row]].tolist())
                    counts[row] = _cut(tokens[row], parents[row], np.array(kept, dtype=np.bool_))
        found = Drafts(counts, tokens, parents)
        return found if found.num_tokens else None

    def _chain(self, matcher: Matcher, own: list[int], room: int) -> list[int]:
        forced: list[int] = []

        def last(draft: int) -> None:
            if draft == len(own) - 1:
                forced.extend(matcher.state.compute_ff_tokens())

        if own:
            allowed = matcher.visit(own, None, last)
            right = allowed.index(False) if False in allowed else len(own)
            if right < len(own) and (right or self.rejects or self.follows):
                return own[: right + self.rejects]
            own = own[:right]
        if not own:
            forced = matcher.state.compute_ff_tokens()
        return (own + forced)[:room]


def _cut(tokens: Ids, parents: Ids, kept: Bools) -> int:
    """Leave the drafts of a tree that are `kept`, in place; how many there are. What follows one that is not is not
    kept."""
    count = int(np.count_nonzero(kept))
    places = np.append(np.cumsum(kept) - 1, -1)  # where each goes; the last entry is for the parent -1
    before, above = tokens[: len(kept)][kept], parents[: len(kept)][kept]
    tokens[:count], parents[:count] = before, places[above]
    return count

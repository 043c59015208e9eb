"""Drafts from a smaller model: it runs on the pages of the target, in which its layers have fields of their own.

A page of tokens has the keys and values of both models: one page id, one eviction, one prefix cache, and one record on
lower tiers. A page is committed only after both models have computed it:

    step       the target computes rows; a page that they fill is computed by the draft too (`follow`)
    propose    the draft computes what it lacks up to the last known token, and then one draft after the other
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.cache import KVCache
from quire.cache.running import Lengths, Rows, RunningBatch
from quire.engine.device.sampler import Drawn, Proposal, Sampler
from quire.errors import OutOfPages
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.slots import flatten_ranges
from quire.loop import ForwardPart
from quire.memory.pool import Pool
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel
from quire.scheduler.step import Places, Step, StepRows
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.speculation import SpeculativeConfig
from quire.speculative.drafter import BestFirst, Drafting, Drafts, no_drafts
from quire.upload import to_device


class DraftLayers:
    """The layers of a draft in the pool of one group of its target. Their ordinals are `first` and those after it."""

    def __init__(self, first: int, cache: KVCache, pools: tuple[Pool, ...], backend: AttentionBackend) -> None:
        self._first = first
        self._backend = backend
        self._cache = cache
        groups = cache.plan.groups
        self._group = next(at for at, g in enumerate(groups) if any(first in field.layers for field in g.layout.fields))
        self._pool = pools[self._group]

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self._pool.device

    def running(
        self, requests: RunningBatch, starts: Lengths, ends: Lengths, parents: Ids | None = None
    ) -> tuple[RunningForward, Tensor]:
        """A pass over rows `starts[i]:ends[i]` of request i, at least one, and their positions, int64 `[rows]`.

        Pages up to `ends` are allocated. `parents` as in `PagedBatch`: without it, row n is at position n.
        """
        offsets = np.zeros(len(starts) + 1, dtype=np.int64)
        np.cumsum(ends - starts, out=offsets[1:])
        rows = self._cache.rows
        frames = rows.page_table(requests, ends, self._group)
        return self._pass(offsets, ends, frames, rows.slots(requests, starts, ends, self._group), parents)

    def ahead(self, requests: RunningBatch, starts: Lengths, ends: Lengths) -> RowsAhead:
        """Passes over rows `starts[i]:ends[i]` of request i, one row after the other. Pages up to `ends` are
        allocated."""
        rows, counts = self._cache.rows, ends - starts
        frames = rows.page_table(requests, ends, self._group)
        slots = rows.slots(requests, starts, ends, self._group)
        return RowsAhead(self._pass, starts, frames, slots, np.cumsum(counts) - counts)

    def _pass(
        self, offsets: Lengths, ends: Lengths, frames: Ids, slots: Ids, parents: Ids | None = None
    ) -> tuple[RunningForward, Tensor]:
        batch = PagedBatch(
            query_starts=offsets.astype(np.int32),
            context_lens=ends.astype(np.int32),
            frames=frames,
            slots=slots,
            page_size=self._cache.page_size,
            parents=parents,
            backend=self._backend,
        )
        positions = ends - 1 if len(slots) == len(ends) else batch.positions()
        return RunningForward((self._pool,), (batch,), first=self._first), to_device(positions, self.device)


@dataclass(frozen=True, slots=True)
class RowsAhead:
    """Passes of one row of each request, whose pages were looked up together. `slots` are those of all rows, and begin
    at `firsts[i]` for request i."""

    make: Callable[[Lengths, Lengths, Ids, Ids], tuple[RunningForward, Tensor]]
    starts: Lengths
    frames: Ids
    slots: Ids
    firsts: Lengths

    def running(self, place: int, at: Rows) -> tuple[RunningForward, Tensor]:
        """As `DraftLayers.running`, over row `place` behind the first one of the requests `at`."""
        offsets, ends = np.arange(len(at) + 1), self.starts[at] + (place + 1)
        return self.make(offsets, ends, self.frames[at], self.slots[self.firsts[at] + place])


class Ahead(NamedTuple):
    """Requests that draft, the tokens that each has, and how many tokens ahead it may draft."""

    requests: StepRows
    known: Lengths
    depth: Lengths

    def part(self, places: Rows) -> Ahead:
        return Ahead(self.requests.part(places), self.known[places], self.depth[places])


Expand = Callable[[Ahead, Rows, Ids, Ids], Tensor]
"""Computes the rows of trees that follow the known tokens. Given are the requests, which of the last ones they are, and
the row that each row follows: of its request, `[requests, rows]`, and flat, as in `PagedBatch`. Returns logits behind
the `topk` last rows of each, float32 `[requests * topk, vocabulary]`."""


class PageDrafter(ForwardPart):
    """What drafters on the pages of their target share.

    `tokens` int32 `[rows, width]` has the tokens of all rows, as in `Drafting`; drafts are written after the known
    ones.
    """

    def __init__(
        self, config: SpeculativeConfig, layers: DraftLayers, sampler: Sampler, cache: KVCache, tokens: Ids
    ) -> None:
        self._layers = layers
        self._sampler = sampler
        self._cache = cache
        self._tokens = tokens
        self._config = config
        self._serials: Lengths = np.zeros(len(tokens), dtype=np.int64)  # when a step of each row was followed last
        self._computed: Lengths = np.zeros(len(tokens), dtype=np.int64)  # leading positions that the draft has computed
        self._drawing: list[tuple[Rows, int, Tensor]] = []  # rows, place and probabilities of the drafts being drawn
        self._drawn = self._drawing  # the last drafts', if all of them were drawn

    def preparing(self, step: Step) -> None:
        step.proposals = self.proposals(step)

    def proposals(self, step: Step) -> tuple[Proposal, ...]:
        """The drafts of a step that were drawn from known probabilities."""
        drawers = step.drawers
        places = np.arange(len(drawers)) - (np.cumsum(step.draw_counts) - step.draw_counts)[drawers]
        if not self._drawn or not places.any():
            return ()
        most = max(place for _, place, _ in self._drawn) + 1
        entries = np.full((len(self._tokens), max(most, int(places.max()) + 1)), -1, dtype=np.int64)
        num_entries = 0
        for rows, place, _ in self._drawn:
            entries[rows, place] = num_entries + np.arange(len(rows))
            num_entries += len(rows)
        found = np.where(places < step.draw_counts[drawers] - 1, entries[step.batch.rows[drawers], places], -1)
        draws = (found >= 0).nonzero()[0]
        if not len(draws):
            return ()
        chosen = to_device(found[draws], self._layers.device)
        every = torch.cat([probabilities for _, _, probabilities in self._drawn])
        return (Proposal(draws, step.tokens[step.draws[draws] + 1], every[chosen]),)

    def _draw(self, requests: StepRows, known: Lengths, place: int, logits: Tensor) -> Tensor:
        """Draw draft number `place` behind the known tokens of each request, int64 `[requests]`."""
        places = Places(requests.terms, known + place - requests.prompt, requests.requests)
        drawn = self._sampler.draw(logits, places)
        if drawn.probabilities is not None:
            sampled, probabilities = drawn.probabilities
            self._drawing.append((requests.rows[sampled], place, probabilities))
        return drawn.tokens

    def _with_room(self, drafting: Drafting) -> tuple[Lengths, Rows, StepRows | None]:
        """How many drafts each request gets, whose places have any, and their batch with room for them; None if none
        has."""
        batch, known = drafting.batch, drafting.known
        self._drawing, self._drawn = [], []
        assert isinstance(batch, StepRows)
        begun = self._serials[batch.rows] == batch.serials
        begun[[at for at, kv in enumerate(batch.kvs) if kv.loads]] = False  # its pages may be arriving
        most = np.where(begun, drafting.most, 0)
        if self._config.branches:  # rows for the nodes that are expanded at each depth but the last
            most = np.minimum(most, 1 + (self._tokens.shape[1] - known) // self._config.topk)
        at = most.nonzero()[0]
        if not len(at):
            return most, at, None
        some = batch if len(at) == len(batch) else batch.part(at)
        try:
            self._cache.reserve(some, known[at] + (most[at] - 1) * self._config.topk + 1)
        except OutOfPages:
            return most, at, None
        return most, at, some

    def _grow(self, num_requests: int, at: Rows, ahead: Ahead, logits: Tensor, expand: Expand) -> Drafts:
        """Trees of the requests `at` of so many. `logits` are those behind the last known tokens."""
        topk, depth = self._config.topk, int(ahead.depth.max())
        tree = BestFirst(num_requests, topk, depth)
        tree.grow(at, *self._children(ahead, 0, logits))
        for place in range(1, depth):
            going = (ahead.depth > place).nonzero()[0]
            if len(going) < len(at):
                at, ahead = at[going], ahead.part(going)
            tokens, parents = tree.rows(at)
            rows = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
            flat = np.where(parents < 0, -1, rows[:, :1] + parents).astype(np.int32).reshape(-1)
            self._tokens[ahead.requests.rows[:, None], ahead.known[:, None] + rows[0]] = tokens
            tree.grow(at, *self._children(ahead, place, expand(ahead, going, parents, flat)))
        return tree.drafts(self._config.num_draft_tokens - 1)

    def _children(self, ahead: Ahead, place: int, logits: Tensor) -> tuple[Ids, npt.NDArray[np.float32]]:
        """The likeliest tokens after each row of `logits`, and their log-probabilities, int32 and float32 `[requests,
        rows, topk]`. That a token is drawn there is the likelier, the higher its score is, noise included."""
        requests, count = ahead.requests, len(ahead.known)
        width = len(logits) // count
        outputs = np.repeat(ahead.known + place - requests.prompt, width)
        places = Places(requests.terms.repeat(width), outputs, [r for r in requests.requests for _ in range(width)])
        likely = torch.log_softmax(self._sampler.scores(logits, places), dim=-1).topk(self._config.topk)
        scores, tokens = (found.cpu().numpy().reshape(count, width, -1) for found in likely)
        return tokens.astype(np.int32), scores

    def moved(self, step: Step, batches: Sequence[Any], sources: Rows, targets: Rows) -> None:
        """What the flat place `sources[i]` of a step has on the pages is at `targets[i]` now."""

    def ended(self, namespace: Namespace, tokens: Ids, num_cached: int) -> None:
        """Nothing is kept beyond the pages."""

    def clear(self, namespace: Namespace | None) -> None:
        """Nothing is kept beyond the pages."""


class ModelDrafter(PageDrafter):
    """Drafts of a smaller model: see the module."""

    def __init__(
        self,
        model: LoadedModel,
        config: SpeculativeConfig,
        layers: DraftLayers,
        sampler: Sampler,
        cache: KVCache,
        tokens: Ids,
    ) -> None:
        super().__init__(config, layers, sampler, cache, tokens)
        self._model = model

    @torch.inference_mode()
    def propose(self, drafting: Drafting) -> Drafts:
        """What the draft model draws next, with the noise that the target's draws use."""
        batch = drafting.batch
        most, at, some = self._with_room(drafting)
        if some is None:
            return no_drafts(len(batch))
        known, depth = drafting.known[at], most[at]
        starts = np.minimum(self._computed[some.rows], known - 1)
        if self._config.branches:
            logits = self._forward(some, starts, known, last=1)
            self._computed[some.rows] = known
            return self._grow(len(batch), at, Ahead(some, known, depth), logits, self._expand)
        tokens = np.zeros((len(batch), int(depth.max())), dtype=np.int32)
        for place in range(tokens.shape[1]):
            if not (depth > place).all():
                going = (depth > place).nonzero()[0]
                some, at, known, depth, starts = some.part(going), at[going], known[going], depth[going], starts[going]
            logits = self._forward(some, starts, known + place, last=1)
            drawn = self._draw(some, known, place, logits)
            tokens[at, place] = self._tokens[some.rows, known + place] = drawn.cpu().numpy()
            starts = known + place
        self._computed[batch.rows] = np.where(most > 0, drafting.known + most - 1, self._computed[batch.rows])
        self._drawn = self._drawing
        return Drafts(most, tokens)

    def after_forward(self, step: Step, target: RunningForward, drawn: Drawn | None) -> None:
        """The target computes this step: compute the pages that it fills, as far as the draft lacks them."""
        del target, drawn
        rows, ends = step.batch.rows, step.ends
        computed = np.where(self._serials[rows] == step.batch.serials, self._computed[rows], step.starts)
        drafted = step.draw_counts > 1
        computed = np.where(drafted, computed, np.minimum(computed, step.starts))  # else some were rejected
        at = (ends // self._cache.page_size * self._cache.page_size > computed).nonzero()[0]
        if len(at):
            parents = parents_of(step, at, computed[at])
            self._forward(step.batch.part(at), computed[at], ends[at], last=0, parents=parents)
            computed[at] = ends[at]
        self._serials[rows], self._computed[rows] = step.batch.serials, computed

    def _expand(self, ahead: Ahead, going: Rows, parents: Ids, flat: Ids) -> Tensor:
        del going
        ends = ahead.known + parents.shape[1]
        return self._forward(ahead.requests, ahead.known, ends, last=self._config.topk, parents=flat)

    def _forward(
        self, requests: StepRows, starts: Lengths, ends: Lengths, *, last: int, parents: Ids | None = None
    ) -> Tensor:
        """Compute rows `starts[i]:ends[i]` of request i. Returns logits float32 `[requests * last, vocabulary]` of the
        last rows of each."""
        counts = ends - starts
        ids = self._tokens[np.repeat(requests.rows, counts), flatten_ranges(starts, ends)].astype(np.int64)
        wanted = (counts.cumsum()[:, None] - np.arange(last, 0, -1)).reshape(-1)
        running, positions = self._layers.running(requests, starts, ends, parents)
        flat = (to_device(array, self._layers.device) for array in (ids, wanted))
        return self._model.run(running, next(flat), positions, next(flat))


def parents_of(step: Step, at: Rows, starts: Lengths) -> Ids | None:
    """The row that each row from `starts[i]` to the end of work `at[i]` follows, as in `PagedBatch`. None: the one
    before it. Rows before the work are of a chain."""
    if step.parents is None:
        return None
    counts = step.ends[at] - starts
    firsts = np.repeat(counts.cumsum() - counts, counts)
    rows = np.arange(len(firsts))
    begins = np.repeat(step.offsets[at] + starts - step.starts[at], counts)  # flat place in the step of each first row
    flat = begins + rows - firsts
    parents = np.where(rows > firsts, rows - 1, -1)
    inside = (flat > np.repeat(step.offsets[at], counts)).nonzero()[0]
    above = step.parents[flat[inside]] - begins[inside]
    parents[inside] = np.where(above < 0, -1, above + firsts[inside])
    return parents.astype(np.int32)

"""Drafts from an EAGLE head: its layer runs on the pages of the target, behind the target's own passes.

    position      0    1    2    3    4
    token         a    b    c    d    e        e is the last known one, so the target has not computed it
    features      f0   f1   f2   f3            from the target's passes
    head reads    f0 b f1 c f2 d f3 e          its last output drafts the token at 5, and is f4'
    drafts                       f4' + draft   and so on

Keys and values of the head at a position depend on the token behind it. For the last row of a step that is the token
that was drawn there, so a page that a step fills is complete before it is committed, as those of a draft model are. A
request that finds the page and goes on with another token reads what the first one wrote: drafts are a little worse at
one position, and no page is computed twice. Features of rows that the head has not computed are kept for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.cache import KVCache
from quire.cache.running import Lengths, Rows
from quire.engine.device.draft_model import Ahead, DraftLayers, PageDrafter, parents_of
from quire.engine.device.sampler import Drawn, Sampler
from quire.kernels.slots import flatten_ranges
from quire.memory.pool import torch_dtype
from quire.models.draft_head import LoadedHead
from quire.models.forward import RunningForward
from quire.scheduler.step import Step, StepRows
from quire.spec.ids import Ids
from quire.spec.speculation import SpeculativeConfig
from quire.speculative.drafter import Drafting, Drafts, no_drafts
from quire.upload import to_device


class _Recent:
    """The vectors of the last positions of each running row, on the device."""

    def __init__(self, num_rows: int, width: int, head: LoadedHead) -> None:
        self._width = width
        shape = (num_rows * width, head.hidden_size)
        self._kept = torch.zeros(shape, dtype=torch_dtype(head.spec.dtype), device=head.device)
        self.num_bytes = self._kept.nbytes

    def of(self, rows: Rows, positions: Lengths) -> Tensor:
        """Those at these positions, `[len(positions), hidden]`, which must be among the last ones stored."""
        return self._kept[self._places(rows, positions)]

    def store(self, rows: Rows, positions: Lengths, ends: Lengths, vectors: Tensor) -> None:
        """Those of these positions replace older ones. `ends` are where the row of each ends."""
        last = (positions >= ends - self._width).nonzero()[0]
        if len(last) < len(positions):
            rows, positions, vectors = rows[last], positions[last], vectors[to_device(last, vectors.device)]
        self._kept.index_copy_(0, self._places(rows, positions), vectors.to(self._kept.dtype))

    def move(self, rows: Rows, sources: Lengths, targets: Lengths) -> None:
        """What is stored of positions `sources` is that of `targets` now."""
        self._kept[self._places(rows, targets)] = self._kept[self._places(rows, sources)]

    def _places(self, rows: Rows, positions: Lengths) -> Tensor:
        return to_device(rows * self._width + positions % self._width, self._kept.device)


class HeadDrafter(PageDrafter):
    """Drafts of a head: see the module."""

    def __init__(
        self,
        head: LoadedHead,
        config: SpeculativeConfig,
        layers: DraftLayers,
        sampler: Sampler,
        cache: KVCache,
        tokens: Ids,
    ) -> None:
        super().__init__(config, layers, sampler, cache, tokens)
        self._head = head
        self._features = _Recent(len(tokens), cache.plan.kept_features, head)
        self._outputs = _Recent(len(tokens), cache.plan.kept_features, head)
        built, planned = self._features.num_bytes + self._outputs.num_bytes, cache.plan.feature_bytes
        assert built == planned, f"built {built} bytes of features, planned {planned}"

    @torch.inference_mode()
    def propose(self, drafting: Drafting) -> Drafts:
        """What the head draws next, with the noise that the target's draws use."""
        batch = drafting.batch
        most, at, some = self._with_room(drafting)
        if some is None:
            return no_drafts(len(batch))
        known, depth = drafting.known[at], most[at]
        self._catch_up(some, known)
        features = self._outputs.of(some.rows, known - 2)
        if self._config.branches:
            return self._grow_from(features, len(batch), at, Ahead(some, known, depth))
        tokens = np.zeros((len(batch), int(depth.max())), dtype=np.int32)
        ahead, which = self._layers.ahead(some, known - 1, known + depth - 2), np.arange(len(at))
        for place in range(tokens.shape[1]):
            drawn = self._draw(some, known, place, self._head.logits(features))
            tokens[at, place] = self._tokens[some.rows, known + place] = drawn.cpu().numpy()
            going = (depth > place + 1).nonzero()[0]
            if not len(going):
                break
            if len(going) < len(at):
                some, at, which = some.part(going), at[going], which[going]
                known, depth = known[going], depth[going]
                where = to_device(going, features.device)
                features, drawn = features[where], drawn[where]
            running, positions = ahead.running(place, which)
            features = self._head.run(running, drawn, features, positions)
        self._drawn = self._drawing
        return Drafts(most, tokens)

    def _grow_from(self, features: Tensor, num_requests: int, at: Rows, ahead: Ahead) -> Drafts:
        """Trees, given the features of each last known token. A node reads the output of the row that it follows."""
        size, topk = features.shape[-1], self._config.topk
        above = features[:, None]  # and the outputs of the rows of the last pass

        def expand(ahead: Ahead, going: Rows, parents: Ids, flat: Ids) -> Tensor:
            nonlocal above
            above = above[to_device(going, above.device)]
            which = to_device(parents.astype(np.int64) + 1, above.device)
            read = above.gather(1, which[:, :, None].expand(-1, -1, size))
            places = ahead.known[:, None] + np.arange(parents.shape[1])
            tokens = self._tokens[ahead.requests.rows[:, None], places].astype(np.int64).reshape(-1)
            following = to_device(tokens, above.device)
            starts, ends = ahead.known - 1, ahead.known - 1 + parents.shape[1]
            outputs = self._run(ahead.requests, starts, ends, following, read.flatten(0, 1), flat).view(read.shape)
            above = torch.cat((above[:, :1], outputs), dim=1)
            return self._head.logits(outputs[:, -topk:].flatten(0, 1))

        return self._grow(num_requests, at, ahead, self._head.logits(features), expand)

    def _catch_up(self, requests: StepRows, known: Lengths) -> None:
        """Compute what the head lacks up to the features before the last known token."""
        computed = self._computed[requests.rows]
        behind = (computed < known - 1).nonzero()[0]
        if not len(behind):
            return
        starts, ends = computed[behind], known[behind] - 1
        part = requests if len(behind) == len(requests) else requests.part(behind)
        rows, positions = np.repeat(part.rows, ends - starts), flatten_ranges(starts, ends)
        following = to_device(self._tokens[rows, positions + 1].astype(np.int64), self._layers.device)
        outputs = self._run(part, starts, ends, following, self._features.of(rows, positions))
        self._outputs.store(rows, positions, np.repeat(ends, ends - starts), outputs)
        self._computed[part.rows] = ends

    @torch.inference_mode()
    def after_forward(self, step: Step, target: RunningForward, drawn: Drawn | None) -> None:
        """The target has computed this step: keep its features, and compute the pages that it fills."""
        rows, starts, ends = step.batch.rows, step.starts, step.ends
        computed = np.where(self._serials[rows] == step.batch.serials, self._computed[rows], starts)
        computed = np.minimum(computed, starts)  # what drafts were accepted is computed from the target's features
        features = self._head.features(target)
        at = (ends // self._cache.page_size * self._cache.page_size > computed).nonzero()[0]
        if len(at):
            self._fill(step, at, computed[at], features, drawn)
            computed[at] = ends[at]
        if step.num_tokens == len(step):  # one row each
            self._features.store(rows, starts, ends, features)
        else:
            places = flatten_ranges(starts, ends)  # rows of a tree, not their positions
            self._features.store(np.repeat(rows, step.counts), places, np.repeat(ends, step.counts), features)
        self._serials[rows], self._computed[rows] = step.batch.serials, computed

    def _fill(self, step: Step, at: Rows, starts: Lengths, features: Tensor, drawn: Drawn | None) -> None:
        """Compute positions from `starts[i]` to its end of work `at[i]`, the last ones of which are in this step."""
        ends, device = step.ends[at], features.device
        work, positions = np.repeat(at, ends - starts), flatten_ranges(starts, ends)
        rows = step.batch.rows[work]
        flat = step.offsets[work] + positions - step.starts[work]
        old, new = (positions < step.starts[work]).nonzero()[0], (positions >= step.starts[work]).nonzero()[0]
        read = features.new_empty(len(positions), features.shape[1])
        read[to_device(new, device)] = features[to_device(flat[new], device)]
        if len(old):
            kept = self._features.of(rows[old], positions[old])
            read[to_device(old, device)] = kept.to(read.dtype)
        last = self._tokens.shape[1] - 1
        following = to_device(self._tokens[rows, np.minimum(positions + 1, last)].astype(np.int64), device)
        if drawn is not None:
            draw_of = np.full(step.num_tokens, -1, dtype=np.int64)
            draw_of[step.draws] = np.arange(len(step.draws))
            draws = draw_of[flat[new]]
            where, which = (to_device(a, device) for a in (new[draws >= 0], draws[draws >= 0]))
            following[where] = drawn.tokens[which]
        part = step.batch if len(at) == len(step) else step.batch.part(at)
        outputs = self._run(part, starts, ends, following, read, parents_of(step, at, starts))
        self._outputs.store(rows, positions, step.ends[work], outputs)

    def moved(self, step: Step, batches: Sequence[Any], sources: Rows, targets: Rows) -> None:
        """See `PageDrafter`. What is kept of each row is moved too."""
        works = np.searchsorted(step.offsets, sources, side="right") - 1
        ahead = (step.starts - step.offsets[:-1])[works]
        for kept in (self._features, self._outputs):
            kept.move(step.batch.rows[works], sources + ahead, targets + ahead)

    def _run(
        self,
        requests: StepRows,
        starts: Lengths,
        ends: Lengths,
        following: Tensor,
        features: Tensor,
        parents: Ids | None = None,
    ) -> Tensor:
        """The head's outputs of rows `starts[i]:ends[i]` of request i; `following` are the tokens behind them."""
        running, positions = self._layers.running(requests, starts, ends, parents)
        return self._head.run(running, following, features, positions)

"""FakeModel: a model and its device in one, for schedulers and engines under test. It computes no numbers.

Its next token is a fixed function of the namespace and of all tokens before, so a request's output does not depend on
what else runs: any difference from `FakeModel.solo` is a fault of the scheduler or the cache. A launched step captures
page tables and slots as a device would, and touches memory only when it is executed, steps in launch order. So a page
handed out again too early is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache import KVCache
from quire.cache.groups import Pieces
from quire.cache.request_kv import RequestKV
from quire.scheduler.batch import Batch, Work
from quire.scheduler.request import Request
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.testing.content import ContentOracle, slots_of_frames

NO_SLOTS: Ids = np.empty(0, dtype=np.int32)


def next_token(namespace: Namespace, tokens: Sequence[int] | Ids, vocabulary: int) -> int:
    """The token that follows `tokens`: a fixed draw from `0..vocabulary - 1`."""
    digest = hashlib.blake2b(repr(namespace).encode(), digest_size=8)
    digest.update(np.asarray(tokens, dtype=np.int32).tobytes())
    return int.from_bytes(digest.digest(), "little") % vocabulary


@dataclass(slots=True)
class FakeStep:
    """A launched step: what the device knows of it. `drawn` is filled by `FakeModel.execute`."""

    batch: Batch
    fence: int
    previous: FakeStep | None
    known: list[Ids]  # per work: the request's tokens on the host at launch
    writes: list[Ids]  # per group: slots of the works' tokens, packed
    reads: list[list[Ids]]  # per group, per work: slots of its context, from the first page it reads on
    pieces: dict[int, Pieces]  # by group of which requests carry a frame
    drawn: list[int | None] = field(default_factory=list)


class FakeModel:
    """Executes batches of `Work` on a cache without bytes. Raises AssertionError when a step reads what it must not."""

    def __init__(self, cache: KVCache, vocabulary: int = 3) -> None:
        self.oracle = ContentOracle(cache)
        self.vocabulary = vocabulary
        self._cache = cache

    def launch(self, batch: Batch, previous: FakeStep | None = None) -> FakeStep:
        """Start a step and open its fence. `previous` is the step in flight whose tokens this one may continue."""
        kvs = [work.kv for work in batch.works]
        starts = np.array([work.start for work in batch.works], dtype=np.int64)
        ends = starts + np.array([work.count for work in batch.works], dtype=np.int64)
        fence = self._cache.open_fence()
        writes, reads, pieces = [], [], {}
        for index in range(len(self._cache.groups)):
            carried = self._cache.launch(index, kvs, ends)
            if carried is not None:
                pieces[index] = carried
            writes.append(self._cache.rows.slots(kvs, starts, ends, index) if carried is None else NO_SLOTS)
            reads.append(self._reads(index, kvs, starts, ends) if carried is None else [])
        known = [work.request.tokens.copy() for work in batch.works]
        return FakeStep(batch, fence, previous, known, writes, reads, pieces)

    def _reads(self, index: int, kvs: list[RequestKV], starts: np.ndarray, ends: np.ndarray) -> list[Ids]:
        size, reach = self._cache.page_size, self._cache.groups[index].reach
        table = self._cache.rows.page_table(kvs, ends, index)
        firsts = [reach.needed(start // size).start for start in starts.tolist()]
        return [
            slots_of_frames(frames[first:], size)[: int(end) - first * size]
            for frames, first, end in zip(table, firsts, ends, strict=True)
        ]

    def execute(self, step: FakeStep) -> list[int | None]:
        """Run a launched step on the device; returns the token of each work, None where it draws none."""
        inputs = [self._contents(step, index) for index in range(len(step.known))]
        new = [contents[work.start :] for work, contents in zip(step.batch.works, inputs, strict=True)]
        for group, reads in enumerate(step.reads):
            if group in step.pieces:
                self._carry(group, step.pieces[group], step, inputs)
                continue
            self.oracle.write(group, step.writes[group], np.concatenate(new))
            for slots, contents in zip(reads, inputs, strict=True):
                self.oracle.check(group, slots, contents[len(contents) - len(slots) :])
        step.drawn = [self._draw(step, index) for index in range(len(step.known))]
        step.previous = None
        return step.drawn

    def _carry(self, group: int, pieces: Pieces, step: FakeStep, inputs: list[np.ndarray]) -> None:
        """Each piece reads what its request holds so far, if that is anything, and writes what it holds then."""
        at = 0
        for work, contents in zip(step.batch.works, inputs, strict=True):
            position = work.start
            while position < work.start + work.count:
                if position:
                    self.oracle.check(group, pieces.sources[at : at + 1], contents[position - 1 : position])
                else:
                    assert pieces.sources[at] == 0, "a request began with what another one holds"
                position += int(pieces.lengths[at])
                self.oracle.write(group, pieces.targets[at : at + 1], contents[position - 1 : position])
                at += 1
        assert at == len(pieces.lengths), "pieces that belong to no request"

    def solo(self, request: Request) -> list[int]:
        """The output of the request as if nothing else existed, by the definition and without a cache."""
        tokens: list[int] = request.tokens[: request.num_prompt_tokens].tolist()
        for _ in range(request.max_tokens):
            tokens.append(next_token(request.namespace, tokens, self.vocabulary))
            drawn = len(tokens) - request.num_prompt_tokens
            if tokens[-1] in request.stop_ids and drawn >= request.params.min_tokens:
                break
        return tokens[request.num_prompt_tokens :]

    def _draw(self, step: FakeStep, index: int) -> int | None:
        work = step.batch.works[index]
        return next_token(work.request.namespace, self._input(step, index), self.vocabulary) if work.samples else None

    def _contents(self, step: FakeStep, index: int) -> np.ndarray:
        return self.oracle.contents(step.batch.works[index].request.namespace, self._input(step, index).tolist())

    def _input(self, step: FakeStep, index: int) -> Ids:
        """The tokens of one work from its first to its last, with the one that only the device knows."""
        work, known = step.batch.works[index], step.known[index]
        end = work.start + work.count
        if len(known) < end:
            assert step.previous is not None, "a token is pending and no step is in flight"
            known = step.known[index] = np.append(known, np.int32(_drawn_for(step.previous, work)))
        return known[:end]


def _drawn_for(step: FakeStep, work: Work) -> int:
    tokens = [token for other, token in zip(step.batch.works, step.drawn, strict=True) if other.request is work.request]
    (token,) = tokens
    assert token is not None
    return token

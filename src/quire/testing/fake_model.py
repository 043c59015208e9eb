"""FakeModel: a model and its device in one, for schedulers and engines under test. It computes no numbers.

Its next token is a fixed function of the namespace and of all tokens before, so a request's output does not depend on
other requests: any difference from `FakeModel.solo` is a fault of the scheduler or the cache. A launched step captures
page tables and slots like a device. It touches memory only when it is executed, in launch order. So a page that
is allocated again too early is detected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache import KVCache
from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths
from quire.cache.states import StatePieces
from quire.scheduler.request import Request
from quire.scheduler.step import Step
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
    """A launched step, as the device has it. `drawn` is filled by `FakeModel.execute`."""

    step: Step
    fence: int
    previous: FakeStep | None
    inputs: list[Ids]  # per work: the request's tokens up to its last one, some of them still to come
    writes: list[Ids]  # per group: slots of the works' tokens, packed
    reads: list[list[Ids]]  # per group, per work: slots of its context, from the first page it reads on
    pieces: dict[int, StatePieces]  # key: group of which requests carry a frame
    drawn: Lengths = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class FakeModel:
    """Executes steps on a cache without bytes. Raises AssertionError when a step reads what it must not."""

    def __init__(self, cache: KVCache, vocabulary: int = 3) -> None:
        self.oracle = ContentOracle(cache)
        self.vocabulary = vocabulary
        self._cache = cache

    def launch(self, step: Step, previous: FakeStep | None = None) -> FakeStep:
        """Start a step and open its fence. `previous` is the step in flight whose tokens this one may continue."""
        kvs, starts, ends = list(step.batch.kvs), step.starts, step.ends
        fence = self._cache.open_fence()
        writes, reads, pieces = [], [], {}
        for index in range(len(self._cache.groups)):
            carried = self._cache.launch(index, step.batch, ends, step.draw_counts)
            if carried is not None:
                pieces[index] = carried
            writes.append(self._cache.rows.slots(step.batch, starts, ends, index) if carried is None else NO_SLOTS)
            reads.append(self._reads(index, kvs, starts, ends) if carried is None else [])
        news = np.split(step.tokens.astype(np.int32), step.offsets[1:-1])
        inputs = [
            np.concatenate((request.tokens[:start], new))
            for request, start, new in zip(step.requests, starts.tolist(), news, strict=True)
        ]
        return FakeStep(step, fence, previous, inputs, writes, reads, pieces)

    def _reads(self, index: int, kvs: list[RequestKV], starts: np.ndarray, ends: np.ndarray) -> list[Ids]:
        size, reach = self._cache.page_size, self._cache.groups[index].reach
        table = self._cache.rows.page_table(kvs, ends, index)
        firsts = [reach.needed(start // size).start for start in starts.tolist()]
        return [
            slots_of_frames(frames[first:], size)[: int(end) - first * size]
            for frames, first, end in zip(table, firsts, ends, strict=True)
        ]

    def execute(self, step: FakeStep) -> Lengths:
        """Run a launched step on the device; returns the tokens it draws, int64."""
        self._continue(step)
        requests, starts = step.step.requests, step.step.starts.tolist()
        inputs = [
            self.oracle.contents(request.namespace, tokens.tolist())
            for request, tokens in zip(requests, step.inputs, strict=True)
        ]
        new = [contents[start:] for start, contents in zip(starts, inputs, strict=True)]
        for group, reads in enumerate(step.reads):
            if group in step.pieces:
                self._carry(group, step.pieces[group], step, inputs)
                continue
            self.oracle.write(group, step.writes[group], np.concatenate(new))
            for slots, contents in zip(reads, inputs, strict=True):
                self.oracle.check(group, slots, contents[len(contents) - len(slots) :])
        step.drawn = self._draw(step)
        step.previous = None
        return step.drawn

    def _carry(self, group: int, pieces: StatePieces, step: FakeStep, inputs: list[np.ndarray]) -> None:
        """Each piece reads the state of its request, if there is one, and writes the next."""
        at = 0
        for position, end, contents in zip(step.step.starts.tolist(), step.step.ends.tolist(), inputs, strict=True):
            while position < end:
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

    def _draw(self, step: FakeStep) -> Lengths:
        """The token behind each place that draws one."""
        found = []
        for work, place in zip(step.step.drawers.tolist(), step.step.draws.tolist(), strict=True):
            tokens = step.inputs[work][: int(step.step.positions[place]) + 1]
            found.append(next_token(step.step.requests[work].namespace, tokens, self.vocabulary))
        return np.array(found, dtype=np.int64)

    def _continue(self, step: FakeStep) -> None:
        """The tokens that only the device knew when the step was launched."""
        if len(step.step.future):
            assert step.previous is not None, "a token is pending and no step is in flight"
            drawn = step.previous.drawn[step.step.continued(step.previous.step)]
            works = np.searchsorted(step.step.offsets, step.step.future, side="right") - 1
            for work, place, token in zip(works.tolist(), step.step.future.tolist(), drawn.tolist(), strict=True):
                step.inputs[work][step.step.positions[place]] = token

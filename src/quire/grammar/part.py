"""GrammarPart: what the draws of a step may be, for requests with a grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher

from quire.cache.running import Rows
from quire.counters import Section, counter, gauge
from quire.errors import InvalidInput, Overloaded, QuireError
from quire.grammar.compiler import Compiler
from quire.grammar.matcher import Matcher
from quire.loop import End, ForwardPart, Loop, Part
from quire.loop.part import Launched
from quire.scheduler.request import Request
from quire.scheduler.step import Places, Step
from quire.spec.ids import Ids

PATIENCE_S = 60.0
"""Time for a grammar to be compiled, behind others, and for the first one to load the tokenizer."""

MASK_S = 0.01
SLOW_S = 0.2
"""A request's masks may take so long each, on the average, and so much more together."""

ROW_S = 0.002
STEP_S = 0.2
"""Masks and drafts of a row may take so long, and those of one owner in one step so much more together. Then its
slowest grammar ends."""


@dataclass(kw_only=True)
class MaskCounters:
    """Masks of the tokens that a grammar allows."""

    masks: int = counter("Masks of the tokens that a grammar allows.", name="grammar_masks")
    mask_seconds: float = counter("Time in which masks were computed.", start=float, name="grammar_mask_seconds")
    running: int = gauge("Requests with a grammar that wait or run.", name="grammar_requests")


class GrammarPart(Part, ForwardPart):
    """The grammars of one engine's requests. A step of requests without any costs one look at an empty dictionary.

    Masks are computed by several threads while a device of its own runs the model. If a step continues tokens of the
    step in flight, that is when those have arrived: the device has this step by then. A model that runs on the same
    cores has them first: masks beside it would delay it by more than they take.
    """

    def __init__(
        self,
        compiler: Compiler,
        vocabulary: int,
        eos: Sequence[int],
        wake: Callable[[], None],
        *,
        threads: int,
        beside: bool,
    ) -> None:
        """`wake` is called on another thread when a grammar is compiled. With `beside`, masks do not wait for the
        model."""
        self._compiler = compiler
        self._together = LLExecutor(threads)
        self._beside = beside
        self._wake = wake
        self._words = -(-vocabulary // 32)
        self._eos = frozenset(eos)
        self._matchers: dict[Request, Matcher] = {}
        self._waiting: dict[str, Request] = {}  # requests whose grammar is being compiled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")
        self._filling: Future[tuple[Rows, Ids] | None] | None = None  # masks of the step that is being launched
        self._failed: list[tuple[Request, QuireError]] = []
        self._step_s: dict[
            str, dict[LLMatcher, float]
        ] = {}  # time beyond ROW_S in this step, by owner and compiled grammar
        self._slow: set[tuple[str, LLMatcher]] = set()
        self._counted = MaskCounters()

    def attach(self, loop: Loop) -> None:
        self._loop = loop

    # -- requests

    def add(self, request: Request) -> Callable[[bool], bool | None]:
        """Queue a request when its grammar is compiled. The result is for `Later`: it raises what `Loop.add` does, and
        InvalidInput for a grammar that is refused."""
        assert request.params.grammar is not None
        compiled = self._compiler.compile(request.params.grammar, request.owner)
        self._waiting[request.request_id] = request
        compiled.add_done_callback(lambda _: self._wake())

        def poll(waits: bool) -> bool | None:
            if self._waiting.get(request.request_id) is not request:
                return True  # the request was aborted before it began
            if waits and not compiled.done():
                return None
            del self._waiting[request.request_id]
            self._begin(request, compiled)
            return True

        return poll

    def drop(self, request_id: str) -> None:
        """A request whose grammar is being compiled never begins."""
        self._waiting.pop(request_id, None)

    def _begin(self, request: Request, compiled: Future[LLMatcher]) -> None:
        try:
            if not compiled.done():
                raise Overloaded("the grammar waited too long to be compiled.", retry_after_s=1.0)
            self._matchers[request] = Matcher(compiled.result(), self._eos)
        except QuireError:
            self._compiler.totals.refused += 1
            self._loop.refused()
            raise
        try:
            self._loop.add(request)
        except QuireError:
            del self._matchers[request]
            raise

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        self._matchers.pop(request, None)

    # -- drafts

    @property
    def is_used(self) -> bool:
        """Whether any request has a grammar."""
        return bool(self._matchers)

    @contextmanager
    def timed(self, request: Request) -> Iterator[Matcher | None]:
        """A request's matcher, for work whose time counts as that of its masks. None if it has ended, or if its grammar
        has taken too long in this step."""
        found = self._matchers.get(request)
        if found is None or (request.owner, found.start) in self._slow:
            yield None
            return
        since = time.thread_time()
        yield found
        took = time.thread_time() - since
        found.mask_s += took
        spent = self._step_s.setdefault(request.owner, {})
        spent[found.start] = spent.get(found.start, 0.0) + max(0.0, took - ROW_S)
        if sum(spent.values()) > STEP_S:
            slowest = max(spent, key=spent.__getitem__)
            del spent[slowest]
            self._slow.add((request.owner, slowest))

    # -- steps

    def before_forward(self, step: Step, batches: Sequence[Any]) -> None:
        known = self._beside and self._matchers and len(step.draws) and not len(step.future)
        self._filling = self._thread.submit(self._fill, step, None) if known else None

    def allowed(self, step: Step, previous: Launched | None) -> tuple[Rows, Ids] | None:
        if not self._matchers:
            return None
        filling, self._filling = self._filling, None
        return self._fill(step, previous) if filling is None else filling.result()

    def launched(self, launched: Launched) -> None:
        """A request whose grammar cannot go on fails alone, before its token is reported."""
        while self._failed:
            request, error = self._failed.pop()
            if request in self._matchers:
                self._loop.fail(request, error)

    def _fill(self, step: Step, previous: Launched | None) -> tuple[Rows, Ids] | None:
        places = step.places
        rows = places.terms["constrained"].nonzero()[0]
        if not len(rows):
            return None
        late = _late(step, previous) if len(step.future) else {}
        began = time.perf_counter()
        bits: Ids = np.full((len(rows), self._words), -1, dtype=np.int32)
        owners = step.drawers[rows]
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        quick: list[tuple[Matcher, int, Ids, Sequence[int]]] = []
        for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), len(rows)], strict=True):
            request, work = places.requests[rows[first]], int(owners[first])
            pending = int(places.outputs[rows[first]]) > request.num_outputs
            new = request.output_tokens, [late[work]] if pending else ()
            found = self._matchers.get(request)
            if found is not None and found.is_quick and stop - first == 1:
                quick.append((found, first, *new))
                continue
            with self.timed(request) as matcher:
                if matcher is None:
                    continue
                matcher.advance(*new)
                if not matcher.has_ended:
                    self._fill_rows(step, matcher, rows[first:stop], bits[first:stop])
                matcher.num_masks += stop - first
            if matcher.is_quick is None:
                matcher.is_quick = matcher.mask_s <= ROW_S
        if quick:
            self._fill_together(quick, bits)
        self._check(places, rows[firsts], np.logical_and.reduceat(bits.any(axis=1), firsts))
        self._counted.masks += len(rows)
        self._counted.mask_seconds += time.perf_counter() - began
        return rows, bits

    def _fill_rows(self, step: Step, matcher: Matcher, rows: Rows, bits: Ids) -> None:
        """The masks of the draws of one work, the first of them after its known tokens, the others after drafts."""
        first, size = bits.ctypes.data, bits.strides[0]

        def fill(row: int) -> None:
            matcher.state.unsafe_compute_mask_ptr(first + row * size, size)

        fill(0)
        if len(rows) == 1:
            return
        places = step.draws[rows]
        parents = None if step.parents is None else _parents(places, step.parents)
        matcher.visit(step.tokens[places[1:]].tolist(), parents, lambda draft: fill(draft + 1))

    def _fill_together(self, quick: Sequence[tuple[Matcher, int, Ids, Sequence[int]]], bits: Ids) -> None:
        """The masks of single draws, each at its row. Which of them took long is not known: if any did, each is
        timed from now on."""
        since = time.perf_counter()
        for matcher, _, outputs, more in quick:
            matcher.advance(outputs, more)
            matcher.num_masks += 1
        if states := [(matcher.state, row) for matcher, row, _, _ in quick if not matcher.has_ended]:
            self._together.unsafe_compute_mask_ptr(states, bits.ctypes.data, bits.strides[0], len(bits))
        if time.perf_counter() - since > ROW_S * len(quick):
            for matcher, *_ in quick:
                matcher.is_quick = False

    def _check(self, places: Places, rows: Rows, some: Any) -> None:
        """Note requests whose grammar cannot go on. `some[i]` is whether the masks of row i allow any token."""
        for row, allows in zip(rows.tolist(), some.tolist(), strict=True):
            request = places.requests[row]
            matcher = self._matchers.get(request)
            if matcher is None:
                continue
            is_slow = matcher.mask_s > SLOW_S + MASK_S * matcher.num_masks
            is_slow |= (request.owner, matcher.start) in self._slow
            if allows and not is_slow and not matcher.state.is_error():
                continue
            reason = matcher.error() or ("its masks take too long" if is_slow else "no token continues it")
            self._failed.append((request, InvalidInput(f"the grammar cannot go on: {reason}.", fix="simplify it.")))
        self._step_s.clear()
        self._slow.clear()

    def counters(self) -> list[Section]:
        self._counted.running = len(self._matchers)
        return [("grammar", self._compiler.counters()), ("grammar", self._counted)]

    def close(self) -> None:
        self._compiler.close()
        self._thread.shutdown(wait=False)


def _late(step: Step, previous: Launched | None) -> dict[int, int]:
    """The token that the step in flight draws for each work that continues it. Waits for that step alone."""
    assert previous is not None, "a token is pending and no step is in flight"
    works = np.searchsorted(step.offsets, step.future, side="right") - 1
    tokens = previous.wait()[step.continued(previous.step)]
    return dict(zip(works.tolist(), tokens.tolist(), strict=True))


def _parents(places: Rows, parents: Ids) -> list[int]:
    """For the draft at each flat place but the first, which draft it follows; -1: the token before all of them."""
    found: list[int] = (np.searchsorted(places, parents[places[1:]]) - 1).tolist()
    return found

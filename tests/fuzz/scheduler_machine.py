"""SchedulerMachine: random requests to a real scheduler on a small cache, with every verb that it calls checked.

Requests arrive and are aborted at any moment; every one that ends by itself must have exactly the tokens of its solo
run, and something must always progress.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.cache.running import Lengths
from quire.errors import ContextTooLong, RequestTooLarge
from quire.offload import Offloads
from quire.prefix.evict import POLICIES as EVICTION
from quire.scheduler.chunk_budget import ChunkBudget
from quire.scheduler.policy import POLICIES, scheduling_policy
from quire.scheduler.prefetching import NOTHING_TO_READ_AHEAD, ReadAhead
from quire.scheduler.request import Request, RequestState
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Step
from quire.spec.events import Namespace
from quire.speculative.verify import accepted_draws
from quire.testing.choices import Choices
from tests.fuzz.device import Part
from tests.fuzz.device import Step as DeviceStep
from tests.fuzz.followed_cache import FollowedCache
from tests.fuzz.plain_cache import Sequence
from tests.fuzz.plans import drafting_plan, hybrid_plan, shuffle_frames

NAMESPACES = (Namespace(), Namespace(salt="a"))
MOST_REQUESTS = 10
"""Requests that wait and run at once, about."""


class _Flight:
    """A launched step, what the device has of it, and the requests that it was launched for."""

    __slots__ = ("followed", "launched", "step")

    def __init__(self, launched: DeviceStep, step: Step, followed: list[Sequence]) -> None:
        self.launched = launched
        self.step = step
        self.followed = followed


class SchedulerMachine:
    """An engine without an engine: schedule, launch, execute, settle, with one step in flight or none."""

    def __init__(self, choices: Choices) -> None:
        page_size = choices.between(1, 4)
        context = choices.between(8, 40)
        self.plan = hybrid_plan(choices, choices.between(3, 16), page_size, context, choices.between(1, 5))
        drawn = choices.below(100)
        self._overlap = drawn < 50
        self._guesses: Choices | None = None
        if drawn % 3 == 1:
            self._guesses = Choices.seeded(drawn)
            self.plan = drafting_plan(self.plan, 1 + drawn % 5, branches=drawn % 2 == 0)
        self._most_tokens = choices.between(1, 8)
        self.cache = self._follow(choices)
        followed: Any = self.cache
        self.scheduler = Scheduler(
            followed,
            scheduling_policy(choices.one_of(sorted(POLICIES))),
            max_running=choices.between(1, self.plan.max_requests),
            max_tokens=self._most_tokens,
            ahead=self._ahead(),
            chunks=ChunkBudget(None if drawn % 2 else 0.004, least=1 + drawn % 3) if drawn % 7 == 3 else None,
        )
        self._vocabulary = choices.between(2, 3)
        self._requests: list[Request] = []
        self._earlier: list[int] = []  # names of what was served
        self._expected: dict[Request, list[int]] = {}  # the outputs of solo runs
        self._arrived = 0
        self._flight: _Flight | None = None
        self._idle = 0  # turns in a row that did nothing
        self._turns = 0  # since a request ended
        self.did: tuple[Any, ...] = ("make a cache",)

    def _follow(self, choices: Choices) -> FollowedCache:
        """The cache, and what checks it."""
        cache = KVCache(
            self.plan,
            eviction=choices.one_of(sorted(EVICTION)),
            share_prefixes=not choices.chance(6),
            checkpoint_interval=choices.between(1, 12),
            offload=Offloads(),
        )
        shuffle_frames(cache, choices)
        return FollowedCache(cache, None)

    def _ahead(self) -> ReadAhead[Any]:
        """What brings prefixes from tiers below the device."""
        return NOTHING_TO_READ_AHEAD

    def end(self) -> None:
        """Nothing has to come to an end here."""

    def step(self, choices: Choices) -> None:
        """Something arrives, something is aborted, or the engine takes a turn; with all checks."""
        open_requests = len(self._requests)
        if open_requests < MOST_REQUESTS and choices.chance(35 if open_requests else 100):
            self.arrive(choices)
        elif open_requests and choices.chance(4):
            self.abort(choices.one_of(self._requests))
        elif self._guesses is not None and self._guesses.chance(3):
            self.did = ("clear",)
            self.cache.clear()
        else:
            self.turn()

    def tell(self, did: tuple[Any, ...]) -> str:
        """What was done, in words."""
        return " ".join(str(part) for part in did)

    # -- operations

    def arrive(self, choices: Choices) -> None:
        """A new request; one in eight asks for about as much as the server can hold."""
        prompt = self._prompt(choices)
        most = choices.between(1, max(1, min(12, self.plan.largest_request - len(prompt))))
        if choices.chance(12):
            total = max(2, self.plan.largest_request + choices.between(-2, 2))
            prompt = (prompt * total)[: choices.between(1, total - 1)]
            most = total - len(prompt)
            self.cache.happened["at the limit"] += 1
        request = Request(
            f"r{self._arrived}",
            np.array(prompt, dtype=np.int32),
            SamplingParams(max_tokens=most, presence_penalty=choices.chance(15) / 2),  # waits for its own tokens
            max_tokens=most,
            stop_ids=frozenset([0]) if choices.chance(15) else frozenset(),
            namespace=NAMESPACES[choices.chance(20)],
            priority=choices.between(0, 2) if choices.chance(30) else 0,
        )
        self._arrived += 1
        self.did = "add", request.request_id, "with", prompt, "for", most, "tokens, priority", request.priority
        self.cache.happened["arrived"] += 1
        if len(prompt) + most > self.plan.largest_request:
            self._refused(request)
            return
        self.scheduler.add(request)
        self._requests.append(request)
        self._expected[request] = self._solo(request)

    def abort(self, request: Request) -> None:
        """A request is ended wherever it is."""
        self.did = "abort", request.request_id
        self.cache.happened[f"abort {request.state.name.lower()}"] += 1
        self.cache.happened["abort in flight"] += request.num_launched > request.num_settled
        self.cache.happened["abort with drafts"] += int(request.pending > 1)
        assert self.scheduler.abort(request.request_id) is request, "an open request was not aborted"
        assert self.scheduler.abort(request.request_id) is None, "a request was aborted twice"
        self._ended(request)

    def turn(self) -> None:
        """One turn of an engine."""
        self.did = ("schedule",)
        first = min(self._running(), key=lambda request: request.order, default=None)
        preemptions = first.num_preemptions if first is not None else 0
        before = self.scheduler.num_preemptions
        if self._guesses is not None:
            self._draft(self._guesses)
        step = self.scheduler.schedule()
        assert first is None or first.num_preemptions == preemptions, "the first in order was preempted"
        self.cache.happened["preemption"] += self.scheduler.num_preemptions - before
        self._check_step(step)
        launched = self._launch(step) if len(step) else None
        settled = self._flight is not None
        self.did = *self.did, "and settle"
        if self._flight is not None:
            self._settle(self._flight)
        self._flight = launched
        if launched is not None and not self._overlap:
            self._settle(launched)
            self._flight = None
        self._check_progress(progress=settled or launched is not None)

    def _draft(self, guesses: Choices) -> None:
        """Propose tokens for the next step, some of them right: as many as there is room for, or fewer."""
        speculation = self.plan.speculation
        assert speculation is not None
        most = speculation.num_draft_tokens - 1
        batch, _, _, room = self.scheduler.drafting()
        counts = np.zeros(len(batch), dtype=np.int64)
        tokens, parents = np.zeros((len(batch), most), dtype=np.int32), np.zeros((len(batch), most), dtype=np.int32)
        for at, request in enumerate(batch.requests):
            root = self.cache.names.named(request.namespace, request.tokens.tobytes()) if room[at] else 0
            nodes = [(-2, root)]  # of each draft, after the last known token: what it follows, and its name
            depths = [0]
            for _ in range(guesses.between(0, most) if room[at] else 0):
                after = guesses.below(len(nodes)) if speculation.topk > 1 else len(nodes) - 1
                if depths[after] == room[at]:
                    continue
                above = nodes[after][1]
                token = self._next(above) if guesses.chance(60) else guesses.below(self._vocabulary)
                node = (after - 1, self.cache.names.child(above, token))
                if node not in nodes:
                    tokens[at, len(nodes) - 1], parents[at, len(nodes) - 1] = token, after - 1
                    nodes.append(node)
                    depths.append(depths[after] + 1)
            counts[at] = len(nodes) - 1
        self.cache.happened["drafted"] += int(counts.sum())
        self.scheduler.draft(batch, counts, tokens, parents if speculation.topk > 1 else None)

    # -- the device

    def _launch(self, step: Step) -> _Flight:
        starts, ends, kvs = step.starts.tolist(), step.ends.tolist(), list(step.batch.kvs)
        names = [request.request_id for request in step.requests]
        self.did = "launch", list(zip(names, starts, ends, strict=True))
        followed = [self.cache.followed(kv) for kv in kvs]
        parts = [Part(start, end, 0) for start, end in zip(starts, ends, strict=True)]
        for s, part in zip(followed, parts, strict=True):
            assert part.start == s.launched and part.end <= s.allocated, "a step goes on elsewhere than the last one"
            s.launched = part.end
        launched = self.cache.device.launch(kvs, parts, step.draw_counts)
        self.cache.launched(launched)
        return _Flight(launched, step, followed)

    def _settle(self, flight: _Flight) -> None:
        """The device executes a step, draws tokens from what it read, and the host hears of it."""
        names, step, parts = self.cache.names, flight.step, flight.launched.parts
        every: list[int] = []  # the name at each flat place
        for work, (request, part) in enumerate(zip(step.requests, parts, strict=True)):
            known = request.tokens[: part.end]
            if step.draw_counts[work] > 1:
                known = np.concatenate((known[: part.start], step.tokens[step.offsets[work] : step.offsets[work + 1]]))
                known = known.astype(np.int32)
            elif len(known) < part.end:  # the token that only the device knew at launch
                known = np.append(known, np.int32(self._next(names.named(request.namespace, known.tobytes()))))
            part.name = names.named(request.namespace, known.tobytes())
            own = names.path[part.name][part.start :]
            if step.parents is not None and step.draw_counts[work] > 1:
                own = self._branches(step, work, names.named(request.namespace, known[: part.start].tobytes()))
                part.name, part.branches = own[0], own[1:]
            every += own
        self.cache.execute(flight.launched, flight.followed)
        drawn = np.array([self._next(every[place]) for place in step.draws.tolist()], dtype=np.int64)
        for s, part in zip(flight.followed, parts, strict=True):
            s.settled = part.end
        drawn, kept = self._verify(flight, every, drawn) if (step.draw_counts > 1).any() else (drawn, None)
        found = self.scheduler.settle(step, drawn, kept)
        self.scheduler.chunks.measured(step, 0.002 + 0.001 * step.num_tokens)
        for request in found.requests:
            expected = self._expected[request]
            output = request.output_tokens.tolist()
            if request.state is RequestState.FINISHED:
                assert output == expected, f"{request.request_id} ends with {output}, and alone with {expected}"
                self.cache.happened[f"finished by {request.finish_reason}"] += 1
                self._ended(request)
            else:
                assert output == expected[: len(output)], f"{request.request_id} has {output}, and alone {expected}"
        self.cache.close_fence(flight.launched)

    def _branches(self, step: Step, work: int, before: int) -> tuple[int, ...]:
        """The names of the tokens of a work that is a tree."""
        first, stop = int(step.offsets[work]), int(step.offsets[work + 1])
        assert step.parents is not None
        found: list[int] = []
        for place in range(first, stop):
            above = int(step.parents[place]) - first if place > first else -1
            assert -1 <= above < len(found), "a draft is computed before what it follows"
            name = self.cache.names.child(found[above] if above >= 0 else before, int(step.tokens[place]))
            assert len(self.cache.names.path[name]) == step.positions[place] + 1, "a draft is at another depth"
            found.append(name)
        return tuple(found)

    def _verify(self, flight: _Flight, every: list[int], drawn: Lengths) -> tuple[Lengths, Lengths]:
        """The draws of a step with drafts, the right ones of each work first, and how many these are."""
        step, happened = flight.step, self.cache.happened
        found = accepted_draws(step.tokens, step.draws, step.draw_counts, drawn, step.parents)
        for work in (step.draw_counts > 1).nonzero()[0].tolist():
            first, root = int(step.offsets[work]), int(step.offsets[work + 1] - step.draw_counts[work])
            last = root
            for _ in range(int(found.kept[work]) - 1):
                wanted = self.cache.names.child(every[last], self._next(every[last]))
                last = every.index(wanted, last + 1, int(step.offsets[work + 1]))
            some = (found.sources >= first) & (found.sources < step.offsets[work + 1])
            moves = (found.sources[some] - first).tolist(), (found.targets[some] - first).tolist()
            self.cache.verified(flight.launched, work, flight.followed[work], every[last], *moves)
            happened["rejected"] += int(step.draw_counts[work] - found.kept[work])
            happened["accepted"] += int(found.kept[work]) - 1
        return drawn if found.order is None else drawn[found.order], found.kept

    def _next(self, name: int) -> int:
        """The token that follows: a fixed draw from all tokens before and the namespace."""
        names = self.cache.names
        return zlib.crc32(names.data[name], len(names.namespaces[name].salt)) % self._vocabulary

    def _solo(self, request: Request) -> list[int]:
        """The output of the request as if nothing else existed."""
        names = self.cache.names
        name = names.named(request.namespace, request.tokens.tobytes())
        output: list[int] = []
        while len(output) < request.max_tokens:
            output.append(self._next(name))
            name = names.child(name, output[-1])
            if output[-1] in request.stop_ids and len(output) >= request.params.min_tokens:
                break
        return output

    # -- checks

    def _check_step(self, step: Step) -> None:
        happened = self.cache.happened
        assert step.num_tokens <= self._most_tokens, "a step has more tokens than it may"
        assert (step.counts > 0).all(), "a request is in a step without a token"
        assert len({request.request_id for request in step.requests}) == len(step), "a request is twice in a step"
        happened["chunk"] += bool((step.draw_counts == 0).any())
        happened["limited"] += self.scheduler.chunks.spent
        happened["mixed"] += bool((step.counts > 1).any()) and len(step) > 1
        happened["prefix wait"] += any("prefix" in request.wait_reason for request in self.scheduler.waiting)

    def _check_progress(self, *, progress: bool) -> None:
        waiting = self.scheduler.waiting
        assert all(request.wait_reason for request in waiting), "a request waits without a reason"
        self._idle = 0 if progress or not self.scheduler.has_requests else self._idle + 1
        assert self._idle < 2, f"nothing progresses: {[request.wait_reason for request in waiting]}"
        self._turns += 1
        work = sum(request.num_prompt_tokens + request.max_tokens for request in self._requests)
        assert self._turns < 500 + 50 * work, "requests thrash instead of finishing"
        assert len(self._requests) == len(waiting) + self.scheduler.num_running, "a request was lost"
        if not self._requests and self._flight is None:
            self._check_empty()

    def _check_empty(self) -> None:
        """With nothing to serve and no step in flight, all memory is free or cached."""
        cache = self.cache.cache
        assert not self.cache.model.live and not cache.fences.waiting, "memory is held without a request"
        found = cache.pages.num_free_pages + cache.tree.num_evictable
        assert found == self.plan.num_pages, f"{found} of {self.plan.num_pages} pages can be had when nothing runs"
        self.cache.happened["empty"] += 1

    def _refused(self, request: Request) -> None:
        """Too much is refused at once, with the numbers."""
        total = request.num_prompt_tokens + request.max_tokens
        kind = ContextTooLong if total > self.plan.context else RequestTooLarge
        waiting = len(self.scheduler.waiting)
        text = ""
        try:
            self.scheduler.add(request)
        except kind as refusal:
            text = str(refusal)
        assert text, f"{total} tokens were admitted where {self.plan.largest_request} can be held"
        numbers = {int(number) for number in re.findall(r"\d+", text)}
        assert {request.num_prompt_tokens, request.max_tokens} <= numbers, f"the error does not say how much: {text}"
        assert numbers & {self.plan.context, self.plan.num_pages}, f"the error does not say what there is: {text}"
        assert len(self.scheduler.waiting) == waiting, "a refused request waits"
        self.cache.happened["refused"] += 1

    # -- inside

    def _running(self) -> list[Request]:
        return [request for request in self._requests if request.state is RequestState.RUNNING]

    def _ended(self, request: Request) -> None:
        self._turns = 0
        self._requests.remove(request)
        del self._expected[request]
        self._earlier.append(self.cache.names.named(request.namespace, request.tokens.tobytes()))
        del self._earlier[:-16]

    def _prompt(self, choices: Choices) -> list[int]:
        """Mostly the beginning of an earlier sequence, then a few tokens of its own."""
        room = self.plan.largest_request - 1
        names = [self.cache.names.data[name] for name in self._earlier[-6:]]
        names += [request.tokens.tobytes() for request in self._requests]
        source: list[int] = []
        if names and choices.chance(80):
            source = np.frombuffer(choices.one_of(names), dtype=np.int32).tolist()
        tokens = source[: choices.between(0, len(source))] if choices.chance(30) else source
        tokens = tokens + [choices.below(3) for _ in range(choices.between(0, 6))]
        return tokens[: choices.between(1, max(1, room)) if choices.chance(50) else max(1, room // 2)] or [1]

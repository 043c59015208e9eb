"""StepMachine: random requests whose steps draw several tokens and keep some, beside a small model of the arithmetic.

The model knows lists of tokens and four numbers for each request. It says what every step must contain, what of its
draws is kept, where requests end, and how far each one is afterwards.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from quire.cache import KVCache
from quire.cache.request_kv import RequestKV
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request, RequestState
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Settled, Step
from quire.spec.group import ReachSpec
from quire.spec.speculation import SpeculativeConfig
from quire.speculative.verify import accepted_draws
from quire.testing import FakeModel, small_plan
from quire.testing.choices import Choices
from quire.testing.fake_model import FakeStep, next_token

VOCABULARY = 3
MOST = 8
TURNS = 2_000

Reaches = tuple[ReachSpec, ...]
KINDS: tuple[Reaches, ...] = (
    (ReachSpec(),),
    (ReachSpec(), ReachSpec("window", tokens=7)),
    (ReachSpec(), ReachSpec("state")),
    (ReachSpec("state"), ReachSpec("window", tokens=3)),
)


@dataclass(eq=False)
class Life:
    """What the model knows of one request."""

    request: Request
    tokens: list[int]
    expected: list[int]  # its outputs, alone
    kv: RequestKV | None = None
    launched: int = 0
    settled: int = 0
    pending: int = 0
    drafts: list[int] = field(default_factory=list)
    reason: str | None = None
    drafted: int = 0
    accepted: int = 0

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.request.num_prompt_tokens :]

    def lose(self) -> None:
        """It has no memory any more."""
        self.kv, self.launched, self.settled, self.pending, self.drafts = None, 0, 0, 0, []


@dataclass
class Work:
    """One request's part of a step."""

    life: Life
    kv: RequestKV
    end: int
    drafts: list[int]
    draws: int


@dataclass
class Flight:
    """A step that was launched."""

    step: Step
    launched: FakeStep
    works: list[Work]


class StepMachine:
    """An engine that drafts, with one step in flight or none."""

    OPERATIONS = ("turn", "turn", "turn", "draft", "draft", "draft", "add", "add", "abort")

    def __init__(self, choices: Choices) -> None:
        size, reaches = choices.between(1, 4), choices.one_of(KINDS)
        drafts = choices.between(1, 5)
        plan = small_plan(
            choices.between(40, 50) // size + 2,
            size,
            context=40,
            max_requests=choices.between(1, 5),
            groups=tuple(f"{reach.kind}{at}" for at, reach in enumerate(reaches)),
            reaches=reaches,
        )
        speculation = (
            SpeculativeConfig(method="eagle", num_steps=drafts, num_draft_tokens=drafts + 1)
            if choices.chance(85)
            else None
        )
        self.plan = replace(plan, speculation=speculation)
        self.cache = KVCache(self.plan)
        self.model = FakeModel(self.cache, VOCABULARY)
        self.most_tokens = choices.between(2, 24)
        self.scheduler = Scheduler(
            self.cache, scheduling_policy("fcfs"), max_running=self.plan.max_requests, max_tokens=self.most_tokens
        )
        self.overlap = choices.chance(30)
        self.flight: Flight | None = None
        self.lives: list[Life] = []
        self.happened: Counter[str] = Counter()
        self.names = 0

    # -- operations

    def add(self, choices: Choices) -> None:
        """A request arrives; mostly it begins like an earlier one."""
        room = self.plan.largest_request
        if len(self.lives) >= MOST:
            return
        source = choices.one_of(self.lives).tokens if self.lives and choices.chance(60) else []
        prompt = [*source[: choices.between(0, len(source))], *(choices.below(3) for _ in range(choices.between(1, 5)))]
        prompt = prompt[: room - 1]
        most = choices.between(1, min(24, room - len(prompt)))
        params = SamplingParams(max_tokens=most, min_tokens=choices.between(0, most) if choices.chance(20) else 0)
        request = Request(
            f"r{self.names}",
            np.array(prompt, dtype=np.int32),
            params,
            max_tokens=most,
            stop_ids=frozenset([choices.below(3)]) if choices.chance(40) else frozenset(),
            priority=choices.between(0, 2) if choices.chance(25) else 0,
        )
        self.names += 1
        self.scheduler.add(request)
        self.lives.append(Life(request, prompt, self.model.solo(request)))

    def abort(self, choices: Choices) -> None:
        """A request ends wherever it is."""
        if self.lives:
            life = choices.one_of(self.lives)
            self.happened["abort in flight"] += life.pending > 0
            self.happened["abort with several"] += life.pending > 1
            self.scheduler.abort(life.request.request_id)
            self.lives.remove(life)
            assert life.request.tokens.tolist() == life.tokens

    def draft(self, choices: Choices) -> None:
        """Draft the next tokens of some requests: correct ones, up to some place."""
        batch, _, _, room = self.scheduler.drafting()
        lives = {life.request.request_id: life for life in self.lives}
        counts, tokens = np.zeros(len(batch), dtype=np.int64), np.zeros((len(batch), MOST), dtype=np.int32)
        for at, request in enumerate(batch.requests):
            life = lives.get(request.request_id)
            guesses = self._guesses(life, choices) if life is not None and choices.chance(70) else []
            if life is not None:
                self._check_room(life, int(room[at]))
                life.drafts = guesses[: room[at]]
                counts[at] = len(life.drafts)
                tokens[at, : len(life.drafts)] = life.drafts
        self.scheduler.draft(batch, counts, tokens)

    def _check_room(self, life: Life, room: int) -> None:
        left = min(self.plan.tokens_per_step, life.request.max_tokens - len(life.outputs)) - 1
        decodes = life.kv is not None and not life.pending and life.launched == len(life.tokens) - 1
        expected = max(0, left) if decodes else 0
        assert room == expected, f"there is room for {room} drafts, {expected} expected"

    def _guesses(self, life: Life, choices: Choices) -> list[int]:
        right = choices.between(0, 5)
        tokens, guesses = list(life.tokens), []
        for place in range(choices.between(1, 6)):
            token = next_token(life.request.namespace, tokens, VOCABULARY)
            guesses.append(token if place < right else (token + 1) % VOCABULARY)
            tokens.append(guesses[-1])
        return guesses

    def turn(self, choices: Choices) -> None:
        """One turn of an engine; mostly half of one without overlap, so that something may come between."""
        if self.flight is not None and not (self.overlap or choices.chance(15)):
            self._settle(self.flight)
            self.flight = None
            return
        step = self.scheduler.schedule()
        for life in self.lives:
            if life.kv is not None and life.request.kv is not life.kv:
                assert not life.pending, "a request with a token on its way was preempted"
                self.happened["preemption"] += 1
                life.lose()
        launched = self._launch(step) if len(step) else None
        if self.flight is not None:
            self._settle(self.flight)
        self.flight = launched

    def end(self) -> None:
        """All requests come to their ends."""
        for _ in range(TURNS):
            if not self.lives and self.flight is None:
                break
            self.turn(Choices(lambda n: 0))
            self.check()
        assert not self.lives, f"they never end: {[life.request.wait_reason for life in self.lives]}"
        self.cache.audit()
        found = self.cache.pages.num_free_pages + self.cache.tree.num_evictable
        assert found == self.plan.num_pages, "memory is held without a request"

    def check(self) -> None:
        """Requests are as far as the model says, and what is cached is what it should be."""
        for life in self.lives:
            request = life.request
            assert request.tokens.tolist() == life.tokens
            assert (request.num_drafted, request.num_accepted) == (life.drafted, life.accepted)
            if life.kv is not None:
                found = (request.num_launched, request.num_settled, request.pending)
                assert found == (life.launched, life.settled, life.pending), f"{found}, and the model {life}"
                committed, allocated = self.cache.rows.committed(life.kv), self.cache.rows.allocated(life.kv)
                assert committed <= life.settled and life.launched <= allocated
        self.model.oracle.check_cached()
        self.cache.audit()

    # -- the device

    def _launch(self, step: Step) -> Flight:
        assert step.num_tokens == step.offsets[-1] == step.counts.sum() <= self.most_tokens
        lives = {life.request: life for life in self.lives}
        works = []
        for at, request in enumerate(step.requests):
            life, kv = lives[request], step.batch.kvs[at]
            if life.kv is None:
                life.kv, life.launched, life.settled = kv, kv.num_cached, kv.num_cached
            assert life.kv is kv and request.kv is kv and step.batch.rows[at] == kv.row
            works.append(self._work(step, at, life, kv))
        draws = [work.draws for work in works]
        assert (
            step.draw_counts.tolist() == draws and step.drawers.tolist() == np.repeat(range(len(works)), draws).tolist()
        )
        self.happened["several"] += any(work.draws > 1 for work in works)
        self.happened["several of several"] += sum(work.draws > 1 for work in works) > 1
        self.happened["mixed"] += any(work.draws > 1 for work in works) and not all(draws)
        previous = self.flight.launched if self.flight is not None else None
        return Flight(step, self.model.launch(step, previous), works)

    def _work(self, step: Step, at: int, life: Life, kv: RequestKV) -> Work:
        """What a work must be; the model follows its launch."""
        known, first, last = len(life.tokens), int(step.offsets[at]), int(step.offsets[at + 1])
        start, end = int(step.starts[at]), int(step.starts[at] + step.counts[at])
        drafts = life.drafts[: max(0, end - known)]  # there may not be room for all of them
        self.happened["drafts cut"] += len(drafts) < len(life.drafts)
        assert start == life.launched < end <= known + life.pending + len(drafts), "a work begins elsewhere"
        assert step.positions[first:last].tolist() == list(range(start, end))
        for place, position in zip(range(first, last), range(start, end), strict=True):
            if position < known:
                assert step.tokens[place] == life.tokens[position] and place not in step.future
            elif life.pending:
                assert place in step.future, "a token that is not known is computed"
            else:
                assert step.tokens[place] == life.drafts[position - known] and place not in step.future
        draws = 1 + len(drafts) if end == known + life.pending + len(drafts) else 0
        assert draws == 0 or step.draws[step.drawers == at].tolist() == list(range(last - draws, last))
        assert life.pending < 2, "a request goes on while it is not known how far it is"
        work = Work(life, kv, end, drafts if draws else [], draws)
        life.launched, life.pending = end, life.pending + draws
        if draws:
            life.drafts = []
        return work

    def _settle(self, flight: Flight) -> None:
        drawn = self.model.execute(flight.launched)
        kept, at = [], 0
        expected: list[tuple[Request, list[int], bool]] = []
        for work in flight.works:
            own = drawn[at : at + work.draws].tolist()
            at += work.draws
            right = 0
            while right < len(work.drafts) and work.drafts[right] == own[right]:
                right += 1
            kept.append(right + 1 if work.draws else 0)
            self.happened["kept all"] += work.draws > 1 and right + 1 == work.draws
            self.happened["kept some"] += 1 < right + 1 < work.draws
            self.happened["kept one"] += work.draws > 1 and right == 0
            if work.life in self.lives and work.life.kv is work.kv:
                expected += self._advance(work, own[: kept[-1]])
            else:
                self.happened["settled too late"] += 1
        step = flight.step
        counted = accepted_draws(step.tokens, step.draws, step.draw_counts, np.asarray(drawn))
        assert counted.kept.tolist() == kept
        given = None if all(n == work.draws for n, work in zip(kept, flight.works, strict=True)) else np.array(kept)
        found = self.scheduler.settle(flight.step, drawn, given)
        self.cache.close_fence(flight.launched.fence)
        self._compare(found, expected)
        for life in [life for life in self.lives if life.reason is not None]:
            assert life.request.finish_reason == life.reason and life.request.state is RequestState.FINISHED
            assert life.request.output_tokens.tolist() == life.outputs == life.expected
            self.lives.remove(life)

    def _advance(self, work: Work, tokens: list[int]) -> list[tuple[Request, list[int], bool]]:
        """The model keeps these tokens, up to one that ends the request. What its reader must hear of."""
        life, request = work.life, work.life.request
        life.pending -= work.draws
        first = not life.outputs
        added = 0
        for token in tokens:
            life.tokens.append(token)
            added += 1
            if token in request.stop_ids and len(life.outputs) >= request.params.min_tokens:
                life.reason = "stop"
            elif len(life.outputs) == request.max_tokens:
                life.reason = "length"
            if life.reason is not None:
                self.happened[f"ended by {life.reason}"] += 1
                self.happened["ended inside"] += added < len(tokens)
                break
        life.settled = work.end - (work.draws - added)
        life.drafted += len(work.drafts)
        life.accepted += max(added - 1, 0)
        if work.draws != added:
            life.launched = life.settled
        assert life.outputs == life.expected[: len(life.outputs)], "a draft came true that is wrong"
        noted = first or life.reason is not None
        return [(request, life.tokens[len(life.tokens) - added :], noted)] if added else []

    def _compare(self, found: Settled, expected: list[tuple[Request, list[int], bool]]) -> None:
        assert found.requests == [request for request, _, _ in expected]
        assert found.counts.tolist() == [len(tokens) for _, tokens, _ in expected]
        assert found.tokens.tolist() == [token for _, tokens, _ in expected for token in tokens]
        assert found.noted == [at for at, (_, _, noted) in enumerate(expected) if noted]


def run_steps(seed: int, operations: int) -> StepMachine:
    """One life, from a seed."""
    choices = Choices.seeded(seed)
    machine = StepMachine(choices)
    for _ in range(operations):
        getattr(machine, choices.one_of(StepMachine.OPERATIONS))(choices)
        machine.check()
    machine.end()
    return machine

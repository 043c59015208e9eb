"""SessionMachine: random turns of sessions on a small cache, beside a plain model of what a session holds.

The model is a dict. It knows no page, row or lease: a turn that ends leaves its tokens, and the next turn must begin
after them if its prompt goes on with them and nothing has taken them away. Contents are checked by `FakeModel`: a
step that reads a token of another turn, tenant or step fails.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from quire.cache import KVCache
from quire.cache.session import SessionKey, SessionSettings, Start
from quire.offload import Offloads
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request, RequestState
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.spec.events import Namespace
from quire.spec.group import ReachSpec
from quire.testing import FakeModel, small_plan
from quire.testing.choices import Choices
from quire.testing.fake_model import FakeStep

NAMESPACES = (Namespace(), Namespace(salt="a"))
NAMES = ("s", "t", "u")
OWNERS = ("ann", "bob")
TTL_S = 10.0
MODELS = (
    (),
    (ReachSpec(), ReachSpec("window", 5)),
    (ReachSpec(), ReachSpec("state")),
    (ReachSpec("window", 7), ReachSpec("state")),
)


@dataclass(eq=False)
class ModelTurn:
    """What the model knows of an open turn."""

    request: Request
    key: SessionKey | None
    arrival: int
    computed: int = 0  # tokens of its prompt that steps computed
    began: bool = False
    refused: bool = False  # closed, or flushed, while it ran
    closed: bool = False  # of a session that was closed since it arrived


class SessionMachine:
    """An engine without an engine: turns arrive, steps are made, sessions are closed, flushed, and expire."""

    def __init__(self, choices: Choices) -> None:
        self.now = 0.0
        reaches = choices.one_of(MODELS)
        page_size = choices.one_of((1, 2, 3, 16))
        self.ample = choices.chance(40)
        num_pages = 400 if self.ample else choices.between(6, 20)
        if page_size == 16 and not self.ample:
            num_pages = choices.between(3, 8)
        max_requests = 20 if self.ample else choices.between(1, 4)
        groups = tuple(f"{reach.kind}{at}" for at, reach in enumerate(reaches)) or ("full",)
        states = 100 if self.ample else max_requests * 2 + choices.between(0, 4)
        least = -(-7 // page_size) + 3  # of the longest window
        num_pages = max(num_pages, least)
        windows = num_pages if self.ample else max(least, num_pages - choices.between(0, 3))
        frames = tuple({"state": states, "window": windows}.get(reach.kind, num_pages) for reach in reaches)
        plan = small_plan(
            num_pages, page_size, max_requests=max_requests, groups=groups, reaches=reaches, frames=frames, context=120
        )
        self.share = 0.9 if self.ample else choices.one_of((0.2, 0.5, 0.9))
        self.has_states = any(reach.kind == "state" for reach in reaches)
        self.cache = KVCache(
            plan,
            share_prefixes=not choices.chance(15),
            checkpoint_interval=choices.between(1, 12),
            explains=True,
            seconds=lambda: self.now,
            sessions=SessionSettings(share=self.share, ttl_s=TTL_S),
            offload=Offloads(),
        )
        self.offload = self.cache.offload
        self.scheduler = Scheduler(
            self.cache,
            scheduling_policy(choices.one_of(("fcfs", "lpm"))),
            max_running=max_requests,
            max_tokens=choices.one_of((3, 8, 64)),
        )
        self.model = FakeModel(self.cache, 3)
        self.overlap = choices.chance(50)
        self.held: dict[SessionKey, list[int]] = {}
        self.expires: dict[SessionKey, float] = {}
        self.last: dict[SessionKey, list[int]] = {}  # all tokens of the last turn, for the next prompt
        self.newest: dict[SessionKey, int] = {}  # arrival of the held turn
        self.open: list[ModelTurn] = []
        self.flight: FakeStep | None = None
        self.arrived = 0
        self.gave_way = False  # in the last turn
        self.happened = Counter[str]()

    # -- operations

    def step(self, choices: Choices) -> None:
        """Something happens; all is checked."""
        if len(self.open) < 5 and choices.chance(45 if self.open else 85):
            self.arrive(choices)
        elif self.open and choices.chance(6):
            self.abort(choices.one_of(self.open), failed=choices.chance(30))
        elif choices.chance(4):
            self.close(choices)
        elif choices.chance(3):
            self.flush(choices)
        elif choices.chance(8):
            self.now += choices.one_of((1.0, 4.0, 11.0))
        else:
            self.turn()
        self.check()

    def arrive(self, choices: Choices) -> None:
        """A turn, mostly of a session: it goes on with the last one, edits it, or begins anew."""
        namespace = NAMESPACES[choices.chance(25)]
        name = choices.one_of(NAMES) if choices.chance(85) else ""
        key = SessionKey(namespace, name, OWNERS[choices.chance(25)])
        before = self.last.get(SessionKey(NAMESPACES[0], name, OWNERS[0]) if choices.chance(10) else key, [])
        if before and choices.chance(20):  # an edit, mostly near the end
            at = choices.between(max(0, len(before) - 4), len(before) - 1)
            before = [*before[:at], (before[at] + 1) % 3]
        prompt = [*before, *(choices.below(3) for _ in range(choices.between(1, 7)))]
        most = choices.between(1, 5)
        room = min(self.cache.plan.largest_request, 110)
        if len(prompt) + most > room:
            prompt = prompt[-max(1, room - most) :]
        request = Request(
            f"r{self.arrived}",
            np.array(prompt, dtype=np.int32),
            SamplingParams(max_tokens=most),
            max_tokens=most,
            stop_ids=frozenset([0]) if choices.chance(30) else frozenset(),
            namespace=namespace,
            priority=choices.below(2),
            session_id=name,
            last_turn=bool(name) and choices.chance(8),
            owner=key.owner,
        )
        self.scheduler.add(request)
        self.open.append(ModelTurn(request, key if name else None, self.arrived, refused=request.last_turn))
        self.arrived += 1

    def abort(self, turn: ModelTurn, *, failed: bool) -> None:
        """A client leaves, or a step failed."""
        began, settled, launched = turn.began, turn.request.num_settled, turn.request.num_launched
        in_flight = self.flight is not None
        self.scheduler.abort(turn.request.request_id, failed=failed)
        self.happened["abort"] += 1
        if not began:
            self.ended(turn, None)
        else:
            self.ended(turn, None if failed else launched if in_flight else settled)

    def close(self, choices: Choices) -> None:
        """A client closes a session."""
        key = SessionKey(NAMESPACES[choices.below(2)], choices.one_of(NAMES), choices.one_of(OWNERS))
        self.expire()
        found = self.cache.sessions.close(*key)
        assert found >= (key in self.held), "a session that holds a row is not found"
        if found:
            self.closed(key)
        self.happened["close"] += found

    def closed(self, key: SessionKey) -> None:
        """A session has been closed; turns of it that run hold nothing when they end."""
        self.forget(key)
        for turn in self.open:
            turn.closed |= turn.key == key
            turn.refused |= turn.closed

    def flush(self, choices: Choices) -> None:
        """A tenant's pages are deleted."""
        namespace = NAMESPACES[choices.below(2)]
        self.offload.flush(namespace)
        for key in [key for key in self.held if key[0] == namespace]:
            self.forget(key)
        for turn in self.open:
            turn.refused |= turn.request.namespace == namespace and turn.began
        self.happened["flush"] += 1

    def turn(self) -> None:
        """One turn of an engine, with a step in flight or none."""
        sessions, preempted = self.cache.sessions, self.scheduler.num_preemptions
        self.cache.sessions.expire()
        self.expire()
        given_up = sessions.totals.sessions_given_up
        step = self.scheduler.schedule()
        if self.scheduler.num_preemptions > preempted:
            assert not sessions.num_held or self.flight is not None, "a request was preempted for a session"
            self.happened["preempted"] += 1
            for turn in self.open:
                turn.began = turn.request.state is RequestState.RUNNING
                turn.computed = -1000 if turn.request.num_preemptions else turn.computed
        self.gave_way = sessions.totals.sessions_given_up > given_up
        if self.gave_way:
            assert not self.ample, "a session gave way although there is room"
            self.happened["gave way"] += 1
            for key in list(self.held):
                if self.held_tokens(key) == 0 and not self.was_taken(key):
                    self.forget(key)
        new = [turn for turn in self.open if turn.request.state is RequestState.RUNNING and not turn.began]
        for turn in sorted(
            new, key=lambda turn: step.admitted.index(turn.request) if turn.request in step.admitted else -1
        ):
            turn.began = True
            self.began(turn)
        launched = self.model.launch(step, self.flight) if len(step) else None
        for request, start, end in zip(step.requests, step.starts.tolist(), step.ends.tolist(), strict=True):
            turn = next(turn for turn in self.open if turn.request is request)
            turn.computed += max(0, min(end, request.num_prompt_tokens) - start)
        before, self.flight = self.flight, launched
        if before is not None:
            self.settle(before)
        if launched is not None and not self.overlap:
            self.settle(launched)
            self.flight = None

    def settle(self, launched: FakeStep) -> None:
        """A step has settled: ended turns leave their rows."""
        in_flight = self.flight is not None and self.flight is not launched
        self.scheduler.settle(launched.step, self.model.execute(launched))
        by_request = {turn.request: turn for turn in self.open}
        for request in launched.step.requests:
            if request in by_request and request.state is RequestState.FINISHED:
                turn = by_request[request]
                assert request.output_tokens.tolist() == self.model.solo(request), "the tokens differ from those alone"
                self.ended(turn, self.length_at_end(turn, launched, in_flight=in_flight))
        self.cache.close_fence(launched.fence)

    def length_at_end(self, turn: ModelTurn, launched: FakeStep, *, in_flight: bool) -> int:
        """The tokens that are computed, or being computed: all but the last drawn one, or all if a step went on."""
        total = turn.request.num_tokens
        if in_flight and self.flight is not None and turn.request in self.flight.step.requests:
            return total
        return total - 1

    # -- the model

    def began(self, turn: ModelTurn) -> None:
        """A turn begins: it continues what its session held, or begins anew."""
        request, key = turn.request, turn.key
        tokens = request.tokens[: request.num_prompt_tokens].tolist()
        if key is None:
            assert request.turn is None
            return
        assert request.turn is not None
        start, resumed = request.turn.start, request.turn.resumed_tokens
        held = self.held.get(key) if not turn.closed else None
        if request.num_preemptions:
            if resumed and held is not None:
                self.forget(key)
            return
        self.happened[f"start {start}"] += 1
        assert not resumed or held is not None, "a turn goes on with what its session does not hold"
        assert request.num_cached >= resumed
        if start is Start.LOST and held is not None:
            assert self.gave_way, "a session has lost its row for no reason"
            self.forget(key)
            return
        if held is None:
            assert start not in (Start.CONTINUED, Start.TRIMMED)
            return
        common = next(
            (at for at, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b), min(len(held), len(tokens))
        )
        if common == len(held) < len(tokens):
            assert (start, resumed) == (Start.CONTINUED, len(held)) or request.num_cached > len(held), (start, resumed)
        if resumed:
            assert resumed <= min(common, len(tokens) - 1), "a turn goes on after tokens that are not its own"
            assert resumed == len(held) or not self.has_states, "a state was taken back"
            assert request.num_cached == resumed
            self.happened["partial"] += resumed % self.cache.page_size != 0
            self.forget(key)
        elif turn.arrival > self.newest[key]:
            self.forget(key)

    def ended(self, turn: ModelTurn, length: int | None) -> None:
        """A turn has ended after `length` computed tokens; None if it leaves nothing."""
        self.open.remove(turn)
        request, key = turn.request, turn.key
        if key is None:
            assert request.grant is None
            return
        grant = request.grant
        assert grant is not None and grant.session_id == key[1]
        tokens = request.tokens.tolist()
        self.last[key] = tokens
        if turn.began and not request.num_preemptions and turn.computed >= 0 and length is not None:
            computed = min(length, request.num_prompt_tokens) - request.num_cached
            assert turn.computed == computed, f"{turn.computed} prompt tokens were computed, not {computed}"
        if not turn.closed:
            self.expires[key] = self.now + TTL_S
        for other in list(self.held):  # the budget may have ended other rows
            if other != key and self.held_tokens(other) == 0:
                assert not self.ample, "the budget has room"
                self.forget(other)
                self.happened["overflow"] += 1
        if length is None or turn.refused or turn.arrival < self.newest.get(key, -1):
            assert not grant.held_tokens, "a row is held that should not be"
            if request.last_turn and not turn.closed:
                self.closed(key)
                self.happened["last turn"] += 1
            return
        if not grant.held_tokens:
            assert grant.reason
            budget = int(self.share * self.cache.plan.num_pages)
            has_room = -(-length // self.cache.page_size) <= budget and (self.ample or self.flight is None)
            computes = "still compute" in grant.reason and not self.ample
            assert not has_room or computes or not length, grant.reason
            return
        assert grant.held_tokens == length, f"{grant.held_tokens} tokens are held of {length}"
        assert grant.expires_in_seconds == TTL_S
        self.held[key], self.newest[key] = tokens[:length], turn.arrival
        self.happened["held"] += 1

    def expire(self) -> None:
        for key, at in list(self.expires.items()):
            if at <= self.now and not any(turn.key == key and not turn.closed for turn in self.open):
                self.happened["expired"] += key in self.held
                self.forget(key)
                del self.expires[key]

    def forget(self, key: SessionKey) -> None:
        self.held.pop(key, None)
        self.newest.pop(key, None)

    def held_tokens(self, key: SessionKey) -> int:
        """What the cache says."""
        listing = self.cache.sessions.listing(key.namespace, key.owner)
        return next((each.held_tokens for each in listing.sessions if each.session_id == key[1]), 0)

    def was_taken(self, key: SessionKey) -> bool:
        """Whether a turn that has just begun took the row of its session, or ended it."""
        turns = [turn for turn in self.open if turn.key == key and not turn.began and turn.request.turn is not None]
        began = [turn for turn in turns if turn.request.state is RequestState.RUNNING]
        return any(t.request.turn.resumed_tokens or t.arrival > self.newest[key] for t in began)

    # -- checks

    def check(self) -> None:
        self.cache.audit()
        sessions, rows = self.cache.sessions, self.cache.rows
        sessions.expire()
        self.expire()
        for key, tokens in self.held.items():
            assert self.held_tokens(key) == len(tokens), f"{key} holds {self.held_tokens(key)} of {len(tokens)} tokens"
        assert sessions.num_held == len(self.held), f"{sessions.num_held} rows are held, the model has {len(self.held)}"
        kvs = [kv for kv in rows.live.values() if kv.is_held]
        pages = {page for kv in kvs for page in rows.page_ids(kv).tolist()}
        assert sessions.num_pages == len(pages) <= sessions.budget, "the budget is exceeded"
        assert sessions.num_tokens == sum(map(len, self.held.values()))

    def end(self) -> None:
        """All turns end, and nothing is lost."""
        for _ in range(2000):
            if not self.scheduler.has_requests and self.flight is None:
                break
            self.turn()
            self.check()
        assert not self.scheduler.has_requests, f"it never ends: {[r.wait_reason for r in self.scheduler.waiting]}"
        self.cache.sessions.close_all()
        self.cache.audit()
        assert not self.cache.rows.live and not len(self.cache.sessions)
        found = self.cache.pages.num_free_pages + self.cache.tree.num_evictable
        assert found == self.cache.plan.num_pages, "pages are lost"
        assert all(frames.private == frames.moving == 0 for frames in self.cache.statistics().frames.values())


def run_sessions(seed: int, steps: int) -> Counter[str]:
    """One life of a machine, from a seed; what happened in it."""
    choices = Choices.seeded(seed)
    machine = SessionMachine(choices)
    for _ in range(steps):
        machine.step(choices)
    machine.end()
    return machine.happened

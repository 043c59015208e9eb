"""Sessions on a scheduler with a model that needs no device: what a turn computes, and when a row ends."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.cache import KVCache
from quire.cache import sessions as sessions_module
from quire.cache.request_kv import RequestKV
from quire.cache.session import SessionGrant, SessionSettings, Start
from quire.counters import plain
from quire.errors import OutOfPages
from quire.offload import Offloads, offload_of
from quire.prefix.evict import DEFAULT_POLICY
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.spec.events import Namespace
from quire.spec.group import ReachSpec
from quire.testing import FakeModel, small_plan
from tests.changes import CORE, slow_unless_changed
from tests.choices import drawn
from tests.scheduler.session_machine import SessionMachine, run_sessions

FULL, WINDOW, STATE = ReachSpec(), ReachSpec("window", 20), ReachSpec("state")
KINDS = {"full": (FULL,), "window": (FULL, WINDOW), "state": (FULL, STATE), "window and state": (WINDOW, STATE)}


class TurnServer:
    """Serves turns to their ends, checks their tokens, and counts the prompt tokens that steps compute."""

    def __init__(
        self,
        kind: str = "full",
        *,
        num_pages: int = 40,
        page_size: int = 16,
        max_requests: int = 4,
        share: float = 0.5,
        share_prefixes: bool = True,
        overlap: bool = False,
        eviction: str = DEFAULT_POLICY,
    ) -> None:
        reaches = KINDS[kind]
        groups = tuple(f"{reach.kind}{at}" for at, reach in enumerate(reaches))
        frames = tuple(3 * max_requests if reach.kind == "state" else num_pages for reach in reaches)
        plan = small_plan(
            num_pages, page_size, max_requests=max_requests, groups=groups, reaches=reaches, frames=frames
        )
        self.now = 0.0
        self.cache = KVCache(
            plan,
            eviction=eviction,
            share_prefixes=share_prefixes,
            explains=True,
            seconds=lambda: self.now,
            sessions=SessionSettings(share=share, ttl_s=100.0),
            offload=Offloads(),
        )
        self.scheduler = Scheduler(self.cache, scheduling_policy("fcfs"), max_running=max_requests, max_tokens=64)
        self.model = FakeModel(self.cache, 50)
        self.overlap = overlap
        self.computed = Counter[str]()
        self._count = 0

    def submit(
        self,
        prompt: list[int],
        session: str = "s",
        max_tokens: int = 3,
        salt: str = "",
        stop: frozenset[int] = frozenset(),
        owner: str = "",
        last: bool = False,
    ) -> Request:
        """Queue a turn."""
        request = Request(
            f"r{self._count}",
            np.array(prompt, dtype=np.int32),
            SamplingParams(max_tokens=max_tokens),
            max_tokens=max_tokens,
            stop_ids=stop,
            namespace=Namespace(salt=salt),
            session_id=session,
            last_turn=last,
            owner=owner,
        )
        self._count += 1
        self.scheduler.add(request)
        return request

    def turn(self, prompt: list[int], session: str = "s", **more: object) -> Request:
        """Serve one turn."""
        request = self.submit(prompt, session, **more)  # type: ignore[arg-type]
        self.finish()
        assert request.output_tokens.tolist() == self.model.solo(request)
        return request

    def finish(self, steps: int = 1000) -> None:
        """Serve what is queued, or make some steps."""
        flight = None
        while (self.scheduler.has_requests or flight is not None) and steps:
            steps -= 1
            step = self.scheduler.schedule()
            launched = self.model.launch(step, flight) if len(step) else None
            for request, start, end in zip(step.requests, step.starts.tolist(), step.ends.tolist(), strict=True):
                self.computed[request.request_id] += max(0, min(end, request.num_prompt_tokens) - start)
            for each in (flight,) if self.overlap else (launched,):
                if each is not None:
                    self.scheduler.settle(each.step, self.model.execute(each))
                    self.cache.close_fence(each.fence)
            flight = launched if self.overlap else None
            self.cache.audit()
        assert flight is None

    def held(self, request: Request) -> int:
        """What the session of a request that has ended holds."""
        return grant_of(request).held_tokens


def grant_of(request: Request) -> SessionGrant:
    assert request.grant is not None
    return request.grant


def prompt(seed: int, length: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 50, length).tolist()
    return found


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_computes_its_new_tokens_and_no_other(kind: str, overlap: bool, share_prefixes: bool) -> None:
    """Pages of 16 tokens, and no turn ends at the end of a page."""
    server = TurnServer(kind, overlap=overlap, share_prefixes=share_prefixes)
    history, saved = prompt(1, 21), 0
    for at in range(4):
        request = server.turn(history)
        grant = grant_of(request)
        new = len(history) - saved
        assert server.computed[request.request_id] == new, "computed tokens"
        assert (grant.start, grant.resumed_tokens) == (Start.CONTINUED if at else Start.NEW, saved)
        assert grant.held_tokens == request.num_tokens - 1 and not grant.reason
        assert request.explanation is not None and request.explanation.hit_tokens == saved
        history, saved = [*request.tokens.tolist(), *prompt(at + 2, 7)], grant.held_tokens
    statistics = plain(server.cache.sessions.counters())
    assert statistics["sessions_continued"] == 3
    assert statistics["session_resumed_tokens"] == server.cache.counters.hit_tokens > 3 * 16
    assert statistics["session_partial_tokens"] > 0
    assert server.cache.sessions.listing(None).sessions[0].saved_tokens == statistics["session_resumed_tokens"]


def test_a_turn_that_stops_while_the_next_step_is_in_flight_holds_what_that_step_computes() -> None:
    server = TurnServer("state", overlap=True)
    first = prompt(1, 21)
    free = server.turn(first, session="", max_tokens=8).output_tokens.tolist()
    request = server.turn(first, max_tokens=8, stop=frozenset(free[2:3]))
    assert request.num_outputs <= 3 and server.held(request) == request.num_tokens
    again = server.turn([*request.tokens.tolist(), 1, 2, 3])
    assert server.computed[again.request_id] == 3 and grant_of(again).start is Start.CONTINUED


def test_an_edit_in_the_last_page_goes_on_where_it_differs() -> None:
    server = TurnServer()
    history = server.turn(prompt(1, 37)).tokens.tolist()
    edited = [*history[:36], (history[36] + 1) % 50, 4, 5]
    request = server.turn(edited)
    assert (grant_of(request).start, grant_of(request).resumed_tokens) == (Start.TRIMMED, 36)
    assert server.computed[request.request_id] == 3


@pytest.mark.parametrize(("kind", "at"), [("full", 20), ("state", 36)])
def test_an_edit_before_begins_on_the_cached_prefix(kind: str, at: int) -> None:
    """A state cannot be taken back, not by one token."""
    server = TurnServer(kind)
    history = server.turn(prompt(1, 37)).tokens.tolist()
    edited = [*history[:at], (history[at] + 1) % 50, *history[at + 1 :]]
    request = server.turn(edited)
    assert grant_of(request).start is Start.EDITED and not grant_of(request).resumed_tokens
    assert request.num_cached == (at // 16 * 16 if kind == "full" else request.num_cached) <= at
    assert server.held(request) == len(edited) + 2, "the session goes on with the edited history"


def test_the_same_prompt_again_computes_its_last_token() -> None:
    server = TurnServer()
    first = server.turn(prompt(1, 37))
    again = server.turn(prompt(1, 37))
    assert server.computed[again.request_id] == 1
    assert again.output_tokens.tolist() == first.output_tokens.tolist()


def test_of_two_turns_at_once_one_continues_and_the_later_is_held() -> None:
    server = TurnServer()
    history = server.turn(prompt(1, 37)).tokens.tolist()
    one, other = server.submit([*history, 1, 2], max_tokens=9), server.submit([*history, 3, 4], max_tokens=2)
    server.finish()
    starts = [grant_of(request).start for request in (one, other)]
    assert starts == [Start.CONTINUED, Start.BRANCHED]
    assert server.computed[one.request_id] == len(history) + 2 - 39
    assert server.held(other) == len(history) + 3 and not server.held(one)
    assert grant_of(one).reason == "a later turn of the session is held"
    for request in (one, other):
        assert request.output_tokens.tolist() == server.model.solo(request)
    assert server.cache.sessions.num_held == 1
    after = server.turn([*other.tokens.tolist(), 9])
    assert server.computed[after.request_id] == 2


def test_a_session_expires() -> None:
    server = TurnServer()
    history = server.turn(prompt(1, 37)).tokens.tolist()
    server.now = 99.0
    assert server.cache.sessions.listing(None).sessions[0].expires_in_seconds == 1.0
    server.now = 100.0
    assert server.cache.sessions.expire() == 1 and server.cache.sessions.num_held == 0
    request = server.turn([*history, 1])
    assert grant_of(request).start is Start.NEW and request.num_cached == 32, "its whole pages stay cached"


def test_an_abort_holds_what_has_settled() -> None:
    server = TurnServer("state")
    request = server.submit(prompt(1, 150), max_tokens=9)
    server.finish(steps=2)  # two chunks of 64
    server.scheduler.abort(request.request_id)
    assert server.held(request) == 128
    again = server.turn(prompt(1, 150))
    assert server.computed[again.request_id] == 22 and grant_of(again).start is Start.CONTINUED


def test_a_turn_that_fails_or_never_runs_holds_nothing() -> None:
    server = TurnServer()
    request = server.submit(prompt(1, 150))
    server.finish(steps=1)
    server.scheduler.abort(request.request_id, failed=True)
    assert grant_of(request).reason == "the turn failed" and server.cache.sessions.num_held == 0
    waiting = server.submit(prompt(2, 20))
    server.scheduler.abort(waiting.request_id)
    assert grant_of(waiting).start is Start.NONE and grant_of(waiting).reason == "it was aborted before it ran"
    server.cache.audit()


def test_the_budget_ends_the_session_that_was_not_used_for_the_longest_time() -> None:
    server = TurnServer(num_pages=40, share=0.25)  # 10 pages
    turns = {name: server.turn(prompt(at, 60), name) for at, name in enumerate("abc")}  # 4 pages each
    assert all(server.held(request) for request in turns.values())
    states = {each.session_id: each for each in server.cache.sessions.listing(None).sessions}
    assert [states[name].held_tokens > 0 for name in "abc"] == [False, True, True]
    assert states["a"].reason == "its room was needed by a later session, as all have one budget"
    assert server.cache.sessions.num_pages == 8 <= server.cache.sessions.budget == 10
    large = server.turn(prompt(9, 170), "d")
    assert grant_of(large).reason == "172 tokens are more than the budget of 160; raise --session-share"
    assert server.cache.sessions.num_held == 2, "no other session ends for one that is too large"


def test_shared_pages_count_once() -> None:
    server = TurnServer(num_pages=40, share=0.25)
    shared = prompt(1, 128)  # 8 pages
    server.turn([*shared, 1], "a")
    server.turn([*shared, 2], "b")
    assert server.cache.sessions.num_held == 2 and server.cache.sessions.num_pages == 10
    assert server.cache.sessions.num_tokens == 2 * 131


def test_sessions_give_way_before_a_request_is_preempted_or_waits() -> None:
    server = TurnServer(num_pages=20, max_requests=3, share=0.9)
    history = server.turn(prompt(1, 100), "s").tokens.tolist()
    server.turn(prompt(2, 100), "t")
    long = server.turn(prompt(3, 250), "", max_tokens=40)
    assert long.num_preemptions == 0 and server.scheduler.num_preemptions == 0
    assert server.cache.sessions.num_held == 0 and server.cache.sessions.totals.sessions_given_up == 2
    request = server.turn([*history, 1])
    assert grant_of(request).start is Start.LOST
    reason = {each.session_id: each.reason for each in server.cache.sessions.listing(None).sessions}["t"]
    assert reason == "its room was needed by another request", "its id is its client's alone"


def test_a_long_turn_looks_once_at_the_rows_that_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many small sessions, four times as many: four times as long, and not sixteen."""
    looks, really = [0], sessions_module._Pages.add

    def counted(pages: sessions_module._Pages, kv: RequestKV) -> None:
        looks[0] += 1
        really(pages, kv)

    monkeypatch.setattr(sessions_module._Pages, "add", counted)
    found = []
    for rows in (12, 48):
        server = TurnServer(num_pages=4 * rows, page_size=4, max_requests=rows + 2)
        for at in range(rows):
            server.turn(prompt(at, 10), f"s{at}", max_tokens=1)
        held, looks[0] = server.cache.sessions.num_held, 0
        server.turn(prompt(99, 6 * rows), "long", max_tokens=1)
        assert server.cache.sessions.num_held < held // 2
        found.append(looks[0])
    assert found[1] <= 5 * found[0], found


def test_a_request_gets_the_row_of_a_session_if_all_rows_are_held() -> None:
    server = TurnServer(max_requests=2)
    for name in "abc":
        server.turn(prompt(ord(name), 20), name)
    assert server.cache.sessions.num_held == 2
    assert [each.session_id for each in server.cache.sessions.listing(None).sessions if each.held_tokens] == ["c", "b"]


def test_another_tenant_has_other_sessions() -> None:
    server = TurnServer()
    history = server.turn(prompt(1, 37), salt="mine").tokens.tolist()
    theirs = server.turn([*history, 1], salt="theirs")
    assert grant_of(theirs).start is Start.NEW and theirs.num_cached == 0
    assert not server.cache.sessions.close(Namespace(), "s")
    assert len(server.cache.sessions.listing(Namespace(salt="theirs")).sessions) == 1
    mine = server.turn([*history, 1], salt="mine")
    assert grant_of(mine).start is Start.CONTINUED


def test_a_key_that_holds_most_gives_way_first() -> None:
    """To its own sessions when the budget is full, and to other requests when rows or pages are short."""
    server = TurnServer(num_pages=60, max_requests=8, share=0.34)  # 20 pages
    listed = server.cache.sessions.listing

    def held(owner: str) -> str:
        return "".join(sorted(each.session_id for each in listed(None, owner).sessions if each.held_tokens))

    server.turn(prompt(0, 60), "a", owner="ann")  # 4 pages, as all
    for at, name in enumerate("vwxyz", 1):
        server.turn(prompt(at, 60), name, owner="bob")
    assert (held("ann"), held("bob")) == ("a", "wxyz")
    server.turn(prompt(9, 60), "b", owner="ann")
    assert (held("ann"), held("bob")) == ("ab", "xyz"), "bob held more than his part"
    large = server.turn(prompt(10, 300), "c", owner="eve")
    assert "other keys that hold less" in grant_of(large).reason and held("ann") + held("bob") == "abxyz"
    for at in range(4):  # of 8 rows sessions have 5
        server.submit(prompt(20 + at, 20), "", max_tokens=9, owner="eve")
    server.finish(steps=2)
    assert (held("ann"), held("bob")) == ("ab", "yz"), "rows are short"


def test_of_too_many_sessions_those_of_the_key_with_most_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MOST_SESSIONS", 4)
    server = TurnServer()
    names = [("ann", "a"), *(("bob", f"b{at}") for at in range(9)), ("eve", "e")]
    for owner, name in names:
        server.turn(prompt(1, 20), name, owner=owner)
    found = {
        owner: [each.session_id for each in server.cache.sessions.listing(None, owner).sessions]
        for owner in ("ann", "bob", "eve")
    }
    assert found == {"ann": ["a"], "bob": ["b8", "b7"], "eve": ["e"]}


def test_another_owner_has_other_sessions_of_a_namespace() -> None:
    """Keys with names that share a cache."""
    server, sessions = TurnServer(), Namespace()
    history = server.turn(prompt(1, 37), owner="ann").tokens.tolist()
    theirs = server.turn([*history, 1], owner="bob")
    assert (grant_of(theirs).start, theirs.num_cached) == (Start.NEW, 32), "pages are shared, and nothing else"
    listed = server.cache.sessions.listing
    assert [len(listed(sessions, owner).sessions) for owner in (None, "ann", "bob", "eve")] == [2, 1, 1, 0]
    assert not server.cache.sessions.close(sessions, "s", "eve")
    assert server.cache.sessions.close(sessions, "s", "bob")
    mine = server.turn([*history, 1], owner="ann")
    assert grant_of(mine).start is Start.CONTINUED
    server.turn([*history, 1], owner="bob")
    assert server.cache.sessions.close(sessions, "s") and not len(server.cache.sessions)


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_flush_ends_sessions_and_what_runs_is_not_held(share_prefixes: bool) -> None:
    server = TurnServer(share_prefixes=share_prefixes)
    history = server.turn(prompt(1, 37)).tokens.tolist()
    running = server.submit(prompt(2, 40), "t")
    server.finish(steps=1)
    offload = server.cache.offload
    offload.flush(None)  # type: ignore[attr-defined]
    assert server.cache.sessions.num_held == 0
    server.finish()
    assert grant_of(running).reason == "its pages were flushed while the turn ran"
    request = server.turn([*history, 1])
    assert request.num_cached == 0 and grant_of(request).start is Start.LOST


def test_a_session_is_closed() -> None:
    server = TurnServer()
    history = server.turn(prompt(1, 37)).tokens.tolist()
    running = server.submit([*history, 5], max_tokens=9)
    server.finish(steps=1)
    assert server.cache.sessions.close(Namespace(), "s") and not server.cache.sessions.close(Namespace(), "s")
    server.finish()
    assert grant_of(running).reason == "the session was closed while the turn ran"
    assert len(server.cache.sessions) == 0 and not server.cache.rows.live
    found = server.cache.pages.num_free_pages + server.cache.tree.num_evictable
    assert found == server.cache.plan.num_pages


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_turn_goes_on_in_the_row_and_closes_the_session_when_it_ends(kind: str) -> None:
    server = TurnServer(kind, share=0.9, eviction="lru")
    other = server.turn(prompt(4, 32), "").tokens
    history = server.turn(prompt(1, 37)).tokens
    last = server.submit([*history.tolist(), 5], last=True)
    assert len(server.cache.sessions) == 1, "it is closed when the turn ends"
    server.finish()
    grant = grant_of(last)
    assert grant.start is Start.CONTINUED and grant.resumed_tokens and not grant.held_tokens
    assert (grant.reason, grant.expires_in_seconds) == ("it was the session's last turn", 0.0)
    assert len(server.cache.sessions) == 0 and not server.cache.rows.live
    if kind == "full":
        assert server.cache.evict(1) == 1
        assert len(server.cache.match(other).pages) == 2, "pages of the closed session go first"


def test_a_last_turn_that_never_ran_closes_the_session_too() -> None:
    server = TurnServer()
    history = server.turn(prompt(1, 37)).tokens.tolist()
    beside = server.submit([*history, 6], max_tokens=9)
    server.finish(steps=1)
    last = server.submit([*history, 5], last=True)
    server.scheduler.abort(last.request_id)
    assert not grant_of(last).held_tokens and len(server.cache.sessions) == 0
    server.finish()
    assert grant_of(beside).reason == "the session was closed while the turn ran"
    assert grant_of(server.turn([*history, 7])).start is Start.NEW


def check_a_closed_session_goes_first() -> None:
    """Two sessions with a common prompt of two pages. The one used last is closed."""
    server = TurnServer(share=0.9, eviction="lru")
    common = prompt(1, 32)
    other = server.turn(prompt(4, 32), "").tokens
    theirs = server.turn([*common, *prompt(2, 32)], "theirs").tokens
    mine = server.turn([*common, *prompt(3, 32)], "mine").tokens
    server.cache.sessions.close(Namespace(), "mine")
    assert len(server.cache.match(mine).pages) == 4, "it is cached until its room is needed"
    assert server.cache.evict(2) == 2
    assert len(server.cache.match(mine).pages) == 2 and len(server.cache.match(theirs).pages) == 4
    assert len(server.cache.match(other).pages) == 2, "which was used before"


def test_what_a_closed_session_alone_has_used_is_evicted_first() -> None:
    check_a_closed_session_goes_first()


def test_a_retention_outlives_the_close_of_its_session() -> None:
    """What a client retains is no candidate. When the retention ends, the pages of the closed session go first."""
    server = TurnServer(share=0.9, eviction="lru")
    other = server.turn(prompt(4, 32), "").tokens
    mine = server.turn(prompt(3, 32), "mine").tokens
    retention = offload_of(server.cache).retention
    granted = retention.retain(mine[:16], Namespace(), ttl_seconds=100.0)
    server.cache.sessions.close(Namespace(), "mine")
    assert server.cache.evict(2) == 2
    assert len(server.cache.match(mine).pages) == 1 and len(server.cache.match(other).pages) == 1
    assert retention.release(granted.retention_id) and server.cache.evict(1) == 1
    assert not len(server.cache.match(mine).pages) and len(server.cache.match(other).pages) == 1


def check_an_expired_session_is_closed() -> None:
    """A client may come back after its session has expired, or close it then."""
    server = TurnServer(share=0.9, eviction="lru")
    history = server.turn(prompt(1, 32), "s").tokens
    other = server.turn(prompt(2, 32), "t").tokens
    server.now = 200.0
    assert server.cache.sessions.expire() == 2
    history = server.turn([*history.tolist(), *prompt(3, 32)], "s").tokens
    assert grant_of(server.turn(prompt(4, 16), "u")).start is Start.NEW
    server.now = 400.0
    assert server.cache.sessions.expire() == 2
    assert not server.cache.sessions.close(Namespace(), "s"), "there is none any more"
    assert server.cache.evict(4) == 4
    assert not len(server.cache.match(history).pages) and len(server.cache.match(other).pages) == 2


def test_a_session_that_has_expired_can_be_closed() -> None:
    check_an_expired_session_is_closed()


def test_an_expired_session_does_not_go_first() -> None:
    """A client that is slow comes back."""
    server = TurnServer(share=0.9, eviction="lru")
    server.turn(prompt(1, 32), "")
    history = server.turn(prompt(2, 32), "s").tokens
    server.now = 200.0
    assert server.cache.sessions.expire() == 1
    assert server.cache.evict(2) == 2 and len(server.cache.match(history).pages) == 2


def test_held_rows_have_an_owner_in_errors() -> None:
    """A row that a step in flight still computes cannot end: the error says what holds the pages."""
    server = TurnServer(num_pages=20, share=0.9)
    turn = server.submit(prompt(1, 200), max_tokens=9)
    server.finish(steps=1)
    fence = server.cache.open_fence()
    server.scheduler.abort(turn.request_id)
    assert server.held(turn) == 64
    kv = server.cache.begin(np.array(prompt(2, 20), dtype=np.int32))
    with pytest.raises(OutOfPages, match="1 running requests hold the rest, beside 1 session"):
        server.cache.extend([kv], [320])
    server.cache.close_fence(fence)
    server.cache.extend([kv], [320])
    assert server.cache.sessions.num_held == 0, "the row is at rest, and gives way"
    server.cache.finish(kv)
    server.cache.audit()


def test_no_share_holds_nothing() -> None:
    server = TurnServer(share=0.0)
    request = server.turn(prompt(1, 37))
    assert grant_of(request).reason == "39 tokens are more than the budget of 0; --session-share is 0"
    assert server.cache.sessions.num_held == 0


@slow_unless_changed(*CORE)
@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_random_turns(seed: int) -> None:
    for each in range(seed, seed + 6):
        run_sessions(each, 60)


@slow_unless_changed(*CORE)
def test_random_turns_meet_everything() -> None:
    """What the seeds above meet, so that they cannot pass by doing nothing."""
    happened = sum((run_sessions(seed, 60) for seed in range(100, 150)), Counter[str]())
    wanted = (
        "held",
        "gave way",
        "expired",
        "overflow",
        "partial",
        "close",
        "flush",
        "abort",
        "start trimmed",
        "last turn",
    )
    assert all(happened[name] for name in (*wanted, "start continued", "start edited", "start branched", "start lost"))


@slow_unless_changed(*CORE)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_turns_that_hypothesis_draws(data: st.DataObject) -> None:
    choices = drawn(data)
    machine = SessionMachine(choices)
    for _ in range(25):
        machine.step(choices)
    machine.end()

"""Endings reach the eviction policy: from the loop at once, from readers of answers later, once each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.loop import endings
from quire.loop.endings import EndingsPart
from quire.prefix.endings import CLASSES
from quire.prefix.hit_density import KINDS, TOLD, HitDensity, Stay
from quire.scheduler.request import Request
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.trace import open_trace
from quire.spec.ending import Ending
from quire.testing import small_plan
from tests.sim.replays import COST, requests


def replay_with(
    ending_of: Callable[[Request], Ending | None] = lambda request: None, **settings: str
) -> tuple[Replay, EndingsPart]:
    """A replay, and a part that tells its policy."""
    part = EndingsPart(ending_of)
    settings = {"check": "all"} | settings
    return Replay(small_plan(64, 4, max_requests=8), COST, ReplaySettings(**settings), parts=[part]), part


def told(replay: Replay) -> dict[str, int]:
    policy = replay.cache.tree.policy
    assert isinstance(policy, HitDensity)
    return policy.counters().told_endings


def test_a_reader_tells_the_ending_of_a_request_that_has_ended() -> None:
    replay, part = replay_with()
    trace = requests([(40, 3), (44, 3)])
    assert not part.tell(trace[0].request_id, Ending.TOOL), "it has not begun"
    replay.run(trace)
    assert part.tell(trace[0].request_id, Ending.TOOL)
    assert not part.tell(trace[0].request_id, Ending.ANSWER), "it was told"
    assert not part.tell("nothing", Ending.ANSWER)
    assert told(replay) == {"tool": 1, "answer": 0, "length": 0}
    stays = [node.memo for node in replay.cache.tree.nodes() if isinstance(node.memo, Stay)]
    assert {each.kind // KINDS for each in stays} - set(range(CLASSES)) == {TOLD[Ending.TOOL]}


def test_what_the_loop_knows_is_told_at_once_and_not_again() -> None:
    replay, part = replay_with(lambda request: Ending.LENGTH)
    trace = requests([(40, 3), (44, 3)])
    replay.run(trace)
    assert told(replay)["length"] == 2
    assert not part.tell(trace[0].request_id, Ending.TOOL)


def test_only_the_last_requests_can_be_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "MOST_ENDED", 3)
    replay, part = replay_with()
    trace = requests([(20 + at, 2) for at in range(8)], gap=1.0)
    replay.run(trace)
    assert [part.tell(each.request_id, Ending.ANSWER) for each in trace] == [False] * 5 + [True] * 3


def test_a_policy_without_data_of_its_own_is_told_nothing() -> None:
    replay, part = replay_with(policy="lru")
    trace = requests([(40, 3)])
    replay.run(trace)
    assert not part.tell(trace[0].request_id, Ending.TOOL) and part.counters() == []


def test_a_replay_tells_the_endings_of_its_trace() -> None:
    """Generated outputs of agents end with tokens that say the same: where these are cut off, only the trace does."""
    trace = list(open_trace("agent-sessions:sessions=2", limit=40, seed=1))
    assert {each.calls_tool for each in trace} == {True, False}
    found = []
    for how in ("hidden", "told"):
        replay = Replay(small_plan(4_000, 64, context=200_000, max_requests=8), COST, ReplaySettings(endings=how))
        result = replay.run(trace)
        found.append((sum(told(replay).values()), result.hit_tokens > 0))
    assert found == [(0, True), (len(trace), True)]

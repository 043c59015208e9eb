"""The loop calls its parts in order, and a feature that is absent costs it nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire.counters import Section, statistics_of
from quire.errors import EngineDead, InvalidInput, RequestTooLarge
from quire.loop import End, Launched, Loop, Part, StepResult
from quire.scheduler.request import Request
from quire.scheduler.step import Step
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.scripts import ScriptedRequest
from quire.testing import small_plan
from tests.sim.replays import COST, requests

TRACE = requests([(40, 3), (44, 3)], shared=16)


class Noting(Part):
    """Notes the hooks that the loop calls."""

    def __init__(self, name: str, notes: list[tuple[str, str]]) -> None:
        self.name, self.notes = name, notes
        self.loop: Loop | None = None

    def note(self, hook: str) -> None:
        self.notes.append((self.name, hook))

    def attach(self, loop: Loop) -> None:
        self.loop = loop
        self.note("attach")

    def before_schedule(self) -> None:
        self.note("before_schedule")

    def scheduled(self, step: Step) -> None:
        self.note("scheduled")

    def launched(self, launched: Launched) -> None:
        self.note("launched")

    def settling(self, result: StepResult) -> None:
        assert result.settled is None
        self.note("settling")

    def settled(self, result: StepResult) -> None:
        assert result.settled is not None and len(result.settled.tokens)
        self.note("settled")

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        self.note(f"{request.request_id} {end}")

    def after_step(self, *, idle: bool) -> None:
        self.note("idle turn" if idle else "turn")

    def counters(self) -> Sequence[Section]:
        return [("notes", {self.name: len(self.notes)})]


def replay_with(*parts: Part, num_pages: int = 64, **settings: Any) -> Replay:
    plan = small_plan(num_pages, 4, max_requests=8)
    return Replay(plan, COST, ReplaySettings(check="all", **settings), parts=parts)


def hooks(notes: list[tuple[str, str]], name: str = "a") -> list[str]:
    return [hook for each, hook in notes if each == name]


def test_hooks_come_in_the_order_of_a_turn_and_of_the_parts() -> None:
    notes: list[tuple[str, str]] = []
    replay = replay_with(Noting("a", notes), Noting("b", notes))
    replay.run(TRACE)
    found = hooks(notes)
    assert found[0] == "attach"
    first = found.index("launched")
    assert found[first - 2 : first + 4] == ["before_schedule", "scheduled", "launched", "settling", "settled", "turn"]
    assert found.count("launched") == found.count("settled") == replay.loop.num_steps > 3
    assert [hook for hook in found if hook.startswith("r")] == ["r0 finished", "r1 finished"]
    assert notes[::2] == [("a", hook) for _, hook in notes[1::2]], "each hook of the first part comes first"
    assert statistics_of(replay.loop.counters())["notes"] == {"a": len(notes), "b": len(notes)}


def test_with_overlap_a_step_is_launched_before_the_one_before_it_settles() -> None:
    notes: list[tuple[str, str]] = []
    replay_with(Noting("a", notes), overlap=True).run(TRACE)
    found = [hook for hook in hooks(notes) if hook in ("launched", "settled")]
    assert found[:3] == ["launched", "launched", "settled"] and found[-1] == "settled"


@pytest.mark.parametrize("overlap", [False, True])
def test_what_precedes_a_launch_is_part_of_what_a_step_costs(overlap: bool) -> None:
    """Requests that decode wait while others are admitted."""

    class Slow(Part):
        seconds = 0.0

        def before_schedule(self) -> None:
            self.seconds += takes

    takes, found = 0.0, {}
    for takes in (0.0, 1.0):
        part = Slow()
        replay = replay_with(part, overlap=overlap)
        loop, costs = replay.loop, found.setdefault(takes, [])
        loop._seconds = lambda clock=loop._seconds, part=part: clock() + part.seconds  # type: ignore[misc]
        loop.scheduler.measured = lambda step, seconds, costs=costs: costs.append(seconds)  # type: ignore[method-assign, misc]
        replay.run(TRACE)
    assert len(found[0.0]) > 3 and min(found[0.0]) > 0
    assert found[1.0][1:] == pytest.approx([each + 1.0 for each in found[0.0][1:]])


def test_a_part_changes_no_result() -> None:
    without, beside = replay_with().run(TRACE), replay_with(Noting("a", [])).run(TRACE)
    assert without.digest == beside.digest


class Leaving(Part):
    """Aborts the first request at its first token."""

    def __init__(self) -> None:
        self.loop: Loop | None = None

    def attach(self, loop: Loop) -> None:
        self.loop = loop

    def settled(self, result: StepResult) -> None:
        assert self.loop is not None
        self.loop.abort("r0")


def test_a_part_may_end_requests() -> None:
    replay = replay_with(Leaving())
    replay.run(TRACE)
    assert replay.loop.ends == {End.FINISHED: 1, End.ABORTED: 1, End.REFUSED: 0, End.FAILED: 0}
    assert replay.cache.statistics().num_pages == 64 and not replay.loop.is_busy


def test_a_step_that_fails_ends_its_requests_and_no_others() -> None:
    notes: list[tuple[str, str]] = []
    replay = replay_with(Noting("a", notes))
    launch = replay.loop.device.launch

    def fails(step: Step, previous: Any) -> Launched:
        if replay.loop.num_steps == 2:
            raise MemoryError("the device is full")
        return launch(step, previous)

    replay.loop.device.launch = fails  # type: ignore[method-assign]
    first, late = TRACE[0], requests([(40, 3)], seed=1)[0]
    for trace in (first, late):
        request = ScriptedRequest(trace, 0.0)
        request.request_id = f"{trace.request_id}-{trace is late}"
        replay.loop.add(request)
        while replay.loop.has_work:
            replay.loop.step()
    assert replay.loop.ends == {End.FINISHED: 1, End.ABORTED: 0, End.REFUSED: 0, End.FAILED: 1}
    assert "r0-False failed" in hooks(notes) and "r0-True finished" in hooks(notes)
    replay.cache.audit()


def test_a_halted_loop_admits_nothing_and_ends_what_runs() -> None:
    replay = replay_with()
    replay.loop.add(ScriptedRequest(TRACE[0], 0.0))
    replay.loop.halt(EngineDead("a law is broken."))
    lengths = []
    for _ in range(3):
        with pytest.raises(EngineDead, match="a law is broken") as refused:
            replay.loop.add(ScriptedRequest(TRACE[1], 0.0))
        lengths.append(len(refused.traceback))
    assert len(set(lengths)) == 1, "each refusal adds its frames to the error, with what they hold"
    while replay.loop.has_work:
        replay.loop.step()
    assert replay.loop.ends[End.FINISHED] == 1 and replay.loop.ends[End.REFUSED] == 0


def test_what_can_never_run_is_refused_and_counted() -> None:
    replay = replay_with(num_pages=8)
    with pytest.raises((RequestTooLarge, InvalidInput)):
        replay.loop.add(ScriptedRequest(TRACE[0], 0.0))
    assert replay.loop.ends[End.REFUSED] == 1 and not replay.loop.has_work

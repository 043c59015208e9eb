"""Mistakes in what keeps a server answering: turns, restarts, watchdogs."""

from __future__ import annotations

from multiprocessing.process import BaseProcess

from quire.client.async_engine import AsyncEngine
from quire.client.process import EngineProcess
from quire.engine.watchdog import LaneWatch, Watchdog
from quire.serve.shares import OpenSequences, Shares
from tests.mutants.mutants import Patch, mutant


@mutant("turns", "a client with a long queue is served before another's first request")
def the_longest_queue_goes_first(patch: Patch) -> None:
    real = Shares._begin_next

    def begin(shares: Shares) -> None:
        waiting = shares._waiting
        longest = max(waiting, key=lambda name: len(waiting[name]), default="")
        shares._waiting = {name: turns for name, turns in waiting.items() if name == longest}
        real(shares)
        shares._waiting = waiting

    patch.setattr(Shares, "_begin_next", begin)


@mutant("shares", "a client that fills the queue keeps all others out for as long as it likes")
def the_first_has_it_all(patch: Patch) -> None:
    real = Shares.enter

    async def enter(shares: Shares, client: str, count: int) -> OpenSequences:
        shares._came_at.clear()
        return await real(shares, client, count)

    patch.setattr(Shares, "enter", enter)


@mutant("rates", "clients that were refused all come again after one second, however long the queue is")
def the_rate_is_not_measured(patch: Patch) -> None:
    patch.setattr(Shares, "wait_s", lambda shares, count: 1.0)


@mutant("queues", "clients that were refused one after the other are all told the same time, and come again at once")
def refusals_are_forgotten(patch: Patch) -> None:
    real = Shares.enter

    async def enter(shares: Shares, client: str, count: int) -> OpenSequences:
        shares._refused.clear()
        return await real(shares, client, count)

    patch.setattr(Shares, "enter", enter)


@mutant("times to come again", "while an engine starts, clients are told the whole time of a start until it is ready")
def a_start_never_gets_nearer(patch: Patch) -> None:
    patch.setattr(AsyncEngine, "_retry_after_s", lambda engine: max(1.0, engine._start_s))


@mutant("deaths", "an engine that was killed looks well until its last reports have been read")
def the_dead_look_alive(patch: Patch) -> None:
    patch.setattr(BaseProcess, "is_alive", lambda process: True)


@mutant("restarts", "an engine whose memory is broken is started again for ever, and clients never hear of it")
def restarts_have_no_limit(patch: Patch) -> None:
    patch.setattr(AsyncEngine, "_may_restart", lambda engine: len(engine._restarted_s) < 5)


@mutant("late deaths", "a start that failed starts another engine, which nobody owns, and which keeps its memory")
def the_dead_are_buried_twice(patch: Patch) -> None:
    def await_end(engine: AsyncEngine, process: EngineProcess, until_s: float) -> None:
        if process is engine._process:
            engine._draining = False
            engine._die(process.death())

    patch.setattr(AsyncEngine, "_await_end", await_end)


@mutant("silent engines", "an engine that stopped while it had no work looks well until a request is lost")
def silence_is_health(patch: Patch) -> None:
    from quire.client import async_engine

    patch.setattr(async_engine, "min", lambda *_: float("inf"), raising=False)


@mutant("watchdogs", "the log has the first time that a loop was stuck, and none after it")
def a_watchdog_barks_once(patch: Patch) -> None:
    real = Watchdog.tick

    def tick(watchdog: Watchdog) -> None:
        told = watchdog._is_told
        real(watchdog)
        watchdog._is_told = told

    patch.setattr(Watchdog, "tick", tick)


@mutant("stuck lanes", "a lane that never had anything to move is reported as stuck")
def an_idle_lane_is_stuck(patch: Patch) -> None:
    real = LaneWatch.stuck

    def stuck(watch: LaneWatch[str]) -> dict[str, float]:
        mark, watch._mark = watch._mark, lambda lane: watch_mark(lane)

        def watch_mark(lane: str) -> object:
            return mark(lane) or 0

        try:
            return real(watch)
        finally:
            watch._mark = mark

    patch.setattr(LaneWatch, "stuck", stuck)

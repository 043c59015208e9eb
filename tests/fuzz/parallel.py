"""Parallel: fuzzing in several processes, each with its own seeds."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from tests.fuzz.run import NO_FAULTS, Tally, Violation, level_for, run_lives
from tests.fuzz.tier_world import TierAsk

_PATIENCE = 1.0
"""Seconds without a word after which it is asked whether a process is still there."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to do: `seed` is the first one; without a limit of `operations` or of `lives` there is one of `seconds`, or
    several."""

    level: str
    seed: int
    jobs: int
    operations: int | None = None
    seconds: float | None = None
    inject: str | None = None
    lives: int | None = None
    ask: TierAsk = NO_FAULTS


def fuzz(task: Task, on_progress: Callable[[Tally], None]) -> Tally:
    """Do it, and return what was done; `on_progress` hears of the sum so far after each life.

    Raises InvalidInput for a mutant that is not known.
    """
    total = Tally()

    def heard(life: Tally) -> None:
        total.add(life)
        on_progress(total)

    if task.jobs == 1:
        total.wall = _run(task, 0, heard)
        return total
    level_for(task.level, task.inject)  # a name that is not known is an error here, not in another process
    context = multiprocessing.get_context("spawn")
    said: Any = context.Queue()
    stop = context.Event()
    workers = [context.Process(target=_work, args=(task, at, said, stop), daemon=True) for at in range(task.jobs)]
    for worker in workers:
        worker.start()
    running = set(range(task.jobs))
    while running:
        try:
            at, life = said.get(timeout=_PATIENCE)
        except queue.Empty:
            for at in [at for at in running if not workers[at].is_alive()]:
                running.discard(at)
                if workers[at].exitcode:
                    total.violation = total.violation or _death(task, workers[at].exitcode)
            continue
        if isinstance(life, float):
            total.wall = max(total.wall, life)
            running.discard(at)
            continue
        heard(life)
        if total.violation is not None:
            stop.set()
    for worker in workers:
        worker.join()
    return total


def _run(task: Task, at: int, heard: Callable[[Tally], None], stopped: Callable[[], bool] = lambda: False) -> float:
    """The lives of one process; returns how long they took."""
    operations = None if task.operations is None else -(-task.operations // task.jobs)
    lives = None if task.lives is None else len(range(at, task.lives, task.jobs))
    seeds = count(task.seed + at, task.jobs)
    done = run_lives(
        task.level,
        seeds.__next__,
        operations=operations,
        seconds=task.seconds,
        lives=lives,
        inject=task.inject,
        ask=task.ask,
        on_life=heard,
        stopped=stopped,
    )
    return done.wall


def _work(task: Task, at: int, said: Any, stop: Any) -> None:
    said.put((at, _run(task, at, lambda life: said.put((at, life)), stop.is_set)))


def _death(task: Task, exitcode: int | None) -> Violation:
    return Violation(task.level, task.seed, 0, f"a process died with exit code {exitcode}", (), by_check=False)

"""`python -m bench.serving.timed_server serve ...`: `quire`, whose engine writes what each turn of its loop took.

The environment's `QUIRE_TURNS` names a file, which gets an array at the end: a row for each turn that launched a step,
with its seconds, the CPU seconds of the engine's thread and those for moves of frames, the tokens that were computed,
the frames that moved, and how often a size was asked for.
"""

from __future__ import annotations

import os
import time
from functools import partial

import numpy as np

from quire.cli import main
from quire.client.async_engine import AsyncEngine
from quire.client.process import Core, Progress
from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.tier_storage import open_tiers
from quire.loop import Launched, Loop, Part
from quire.memory.allocator import Move
from quire.plan.budget import MemoryPlan
from quire.serve import server

FILE = "QUIRE_TURNS"


class TurnTimes(Part):
    """The time from the end of a turn to the end of the next, which commands to the engine are a part of."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._rows: list[tuple[float, ...]] = []
        self._num_tokens = self._num_moved = self._num_sizes = 0
        self._moving = 0.0
        self._was_busy = False
        self._began = self._cpu = 0.0

    def attach(self, loop: Loop) -> None:
        self._loop = loop
        self._move = loop.cache._growth.move
        loop.cache._growth.move = self.move  # type: ignore[method-assign]
        loop.cache.parts.resized.append(self._resized)

    def move(self, move: Move) -> None:
        """As the cache's."""
        began = time.thread_time()
        self._move(move)
        self._moving += time.thread_time() - began
        self._num_moved += len(move.sources)

    def launched(self, launched: Launched) -> None:
        self._num_tokens += launched.step.num_tokens

    def after_step(self, *, idle: bool) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        if self._was_busy and not idle:
            counts = (self._num_tokens, self._num_moved, self._num_sizes)
            self._rows.append((now - self._began, cpu - self._cpu, self._moving, *counts))
        self._began, self._cpu, self._moving = now, cpu, 0.0
        self._num_tokens = self._num_moved = self._num_sizes = 0
        self._was_busy = self._loop.is_busy

    def _resized(self, plan: MemoryPlan) -> None:
        self._num_sizes += 1

    def close(self) -> None:
        np.save(self._path, np.array(self._rows))


def build(config: EngineConfig, progress: Progress) -> Core:
    """An engine with this part, for its process."""
    storage = open_tiers(config)
    return EngineCore(config, storage=storage, progress=progress, parts=[TurnTimes(os.environ[FILE])])


if __name__ == "__main__":
    from bench.serving.timed_server import build as importable

    server.serve = partial(server.serve, start=partial(AsyncEngine.start, build=importable))  # type: ignore[assignment]
    main()

"""What a run in several processes says while it collects: each process collects all tests, which takes a while."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

EVERY_S = 4.0
FIRST = "gw0"
"""The process that speaks for all."""


class Progress:
    """A plugin of pytest, in each process of a run. `say` writes a line, by default past what pytest captures."""

    def __init__(
        self,
        config: pytest.Config,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._say = say or self._past_captures
        self._clock = clock
        self._speaks = getattr(config, "workerinput", {}).get("workerid") == FIRST
        self._num_found = 0
        self._said_at_s = clock()

    def pytest_itemcollected(self) -> None:
        """A test is found; whether it is selected is decided at the end."""
        self._num_found += 1
        if self._speaks and self._clock() - self._said_at_s >= EVERY_S:
            self._said_at_s = self._clock()
            self._say(f"==> {self._num_found:,} tests found so far")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """A process has collected: here, in the one that started it."""
        if node.gateway.id == FIRST:
            self._say(f"==> {len(ids):,} tests to run")

    def _past_captures(self, line: str) -> None:
        captures = self._config.pluginmanager.getplugin("capturemanager")
        with captures.global_and_fixture_disabled():
            os.write(2, f"{line}\n".encode())

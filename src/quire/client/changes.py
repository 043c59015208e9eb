"""Changes: what was changed of an engine while it ran, for one that takes its place."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from quire.client.process import Core
from quire.engine.messages import ResizeRequest
from quire.errors import QuireError

logger = logging.getLogger(__name__)


class Changes:
    """The last sizes of memory, whether it is released, and the last terms of each tenant."""

    def __init__(self) -> None:
        self._terms: dict[str, dict[str, Any]] = {}
        self._sizes: dict[str, Any] = {}
        self._is_released = False

    def done(self, verb: str, arguments: tuple[Any, ...]) -> None:
        """A method of a core was called, and has changed what it says."""
        match verb, arguments:
            case Core.set_tenant.__name__, (str(name), dict(terms)):
                self._terms[name] = self._terms.get(name, {}) | terms
            case Core.resize.__name__, (ResizeRequest() as request,):
                asked = {"device_bytes": request.device_bytes, "host_bytes": request.host_bytes}
                self._sizes |= {name: size for name, size in asked.items() if size is not None}
            case ((Core.release_memory.__name__ | Core.resume_memory.__name__), _):
                self._is_released = verb == Core.release_memory.__name__

    def calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Methods and arguments for an engine that has just started. Terms come first: floors that fit a smaller size
        fit all of it."""
        calls: list[tuple[str, tuple[Any, ...]]] = [(Core.set_tenant.__name__, each) for each in self._terms.items()]
        sizes = [ResizeRequest(**{name: size}, wait_s=0.0) for name, size in self._sizes.items()]
        calls += [(Core.resize.__name__, (size,)) for size in sizes]
        return calls + [(Core.release_memory.__name__, (0.0,))] * self._is_released

    async def make_again(self, ask: Callable[[str, tuple[Any, ...]], Awaitable[Any]]) -> None:
        """Make the calls, in any order that the engine takes: floors of tenants fit one after the other only."""
        calls = self.calls()
        while calls:
            refused, why = [], ""
            for call in calls:
                try:
                    await ask(*call)
                except QuireError as error:
                    refused.append(call)
                    why = str(error)
            if len(refused) == len(calls):
                logger.error("what was changed is not made again: %s", why)
                return
            calls = refused

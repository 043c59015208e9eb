"""Faults: allocations that fail in the middle of an operation, although there is room."""

from __future__ import annotations

from typing import Any

from quire.cache import KVCache
from quire.errors import OutOfPages
from quire.testing.choices import Choices


class Faults:
    """Stands before every allocator of one cache, and lets the n-th allocation from now on fail, once."""

    def __init__(self, cache: KVCache) -> None:
        self._left = 0
        self._raised: OutOfPages | None = None
        self._put_before(cache.pages, "alloc_pages")
        for group in cache.groups:
            self._put_before(group.frames.allocator, "alloc_group_begin" if group.reach.in_place else "alloc_pages")

    def arm(self, choices: Choices) -> None:
        """One of the next few allocations will fail."""
        self._left = choices.between(1, 4)

    def disarm(self) -> None:
        """None will."""
        self._left = 0

    def take(self, error: OutOfPages) -> bool:
        """Whether this error was ours."""
        ours, self._raised = error is self._raised, None
        return ours

    def _put_before(self, allocator: Any, verb: str) -> None:
        real = getattr(allocator, verb)

        def allocate(count: int) -> Any:
            if self._left and count:
                self._left -= 1
                if not self._left:
                    self._raised = OutOfPages(
                        group=allocator.name, wanted=count, free=0, held_by="a fault was injected"
                    )
                    raise self._raised
            return real(count)

        setattr(allocator, verb, allocate)

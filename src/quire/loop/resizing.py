"""ResizingPart: a cache gets smaller between steps, until it has the size that was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.cache import KVCache
from quire.loop.loop import Loop
from quire.loop.part import Part
from quire.plan.budget import MemoryPlan

_AGAIN_S = 0.05  # until it is tried again, although no request has ended: frames move, or a transfer has ended
_SMALLER = "was preempted: the KV memory was made smaller"


class ResizingPart(Part):
    """The size of one cache (`quire.cache.resizing`). `resized` is called when groups have other frames than before."""

    def __init__(
        self,
        cache: KVCache,
        resized: Callable[[], None] = lambda: None,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._resizing = cache.resizing
        self._resized = resized
        self._seconds = seconds
        self._preempts = self._is_busy = False
        self._seen, self._again_at = -1, 0.0
        self._loop: Loop | None = None

    def attach(self, loop: Loop) -> None:
        self._loop = loop

    @property
    def is_done(self) -> bool:
        """Whether the size is the one that was asked for."""
        return self._resizing.reached

    @property
    def is_due(self) -> bool:
        if not self._is_busy:
            return False
        return self._cache.tree.num_releases != self._seen or self._seconds() >= self._again_at

    @property
    def preempts(self) -> bool:
        """Whether a change that is on its way preempts requests."""
        return self._preempts and self._is_busy

    def before_schedule(self) -> None:
        if self.is_due:
            self._go_on()

    def aim(self, plan: MemoryPlan, *, released: bool = False, preempts: bool = False) -> None:
        """Have the frames of this plan (`Resizing.aim`), or none while `released`; as much of it as is possible is done
        at once. Requests that run keep theirs until they end, unless it `preempts` them or all is `released`."""
        self._preempts = preempts or released
        self._resizing.aim(plan, released=released)
        self._go_on()

    def _go_on(self) -> None:
        assert self._loop is not None
        loop, scheduler, resizing, pages_of = (
            self._loop,
            self._loop.scheduler,
            self._resizing,
            self._cache.plan.pages_of,
        )
        loop.drain()
        most = {each: pages_of(each.num_prompt_tokens + each.max_tokens) for each in scheduler.requests}
        ends = [] if resizing.is_released else [(request.namespace, end) for request, end in most.items()]
        promised = self._cache.admission.units_for(ends)
        while True:
            running = {each.kv: end * (not self._preempts) for each, end in most.items() if each.kv is not None}
            done = resizing.go_on(list(running), list(running.values()), promised)
            if done or not self._preempts or not scheduler.num_running:
                break
            scheduler.preempt_last(_SMALLER)
        self._resized()
        self._is_busy = not self.is_done
        self._seen, self._again_at = self._cache.tree.num_releases, self._seconds() + _AGAIN_S

"""Workers: threads that make calls in their order. A call that hangs does not keep the process alive."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

logger = logging.getLogger(__name__)


class Workers:
    """So many threads, which end with `close`."""

    def __init__(self, name: str, threads: int) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def run(self, call: Callable[[], None]) -> None:
        """Make the call on one of the threads."""
        self._calls.put(call)

    def close(self, timeout_s: float) -> bool:
        """End the threads after the calls that were given; False: some have not ended in time."""
        for _ in self._threads:
            self._calls.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                logger.exception("a call to the store failed")

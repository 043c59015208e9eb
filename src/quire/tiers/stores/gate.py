"""Gate: operations of many threads, and one close that waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class Gate:
    """Open until `shut`. Entered by every operation, which is told whether it may go on."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._inside = 0
        self.is_open = True

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """False once it is shut; else nothing is closed before this ends."""
        with self._changed:
            is_open = self.is_open
            self._inside += is_open
        try:
            yield is_open
        finally:
            if is_open:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()

    def shut(self) -> bool:
        """Let no operation in and wait for those inside. False: it was shut before."""
        with self._changed:
            was_open, self.is_open = self.is_open, False
            self._changed.wait_for(lambda: self._inside == 0)
        return was_open

"""Gate: operations of many threads, and one close that waits for them."""

from __future__ import annotations

from threading import Condition


class Gate:
    """Open until `shut`. Every operation is a `with` block of it, and is told whether it may go on."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._inside = 0
        self.is_open = True

    def __enter__(self) -> bool:
        """False once it is shut; else nothing is closed before the block ends."""
        with self._changed:
            self._inside += 1
            return self.is_open

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def shut(self) -> bool:
        """Let no operation go on, and wait for those that do. False: it was shut before."""
        with self._changed:
            was_open, self.is_open = self.is_open, False
            self._changed.wait_for(lambda: self._inside == 0)
        return was_open

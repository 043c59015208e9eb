"""Gate: a close that waits for the operations of all threads."""

from __future__ import annotations

from threading import Condition


class Gate:
    """Open until `shut`. Each operation is a `with` block, whose value says whether it may go on."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._inside = 0
        self.is_open = True

    def __enter__(self) -> bool:
        """False after `shut`; else nothing is closed before the block ends."""
        with self._changed:
            self._inside += 1
            return self.is_open

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def shut(self) -> bool:
        """Refuse new operations, and wait for those inside. False: it was shut before."""
        with self._changed:
            was_open, self.is_open = self.is_open, False
            self._changed.wait_for(lambda: self._inside == 0)
        return was_open

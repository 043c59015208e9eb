"""LookupLog: a file of JSON lines that says what a connector looked up, loaded and saved; `quire explain` reads it.

    {"time": 1.5, "since": 1.2, "scope": HEX, "request": ID, "part": 0, "asked": 12, "found": 9, "missed": KEY,
     "unanswered": false}
    {"time": 1.6, "scope": HEX, "bad": {KEY: "digest"}}
    {"time": 1.7, "scope": HEX, "saved": [KEY, ...]}

A KEY is the hash of a chunk in hex, a dot and its part. The file begins anew at 64 MiB; the one before it is kept.
A process that is killed may leave half a line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any

from quire.errors import StoreError
from quire.tiers.store import Answer, StoreKey

_MOST_BYTES = 64 << 20
_MOST_WAITING = 1000
_CLOSE_S = 1.0


class LookupLog:
    """Appends lines on a thread; any other may call it and does not wait. A disk that is full or hangs loses lines and
    nothing else."""

    def __init__(self, path: str | Path) -> None:
        """Raises StoreError if the file cannot be written."""
        self._path = Path(path)
        self._waiting: Queue[str | None] = Queue(_MOST_WAITING)
        self._open()
        self._writer = Thread(target=self._run, name="quire-log", daemon=True)
        self._writer.start()

    def _open(self) -> None:
        try:
            self._file = self._path.open("a")
        except OSError as error:
            raise StoreError(f"the log of lookups '{self._path}' cannot be written: {error}.") from error

    def looked_up(
        self, scope: bytes, request: str, answers: Iterable[tuple[tuple[bytes, int], Answer | None]], since: float = 0.0
    ) -> None:
        """A request asked for keys, in the order of its prompt. RETRY or None: the store has not said whether it is
        there. It began to ask at `since`, in seconds of the wall clock; 0: now. A line for each part."""
        by_part: dict[int, list[tuple[str, Answer | None]]] = {}
        for (page, part), answer in answers:
            by_part.setdefault(part, []).append((_name(page, part), answer))
        for part, asked in by_part.items():
            missed = next((at for at, (_, answer) in enumerate(asked) if answer is not Answer.HIT), len(asked))
            line = {"since": since or time.time(), "scope": scope.hex(), "request": request, "part": part}
            name, answer = asked[missed] if missed < len(asked) else (None, Answer.MISS)
            more = {"asked": len(asked), "found": missed, "missed": name, "unanswered": answer is not Answer.MISS}
            self._write(line | more)

    def bad(self, scope: bytes, defects: Mapping[StoreKey, str]) -> None:
        """Records that were found and are bad, by what is wrong."""
        self._write(
            {"scope": scope.hex(), "bad": {_name(key.page, key.part): defect for key, defect in defects.items()}}
        )

    def saved(self, scope: bytes, keys: Sequence[StoreKey]) -> None:
        """Records that are visible now."""
        if keys:
            self._write({"scope": scope.hex(), "saved": [_name(key.page, key.part) for key in keys]})

    def close(self) -> None:
        """Write what waits, for a second at most. May be called twice."""
        with suppress(Full):
            self._waiting.put_nowait(None)
        self._writer.join(_CLOSE_S)

    def _write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps({"time": round(time.time(), 6), **line})
        with suppress(Full):
            self._waiting.put_nowait(text + "\n")

    def _run(self) -> None:
        while (text := self._waiting.get()) is not None:
            with suppress(OSError, ValueError):
                if self._file.tell() > _MOST_BYTES:
                    self._file.close()
                    self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                    self._file = self._path.open("a")
                self._file.write(text)
                self._file.flush()
        with suppress(OSError):
            self._file.close()


def _name(page: bytes, part: int) -> str:
    return f"{page.hex()}.{part}"

"""LoggedStore: writes down what is asked of a store and what it answers."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Buffer

from quire.testing.stores.wrapped_store import WrappedStore
from quire.tiers.store import Answer, Store, StoreKey


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `num_bytes` is of all records that were handed over, or buffers to be filled."""

    verb: str
    keys: tuple[StoreKey, ...]
    answers: tuple[Answer, ...]
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        counts = Counter(answer.name for answer in self.answers)
        said = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"
        size = f", {self.num_bytes} bytes" if self.num_bytes else ""
        return f"{self.verb} of {len(self.keys)}: {said}{size}, {self.seconds * 1e3:.2f} ms"


class LoggedStore(WrappedStore):
    """Keeps the last 10,000 calls in `calls`, oldest first, and logs each at level DEBUG."""

    def __init__(self, inner: Store, logger: logging.Logger | None = None) -> None:
        super().__init__(inner)
        self.calls: deque[Call] = deque(maxlen=10_000)
        self._logger = logger or logging.getLogger("quire.store")

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """Written down."""
        started = time.perf_counter()
        return self._note("exists", keys, super().exists(keys), started)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """Written down."""
        started = time.perf_counter()
        return self._note("prepare", keys, super().prepare(keys, sizes), started)

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Written down."""
        started = time.perf_counter()
        return self._note("put", keys, super().put(keys, records), started, records)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Written down."""
        started = time.perf_counter()
        return self._note("complete", keys, super().complete(keys, ok), started)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Written down."""
        started = time.perf_counter()
        return self._note("get", keys, super().get(keys, records), started, records)

    def remove(self, keys: Sequence[StoreKey]) -> int:
        """Written down, without an answer for each key."""
        started = time.perf_counter()
        count = super().remove(keys)
        self._note("remove", keys, [], started)
        return count

    def _note(
        self,
        verb: str,
        keys: Sequence[StoreKey],
        answers: list[Answer],
        started: float,
        records: Sequence[Buffer] = (),
    ) -> list[Answer]:
        num_bytes = sum(memoryview(record).nbytes for record in records)
        call = Call(verb, tuple(keys), tuple(answers), num_bytes, time.perf_counter() - started)
        self.calls.append(call)
        self._logger.debug("%s", call)
        return answers

"""Prepared: the records that one open store has announced and not completed yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from typing_extensions import Buffer

from quire.tiers.store import Answer, StoreKey


@dataclass(slots=True)
class Announced:
    """A record that was announced: its bytes, and where they are once they were put. They are the caller's."""

    num_bytes: int
    record: memoryview | None = None


class Prepared:
    """What is between `prepare` and `complete`, by key. It copies nothing and is for any number of threads.

    A key is here at most once, so a second writer in this process is told to wait whatever the medium knows.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._announced: dict[StoreKey, Announced] = {}

    def announce(
        self, keys: Sequence[StoreKey], sizes: Sequence[int], ask: Callable[[list[StoreKey], list[int]], list[Answer]]
    ) -> list[Answer]:
        """Announce the records for which `ask`, the medium, says MISS. It is asked of none that is announced already.

        Of two announcements of one key in a batch, the first is the writer.
        """
        with self._lock:
            claimed = [self._claim(key, size) for key, size in zip(keys, sizes, strict=True)]
        mine = [index for index, was_claimed in enumerate(claimed) if was_claimed]
        said = dict.fromkeys((keys[index] for index in mine), Answer.RETRY)
        try:
            said.update(zip(said, ask([keys[index] for index in mine], [sizes[index] for index in mine]), strict=True))
        finally:
            self.take([key for key, answer in said.items() if answer is not Answer.MISS])
        answers = [said.get(key, Answer.PENDING) for key in keys]
        return [
            answer if was_claimed or answer is not Answer.MISS else Answer.PENDING
            for answer, was_claimed in zip(answers, claimed, strict=True)
        ]

    def _claim(self, key: StoreKey, size: int) -> bool:
        if key in self._announced:
            return False
        self._announced[key] = Announced(size)
        return True

    def hold(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Refer to the bytes of announced records: HIT, or RETRY for one not announced, or of another length."""
        with self._lock:
            return [self._hold(key, bytes_of(record)) for key, record in zip(keys, records, strict=True)]

    def _hold(self, key: StoreKey, record: memoryview) -> Answer:
        announced = self._announced.get(key)
        if announced is None or announced.num_bytes != record.nbytes:
            return Answer.RETRY
        announced.record = record
        return Answer.HIT

    def take(self, keys: Sequence[StoreKey]) -> list[Announced | None]:
        """Forget announced records and return them; None for one that was not announced."""
        with self._lock:
            return [self._announced.pop(key, None) for key in keys]

    def keys(self) -> list[StoreKey]:
        """What is announced now."""
        with self._lock:
            return list(self._announced)


def bytes_of(record: Buffer) -> memoryview:
    """The bytes of a record or of a buffer for one, without a copy."""
    view = memoryview(record)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")

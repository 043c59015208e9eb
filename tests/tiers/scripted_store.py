"""A store in a dictionary that refuses, fails and waits as a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from quire.errors import InvalidInput
from quire.testing.stores import DictStore
from quire.tiers.store import Answer, Record, RecordViews, StoreKey
from tests.tiers.array_copies import page_key


class ScriptedStore(DictStore):
    """Any key in `refused[method]` is answered RETRY there, a method named in `failing` raises, and `log` has every
    call with the number of its keys."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        super().__init__(most_bytes)
        self.refused: dict[str, set[StoreKey]] = {"prepare": set(), "put": set(), "complete": set(), "get": set()}
        self.failing: set[str] = set()
        self.log: list[tuple[str, int]] = []
        self.gates: dict[str, threading.Semaphore] = {}
        self.entered = threading.Semaphore(0)

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        self._note("exists", keys)
        return super().exists(keys)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        self._note("prepare", keys)
        answers = super().prepare(keys, sizes)
        refused = self._refused("prepare", keys, answers, Answer.MISS)
        super().complete(refused, [False] * len(refused))
        return answers

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        self._note("put", keys)
        assert all(
            self.prepared[key] == RecordViews(record).num_bytes for key, record in zip(keys, records, strict=True)
        )
        answers = super().put(keys, records)
        for key in self._refused("put", keys, answers, Answer.HIT):
            del self.taken[key]
        return answers

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        self._note("complete", keys)
        assert all(key in (self.taken if good else self.prepared) for key, good in zip(keys, ok, strict=True))
        wanted = [good and key not in self.refused["complete"] for key, good in zip(keys, ok, strict=True)]
        answers = super().complete(keys, wanted)
        return [Answer.RETRY if good != kept else said for good, kept, said in zip(ok, wanted, answers, strict=True)]

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        self._note("get", keys)
        answers = super().get(keys, records)
        self._refused("get", keys, answers, Answer.HIT)
        return answers

    def remove(self, keys: Sequence[StoreKey]) -> int:
        self._note("remove", keys)
        return super().remove(keys)

    def close(self) -> None:
        """What is visible stays, as in a store that is opened again."""
        self.prepared.clear()
        self.taken.clear()

    def by_use(self) -> list[StoreKey]:
        """The visible records, the least recently used first."""
        return sorted(self.visible, key=self._used.__getitem__)

    def spoil(self, key: StoreKey, at: int = -1) -> None:
        """Damage a byte of a visible record."""
        record = bytearray(self.visible[key])
        record[at] ^= 1
        self.visible[key] = bytes(RecordViews(record).join())

    def hold(self, name: str) -> threading.Semaphore:
        """Calls of this name wait from now on, each for one release."""
        self.gates[name] = threading.Semaphore(0)
        return self.gates[name]

    def _note(self, name: str, keys: Sequence[StoreKey]) -> None:
        self.log.append((name, len(keys)))
        if name in self.gates:
            self.entered.release()
            assert self.gates[name].acquire(timeout=60)
        if name in self.failing:
            raise InvalidInput(f"{name} failed.")

    def _refused(self, name: str, keys: Sequence[StoreKey], answers: list[Answer], said: Answer) -> list[StoreKey]:
        """The keys that are refused although the answer was `said`, which is RETRY from now on."""
        found = [at for at, key in enumerate(keys) if key in self.refused[name] and answers[at] is said]
        for at in found:
            answers[at] = Answer.RETRY
        return [keys[at] for at in found]


class WatchedStore(ScriptedStore):
    """Records in `wrong` when it is given the frame of a page that is not `busy`: one that was handed back already."""

    def __init__(self, busy: set[int], *, most_bytes: int = 1 << 30) -> None:
        super().__init__(most_bytes=most_bytes)
        self.busy = busy
        self.wrong: list[str] = []

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        self._watch("put", keys)
        return super().put(keys, records)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        self._watch("get", keys)
        return super().get(keys, records)

    def _watch(self, name: str, keys: Sequence[StoreKey]) -> None:
        pages = {page_key(number) for number in tuple(self.busy)}
        self.wrong += [f"{name} of a page that nothing holds" for key in keys if key.page not in pages]

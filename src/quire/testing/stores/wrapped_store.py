"""Stores around another store: one that subclasses change, a slow one, and one that fails and returns wrong bytes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from random import Random
from threading import Lock, RLock

from quire.testing.choices import Choices
from quire.tiers.store import Answer, Entry, Record, RecordViews, Store, StoreKey


class WrappedStore(Store):
    """Forwards every call to `inner`, which it closes. `before` is called first where a call takes time, with the
    records of the call."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def before(self, records: Sequence[Record] = ()) -> None:
        """Nothing; for subclasses."""

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        self.before()
        return self.inner.exists(keys)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        self.before()
        return self.inner.prepare(keys, sizes)

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        self.before(records)
        return self.inner.put(keys, records)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        self.before()
        return self.inner.complete(keys, ok)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        self.before(records)
        return self.inner.get(keys, records)

    def remove(self, keys: Sequence[StoreKey]) -> int:
        return self.inner.remove(keys)

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        return self.inner.entries(scope)

    def close(self) -> None:
        self.inner.close()


class SlowStore(WrappedStore):
    """Waits before each call between `seconds[0]` and `seconds[1]`, and for records also their bytes at `bandwidth`, in
    bytes a second. The times follow from `seed`; `sleep` is called with them."""

    def __init__(
        self,
        inner: Store,
        seconds: tuple[float, float],
        *,
        bandwidth: float | None = None,
        seed: int = 0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._seconds, self._bandwidth, self._sleep = seconds, bandwidth, sleep
        self._random, self._lock = Random(seed), Lock()

    def before(self, records: Sequence[Record] = ()) -> None:
        with self._lock:
            seconds = self._random.uniform(*self._seconds)
        if self._bandwidth is not None:
            seconds += sum(RecordViews(record).num_bytes for record in records) / self._bandwidth
        self._sleep(seconds)


class Fault(Enum):
    """A kind of fault. The first five return wrong bytes, which only the digest of a record shows."""

    TORN = "torn"
    """`put` takes a record whose end never reaches the medium: zeros from some place on."""
    TRUNCATED = "truncated"
    """`get` fills the beginning of the buffer, leaves the rest as it was, and says HIT."""
    EXCHANGED = "exchanged"
    """`get` fills the buffer with another, intact record of the same size, and says HIT."""
    FLIPPED = "flipped"
    """One bit of a record that was read is flipped."""
    STALE = "stale"
    """`get` says HIT and has filled in nothing."""
    PUT_FAILS = "put fails"
    """`put` says RETRY."""
    GET_FAILS = "get fails"
    """`get` says RETRY."""
    COMPLETE_FAILS = "complete fails"
    """`complete` says RETRY; the record was dropped."""
    LOST = "lost"
    """`complete` says HIT, and the record is gone at once. A store may do that."""
    UNREACHABLE = "unreachable"
    """`exists` and `prepare` say RETRY for all keys."""
    FULL = "full"
    """`prepare` says RETRY for one key."""


LIES = (Fault.TORN, Fault.TRUNCATED, Fault.EXCHANGED, Fault.FLIPPED, Fault.STALE)


class FaultyStore(WrappedStore):
    """Faults of some kinds, each with a chance of `percent` wherever it can happen, drawn from `seed`.

    `happened` counts them; `keys` has the keys that each lie was told about. Calls from several threads are drawn for
    in the order in which they come. `percent` may be changed at any time.
    """

    def __init__(self, inner: Store, *, seed: int, kinds: Iterable[Fault] = tuple(Fault), percent: int = 10) -> None:
        super().__init__(inner)
        self.percent = percent
        self.happened: Counter[Fault] = Counter()
        self.keys: list[tuple[Fault, StoreKey]] = []
        self._kinds = frozenset(kinds)
        self._choices = Choices.seeded(seed)
        self._lock = RLock()
        self._seen: dict[int, tuple[StoreKey, bytes]] = {}  # a record of each size, to be returned for another one

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """UNREACHABLE."""
        if self._strikes(Fault.UNREACHABLE):
            return [Answer.RETRY] * len(keys)
        return super().exists(keys)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """UNREACHABLE, FULL."""
        if self._strikes(Fault.UNREACHABLE):
            return [Answer.RETRY] * len(keys)
        answers = super().prepare(keys, sizes)
        full = [at for at, said in enumerate(answers) if said is Answer.MISS and self._strikes(Fault.FULL)]
        super().complete([keys[at] for at in full], [False] * len(full))
        refused = {keys[at] for at in full}  # wherever they stand in the batch
        return [Answer.RETRY if key in refused else said for key, said in zip(keys, answers, strict=True)]

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        """TORN, PUT_FAILS."""
        failing = [self._strikes(Fault.PUT_FAILS) for _ in keys]
        given: list[Record] = []
        for key, record in zip(keys, records, strict=True):
            whole = bytes(RecordViews(record).join())
            with self._lock:
                self._seen.setdefault(len(whole), (key, whole))
            torn = self._strikes(Fault.TORN, key, can=any(whole))
            given.append(self._torn(whole) if torn else record)
        put = [at for at, fails in enumerate(failing) if not fails]
        answers = [Answer.RETRY] * len(keys)
        for at, said in zip(put, super().put([keys[at] for at in put], [given[at] for at in put]), strict=True):
            answers[at] = said
        return answers

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """COMPLETE_FAILS, LOST."""
        failing = [good and self._strikes(Fault.COMPLETE_FAILS, key) for key, good in zip(keys, ok, strict=True)]
        answers = super().complete(keys, [good and not fails for good, fails in zip(ok, failing, strict=True)])
        for at, key in enumerate(keys):
            if failing[at]:
                answers[at] = Answer.RETRY
            elif answers[at] is Answer.HIT and self._strikes(Fault.LOST, key):
                super().remove([key])
        return answers

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        """TRUNCATED, EXCHANGED, FLIPPED, STALE, GET_FAILS."""
        before = [bytes(RecordViews(record).join()) for record in records]
        answers = super().get(keys, records)
        for at, (key, record) in enumerate(zip(keys, records, strict=True)):
            if answers[at] is Answer.HIT:
                if self._strikes(Fault.GET_FAILS, key):
                    answers[at] = Answer.RETRY
                else:
                    self._lie(key, RecordViews(record), before[at])
        return answers

    def _lie(self, key: StoreKey, record: RecordViews, before: bytes) -> None:
        whole, size = bytes(record.join()), record.num_bytes
        with self._lock:
            other, content = self._seen.setdefault(size, (key, whole))
            if self._strikes(Fault.EXCHANGED, key, can=other != key and content != whole):
                record.write(0, memoryview(content))
            elif self._strikes(Fault.STALE, key, can=before != whole):
                record.write(0, memoryview(before))
            elif self._strikes(Fault.TRUNCATED, key, can=before[size // 2 :] != whole[size // 2 :]):
                record.write(size // 2, memoryview(before)[size // 2 :])
            elif self._strikes(Fault.FLIPPED, key):
                at = self._choices.below(size)
                record.write(at, memoryview(bytes([whole[at] ^ 1 << self._choices.below(8)])))

    def _torn(self, whole: bytes) -> bytes:
        """Cut before the last nonzero byte, so that the record differs."""
        with self._lock:
            cut = self._choices.below(len(whole.rstrip(b"\0")))
        return whole[:cut] + bytes(len(whole) - cut)

    def _strikes(self, fault: Fault, key: StoreKey | None = None, *, can: bool = True) -> bool:
        with self._lock:
            if fault not in self._kinds or not can or not self._choices.chance(self.percent):
                return False
            self.happened[fault] += 1
            if key is not None and fault in LIES:
                self.keys.append((fault, key))
            return True

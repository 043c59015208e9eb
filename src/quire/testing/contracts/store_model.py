"""StoreModel: a dictionary that random operations compare a real store with. It shares no code with any store.

A store may evict, so the model follows what *may* be there: what was completed and not removed since. What a store
returns must be that record, whole; where it evicts nothing, all of it must be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.testing.choices import Choices
from quire.testing.contracts.records import make_key, make_record
from quire.tiers.store import Answer, Store

OPERATIONS = ("prepare", "prepare", "put", "put", "complete", "get", "get", "exists", "remove", "entries")


class StoreModel:
    """Random operations on one store, each checked against the model. Raises AssertionError if the store is wrong."""

    def __init__(self, store: Store, *, sizes: Sequence[int], evicts: bool, num_keys: int = 12) -> None:
        self.store = store
        self.sizes = sizes
        self.evicts = evicts
        self.keys = [make_key(number // 2, scope=number % 2, part=number % 3) for number in range(num_keys)]
        self.visible: dict[int, int] = {}  # number of a key -> number of its record
        self.prepared: dict[int, tuple[int, bool]] = {}  # prepared keys: number of the record, whether put
        self.happened: Counter[str] = Counter()
        self._records = 0

    def step(self, choices: Choices) -> None:
        """One operation on a batch of keys."""
        operation = choices.one_of(OPERATIONS)
        if operation in ("put", "complete"):
            batch = choices.some_of(list(self.prepared))
        else:
            batch = [choices.below(len(self.keys)) for _ in range(choices.below(5))]
        if operation == "complete":
            self._complete(batch, [choices.chance(80) for _ in batch])
        else:
            getattr(self, f"_{operation}")(batch)
        self.happened[operation] += 1

    def check(self) -> None:
        """Check that every record is there in full, or not at all if the store evicts."""
        self._get(list(range(len(self.keys))))

    def _or_retry(self, answer: Answer) -> tuple[Answer, ...]:
        return (answer, Answer.RETRY) if self.evicts else (answer,)

    def _size(self, record: int) -> int:
        return self.sizes[record % len(self.sizes)]

    def _prepare(self, batch: list[int]) -> None:
        records = [self._records + index for index in range(len(batch))]
        self._records += len(batch)
        answers = self.store.prepare([self.keys[key] for key in batch], [self._size(record) for record in records])
        assert len(answers) == len(batch)
        for key, record, answer in zip(batch, records, answers, strict=True):
            if key in self.prepared:
                assert answer in self._or_retry(Answer.PENDING), "a prepared key was given to a second writer"
            elif answer is Answer.MISS:
                assert self.evicts or key not in self.visible, "a record was evicted"
                self.visible.pop(key, None)
                self.prepared[key] = (record, False)
            elif answer is Answer.HIT:
                assert key in self.visible, "a record that was never completed"
            else:
                assert answer is Answer.RETRY and self.evicts, f"{answer} for a key that is not prepared"

    def _put(self, batch: list[int]) -> None:
        records = [self.prepared[key][0] for key in batch]
        contents = [make_record(record, self._size(record)) for record in records]
        answers = self.store.put([self.keys[key] for key in batch], contents)
        for key, record, answer in zip(batch, records, answers, strict=True):
            assert answer in self._or_retry(Answer.HIT)
            self.prepared[key] = (record, answer is Answer.HIT or self.prepared[key][1])

    def _complete(self, batch: list[int], ok: list[bool]) -> None:
        answers = self.store.complete([self.keys[key] for key in batch], ok)
        for key, good, answer in zip(batch, ok, answers, strict=True):
            record, was_put = self.prepared.pop(key)
            if good and was_put:
                assert answer in self._or_retry(Answer.HIT)
            if answer is Answer.HIT:
                assert good and was_put, "a record without bytes, or given up, became visible"
                self.visible[key] = record
                self.happened["stored"] += 1

    def _get(self, batch: list[int]) -> None:
        expected = [self.visible.get(key) for key in batch]
        buffers = [bytearray(64 if record is None else self._size(record)) for record in expected]
        answers = self.store.get([self.keys[key] for key in batch], buffers)
        for key, record, buffer, answer in zip(batch, expected, buffers, answers, strict=True):
            if answer is Answer.HIT:
                assert record is not None, f"a record that was never completed, under key {key}"
                assert buffer == make_record(record, self._size(record)), f"wrong bytes of record {record}"
                self.happened["hit"] += 1
            else:
                assert record is None or self.evicts, f"record {record} was evicted"

    def _exists(self, batch: list[int]) -> None:
        answers = self.store.exists([self.keys[key] for key in batch])
        for key, answer in zip(batch, answers, strict=True):
            if answer is Answer.HIT:
                assert key in self.visible
            else:
                assert key not in self.visible or self.evicts

    def _remove(self, batch: list[int]) -> None:
        there = {key for key in batch if key in self.visible}
        count = self.store.remove([self.keys[key] for key in batch])
        assert count <= len(there) and (self.evicts or count == len(there))
        for key in there:
            del self.visible[key]

    def _entries(self, batch: list[int]) -> None:
        scope = self.keys[batch[0]].scope if batch else None
        expected = {
            self.keys[key]: self._size(record)
            for key, record in self.visible.items()
            if scope is None or self.keys[key].scope == scope
        }
        listed = {entry.key: entry.num_bytes for entry in self.store.entries(scope)}
        assert listed.items() <= expected.items()
        assert self.evicts or listed == expected

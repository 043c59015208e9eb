"""CheckedStore: records of another engine's memory in a store, each bound to what its bytes depend on, and checked.

The engine describes itself by facts: model, weights, dtype, page size, layout, rank. All of them are in the scope of
its keys, and in the header of each record. So a record of other weights or of another layout is not found; and one
that lies under the right key nevertheless, or was damaged, is a miss with a reason, and is removed.

A payload is the engine's own memory, in one buffer or several. The header is beside it, so nothing is copied.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from threading import Condition, Thread
from typing import TypeAlias

from quire.connectors.lookup_log import LookupLog
from quire.errors import InvalidInput, StoreError
from quire.memory.record import HEADER_BYTES, RecordFormat
from quire.prefix.hashing import layout_identity, scope_of
from quire.spec.events import Namespace
from quire.tiers.scope_facts import FACTS_BYTES, Facts, differences, facts_record, read_facts
from quire.tiers.store import Answer, Counts, Record, RecordViews, Store, StoreKey
from quire.tiers.stores.registry import open_store
from quire.tiers.tombstones import tombstones_over

logger = logging.getLogger(__name__)

ChunkKey: TypeAlias = "tuple[bytes, int]"
"""32 bytes that the engine computes from tokens and all before them, and the part: a group of layers, or a pool."""

NEEDED = ("engine", "model", "weights", "dtype", "page_size", "rank")
"""Facts without which two engines could read each other's bytes."""

_LEAST_REST_S, _MOST_REST_S = 0.5, 30.0
CLOSE_S = 3.0
"""How long `close` waits for calls in flight."""


class Job:
    """A call of a CheckedStore on its threads. If no thread has begun it at its deadline, it ends there. A call that
    has begun ends when it returns, because it may still use the payloads; one that `is_free` of them is given up."""

    def __init__(self, call: Callable[[], list[Answer]], count: int, deadline_s: float, *, is_free: bool) -> None:
        """`count` keys. The call does not raise."""
        self._call: Callable[[], list[Answer]] | None = call
        self._count, self._is_free = count, is_free
        self._expires_at = time.monotonic() + deadline_s
        self._changed = Condition()
        self._is_running = False
        self._answers: list[Answer] | None = None
        self.expired = False

    def run(self) -> None:
        """Call it, unless it has expired."""
        with self._changed:
            call, self._is_running = self._call, self._answers is None
        if call is not None:
            answers = call()
            with self._changed:
                self._answers = self._answers or answers
                self._changed.notify_all()

    def poll(self) -> list[Answer] | None:
        """The answers, all RETRY if it has expired; None if it has not ended."""
        with self._changed:
            is_late = self._answers is None and time.monotonic() >= self._expires_at
            if is_late and (self._is_free or not self._is_running):
                self._answers, self.expired = [Answer.RETRY] * self._count, True
                self._call = None  # and what it refers to, while it is in a queue
            return self._answers

    def wait(self) -> list[Answer]:
        """The answers, when `poll` has them."""
        with self._changed:
            while (answers := self.poll()) is None:
                left = self._expires_at - time.monotonic()
                self._changed.wait(left if left > 0 else None)
            return answers


class _Rest:
    """When a store may be asked again that answered nothing: after half a second, then longer each time."""

    def __init__(self) -> None:
        self._until, self._seconds = 0.0, _LEAST_REST_S

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def heard(self, answers: Sequence[Answer]) -> None:
        if answers.count(Answer.RETRY) < len(answers):
            self._seconds = _LEAST_REST_S
        else:
            self._until = time.monotonic() + self._seconds
            self._seconds = min(2 * self._seconds, _MOST_REST_S)


class _Threads:
    """Threads that run jobs in their order. They end with the process, also one that hangs in a store."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [Thread(target=self._run, name=f"{name}-{at}", daemon=True) for at in range(count)]
        for thread in self._threads:
            thread.start()

    def add(self, job: Job) -> Job:
        self._jobs.put(job)
        return job

    def close(self, until: float) -> bool:
        """Run what waits, for as long as the store answers. False: a thread has not ended by then."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


class CheckedStore:
    """The records of one engine in a store, which it closes. Any thread may call it. Calls do not raise.

    `counts`: hits, misses, saved, present (saved before, by anyone), loaded_bytes, saved_bytes, refused (the store
    could not answer). `bad` counts bad records by reason: "magic", "group",
    "length", "key", "digest", the names of facts that differ (as "weights"), or "layout" where these are not known.
    """

    def __init__(
        self,
        store: Store,
        facts: Facts,
        payload_bytes: Mapping[int, int],
        *,
        deadline_s: float = 10.0,
        threads: int = 4,
        log: LookupLog | None = None,
    ) -> None:
        """`payload_bytes` has the bytes of a payload of each part. `deadline_s` bounds how long a call waits for one of
        the `threads`: so many read, and as many write. Raises InvalidInput for facts that lack a name in `NEEDED`."""
        if missing := [name for name in NEEDED if not facts.get(name)]:
            raise InvalidInput(
                f"records cannot be told from those of other engines without: {', '.join(missing)}.",
                fix="give the connector what it could not find out by itself.",
            )
        self.facts = facts
        self.scope = scope_of(Namespace(), layout_identity(b"quire-facts-1", [json.dumps(facts, sort_keys=True)]))
        self.counts, self.bad = Counts(), Counts()
        self.log = log
        self.store, self._deadline_s = store, deadline_s
        self._is_open = True
        self._formats = {part: RecordFormat(part, self.scope, size) for part, size in payload_bytes.items()}
        self._tombstones = [key for _, key in tombstones_over(self.scope)]
        self._readers = _Threads(threads, "quire-load")
        self._writers = _Threads(threads, "quire-save")
        self._described = facts_record(self.scope, facts)
        self._reading, self._saving = _Rest(), _Rest()  # a store that is full can be read

    @classmethod
    def open(
        cls,
        url: str,
        facts: Facts,
        payload_bytes: Mapping[int, int],
        *,
        capacity: int | None = None,
        deadline_s: float = 10.0,
        threads: int = 4,
        log: str | None = None,
    ) -> CheckedStore:
        """The store of a URL, as `open_store`. `log` is the file of a `LookupLog`. Raises StoreError, InvalidInput."""
        store = open_store(url, capacity=capacity)
        try:
            opened = None if log is None else LookupLog(log)
            return cls(store, facts, payload_bytes, deadline_s=deadline_s, threads=threads, log=opened)
        except (InvalidInput, StoreError):
            store.close()
            raise

    # -- calls that wait for the store

    def exists(self, keys: Sequence[ChunkKey]) -> list[Answer]:
        """HIT for each record that could be loaded now. RETRY: the store cannot say."""
        return self._asked(self._reading, len(keys), lambda: self._exists(keys))

    def load(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> list[Answer]:
        """Fill payloads, of exactly their part's bytes. One without HIT may have any bytes. MISS: it is not there, or
        was bad, and is gone now."""
        answers = self._asked(self._reading, len(keys), lambda: self._load(keys, payloads))
        self.counts.add(hits=answers.count(Answer.HIT), misses=answers.count(Answer.MISS))
        return answers

    def save(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> list[Answer]:
        """Store payloads, which must not change meanwhile. HIT: it is there. PENDING: another writer stores it. RETRY:
        there was no room, or the store cannot do it now."""
        return self._asked(self._saving, len(keys), lambda: self._save(keys, payloads))

    # -- the same on threads

    def submit_exists(self, keys: Sequence[ChunkKey]) -> Job:
        """`exists` as a Job."""
        return self._submit(self._readers, lambda: self.exists(keys), len(keys), is_free=True)

    def submit_load(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> Job:
        """`load` as a Job."""
        return self._submit(self._readers, lambda: self.load(keys, payloads), len(keys))

    def submit_save(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> Job:
        """`save` as a Job."""
        return self._submit(self._writers, lambda: self.save(keys, payloads), len(keys))

    def submit_touch(self, keys: Sequence[ChunkKey]) -> Job:
        """Count records as used that the engine read from its own memory. The answers are those of `exists`."""
        return self._submit(
            self._writers, lambda: self._asked(self._saving, len(keys), lambda: self._touch(keys)), len(keys)
        )

    def _touch(self, keys: Sequence[ChunkKey]) -> list[Answer]:
        there = self.store.exists(self._keys(keys))
        names = [name for name, answer in zip(self._keys(keys), there, strict=True) if answer is Answer.HIT]
        answers = self.store.prepare(names, [self._formats[name.part].num_bytes for name in names])
        absent = [name for name, answer in zip(names, answers, strict=True) if answer is Answer.MISS]
        self.store.complete(absent, [False] * len(absent))
        return there

    def clear(self) -> int:
        """Remove all records under these facts; returns how many. Raises StoreError if the store cannot be listed."""
        return self.store.remove([entry.key for entry in self.store.entries(self.scope)])

    def close(self) -> None:
        """Let jobs end, at most `CLOSE_S`, and close the store; one that hangs is left to the process's end, with the
        memory that it may use. May be called twice."""
        until = time.monotonic() + CLOSE_S
        self._is_open = False
        have_ended = [threads.close(until) for threads in (self._readers, self._writers)]
        if all(have_ended):
            self.store.close()
        if self.log is not None:
            self.log.close()

    def _submit(self, threads: _Threads, call: Callable[[], list[Answer]], count: int, *, is_free: bool = False) -> Job:
        return threads.add(Job(call, count, self._deadline_s if self._is_open else 0.0, is_free=is_free))

    def _asked(self, rest: _Rest, count: int, call: Callable[[], list[Answer]]) -> list[Answer]:
        """The answers of a call; RETRY while the store rests, and if it raises, which breaks its contract."""
        answers = [Answer.RETRY] * count
        if count and rest.is_over:
            try:
                answers = call()
            except Exception:
                logger.exception("a store raised")
            rest.heard(answers)
        self.counts.add(refused=answers.count(Answer.RETRY))
        return answers

    # -- the work

    def _keys(self, keys: Sequence[ChunkKey]) -> list[StoreKey]:
        return [StoreKey(self.scope, page, part) for page, part in keys]

    def _exists(self, keys: Sequence[ChunkKey]) -> list[Answer]:
        *answers, wide, narrow = self.store.exists([*self._keys(keys), *self._tombstones])
        if Answer.HIT in (wide, narrow):
            return [Answer.MISS] * len(keys)
        return answers if wide is narrow is Answer.MISS else [Answer.RETRY] * len(keys)

    def _load(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> list[Answer]:
        names, pieces = self._keys(keys), list(map(RecordViews, payloads))
        headers = memoryview(bytearray(HEADER_BYTES * len(keys)))
        rows = [headers[at : at + HEADER_BYTES] for at in range(0, len(headers), HEADER_BYTES)]
        records: list[Record] = [(row, *each.views) for row, each in zip(rows, pieces, strict=True)]
        answers, defects = self.store.get(names, records), dict[int, str]()
        missing = [at for at, answer in enumerate(answers) if answer is Answer.MISS]
        # One that is there and not in this size can neither be read nor written. Or it was stored just now.
        for at in self._there(names, missing):
            (answers[at],) = self.store.get([names[at]], [records[at]])
            if answers[at] is Answer.MISS and self._there(names, [at]):
                defects[at] = "length"
        for at, (name, row, each) in enumerate(zip(names, rows, pieces, strict=True)):
            if answers[at] is Answer.HIT and (found := self._formats[name.part].defect(row, name.page, each.views)):
                defects[at] = found
        if defects:
            self.store.remove([names[at] for at in defects])
            others = read_facts(self.store, {_scope_in(rows[at]) for at in defects if defects[at] == "layout"})
            for at, defect in defects.items():
                answers[at] = Answer.MISS
                if defect == "layout" and (facts := others.get(_scope_in(rows[at]))) is not None:
                    defects[at] = ",".join(differences(self.facts, facts)) or defect
            self.bad.add(*defects.values())
            kinds = ", ".join(sorted(set(defects.values())))
            logger.warning("quire: %d of %d records were bad (%s), and are removed", len(defects), len(keys), kinds)
            if self.log is not None:
                self.log.bad(self.scope, {names[at]: defect for at, defect in defects.items()})
        loaded = (each.num_bytes for each, answer in zip(pieces, answers, strict=True) if answer is Answer.HIT)
        self.counts.add(loaded_bytes=sum(loaded))
        return answers

    def _there(self, names: Sequence[StoreKey], places: Sequence[int]) -> list[int]:
        """Those of these places whose records exist."""
        answers = self.store.exists([names[at] for at in places])
        return [at for at, answer in zip(places, answers, strict=True) if answer is Answer.HIT]

    def _save(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> list[Answer]:
        names, pieces = self._keys(keys), list(map(RecordViews, payloads))
        wrong = [at for at, name in enumerate(names) if pieces[at].num_bytes != self._formats[name.part].payload_bytes]
        assert not wrong, f"a payload of {pieces[wrong[0]].num_bytes} bytes for part {names[wrong[0]].part}"
        # The facts are beside each batch, so that they are used as lately as what they describe.
        sizes = [self._formats[name.part].num_bytes for name in names]
        *answers, described = self.store.prepare([*names, self._described[0]], [*sizes, FACTS_BYTES])
        self.counts.add(present=answers.count(Answer.HIT))
        mine = [at for at, answer in enumerate(answers) if answer is Answer.MISS]
        own = [names[at] for at in mine]
        sealed: list[Record] = [
            (self._formats[name.part].header(name.page, pieces[at].views), *pieces[at].views)
            for at, name in zip(mine, own, strict=True)
        ]
        if described is Answer.MISS:
            own, sealed = [*own, self._described[0]], [*sealed, self._described[1]]
        put = self.store.put(own, sealed)
        done = self.store.complete(own, [answer is Answer.HIT for answer in put])
        for at, answer in zip(mine, done, strict=False):
            answers[at] = answer if answer is Answer.HIT else Answer.RETRY
        saved = [pieces[at].num_bytes for at in mine if answers[at] is Answer.HIT]
        self.counts.add(saved=len(saved), saved_bytes=sum(saved))
        if self.log is not None:
            self.log.saved(self.scope, [names[at] for at in mine if answers[at] is Answer.HIT])
        return answers


def _scope_in(header: memoryview) -> bytes:
    """The scope that a record's header names, where pages of other engines have their layout."""
    return bytes(header[16:32])

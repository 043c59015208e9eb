"""CheckedStore: records of another engine's memory in a store, each bound to what its bytes depend on, and checked.

The engine describes itself by facts: model, weights, dtype, page size, layout, rank. All of them are in the scope of
its keys, and in the header of each record. So a record of other weights or of another layout is not found; and one
that lies under the right key nevertheless, or was damaged, is a miss with a reason, and is removed.

A payload is the engine's own memory, in one buffer or several. It is saved from where it is, with its header beside it.
What is loaded arrives in memory of this class, is checked there while a processor's cache has it, and is copied to the
payload: a read that hangs can be given up, and never writes to memory that the engine uses for something else by then.
"""

from __future__ import annotations

import json
import logging
import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from threading import local
from typing import Any, TypeAlias

from quire.connectors.job import Job, Threads
from quire.connectors.lookup_log import LookupLog
from quire.errors import InvalidInput, StoreError
from quire.memory.record import HEADER_BYTES, RecordFormat
from quire.prefix.hashing import layout_identity, scope_of
from quire.settings.setting import without_secrets
from quire.spec.events import Namespace
from quire.tiers.scope_facts import FACTS_BYTES, Facts, differences, facts_record, read_facts
from quire.tiers.store import Answer, Counts, Record, RecordViews, Store, StoreKey, check_records
from quire.tiers.stores.registry import open_store
from quire.tiers.tombstones import tombstones_over

logger = logging.getLogger(__name__)

ChunkKey: TypeAlias = "tuple[bytes, int]"
"""32 bytes that the engine computes from tokens and all before them, and the part: a group of layers, or a pool."""

NEEDED = ("engine", "model", "weights", "dtype", "page_size", "rank")
"""Facts without which two engines could read each other's bytes."""

_BLOCK = 4096
_LOADED_BYTES, _SAVED_BYTES, _KEYS = 8 << 20, 32 << 20, 512  # limits of a call of a store; between calls a job goes on
_Work: TypeAlias = "Callable[[Job, Sequence[ChunkKey], Sequence[Record]], None]"
CLOSE_S = 3.0
"""How long `close` waits for calls in flight."""


class _Arrivals(local):
    """Memory of one thread where records arrive before they are checked."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, sizes: Sequence[int]) -> list[tuple[memoryview, memoryview]]:
        """A header and a payload of each size. Payloads begin on boundaries of blocks, as direct reading needs it."""
        ends = list(accumulate(-(-size // _BLOCK) * _BLOCK for size in (HEADER_BYTES * len(sizes), *sizes)))
        if ends[-1] > len(self._memory):
            memory = mmap.mmap(-1, ends[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)  # the kernel has fewer pages to look up for each read
            self._memory = memoryview(memory)
        headers = range(0, HEADER_BYTES * len(sizes), HEADER_BYTES)
        return [
            (self._memory[header : header + HEADER_BYTES], self._memory[start : start + size])
            for header, start, size in zip(headers, ends, sizes, strict=False)
        ]


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
        """`payload_bytes` has the bytes of a payload of each part. `deadline_s` bounds how long a job waits for one of
        the `threads`, and then for each few megabytes: so many read, and as many write. Raises InvalidInput for facts
        that lack a name in `NEEDED`, and for a store that does not take such records."""
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
        check_records(store, max((each.num_bytes for each in self._formats.values()), default=0))
        self._tombstones = [key for _, key in tombstones_over(self.scope)]
        self._askers = Threads(2, "quire-lookup")
        self._readers = Threads(threads, "quire-load")
        self._writers = Threads(threads, "quire-save")  # a full store can be read, so these rest alone
        self._arrivals = _Arrivals()
        self._described = facts_record(self.scope, facts)

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
            checked = cls(store, facts, payload_bytes, deadline_s=deadline_s, threads=threads, log=opened)
        except (InvalidInput, StoreError):
            store.close()
            raise
        logger.info("quire: records in %s, scope %s, of %s", without_secrets(url), checked.scope.hex(), facts)
        return checked

    # -- calls that wait for the store

    def exists(self, keys: Sequence[ChunkKey]) -> list[Answer]:
        """HIT for each record that could be loaded now. RETRY: the store cannot say."""
        return self._job(self._askers, self._exists, keys).run().answers

    def load(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> list[Answer]:
        """Fill payloads, of exactly their part's bytes. One without HIT is as it was. MISS: it is not there, or was
        bad, and is gone now."""
        return self._job(self._readers, self._load, keys, payloads).run().answers

    def save(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> list[Answer]:
        """Store payloads, which must not change meanwhile. HIT: it is there. PENDING: another writer stores it. RETRY:
        there was no room, or the store cannot do it now."""
        return self._job(self._writers, self._save, keys, payloads).run().answers

    # -- the same on threads

    def submit_exists(self, keys: Sequence[Any], key_of: Callable[[Any], ChunkKey] = lambda key: key) -> Job:
        """`exists` as a Job. Its thread calls `key_of` for each key, where these are an engine's own."""
        return self._submit(self._askers, lambda job, keys, _: self._exists(job, list(map(key_of, keys)), _), keys)

    def submit_load(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> Job:
        """`load` as a Job."""
        return self._submit(self._readers, self._load, keys, payloads)

    def submit_save(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> Job:
        """`save` as a Job. When it has expired, payloads may change: what was not yet stored never is."""
        return self._submit(self._writers, self._save, keys, payloads)

    def submit_touch(self, keys: Sequence[ChunkKey]) -> Job:
        """Count records as used that the engine read from its own memory. The answers are those of `exists`."""
        return self._submit(self._writers, self._touch, keys, counts=None)

    def clear(self) -> int:
        """Remove all records under these facts; returns how many. Raises StoreError if the store cannot be listed, or
        records remain."""
        names, removed = [entry.key for entry in self.store.entries(self.scope)], 0
        for at in range(0, len(names), _KEYS):
            some = names[at : at + _KEYS]
            removed += (count := self.store.remove(some))
            if count < len(some) and any(answer is not Answer.MISS for answer in self.store.exists(some)):
                raise StoreError(
                    f"{removed:,} of {len(names):,} records were removed, and the store refused the others.",
                    fix="try again; if it goes on, look at the store's log.",
                )
        return removed

    def close(self) -> bool:
        """Let jobs end, at most `CLOSE_S`, and close the store. False: it hangs, and is left to the process's end with
        the payloads that it may still read. May be called twice."""
        until = time.monotonic() + CLOSE_S
        self._is_open = False
        have_ended = [threads.close(until) for threads in (self._askers, self._readers, self._writers)]
        if all(have_ended):
            self.store.close()
        if self.log is not None:
            self.log.close()
        return all(have_ended)

    def _submit(self, threads: Threads, work: _Work, *given: Any, **more: Any) -> Job:
        is_lost = threads.hang or not self._is_open  # its threads would not take the job
        options: dict[str, Any] = {"deadline_s": 0.0 if is_lost else self._deadline_s, "counts": self.counts} | more
        job = self._job(threads, work, *given, **options)
        return job if is_lost else threads.add(job)

    def _job(
        self, threads: Threads, work: _Work, keys: Sequence[Any], payloads: Sequence[Record] = (), **more: Any
    ) -> Job:
        """The work as a job. All answers are RETRY while the store rests, and if it raises, which breaks its
        contract."""

        def call(job: Job) -> None:
            if keys and threads.rest.is_over:
                try:
                    work(job, keys, payloads)
                except Exception:
                    logger.exception("a store raised")
                threads.rest.told(job.answers)
            if not job.expired:
                self.counts.add(refused=job.answers.count(Answer.RETRY))

        return Job(call, len(keys), **more)

    # -- the work

    def _keys(self, keys: Sequence[ChunkKey]) -> list[StoreKey]:
        return [StoreKey(self.scope, page, part) for page, part in keys]

    def _exists(self, job: Job, keys: Sequence[ChunkKey], _: Sequence[Record]) -> None:
        for start in range(0, len(keys), _KEYS):
            *answers, wide, narrow = self.store.exists([*self._keys(keys[start : start + _KEYS]), *self._tombstones])
            if Answer.HIT in (wide, narrow):
                answers = [Answer.MISS] * len(answers)
            elif not wide is narrow is Answer.MISS:
                return
            if not job.tell(dict(enumerate(answers, start))):
                return

    def _touch(self, job: Job, keys: Sequence[ChunkKey], _: Sequence[Record]) -> None:
        there = self.store.exists(self._keys(keys))
        names = [name for name, answer in zip(self._keys(keys), there, strict=True) if answer is Answer.HIT]
        answers = self.store.prepare(names, [self._formats[name.part].num_bytes for name in names])
        absent = [name for name, answer in zip(names, answers, strict=True) if answer is Answer.MISS]
        self.store.complete(absent, [False] * len(absent))
        job.tell(dict(enumerate(there)))

    def _load(self, job: Job, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> None:
        names, targets = self._keys(keys), self._views(keys, payloads)
        for places in self._batches(names, range(len(names)), _LOADED_BYTES):
            own = [names[at] for at in places]
            records = self._arrivals.of([targets[at].num_bytes for at in places])
            answers, defects, num_bytes = self.store.get(own, records), dict[int, str](), 0
            missing = [at for at, answer in enumerate(answers) if answer is Answer.MISS]
            # One that is there and not in this size can neither be read nor written. Or others store and evict it now.
            for at in self._there(own, missing):
                for _ in range(3):
                    (answers[at],) = self.store.get([own[at]], [records[at]])
                    if answers[at] is not Answer.MISS or not self._there(own, [at]):
                        break
                else:
                    defects[at] = "length"
            for at, (name, (header, content)) in enumerate(zip(own, records, strict=True)):
                if answers[at] is Answer.HIT:
                    if found := self._formats[name.part].defect(header, name.page, (content,)):
                        defects[at] = found
                    elif job.fill(places[at], targets[places[at]], content):
                        num_bytes += content.nbytes
                    else:
                        answers[at] = Answer.RETRY
            if defects:
                answers = [Answer.MISS if at in defects else answer for at, answer in enumerate(answers)]
                self._remove({own[at]: (defect, bytes(records[at][0][16:32])) for at, defect in defects.items()})
            others = {at: answer for at, answer in zip(places, answers, strict=True) if answer is not Answer.HIT}
            is_told = job.tell(others)
            misses = answers.count(Answer.MISS) if is_told else 0
            self.counts.add(hits=answers.count(Answer.HIT), misses=misses, loaded_bytes=num_bytes)
            if not is_told:
                return

    def _remove(self, bad: Mapping[StoreKey, tuple[str, bytes]]) -> None:
        """Remove and count bad records, each with its defect and the layout in its header: the scope of an engine."""
        self.store.remove(list(bad))
        others = read_facts(self.store, {layout for defect, layout in bad.values() if defect == "layout"})
        defects = {
            name: ",".join(differences(self.facts, others.get(layout, self.facts))) or defect
            for name, (defect, layout) in bad.items()
        }
        self.bad.add(*defects.values())
        logger.warning("quire: %d records were bad, and are removed: %s", len(bad), set(defects.values()))
        if self.log is not None:
            self.log.bad(self.scope, defects)

    def _there(self, names: Sequence[StoreKey], places: Sequence[int]) -> list[int]:
        """Those of these places whose records exist."""
        answers = self.store.exists([names[at] for at in places])
        return [at for at, answer in zip(places, answers, strict=True) if answer is Answer.HIT]

    def _save(self, job: Job, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> None:
        # The facts are beside each batch, so that they are used as lately as what they describe.
        names, pieces = [*self._keys(keys), self._described[0]], self._views(keys, payloads)
        sizes = [self._formats[part].num_bytes for _, part in keys]
        prepared = self.store.prepare(names, [*sizes, FACTS_BYTES])
        self.counts.add(present=prepared[:-1].count(Answer.HIT))
        job.tell({at: answer for at, answer in enumerate(prepared[:-1]) if answer is not Answer.MISS})
        mine = [at for at in (len(keys), *range(len(keys))) if prepared[at] is Answer.MISS]
        left = {names[at]: None for at in mine}
        try:
            for places in self._batches(names, mine, _SAVED_BYTES):
                own = [names[at] for at in places]
                found = self.store.put(own, [self._sealed(names, pieces, at) for at in places]) if job.tell({}) else []
                is_whole = job.tell({})  # what the engine changes since it gave up is seen by no reader
                put = [is_whole and answer is Answer.HIT for answer in found or places]
                for name in own:
                    del left[name]
                done = self.store.complete(own, put)
                saved = [at for at, answer in zip(places, done, strict=True) if answer is Answer.HIT and at < len(keys)]
                if not job.tell(dict.fromkeys(saved, Answer.HIT)):  # the payload may have changed while it was sent
                    self.store.remove([names[at] for at in saved])
                    return
                self.counts.add(saved=len(saved), saved_bytes=sum(pieces[at].num_bytes for at in saved))
                if self.log is not None:
                    self.log.saved(self.scope, [names[at] for at in saved])
        finally:
            self.store.complete(list(left), [False] * len(left))

    def _sealed(self, names: Sequence[StoreKey], pieces: Sequence[RecordViews], at: int) -> Record:
        """The record of a payload; that of the facts after the last one."""
        if at == len(pieces):
            return self._described[1]
        return (self._formats[names[at].part].header(names[at].page, pieces[at].views), *pieces[at].views)

    def _views(self, keys: Sequence[ChunkKey], payloads: Sequence[Record]) -> list[RecordViews]:
        pieces = list(map(RecordViews, payloads))
        for (_, part), piece in zip(keys, pieces, strict=True):
            assert piece.num_bytes == self._formats[part].payload_bytes, f"a payload of {piece.num_bytes} bytes"
        return pieces

    def _batches(self, names: Sequence[StoreKey], places: Sequence[int], most: int) -> Iterator[list[int]]:
        """Places in runs of records with so many bytes."""
        some, room = list[int](), most
        for at in places:
            size = self._formats[names[at].part].payload_bytes if names[at].scope == self.scope else FACTS_BYTES
            if some and size > room:
                yield some
                some, room = [], most
            some.append(at)
            room -= size
        if some:
            yield some

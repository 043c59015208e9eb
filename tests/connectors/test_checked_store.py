"""A CheckedStore gives out what was stored under its own facts, and everything else is a miss with a reason."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.connectors import checked_store, job
from quire.connectors.checked_store import CheckedStore, ChunkKey
from quire.errors import InvalidInput, StoreError
from quire.memory.record import HEADER_BYTES, RecordFormat
from quire.testing.stores.dict_store import DictStore
from quire.testing.stores.wrapped_store import LIES, FaultyStore, WrappedStore
from quire.tiers.scope_facts import facts_key, read_facts, write_facts
from quire.tiers.store import Answer, Record, RecordViews, Store, StoreKey, write_record
from quire.tiers.stores.directory import DirectoryStore
from quire.tiers.tombstones import tombstone_of, tombstone_scope

HIT, MISS, RETRY = Answer.HIT, Answer.MISS, Answer.RETRY
SIZES = {0: 4096, 1: 1000}
FACTS = {"engine": "test", "model": "m", "weights": "w1", "dtype": "float32", "page_size": 16, "rank": "0/1"}


def key(number: int, part: int = 0) -> ChunkKey:
    return hashlib.sha256(b"%d" % number).digest(), part


def payload(number: int, part: int = 0) -> bytes:
    return np.random.default_rng([number, part]).bytes(SIZES[part])


def checked(store: Store, **changed: str | int) -> CheckedStore:
    return CheckedStore(store, FACTS | changed, SIZES, deadline_s=0.2)


def halves(buffer: bytes | bytearray) -> Record:
    view = memoryview(buffer)
    return view[:333], view[333:]


@pytest.fixture(params=["dict", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = DictStore() if request.param == "dict" else DirectoryStore(tmp_path / "store", 64 << 20)
    yield opened
    opened.close()


def loaded(store: CheckedStore, keys: Sequence[ChunkKey]) -> list[bytes | None]:
    """What `load` fills in, None where it does not say HIT."""
    buffers = [bytearray(SIZES[part]) for _, part in keys]
    answers = store.load(keys, [halves(buffer) for buffer in buffers])
    return [bytes(buffer) if answer is HIT else None for buffer, answer in zip(buffers, answers, strict=True)]


def test_what_was_saved_is_loaded(store: Store) -> None:
    engine, again = checked(store), checked(store)
    keys = [key(number, number % 2) for number in range(10)]
    payloads = [payload(number, number % 2) for number in range(10)]
    assert engine.exists(keys) == [MISS] * 10
    assert engine.save(keys, [halves(each) for each in payloads]) == [HIT] * 10
    assert again.exists([*keys, key(99)]) == [HIT] * 10 + [MISS]
    assert loaded(again, [*keys, key(99)]) == [*payloads, None]
    assert again.save(keys, payloads) == [HIT] * 10
    counts = again.counts
    assert (counts["hits"], counts["misses"], counts["present"], counts["saved"]) == (10, 1, 10, 0)
    assert counts["loaded_bytes"] == engine.counts["saved_bytes"] == sum(map(len, payloads))
    assert not again.bad


@pytest.mark.parametrize("name", sorted(FACTS))
def test_other_facts_are_another_scope(store: Store, name: str) -> None:
    engine, other = checked(store), checked(store, **{name: "other"})
    assert engine.save([key(1)], [payload(1)]) == [HIT]
    assert other.exists([key(1)]) == [MISS] and loaded(other, [key(1)]) == [None]
    assert not other.bad


def test_facts_that_are_needed() -> None:
    for name in FACTS:
        if name != "model":
            with pytest.raises(InvalidInput, match=name):
                CheckedStore(DictStore(), {each: value for each, value in FACTS.items() if each != name}, SIZES)


@pytest.mark.parametrize("count", [1000])
def test_bad_records_are_counted_by_reason(count: int) -> None:
    """A thousand of each kind: each is a miss, is counted and is gone, and the good one beside them is a hit."""
    store = DictStore()
    engine = checked(store)
    others = {name: checked(store, **{name: value}) for name, value in _OTHERS.items()}
    for other in others.values():
        assert other.save([key(1)], [payload(1)]) == [HIT]  # which also stores its facts
    kinds = ["flipped", "header", "truncated", "foreign", "part", "unknown", *others]
    for kind in kinds:
        keys = [key(number) for number in range(count)]
        payloads = [payload(number % 7) for number in range(count)]
        assert engine.save(keys, payloads) == [HIT] * count
        for number in range(count):
            place = StoreKey(engine.scope, keys[number][0], 0)
            store.visible[place] = _damaged(kind, store, place, number, others.get(kind))
        good = key(count)
        assert engine.save([good], [payload(count)]) == [HIT]
        assert loaded(engine, [*keys, good]) == [None] * count + [payload(count)]
        assert sum(each.scope == engine.scope for each in store.visible) == 1
        store.remove([StoreKey(engine.scope, good[0], 0)])
    assert engine.bad == {
        "digest": count,
        "magic": count,
        "length": count,
        "key": count,
        "group": count,
        "layout": count,
        **dict.fromkeys(others, count),
    }


_OTHERS: dict[str, str | int] = {"weights": "w2", "dtype": "bfloat16", "page_size": 32, "rank": "1/2"}


def _damaged(kind: str, store: DictStore, place: StoreKey, number: int, other: CheckedStore | None) -> bytes:
    record = bytearray(store.visible[place])
    if kind == "flipped":
        record[HEADER_BYTES + number % SIZES[0]] ^= 1 << number % 8
    elif kind == "header":
        record[number % 4] ^= 255
    elif kind == "truncated":
        del record[-1 - number % 5000 :]
    elif kind == "foreign":
        record[:] = _sealed(place.scope, key(number + 1)[0], 0, payload(number % 7))
    elif kind == "part":
        record[:] = _sealed(place.scope, place.page, 1, payload(number % 7))
    else:
        record[:] = _sealed(b"u" * 16 if other is None else other.scope, place.page, 0, payload(number % 7))
    return bytes(record)


def _sealed(scope: bytes, page: bytes, part: int, content: bytes) -> bytes:
    return RecordFormat(part, scope, len(content)).header(page, (content,)) + content


def test_touched_records_stay_and_a_scope_is_cleared() -> None:
    """The store is full: what was touched is evicted last."""
    store = DictStore(4 * 4200 + 4096)
    engine, other = checked(store), checked(store, rank="1/2")
    assert engine.save([key(at) for at in range(4)], [payload(at) for at in range(4)]) == [HIT] * 4
    assert engine.submit_touch([key(0), key(1), key(99)]).wait() == [HIT, HIT, MISS]
    assert not store.prepared
    assert other.save([key(5)], [payload(5)]) == [HIT]
    there = engine.exists([key(at) for at in range(4)])
    assert there[:2] == [HIT, HIT] and MISS in there[2:]
    assert engine.clear() == there.count(HIT)
    assert other.exists([key(5)]) == [HIT]


def test_a_scope_that_was_deleted_is_a_miss(store: Store) -> None:
    engine = checked(store)
    assert engine.save([key(1)], [payload(1)]) == [HIT]
    assert write_record(store, tombstone_of(engine.scope[:8]), b"x" * 100) is HIT
    assert engine.exists([key(1)]) == [MISS]


def test_a_scope_that_may_be_deleted_is_unknown() -> None:
    store = Deaf()
    engine = checked(store)
    assert engine.save([key(1)], [payload(1)]) == [HIT]
    assert engine.exists([key(1)]) == [RETRY]


class Deaf(DictStore):
    """Does not answer for tombstones."""

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        found = super().exists(keys)
        return [RETRY if tombstone_scope(key) else answer for key, answer in zip(keys, found, strict=True)]


def test_a_full_store_can_be_read() -> None:
    store = DictStore(3 * 4200)
    engine = checked(store)
    assert engine.save([key(1)], [payload(1)]) == [HIT]
    small = CheckedStore(DictStore(100), FACTS, SIZES)
    assert small.save([key(1)], [payload(1)]) == [RETRY]
    assert small.exists([key(1)]) == [MISS], "a refused save says nothing of reading"
    assert small.save([key(1)], [payload(1)]) == [RETRY] and small.counts["refused"] == 2


class Raising(DictStore):
    """Breaks the contract of stores."""

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        raise OSError("the disk is on fire")


def test_a_store_that_raises() -> None:
    engine = checked(Raising())
    assert engine.save([key(1)], [payload(1)]) == [HIT]
    for _ in range(3):
        assert engine.load([key(1)], [bytearray(SIZES[0])]) == [RETRY]
        assert engine.submit_load([key(1)], [bytearray(SIZES[0])]).wait() == [RETRY]
    assert engine.save([key(2)], [payload(2)]) == [HIT]


def test_waiting_ends_with_the_job() -> None:
    """Not at its next look."""
    engine = checked(DictStore())
    started = time.monotonic()
    for number in range(300):
        engine.submit_exists([key(number)]).wait()
    assert time.monotonic() - started < 5


def test_facts_are_stored_with_the_first_record(store: Store) -> None:
    engine = checked(store)
    assert read_facts(store, [engine.scope]) == {}
    engine.save([key(1)], [payload(1)])
    assert read_facts(store, [engine.scope, b"x" * 16]) == {engine.scope: FACTS}
    assert facts_key(engine.scope).scope.startswith(engine.scope[:8])


def test_long_facts_are_cut(store: Store) -> None:
    assert write_facts(store, b"s" * 16, {"engine": "e" * 9000, "model": "m", "page_size": 16}) is HIT
    (found,) = read_facts(store, [b"s" * 16]).values()
    assert str(found["engine"]).startswith("eee") and found["model"] == "m" and found["page_size"] == 16


class Hanging(WrappedStore):
    """Calls wait while `lets_go` is clear."""

    def __init__(self) -> None:
        super().__init__(DictStore())
        self.lets_go = threading.Event()
        self.num_calls = 0

    def before(self, records: Sequence[Record] = ()) -> None:
        self.num_calls += 1
        assert self.lets_go.wait(30)


def test_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job ends within its deadline. What arrives later is written nowhere; what is read later is not stored."""
    store = Hanging()
    store.lets_go.set()
    engine = CheckedStore(store, FACTS, SIZES, deadline_s=0.2, threads=2)
    assert engine.save([key(1)], [payload(1)]) == [HIT]
    store.lets_go.clear()
    started = time.monotonic()
    buffers = [bytearray(SIZES[0]) for _ in range(5)]
    jobs = [engine.submit_load([key(1)], [buffer]) for buffer in buffers]
    jobs.append(engine.submit_exists([key(1)]))
    changed = bytearray(payload(2))
    jobs.append(engine.submit_save([key(2)], [changed]))
    assert [each.poll() for each in jobs] == [None] * 7
    assert [each.wait() for each in jobs] == [[RETRY]] * 7
    assert all(each.expired for each in jobs)
    assert engine.submit_load([key(1)], [buffers[0]]).poll() == [RETRY], "no thread is left, so nothing is waited for"
    assert time.monotonic() - started < 5
    calls = store.num_calls
    changed[0] ^= 1
    store.lets_go.set()
    end = time.monotonic() + 10
    while any(threads.hang for threads in (engine._askers, engine._readers, engine._writers)):
        assert time.monotonic() < end
    assert store.inner.exists([StoreKey(engine.scope, key(2)[0], 0)]) == [MISS]
    counts = engine.counts
    assert (counts["hits"], counts["loaded_bytes"], counts["refused"], counts["expired"]) == (0, 0, 0, 8)
    engine._readers.rest = engine._writers.rest = job.Rest()
    assert loaded(engine, [key(1), key(2)]) == [payload(1), None]
    assert store.num_calls > calls and not any(map(any, buffers)) and not engine.bad
    store.lets_go.clear()
    hanging = engine.submit_save([key(3)], [payload(3)])
    monkeypatch.setattr(checked_store, "CLOSE_S", 0.1)
    assert not engine.close()
    assert engine.submit_load([key(1)], [buffers[1]]).wait() == [RETRY]
    store.lets_go.set()
    assert hanging.wait() in ([HIT], [RETRY])


def test_a_job_that_has_ended_says_so_while_its_late_thread_has_the_lock() -> None:
    given_up = job.Job(lambda _: None, 1, 0.0)
    assert given_up.poll() == [RETRY]
    with given_up._changed:
        found: list[object] = []
        other = threading.Thread(target=lambda: found.append(given_up.poll()))
        other.start()
        other.join()
    assert found == [[RETRY]]


def check_hung_reads() -> None:
    """A disk that answers too late: what it reads then is dropped."""
    with TemporaryDirectory() as folder, closing(DirectoryStore(Path(folder) / "store", 64 << 20)) as store:
        engine, reads, lets_go = checked(store), [0], threading.Event()
        keys, payloads = [key(at) for at in range(20)], [payload(at) for at in range(20)]
        assert engine.save(keys, payloads) == [HIT] * 20
        really = os.preadv

        def preadv(*given: Any) -> int:
            reads[0] += 1
            assert lets_go.wait(30)
            return really(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            buffer = bytearray(20 * SIZES[0])
            rows = [memoryview(buffer)[at : at + SIZES[0]] for at in range(0, len(buffer), SIZES[0])]
            jobs = [engine.submit_load(keys[:10], rows[:10]), engine.submit_load(keys[10:], rows[10:])]
            started = time.monotonic()
            assert [each.wait() for each in jobs] == [[RETRY] * 10] * 2 and reads[0]
            assert time.monotonic() - started < 5
            buffer[:] = b"x" * len(buffer)  # another prompt's
            lets_go.set()
            engine.close()
        assert buffer == b"x" * len(buffer)


def test_a_directory_that_hangs() -> None:
    check_hung_reads()


class Clock:
    """The time that jobs see."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(time, "monotonic", lambda: self.now)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_job_is_given_up_once(data: st.DataObject) -> None:
    """Beside a model: a job lives while each step takes less than its deadline, and when it is dead nothing changes."""
    with pytest.MonkeyPatch.context() as patch:
        clock, deadline = Clock(patch), 10.0
        job_of = job.Job(lambda _: None, 3, deadline)
        buffers = [bytearray(8) for _ in range(3)]
        answers, contents = [RETRY] * 3, [bytes(8)] * 3
        last, is_dead, has_ended = 0.0, False, False
        for _ in range(data.draw(st.integers(1, 25))):
            step = data.draw(st.sampled_from(["wait", "fill", "tell", "poll", "end"]))
            at = data.draw(st.integers(0, 2))
            if step == "wait":
                clock.now += data.draw(st.sampled_from([1.0, 9.0, 10.0]))
            elif step == "fill" and not has_ended:
                content = data.draw(st.binary(min_size=8, max_size=8))
                target = RecordViews((memoryview(buffers[at])[:3], memoryview(buffers[at])[3:]))
                assert job_of.fill(at, target, memoryview(content)) == (not is_dead)
                if not is_dead:
                    answers[at], contents[at], last = HIT, content, clock.now
            elif step == "tell" and not has_ended:
                answer = data.draw(st.sampled_from([MISS, RETRY, Answer.PENDING]))
                assert job_of.tell({at: answer}) == (not is_dead)
                if not is_dead:
                    answers[at], last = answer, clock.now
            elif step == "end" and not has_ended:
                job_of.run()
                has_ended = True
            else:
                is_dead = is_dead or (not has_ended and clock.now >= last + deadline)
                assert job_of.poll() == (answers if has_ended or is_dead else None)
                assert job_of.expired == is_dead
            assert buffers == contents


class Down(WrappedStore):
    """Says RETRY to everything while it `is_down`."""

    def __init__(self) -> None:
        super().__init__(DictStore())
        self.is_down, self.num_calls = True, 0

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        self.num_calls += 1
        return [RETRY] * len(keys) if self.is_down else super().get(keys, records)


def test_a_store_that_is_down_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = Down(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    engine = checked(store)
    assert engine.save([key(1)], [payload(1)]) == [HIT]
    for _ in range(300):
        assert engine.load([key(1)], [bytearray(SIZES[0])]) == [RETRY]
        now += 0.1
    assert store.num_calls == 6, "after 0, 0.5, 1.5, 3.5, 7.5 and 15.5 seconds"
    store.is_down = False
    now += 31
    assert loaded(engine, [key(1), key(2)]) == [payload(1), None]
    assert engine.counts["refused"] == 300


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_store_that_lies(data: st.DataObject) -> None:
    """Whatever a store returns, a hit has the bytes that were saved."""
    faulty = FaultyStore(DictStore(8 * 4200), seed=data.draw(st.integers(0, 2**32)), percent=30)
    engine = checked(faulty)
    for _ in range(30):
        numbers = data.draw(
            st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=4, unique=True)
        )
        keys = [key(*each) for each in numbers]
        engine._readers.rest = engine._writers.rest = job.Rest()
        if data.draw(st.booleans()):
            engine.save(keys, [halves(payload(*each)) for each in numbers])
        else:
            for each, found in zip(numbers, loaded(engine, keys), strict=True):
                assert found is None or found == payload(*each)
    lies = sum(faulty.happened[kind] for kind in LIES)
    assert sum(engine.bad.values()) <= lies


def check_store() -> None:
    """What must hold of every store beneath an engine, in a second."""
    for name in ("weights", "rank"):
        test_other_facts_are_another_scope(DictStore(), name)
    test_bad_records_are_counted_by_reason(20)
    test_a_scope_that_was_deleted_is_a_miss(DictStore())
    with pytest.MonkeyPatch.context() as patch:
        test_a_store_that_hangs(patch)
    check_hung_reads()
    test_a_job_is_given_up_once()
    test_a_job_that_expires_while_it_sends_leaves_nothing()
    test_a_store_that_raises_between_prepare_and_complete_keeps_no_key()


def test_jobs_for_a_store_that_hangs_are_in_no_queue() -> None:
    """Each is answered at once, and nobody would take it from there."""
    store = Hanging()
    with closing(CheckedStore(store, FACTS, SIZES, deadline_s=0.1, threads=1)) as engine:
        for _ in range(2):  # both threads
            assert engine.submit_exists([key(1)]).wait() == [RETRY]
        waiting = engine._askers._jobs.qsize()
        assert [engine.submit_exists([key(1)]).poll() for _ in range(50)] == [[RETRY]] * 50
        assert engine._askers._jobs.qsize() == waiting
        store.lets_go.set()


class Asked(DictStore):
    """Says what is asked in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        self.asked.append(len(keys))
        return super().exists(keys)


def test_a_long_prompt_is_asked_for_in_parts() -> None:
    """A bucket needs a request for each key: between parts a job says that it goes on."""
    store, names = Asked(), [key(number) for number in range(2000)]
    with closing(checked(store)) as engine:
        engine.save([names[0], names[1999]], [payload(0), payload(1999)])
        store.asked.clear()
        assert engine.exists(names) == [HIT, *[MISS] * 1998, HIT]
        assert len(store.asked) == 4 and max(store.asked) <= 512 + 2


class Sending(DictStore):
    """Reads payloads in `complete`, as stores on a server do; `meanwhile` is called before."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Any = None
        self.completed: list[int] = []

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        if any(ok) and self.meanwhile is not None:
            self.meanwhile()
        self.completed.append(sum(ok))
        return super().complete(keys, ok)


def test_a_job_that_expires_while_it_sends_leaves_nothing() -> None:
    """Each part is sent by itself, within a deadline of its own; of one that came too late nothing is found."""
    store = Sending()
    with closing(checked(store)) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked_store, "_SAVED_BYTES", 2 * SIZES[0])
        names, pages = [key(number) for number in range(6)], [payload(number) for number in range(6)]
        assert engine.save(names, pages) == [HIT] * 6
        assert len(store.completed) > 3 and max(store.completed) <= 3
        late = [key(number) for number in range(10, 12)]
        work = engine._job(engine._writers, engine._save, late, pages[:2], deadline_s=0.05)

        def expires() -> None:
            while work.poll() is None:
                time.sleep(0.01)

        store.meanwhile = expires
        work.run()
        store.meanwhile = None
        assert work.expired and engine.exists(late) == [MISS] * 2
        assert engine.counts["saved"] == 6


def test_a_store_that_raises_between_prepare_and_complete_keeps_no_key() -> None:
    class Raises(DictStore):
        raises = True

        def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
            if self.raises:
                raise OSError("a stale handle")
            return super().put(keys, records)

    store = Raises()
    with closing(checked(store)) as engine:
        assert engine.save([key(1)], [payload(1)]) == [RETRY]
        engine._writers.rest = job.Rest()
        store.raises = False
        assert engine.save([key(1)], [payload(1)]) == [HIT], "it is not announced for ever"


def test_records_that_could_not_be_removed_are_named() -> None:
    class Stubborn(DictStore):
        def remove(self, keys: Sequence[StoreKey]) -> int:
            return super().remove(keys[1:])

    with closing(checked(Stubborn())) as engine:
        engine.save([key(1), key(2)], [payload(1), payload(2)])
        with pytest.raises(StoreError, match="refused the others"):
            engine.clear()


def test_records_that_a_store_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="takes none above"):
        CheckedStore.open(str(tmp_path / "store"), FACTS, {0: 2 << 20}, capacity=1 << 20)
    DirectoryStore(tmp_path / "store", None).close()  # and it was closed

"""StoreContract: tests that every storage backend must pass. They check the backend and, directly, its medium.

The test of a backend subclasses it and says how to make, reopen and inspect a store:

    class TestDirectory(StoreContract):
        @pytest.fixture(autouse=True)
        def place(self, tmp_path): self.path = tmp_path

        def make_store(self, capacity): return DirectoryStore(self.path, capacity)
        def open_again(self): return DirectoryStore(self.path, self.capacity)
        def medium(self): return MyMedium(self.path)

Class attributes say which features the backend has. Every store that a test opens is closed after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest

from quire.testing.choices import Choices
from quire.testing.contracts.records import Medium, make_key, make_keys, make_record, read, write
from quire.testing.contracts.store_model import StoreModel
from quire.tiers.store import Answer, Store, StoreKey
from quire.tiers.tombstones import delete_scope, tombstone_of
from quire.tiers.transfer import Lane, Transfer

HIT, MISS, PENDING, RETRY = Answer.HIT, Answer.MISS, Answer.PENDING, Answer.RETRY
UNSEEN = (MISS, PENDING)
"""What `exists` and `get` may say of a record that is being written."""

Test = TypeVar("Test", bound=Callable[..., None])


def needs(*attributes: str) -> Callable[[Test], Test]:
    """Mark a test that applies only to classes where all these attributes are true."""

    def mark(test: Test) -> Test:
        test.__dict__["needs"] = attributes
        return test

    return mark


class StoreContract:
    """Subclasses implement `make_store`, `open_again` and `medium`, and set the attributes. Tests of features that the
    backend lacks are omitted."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in dir(cls):
            if not all(getattr(cls, attribute) for attribute in getattr(getattr(cls, name), "needs", ())):
                setattr(cls, name, None)

    bounded = True  # never holds more bytes than its capacity: it evicts
    lru = True  # what was not used for longest is evicted first, and of one batch the last
    survives_restart = True  # a store that is closed and opened again holds what it held
    shared = True  # several stores can be open on one medium at once
    exclusive = True  # with several, a second writer of a key is told PENDING until the first has completed
    listable = True  # `entries` works
    cuttable = True  # the medium can hold a record that is shorter than what was stored
    exact_sizes = True  # `prepare` fixes the size: a put of another is refused. Else it may only never be a wrong HIT
    capacity = 16 << 20
    """Bytes of the stores that tests make; a bounded backend with a larger smallest size raises it."""

    large_batch = 700
    """Records in one call: more than the backend does in one go."""

    record_sizes: Sequence[int] = (64, 65, 511, 4096, 4097, 65_600, (1 << 20) + 64)

    # -- what a backend gives

    def make_store(self, capacity: int | None) -> Store:
        """An empty store of so many bytes (None: the backend's own default) on a fresh medium."""
        raise NotImplementedError

    def open_again(self) -> Store:
        """Another store on the medium of the last `make_store`, whether that one is still open or not."""
        raise NotImplementedError

    def medium(self) -> Medium:
        """The medium of the last `make_store`."""
        raise NotImplementedError

    # -- what tests use

    @pytest.fixture(autouse=True)
    def opened(self) -> Iterator[None]:
        """Closes what a test has opened."""
        self._opened: list[Store] = []
        yield
        for store in self._opened:
            store.close()

    def new(self, capacity: int | None = None) -> Store:
        """`make_store`, closed after the test."""
        store = self.make_store(self.capacity if capacity is None else capacity)
        self._opened.append(store)
        return store

    def again(self) -> Store:
        """`open_again`, closed after the test."""
        store = self.open_again()
        self._opened.append(store)
        return store

    @pytest.fixture
    def store(self, opened: None) -> Store:
        """An empty store."""
        return self.new()

    def test_unknown_keys(self, store: Store) -> None:
        """Nothing is there, and nothing goes wrong."""
        keys = make_keys(3)
        assert store.exists(keys) == [MISS] * 3
        assert store.get(keys, [bytearray(100) for _ in keys]) == [MISS] * 3
        assert store.remove(keys) == 0
        assert store.complete(keys, [True, False, True]) == [MISS] * 3
        assert store.exists(keys) == [MISS] * 3
        if self.listable:
            assert list(store.entries()) == []

    def test_empty_batches(self, store: Store) -> None:
        """Every verb takes no keys at all."""
        assert store.exists([]) == store.prepare([], []) == store.put([], []) == []
        assert store.complete([], []) == store.get([], []) == []
        assert store.remove([]) == 0

    # -- writing and reading

    def test_round_trip(self, store: Store) -> None:
        """Records of every size come back as they went in, and the medium holds just these bytes."""
        medium = self.medium()
        for number, size in enumerate(self.record_sizes):
            key, record = make_key(number), make_record(number, size)
            assert write(store, [key], [record]) == [HIT]
            assert store.exists([key]) == [HIT]
            assert read(store, key, size) == record
            assert medium.read(key) == record, f"the medium holds other bytes of {size}"

    def test_a_batch(self, store: Store) -> None:
        """A batch of mixed sizes, written and read in other orders."""
        keys = make_keys(24)
        records = [make_record(number, self.record_sizes[number % 6]) for number in range(24)]
        assert write(store, keys, records) == [HIT] * 24
        order = np.random.default_rng(0).permutation(24).tolist()
        buffers = [bytearray(len(records[index])) for index in order]
        assert store.get([keys[index] for index in order], buffers) == [HIT] * 24
        assert [bytes(buffer) for buffer in buffers] == [records[index] for index in order]
        assert self.medium().keys() == set(keys)

    def test_a_large_batch(self, store: Store) -> None:
        """More records in one batch than the backend does in one go."""
        count = self.large_batch
        keys = make_keys(count)
        records = [make_record(number, 64 + number % 3) for number in range(count)]
        assert write(store, keys, records) == [HIT] * count
        assert store.exists(keys) == [HIT] * count
        buffers = [bytearray(len(record)) for record in records]
        assert store.get(keys, buffers) == [HIT] * count
        assert [bytes(buffer) for buffer in buffers] == records
        assert store.remove(keys) == count

    def test_every_part_of_a_key_counts(self, store: Store) -> None:
        """Keys that differ in their scope, page or part alone are different records."""
        keys = [make_key(0), make_key(1), make_key(0, scope=1), make_key(0, part=1), make_key(0, part=256)]
        assert write(store, keys[:1], [make_record(0, 500)]) == [HIT]
        assert store.exists(keys) == [HIT, MISS, MISS, MISS, MISS]
        assert write(store, keys[1:], [make_record(number, 500) for number in range(1, 5)]) == [HIT] * 4
        assert [read(store, key, 500) for key in keys] == [make_record(number, 500) for number in range(5)]

    def test_any_buffer(self, store: Store) -> None:
        """Records come and go in bytes, views and arrays, at any address."""
        size = 8192 + 64
        backing = np.zeros(4 * size + 4096, dtype=np.uint8)
        start = -backing.ctypes.data % 4096
        aligned, odd = backing[start : start + size], backing[start + size + 1 : start + 2 * size + 1]
        words = np.frombuffer(make_record(3, size), dtype=np.uint32)
        aligned[:], odd[:] = (np.frombuffer(make_record(number, size), dtype=np.uint8) for number in (1, 2))
        keys = make_keys(5)
        last = memoryview(bytearray(make_record(4, size)))
        assert write(store, keys, [make_record(0, size), aligned.data, odd.data, words.data, last]) == [HIT] * 5
        first = bytearray(size)
        views = [np.zeros_like(odd).data, np.zeros_like(words).data, last, aligned.data]
        last[:] = bytes(size)
        assert store.get(keys, [first, *views]) == [HIT] * 5
        found = [bytes(first), *(bytes(view.cast("B")) for view in views)]
        assert found == [make_record(number, size) for number in range(5)]

    def test_a_record_in_pieces(self, store: Store) -> None:
        """Buffers that follow each other are one record, of any size, wherever it is cut."""
        for number, size in enumerate((500, 8192 + 64, 2_500_000)):
            key, record = make_key(number), make_record(number, size)
            assert write(store, [key], [(record[:64], record[64:300], b"", record[300:])]) == [HIT]
            row = memoryview(bytearray(size + 60))
            pieces = row[:113], row[133 : size // 2], row[size // 2 + 20 : -20]
            assert store.get([key], [pieces]) == [HIT] and b"".join(pieces) == record
            assert not any([*row[113:133], *row[-20:]]), "bytes beside the pieces have changed"

    def test_nothing_is_written_beside_a_buffer(self, store: Store) -> None:
        """A record that is read touches its own buffer alone."""
        keys, size = make_keys(3), 5000
        assert write(store, keys, [make_record(number, size) for number in range(3)]) == [HIT] * 3
        row = np.full(5 * size, 7, dtype=np.uint8)
        assert store.get(keys, [row[start : start + size].data for start in (size, 2 * size, 3 * size)]) == [HIT] * 3
        assert row[size:-size].tobytes() == b"".join(make_record(number, size) for number in range(3))
        assert (row[:size] == 7).all() and (row[-size:] == 7).all()

    # -- two phases

    def test_visible_only_when_complete(self, store: Store) -> None:
        """Neither prepared nor put records can be found."""
        key, record = make_key(0), make_record(0, 5000)
        assert store.prepare([key], [len(record)]) == [MISS]
        self._unseen(store, key, len(record))
        assert store.put([key], [record]) == [HIT]
        self._unseen(store, key, len(record))
        assert store.complete([key], [True]) == [HIT]
        assert read(store, key, len(record)) == record

    def _unseen(self, store: Store, key: StoreKey, size: int) -> None:
        assert store.exists([key])[0] in UNSEEN
        assert store.get([key], [bytearray(size)])[0] in UNSEEN
        assert self.medium().read(key) is None
        if self.listable:
            assert list(store.entries()) == []

    def test_given_up(self, store: Store) -> None:
        """`complete(False)` leaves nothing, put or not, and the key is free for another record."""
        keys = make_keys(2)
        assert store.prepare(keys, [5000, 5000]) == [MISS, MISS]
        assert store.put(keys[:1], [make_record(0, 5000)]) == [HIT]
        assert store.complete(keys, [False, False]) == [MISS, MISS]
        assert store.exists(keys) == [MISS, MISS]
        assert self.medium().keys() == set()
        assert write(store, keys, [make_record(7, 600), make_record(8, 70_000)]) == [HIT, HIT]
        assert read(store, keys[0], 600) == make_record(7, 600)
        assert read(store, keys[1], 70_000) == make_record(8, 70_000)

    def test_completed_without_bytes(self, store: Store) -> None:
        """A record that was prepared and not put never becomes visible."""
        key = make_key(0)
        assert store.prepare([key], [5000]) == [MISS]
        assert store.complete([key], [True]) != [HIT]
        assert store.exists([key]) == [MISS]
        assert write(store, [key], [make_record(0, 5000)]) == [HIT]

    def test_put_without_prepare(self, store: Store) -> None:
        """What was not prepared is not taken."""
        key = make_key(0)
        assert store.put([key], [make_record(0, 100)]) != [HIT]
        assert store.complete([key], [True]) == [MISS]
        assert store.exists([key]) == [MISS]

    def test_a_size_that_was_not_prepared(self, store: Store) -> None:
        """A record of another size than announced is refused, and what is completed of it is nothing."""
        keys = make_keys(2)
        assert store.prepare(keys, [5000, 5000]) == [MISS, MISS]
        taken = store.put(keys, [make_record(0, 4999), make_record(1, 9001)])
        if self.exact_sizes:
            assert HIT not in taken
        done = store.complete(keys, [answer is HIT for answer in taken])
        for key, size, answer in zip(keys, (4999, 9001), done, strict=True):
            assert store.get([key], [bytearray(5000)]) == [MISS]
            if answer is HIT:
                assert read(store, key, size) is not None

    def test_a_batch_in_which_some_fail(self, store: Store) -> None:
        """Each key of a batch is answered for itself, in order."""
        keys = make_keys(4)
        assert write(store, keys[1:2], [make_record(1, 300)]) == [HIT]
        assert store.prepare(keys, [300] * 4) == [MISS, HIT, MISS, MISS]
        mine = [keys[0], keys[2], keys[3]]
        assert store.put([keys[3], keys[0]], [make_record(3, 300), make_record(0, 300)]) == [HIT, HIT]
        done = store.complete(mine, [True, True, False])
        assert (done[0], done[2]) == (HIT, MISS) and done[1] is not HIT
        assert store.exists(keys) == [HIT, HIT, MISS, MISS]
        buffers = [bytearray(300) for _ in keys]
        assert store.get(keys, buffers) == [HIT, HIT, MISS, MISS]
        assert [bytes(buffer) for buffer in buffers[:2]] == [make_record(0, 300), make_record(1, 300)]

    def test_the_first_record_stays(self, store: Store) -> None:
        """A key that is there is not written again, whatever a writer does."""
        key, record = make_key(0), make_record(0, 3000)
        assert write(store, [key], [record]) == [HIT]
        assert store.prepare([key], [3000]) == [HIT]
        assert store.put([key], [make_record(1, 3000)]) != [HIT]
        store.complete([key], [True])
        assert read(store, key, 3000) == record
        assert self.medium().read(key) == record

    def test_a_prepared_key_is_pending(self, store: Store) -> None:
        """A second writer is told to leave it, and cannot spoil it."""
        key = make_key(0)
        assert store.prepare([key], [3000]) == [MISS]
        assert store.prepare([key], [3000]) == [PENDING]
        assert store.put([key], [make_record(0, 3000)]) == [HIT]
        assert store.prepare([key], [3000]) == [PENDING]
        assert store.complete([key], [True]) == [HIT]
        assert store.prepare([key], [3000]) == [HIT]
        assert store.complete([key], [False]) == [MISS], "a key is completed once"
        assert read(store, key, 3000) == make_record(0, 3000)

    def test_a_key_twice_in_a_batch(self, store: Store) -> None:
        """The first of two announcements of one key is the writer."""
        first, second = make_keys(2)
        assert store.prepare([first, second, first], [300, 300, 300]) == [MISS, MISS, PENDING]
        assert store.put([first, second], [make_record(0, 300), make_record(1, 300)]) == [HIT, HIT]
        assert store.complete([first, second], [True, True]) == [HIT, HIT]
        assert store.exists([first, first]) == [HIT, HIT]
        buffers = [bytearray(300), bytearray(300)]
        assert store.get([first, first], buffers) == [HIT, HIT]
        assert [bytes(buffer) for buffer in buffers] == [make_record(0, 300)] * 2
        assert store.remove([first, first, second]) == 2

    def test_another_size_than_stored(self, store: Store) -> None:
        """A buffer that does not fit exactly is a miss, and the record stays."""
        key, record = make_key(0), make_record(0, 5000)
        assert write(store, [key], [record]) == [HIT]
        for size in (0, 64, 4999, 5001, 9000):
            assert store.get([key], [bytearray(size)]) == [MISS], size
        assert read(store, key, 5000) == record

    def test_remove(self, store: Store) -> None:
        """What is removed is gone from the medium, and the key can hold another record."""
        keys = make_keys(3)
        assert write(store, keys, [make_record(number, 700) for number in range(3)]) == [HIT] * 3
        assert store.remove([keys[0], make_key(9), keys[2]]) == 2
        assert store.exists(keys) == [MISS, HIT, MISS]
        assert store.get(keys[:1], [bytearray(700)]) == [MISS]
        assert self.medium().keys() == {keys[1]}
        assert write(store, keys[:1], [make_record(5, 800)]) == [HIT]
        assert read(store, keys[0], 800) == make_record(5, 800)

    @needs("listable")
    def test_entries(self, store: Store) -> None:
        """All records, or those of one scope, with their sizes."""
        ours, theirs = make_keys(3), make_keys(2, scope=1)
        sizes = [100, 5000, 64, 70_000, 4096]
        assert write(store, ours + theirs, [make_record(size, size) for size in sizes]) == [HIT] * 5
        assert store.prepare([make_key(8)], [500]) == [MISS]
        listed = list(store.entries())
        assert {entry.key: entry.num_bytes for entry in listed} == dict(zip(ours + theirs, sizes, strict=True))
        assert len(listed) == 5
        assert all(entry.idle_seconds is None or entry.idle_seconds >= 0 for entry in listed)
        assert {entry.key for entry in store.entries(theirs[0].scope)} == set(theirs)
        assert list(store.entries(make_key(0, scope=2).scope)) == []
        assert store.complete([make_key(8)], [False]) == [MISS]

    # -- closing and opening again

    def test_close(self, store: Store) -> None:
        """A store may be closed twice, and answers after that, though nothing is there any more."""
        keys = make_keys(2)
        assert write(store, keys[:1], [make_record(0, 500)]) == [HIT]
        store.close()
        store.close()
        assert HIT not in store.exists(keys)
        assert HIT not in store.get(keys, [bytearray(500), bytearray(500)])
        assert store.prepare(keys, [500, 500]) == [RETRY, RETRY]
        assert HIT not in store.put(keys, [make_record(0, 500), make_record(1, 500)])
        assert HIT not in store.complete(keys, [True, True])
        assert store.remove(keys) == 0

    def test_restart(self, store: Store) -> None:
        """After it is opened again, complete records are there, and incomplete ones are not."""
        keys = make_keys(len(self.record_sizes))
        records = [make_record(number, size) for number, size in enumerate(self.record_sizes)]
        assert write(store, keys, records) == [HIT] * len(keys)
        unfinished = [make_key(100), make_key(101)]
        assert store.prepare(unfinished, [3000, 3000]) == [MISS, MISS]
        assert store.put(unfinished[:1], [make_record(100, 3000)]) == [HIT]
        store.close()
        opened = self.again()
        for key, record in zip(keys, records, strict=True):
            found = read(opened, key, len(record))
            assert found == record if self.survives_restart else found in (record, None)
        assert opened.exists(unfinished) == [MISS, MISS]
        assert write(opened, unfinished, [make_record(100, 3000), make_record(101, 3000)]) == [HIT, HIT]

    # -- several at once

    @needs("shared")
    def test_two_stores_on_one_medium(self, store: Store) -> None:
        """Each sees what the other has completed and removed."""
        other = self.again()
        keys = make_keys(4)
        assert write(store, keys[:2], [make_record(number, 900) for number in range(2)]) == [HIT] * 2
        assert other.exists(keys) == [HIT, HIT, MISS, MISS]
        assert read(other, keys[0], 900) == make_record(0, 900)
        assert write(other, keys, [make_record(number, 900) for number in range(4)]) == [HIT] * 4
        assert [read(store, key, 900) for key in keys] == [make_record(number, 900) for number in range(4)]
        assert other.remove(keys[:1]) == 1
        assert store.exists(keys[:1]) == [MISS]
        assert read(store, keys[0], 900) is None

    @needs("shared")
    def test_two_writers(self, store: Store) -> None:
        """Two stores write one key: one record stays, whole."""
        other = self.again()
        key = make_key(0)
        assert store.prepare([key], [900]) == [MISS]
        if self.exclusive:
            assert other.prepare([key], [900]) == [PENDING]
            assert other.complete([key], [False]) == [MISS], "only the writer completes"
            assert store.put([key], [make_record(0, 900)]) == [HIT]
            assert store.complete([key], [True]) == [HIT]
            assert read(other, key, 900) == make_record(0, 900)
            return
        assert other.prepare([key], [900]) in ([MISS], [PENDING])
        assert store.put([key], [make_record(0, 900)]) == [HIT]
        other.put([key], [make_record(1, 900)])
        assert store.complete([key], [True]) == [HIT]
        other.complete([key], [True])
        assert read(store, key, 900) == read(other, key, 900) == make_record(0, 900)

    @needs("shared")
    def test_a_writer_that_closes(self, store: Store) -> None:
        """What it had prepared is free for others."""
        other = self.again()
        keys = make_keys(2)
        assert store.prepare(keys, [900, 900]) == [MISS, MISS]
        assert store.put(keys[:1], [make_record(5, 900)]) == [HIT]
        store.close()
        assert other.exists(keys) == [MISS, MISS]
        assert write(other, keys, [make_record(0, 900), make_record(1, 900)]) == [HIT, HIT]
        assert read(other, keys[0], 900) == make_record(0, 900)

    def test_threads(self, store: Store) -> None:
        """Threads that write, read and remove their own records and shared ones see right bytes or nothing."""
        shared = make_keys(8)
        started = threading.Barrier(4)

        def work(thread: int) -> None:
            rng = np.random.default_rng(thread)
            started.wait()
            for turn in range(12):
                own = [make_key(1000 + 100 * thread + turn), make_key(2000 + 100 * thread + turn)]
                records = [make_record(int.from_bytes(key.page[:4], "little"), 3000 + turn) for key in own]
                assert write(store, own, records) == [HIT, HIT]
                assert [read(store, key, 3000 + turn) for key in own] == records
                number = int(rng.integers(8))
                write(store, [shared[number]], [make_record(number, 2000)])
                assert read(store, shared[number], 2000) in (make_record(number, 2000), None)
                if turn % 5 == 4:
                    store.remove([shared[number], own[0]])

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, thread) for thread in range(4)]:
                done.result()

    @needs("listable", "survives_restart")
    def test_what_is_deleted_half_way(self, store: Store) -> None:
        """Where the process that deletes a scope dies, the next store finds the tombstone, and can go on."""
        keys = [*make_keys(5), *make_keys(3, scope=1)]
        assert write(store, keys, [make_record(number, 900) for number in range(8)]) == [HIT] * 8
        scope, tombstone = keys[0].scope, tombstone_of(keys[0].scope)
        move = Transfer(Lane.DELETE, (), scope)
        next(delete_scope(store, move))
        assert move.hidden
        store.close()
        other = self.again()
        assert other.exists([tombstone, *keys]) == [HIT] * 9
        for _ in delete_scope(other, Transfer(Lane.DELETE, (), scope)):
            pass
        assert other.exists([tombstone, *keys]) == [MISS] * 6 + [HIT] * 3
        assert write(other, keys[:1], [make_record(9, 900)]) == [HIT]

    # -- a medium that changes behind the store's back

    def test_a_damaged_record(self, store: Store) -> None:
        """Other bytes of the same length are returned as they are, for the digest to refuse, or not at all."""
        key, damaged = make_key(0), make_record(1, 5000)
        assert write(store, [key], [make_record(0, 5000)]) == [HIT]
        self.medium().write(key, damaged)
        assert read(store, key, 5000) in (damaged, None)

    @needs("cuttable")
    def test_a_record_cut_short(self, store: Store) -> None:
        """Never a hit, and the key can be written again."""
        key, record = make_key(0), make_record(0, 20_000)
        assert write(store, [key], [record]) == [HIT]
        self.medium().write(key, record[:7000])
        assert read(store, key, 20_000) is None
        store.remove([key])
        assert write(store, [key], [record]) == [HIT]
        assert read(store, key, 20_000) == record

    def test_a_record_that_went_away(self, store: Store) -> None:
        """A miss, and the key can be written again."""
        keys, records = make_keys(2), [make_record(number, 5000) for number in range(2)]
        assert write(store, keys, records) == [HIT, HIT]
        self.medium().delete(keys[0])
        assert read(store, keys[0], 5000) is None
        assert read(store, keys[1], 5000) == records[1]
        assert store.exists(keys) == [MISS, HIT]
        assert write(store, keys[:1], records[:1]) == [HIT]
        assert read(store, keys[0], 5000) == records[0]

    # -- bounds

    @needs("bounded")
    def test_the_capacity_holds(self) -> None:
        """Twice what fits: all is taken, most of it evicted, what is there is right."""
        store, size = self.new(), self.capacity // 16
        keys = make_keys(32)
        for number, key in enumerate(keys):
            assert write(store, [key], [make_record(number, size - 64)]) == [HIT]
            assert sum(entry.num_bytes for entry in store.entries()) <= self.capacity
        kept = [number for number, key in enumerate(keys) if store.exists([key]) == [HIT]]
        assert 4 <= len(kept) <= 16
        for number in kept:
            assert read(store, keys[number], size - 64) in (make_record(number, size - 64), None)

    @needs("bounded", "lru")
    def test_what_was_not_used_for_longest_goes_first(self) -> None:
        """Every evicted record was used before all that are still there."""
        store, size = self.new(), self.capacity // 16
        keys = make_keys(48)
        by_use: list[int] = []
        rng = np.random.default_rng(0)
        for number in range(48):
            assert write(store, [keys[number]], [make_record(number, size - 64)]) == [HIT]
            by_use.append(number)
            if number % 3 == 0:
                used = by_use[max(0, len(by_use) - 6 + int(rng.integers(6)))]
                if read(store, keys[used], size - 64) is not None:
                    by_use.remove(used)
                    by_use.append(used)
            there = [answer is HIT for answer in store.exists([keys[other] for other in by_use])]
            assert there == sorted(there), "a record was evicted before one that was not used for longer"
        assert 4 <= sum(there) <= 16

    @needs("bounded", "lru")
    @pytest.mark.parametrize("use", ["written", "begun", "read", "announced"])
    def test_of_a_batch_the_last_goes_first(self, use: str) -> None:
        """A batch comes in the order of a prompt, whose end is of no use without its beginning. So of what was written
        together, some of it before, or read, or announced again, what is left is the beginning."""
        store, size = self.new(), self.capacity // 16 - 64
        keys, others = make_keys(4), [make_key(100 + number) for number in range(24)]
        records = [make_record(number, size) for number in range(4)]
        if use == "begun":
            assert write(store, keys[:2], records[:2]) == [HIT] * 2
        order = keys if use in ("written", "begun") else keys[::-1]
        assert write(store, order, records) == [HIT] * 4
        if use == "read":
            assert store.get(keys, [bytearray(size) for _ in keys]) == [HIT] * 4
        elif use == "announced":
            assert store.prepare([*keys, others[0]], [size] * 5) == [HIT] * 4 + [MISS]
            assert store.complete(others[:1], [False]) == [MISS]
        left = []
        for number, other in enumerate(others):
            assert write(store, [other], [make_record(number, size)]) == [HIT]
            there = [answer is HIT for answer in store.exists(keys)]
            assert there == sorted(there, reverse=True), "the beginning was evicted before the end"
            left.append(sum(there))
        assert left[0] == 4 and left[-1] == 0 and {1, 2, 3} & set(left)

    @needs("bounded")
    def test_prepared_records_are_not_evicted(self) -> None:
        """Prepared space stays reserved; a later writer gets RETRY, and nothing is lost."""
        store, size = self.new(), self.capacity // 16
        keys = make_keys(40)
        answers = [store.prepare([key], [size - 64])[0] for key in keys]
        mine = [key for key, answer in zip(keys, answers, strict=True) if answer is MISS]
        assert set(answers) == {MISS, RETRY} and 4 <= len(mine) <= 16
        for key in mine:
            number = keys.index(key)
            assert store.put([key], [make_record(number, size - 64)]) == [HIT]
        assert store.complete(mine, [True] * len(mine)) == [HIT] * len(mine)
        assert [read(store, key, size - 64) for key in mine] == [make_record(keys.index(k), size - 64) for k in mine]
        late = keys[answers.index(RETRY)]
        assert write(store, [late], [make_record(99, size - 64)]) == [HIT]

    @needs("bounded")
    def test_a_record_that_can_never_fit(self) -> None:
        """RETRY, and nothing is evicted for it."""
        store = self.new()
        key, record = make_key(0), make_record(0, 5000)
        assert write(store, [key], [record]) == [HIT]
        assert store.prepare([make_key(1)], [self.capacity + 1]) == [RETRY]
        assert read(store, key, 5000) == record

    # -- all of it at random

    @pytest.mark.parametrize("seed", range(3))
    def test_random_operations(self, store: Store, seed: int) -> None:
        """A store does what a dictionary does, but for what it evicts."""
        model = StoreModel(store, sizes=(64, 700, 4096, 5000, 20_000), evicts=False)
        choices = Choices.seeded(seed)
        for _ in range(200):
            model.step(choices)
        model.check()
        assert model.happened["stored"] > 10 and model.happened["hit"] > 10

"""The directory store: the contract of all stores, and what only a directory can go through."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from quire.errors import InvalidInput, StoreError
from quire.testing.contracts.records import make_key, make_keys, make_record, read, write
from quire.testing.contracts.store import StoreContract
from quire.tiers.store import Answer, StoreKey, check_records
from quire.tiers.stores.directory import DirectoryStore, slab_allocator, slab_files
from quire.tiers.stores.directory.slab_allocator import slot_size
from quire.tiers.stores.directory.slab_files import SlabFiles
from quire.tiers.tombstones import delete_scope
from quire.tiers.transfer import Lane, Transfer
from tests.tiers.stores.directory_medium import DirectoryMedium


class TestDirectory(StoreContract):
    direct: bool | None = None

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store"

    def make_store(self, capacity: int | None) -> DirectoryStore:
        return DirectoryStore(self.path, capacity, direct=self.direct)

    def open_again(self) -> DirectoryStore:
        return DirectoryStore(self.path, None, direct=self.direct)

    def medium(self) -> DirectoryMedium:
        return DirectoryMedium(self.path)

    @pytest.fixture(autouse=True)
    def conserved(self, place: None, opened: None) -> Iterator[None]:
        """After every test, no slot of the directory is lost and none has two records."""
        yield
        if self._opened:
            self.medium().check()


class TestDirectoryThroughThePageCache(TestDirectory):
    """What a filesystem without O_DIRECT gets."""

    direct = False


# -- what lies below


def open_in(path: Path, capacity: int | None = 1 << 20, **settings: Any) -> DirectoryStore:
    return DirectoryStore(path, capacity, **settings)


def filled(store: DirectoryStore, count: int, size: int = 30_000) -> list[StoreKey]:
    keys = make_keys(count)
    assert write(store, keys, [make_record(number, size) for number in range(count)]) == [Answer.HIT] * count
    return keys


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("how", ["shortened", "removed"])
def test_a_slab_that_changes(tmp_path: Path, how: str, is_open: bool) -> None:
    """Records that are gone are misses and their rows go; the others stay, and all can be stored again."""
    store = open_in(tmp_path, slab_bytes=128 << 10)  # 4 records of 8 blocks each
    keys = filled(store, 12)
    medium = DirectoryMedium(tmp_path)
    slab = medium.slab_of(keys[5])
    if not is_open:
        store.close()
    if how == "removed":
        slab.unlink()
    else:
        os.truncate(slab, 2 * 32768 + 30_000 - 1)
    if not is_open:
        store = open_in(tmp_path, None, slab_bytes=128 << 10)
        assert len(list(store.entries())) == (8 if how == "removed" else 10), "seen at once when it is opened"
    kept = [read(store, key, 30_000) is not None for key in keys]
    assert kept == [True] * 4 + [how == "shortened"] * 2 + [False] * 2 + [True] * 4
    assert medium.keys() == {key for key, is_there in zip(keys, kept, strict=True) if is_there}
    again = write(store, keys, [make_record(number, 30_000) for number in range(12)])
    assert again == [Answer.HIT] * 12
    assert [read(store, key, 30_000) for key in keys] == [make_record(number, 30_000) for number in range(12)]
    store.close()
    medium.check()


def test_a_slab_that_goes_while_a_record_is_prepared(tmp_path: Path) -> None:
    with closing(open_in(tmp_path)) as store:
        (key,) = make_keys(1)
        for before_put in (True, False):
            assert store.prepare([key], [5000]) == [Answer.MISS]
            if before_put:
                for path in (tmp_path / "slabs").iterdir():
                    path.unlink()
            answers = store.put([key], [make_record(0, 5000)])
            assert answers == [Answer.RETRY if before_put else Answer.HIT]
            done = store.complete([key], [True])
            if before_put:
                assert done == [Answer.RETRY]
                assert read(store, key, 5000) is None
                store.close()
                store = open_in(tmp_path)
        assert read(store, key, 5000) == make_record(0, 5000)
        store.close()


def test_a_slot_that_is_given_away_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader finds other bytes than it looked for, and says MISS."""
    with closing(open_in(tmp_path)) as reader, closing(open_in(tmp_path)) as writer:
        old, new, beside = make_keys(3)
        assert write(reader, [old, beside], [make_record(0, 5000), make_record(2, 5000)]) == [Answer.HIT] * 2
        really = reader._files.read

        def late(places: Any) -> list[bool]:
            assert writer.remove([old]) == 1
            assert write(writer, [new], [make_record(1, 5000)]) == [Answer.HIT]
            return really(places)

        monkeypatch.setattr(reader._files, "read", late)
        buffer = bytearray(5000)
        assert reader.get([old], [buffer]) == [Answer.MISS]
        assert bytes(buffer) == make_record(1, 5000), "the slot was to be reused for this test"
        assert reader.statistics["overtaken"] == 1 and reader.statistics["hits"] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 12 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m,mode=700", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount")
    yield place
    subprocess.run(["umount", place], check=True)


def fill_up(disk: Path) -> None:
    with open(disk / "ballast", "wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(bytes(4096)):
            pass


def test_a_disk_that_is_full_at_start(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every process that opens it reads what is stored, with a warning, and stores nothing until there is room."""
    path = small_disk / "kv"
    with closing(open_in(path, 4 << 20, slab_bytes=128 << 10)) as store:
        keys, direct = filled(store, 20), store.direct
    fill_up(small_disk)
    others = [make_key(100 + number) for number in range(60)]
    for _ in range(2):  # as it closes, it keeps room to be opened again
        caplog.clear()
        with closing(open_in(path, 4 << 20)) as store, closing(open_in(path, None)) as second:
            assert [record.levelname for record in caplog.records] == ["WARNING"] * 2 and "is full" in caplog.text
            for each in (store, second):
                assert each.direct == direct
                assert [read(each, key, 30_000) for key in keys] == [make_record(n, 30_000) for n in range(20)]
            fill_up(small_disk)
            assert write(store, others[:1], [make_record(0, 900_000)]) == [Answer.RETRY]
    (small_disk / "ballast").unlink()
    caplog.clear()
    with closing(open_in(path, None)) as store:
        assert not caplog.records
        assert write(store, others, [make_record(number, 30_000) for number in range(60)]) == [Answer.HIT] * 60
    DirectoryMedium(path).check()


def test_a_full_disk_without_a_store(small_disk: Path) -> None:
    fill_up(small_disk)
    with pytest.raises(StoreError, match="is full") as caught:
        open_in(small_disk / "kv")
    assert "make room" in caught.value.fix


def test_a_disk_that_is_full(small_disk: Path) -> None:
    """Records that do not fit are RETRY, what is there stays, and with room it goes on."""
    place = small_disk
    with closing(open_in(place, 64 << 20, slab_bytes=256 << 10)) as store:
        keys = make_keys(500)
        answers = [write(store, [key], [make_record(n, 30_000)])[0] for n, key in enumerate(keys)]
        assert set(answers) <= {Answer.HIT, Answer.RETRY}
        assert len(list(store.entries())) > 150
        for n, key in enumerate(keys):
            assert read(store, key, 30_000) in (make_record(n, 30_000), None)
        (place / "ballast").write_bytes(bytes(shutil.disk_usage(place).free))
        kept = list(store.entries())
        late = write(store, keys[:30], [make_record(n, 30_000) for n in range(30)])
        assert set(late) <= {Answer.HIT, Answer.RETRY}
        large = make_key(1000)
        assert write(store, [large], [make_record(7, 3_000_000)])[0] in (Answer.RETRY, Answer.HIT)
        for entry in kept:
            n = keys.index(entry.key)
            assert read(store, entry.key, 30_000) in (make_record(n, 30_000), None)
        (place / "ballast").unlink()
        store.remove([large])
        assert write(store, [large], [make_record(7, 3_000_000)]) == [Answer.HIT]
        assert read(store, large, 3_000_000) == make_record(7, 3_000_000)
        assert write(store, keys[:30], [make_record(n, 30_000) for n in range(30)]) == [Answer.HIT] * 30
    DirectoryMedium(place).check()


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """As on a full disk, where nothing can be mounted: no slab can be made, and nothing else changes."""
    with closing(open_in(tmp_path, 64 << 20, slab_bytes=8 << 20)) as store:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, hard))
        try:
            assert store.prepare(make_keys(2), [5000, 50_000]) == [Answer.RETRY] * 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert store.exists(make_keys(2)) == [Answer.MISS] * 2
        filled(store, 2)
    DirectoryMedium(tmp_path).check()


def test_an_index_that_is_busy(tmp_path: Path) -> None:
    """While another process writes, writing is RETRY and reading goes on. What could not be dropped goes later."""
    with closing(open_in(tmp_path, busy_seconds=0.05)) as store:
        keys = filled(store, 2)
        late = make_key(50)
        assert store.prepare([late], [4000]) == [Answer.MISS]
        assert store.put([late], [make_record(50, 4000)]) == [Answer.HIT]
        with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert store.prepare([make_key(51)], [4000]) == [Answer.RETRY]
            assert store.complete([late], [True]) == [Answer.RETRY]
            assert store.remove(keys) == 0
            assert store.exists(keys) == [Answer.HIT, Answer.HIT]
            assert read(store, keys[0], 30_000) == make_record(0, 30_000)
            other.execute("ROLLBACK")
        assert store.prepare([make_key(51)], [4000]) == [Answer.MISS]
        assert store.prepare([late], [4000]) == [Answer.MISS], "dropped with the first transaction"
    DirectoryMedium(tmp_path).check()


def test_the_log_of_the_index_stays_small(tmp_path: Path) -> None:
    """While a reader has an old state of the index open its log grows; afterwards it shrinks by itself."""
    log = tmp_path / "index.sqlite-wal"
    with closing(open_in(tmp_path)) as store, closing(open_in(tmp_path, None)) as reader:
        keys = make_keys(256)

        def turn(number: int) -> None:
            assert write(store, keys, [make_record(number, 64)] * 256) == [Answer.HIT] * 256
            assert reader.exists(keys) == [Answer.HIT] * 256
            assert reader.get(keys[:1], [bytearray(64)]) == [Answer.HIT]
            assert store.remove(keys) == 256

        with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT COUNT(*) FROM records").fetchone()
            while log.stat().st_size <= 9 << 20:
                turn(0)
        for number in range(60):
            turn(number)
        assert log.stat().st_size <= 8 << 20
        assert (tmp_path / "index.sqlite").stat().st_size < 1 << 20
    assert not log.exists()


def test_a_transaction_that_is_undone(tmp_path: Path) -> None:
    """The files of slabs that were dropped in it are there, and those that were made are not."""
    with closing(open_in(tmp_path, 256 << 10, slab_bytes=128 << 10)) as store:
        keys = filled(store, 4)
        medium = DirectoryMedium(tmp_path)
        ((slab, slot_bytes),) = medium.query("SELECT id, slot_bytes FROM slabs")

        def undone() -> None:
            with store._index.writing() as index:
                assert len(store._allocator.alloc(index, 8192, 3)) == 3
                store._allocator.drop(index, slab, slot_bytes)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            undone()
        medium.check()
        assert [read(store, key, 30_000) for key in keys] == [make_record(number, 30_000) for number in range(4)]


# -- opening


def test_opening_beside_a_writer(tmp_path: Path) -> None:
    """What a living writer has prepared stays its own; what it leaves when it closes is nothing."""
    with closing(open_in(tmp_path)) as writer:
        keys = make_keys(2)
        assert writer.prepare(keys, [900, 900]) == [Answer.MISS] * 2
        with closing(open_in(tmp_path)) as other:
            assert other.reclaim() == 0
            assert other.prepare(keys, [900, 900]) == [Answer.PENDING] * 2
        assert writer.put(keys[:1], [make_record(0, 900)]) == [Answer.HIT]
        assert writer.complete(keys[:1], [True]) == [Answer.HIT]
        writer.close()
    assert DirectoryMedium(tmp_path).query("SELECT COUNT(*) FROM records") == [(1,)]


def test_files_that_nothing_tells_of(tmp_path: Path) -> None:
    """A slab that was made in a transaction that never ended."""
    open_in(tmp_path).close()
    (tmp_path / "slabs" / "00000000beef.slab").write_bytes(bytes(4096))
    with closing(open_in(tmp_path)):
        DirectoryMedium(tmp_path).check()


def test_a_use_is_known_at_once(tmp_path: Path) -> None:
    """To this process, before it is written down."""
    with closing(open_in(tmp_path)) as store:
        keys = filled(store, 2)
        DirectoryMedium(tmp_path).query("UPDATE records SET used = used - 3600000000")
        assert read(store, keys[0], 30_000) is not None
        idle = {entry.key: entry.idle_seconds or 0.0 for entry in store.entries()}
        assert idle[keys[0]] < 1800 < idle[keys[1]]


@pytest.mark.parametrize("is_new", [True, False])
def test_no_other_user_may_read(tmp_path: Path, is_new: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the umask. A folder that was there keeps its mode, as what is in it is closed. What was made open to
    others stays so, with a word."""
    path = tmp_path / "new" / "store"
    if not is_new:
        path.mkdir(parents=True)
        path.chmod(0o755)
    before = os.umask(0)
    try:
        with closing(open_in(path)) as store, closing(open_in(path, None)):
            filled(store, 3)
            modes = {each.relative_to(path).parts[0]: each.stat().st_mode & 0o777 for each in path.rglob("*")}
            files = {each.stat().st_mode & 0o777 for each in path.rglob("*") if each.is_file()}
    finally:
        os.umask(before)
    assert {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "slabs", "owners"} <= modes.keys()
    assert files == {0o600} and (path / "slabs").stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == (0o700 if is_new else 0o755)
    assert not caplog.records
    (path / "index.sqlite").chmod(0o644)
    with closing(open_in(path, None)) as store:
        assert len(list(store.entries())) == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "chmod" in caplog.text


def test_the_last_version_is_opened(tmp_path: Path) -> None:
    """Its records have no first bytes that are after the rest."""
    with closing(open_in(tmp_path)) as store:
        assert write(store, make_keys(1), [make_record(0, 5000)]) == [Answer.HIT]
    DirectoryMedium(tmp_path).query("ALTER TABLE records DROP COLUMN lead")
    DirectoryMedium(tmp_path).query("PRAGMA user_version = 1")
    aligned = memoryview(mmap.mmap(-1, 8192))
    aligned[:] = make_record(1, 8192)
    with closing(open_in(tmp_path)) as store:
        old, new = make_keys(2)
        assert read(store, old, 5000) == make_record(0, 5000)
        assert write(store, [new], [(b"x" * 64, aligned)]) == [Answer.HIT]
    with closing(open_in(tmp_path)) as store:
        assert read(store, new, 8192 + 64) == b"x" * 64 + make_record(1, 8192)
        found = memoryview(mmap.mmap(-1, 8192))
        for parts in ((bytearray(64), found), (bytearray(10), bytearray(60), found[: 8192 - 6])):
            assert store.get([new], [parts]) == [Answer.HIT]
            assert b"".join(parts) == b"x" * 64 + make_record(1, 8192)
        assert [lead for (lead,) in DirectoryMedium(tmp_path).query("SELECT lead FROM records ORDER BY id")] == [0, 64]


def test_another_version(tmp_path: Path) -> None:
    open_in(tmp_path).close()
    DirectoryMedium(tmp_path).query("PRAGMA user_version = 3")
    with pytest.raises(StoreError, match="has version 3, and this is for version 2"):
        open_in(tmp_path)


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("dear")
    with pytest.raises(StoreError, match=r"holds 'one\.txt'"):
        open_in(tmp_path / "letters")
    with pytest.raises(StoreError, match="there is no store"):
        open_in(tmp_path / "nothing", None)
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        open_in(tmp_path / "file")
    with pytest.raises(InvalidInput):
        open_in(tmp_path / "empty", 0)
    open_in(tmp_path / "broken").close()
    (tmp_path / "broken" / "index.sqlite").write_bytes(make_record(0, 20_000))
    with pytest.raises(StoreError, match="cannot be opened"):
        open_in(tmp_path / "broken")
    with closing(sqlite3.connect(tmp_path / "letters" / "index.sqlite")) as other, other:
        other.execute("CREATE TABLE mine (number INTEGER)")
    with pytest.raises(StoreError, match="not the index of a store"):
        open_in(tmp_path / "letters")


def test_a_smaller_capacity(tmp_path: Path) -> None:
    """The coldest slabs are removed until it fits, for the process that opens it next."""
    with closing(open_in(tmp_path, slab_bytes=128 << 10)) as store:
        keys = filled(store, 20)
        assert read(store, keys[19], 30_000) == make_record(19, 30_000)  # its slab is the warmest now
    with closing(open_in(tmp_path, 256 << 10, slab_bytes=128 << 10)) as store:
        assert [key for key, answer in zip(keys, store.exists(keys), strict=True) if answer is Answer.HIT] == [
            *keys[:4],
            *keys[16:],
        ]
        assert store.facts().capacity == 256 << 10
        assert DirectoryMedium(tmp_path).disk_bytes() <= 256 << 10
    with closing(open_in(tmp_path, None)) as store:
        assert store.facts().capacity == 256 << 10


def test_sizes_share_the_capacity(tmp_path: Path) -> None:
    """A size that is no longer used gives its slabs to another one."""
    with closing(open_in(tmp_path, slab_bytes=128 << 10)) as store:
        small = filled(store, 32)
        assert store.exists(small) == [Answer.HIT] * 32
        large = [make_key(100 + number) for number in range(20)]
        for number, key in enumerate(large):
            assert write(store, [key], [make_record(number, 200_000)]) == [Answer.HIT]
        assert store.exists(large[-3:]) == [Answer.HIT] * 3
        DirectoryMedium(tmp_path).check()
        for turn in range(4):
            keys = [make_key(1000 + 28 * turn + number) for number in range(28)]
            records = [make_record(number, 30_000) for number in range(28)]
            assert write(store, keys, records) == [Answer.HIT] * 28
        assert store.exists(keys).count(Answer.HIT) > 16
        assert DirectoryMedium(tmp_path).disk_bytes() <= 1 << 20
    DirectoryMedium(tmp_path).check()


def test_last_use_outlives_the_process(tmp_path: Path) -> None:
    with closing(open_in(tmp_path, 128 << 10)) as store:
        keys = filled(store, 4)
        assert read(store, keys[0], 30_000) is not None
    with closing(open_in(tmp_path, 128 << 10)) as store:
        assert write(store, [make_key(9)], [make_record(9, 30_000)]) == [Answer.HIT]
        assert store.exists(keys) == [Answer.HIT, Answer.HIT, Answer.HIT, Answer.MISS]


def test_facts(tmp_path: Path) -> None:
    with closing(open_in(tmp_path, slab_bytes=128 << 10)) as store, closing(open_in(tmp_path, None)):
        filled(store, 5)
        store.prepare([make_key(77)], [100])
        facts = store.facts()
        assert (facts.capacity, facts.num_slabs, facts.num_prepared, facts.num_owners) == (1 << 20, 3, 1, 2)
        assert facts.slab_bytes == 3 * (128 << 10)
        assert facts.free_bytes == (1 << 20) - 5 * 32768 - 4096
        assert facts.direct is store.direct
        assert store.statistics["stored"] == 5 and store.statistics["written_bytes"] == 150_000


def test_around_the_page_cache(tmp_path: Path) -> None:
    """Where the filesystem can; where it cannot, asking for it is refused."""
    with closing(open_in(tmp_path, direct=False)) as store:
        assert not store.direct
    try:
        with closing(open_in(tmp_path, direct=True)) as store:
            assert store.direct
    except StoreError:
        with closing(open_in(tmp_path, direct=None)) as store:
            assert not store.direct


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 65_600, 131_072, 131_073, (1 << 20) + 64, 40 << 20])
def test_slots_waste_little(num_bytes: int) -> None:
    slot = slot_size(num_bytes)
    assert slot % 4096 == 0 and num_bytes <= slot
    assert slot - num_bytes < max(4096, num_bytes / 32 + 4096)


def test_a_flush_takes_no_room_from_others(tmp_path: Path) -> None:
    """Its tombstone lies among records of the same size: a full store makes no slab for it, and gives up one record."""
    size = 60_000
    with closing(DirectoryStore(tmp_path / "kv", 8 << 20)) as store:
        keys = [*make_keys(80, scope=1), *make_keys(80, scope=2)]
        for number, key in enumerate(keys):
            write(store, [key], [make_record(number, size)])
        before, listed = store.facts().num_slabs, set(store.entries())
        move = Transfer(Lane.DELETE, (), keys[-1].scope)
        next(delete_scope(store, move))
        assert move.hidden and store.facts().num_slabs == before
        gone = {entry.key for entry in listed} - {entry.key for entry in store.entries()}
        assert len(gone) == 1


@pytest.mark.parametrize("passing", [errno.EMFILE, errno.ESTALE])
def test_what_cannot_be_opened_now_is_not_lost(tmp_path: Path, passing: int) -> None:
    check_passing(tmp_path, passing)


def check_passing(path: Path, passing: int) -> None:
    """A process without descriptors tells nothing of a file, nor does a filesystem of a network that hiccups."""
    with closing(open_in(path)) as store:
        keys = filled(store, 3)

        def fails(*_: object) -> int:
            raise OSError(passing, os.strerror(passing))

        with pytest.MonkeyPatch.context() as patch:
            store._files._files.clear()
            patch.setattr(slab_files, "open_owned", fails)
            assert store.get(keys, [bytearray(30_000) for _ in keys]) == [Answer.RETRY] * 3
            assert store.put(keys, [make_record(9, 30_000)] * 3) == [Answer.MISS] * 3
        assert [read(store, key, 30_000) for key in keys] == [make_record(number, 30_000) for number in range(3)]
        new = StoreKey(b"s" * 16, b"p" * 32, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fstat", fails)  # of files that are open already
            assert store.prepare([new], [30_000]) == [Answer.MISS], "and what was prepared stays so"
        assert store.put([new], [make_record(5, 30_000)]) == [Answer.HIT]
        assert store.complete([new], [True]) == [Answer.HIT]
        assert read(store, new, 30_000) == make_record(5, 30_000) and store.statistics["lost"] == 0


def test_a_disk_that_is_nearly_full_keeps_some_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slab is made no larger than what is there, and a part of it stays; once it is said."""
    made: list[int] = []
    really = slab_allocator.make_file

    def noted(path: Path, num_bytes: int) -> None:
        made.append(num_bytes)
        really(path, num_bytes)

    monkeypatch.setattr(slab_allocator, "make_file", noted)
    there = 900 << 10
    monkeypatch.setattr(SlabFiles, "free_bytes", property(lambda _: there - sum(made)))
    with closing(open_in(tmp_path, 64 << 20, slab_bytes=512 << 10)) as store:
        keys = make_keys(40)
        answers = write(store, keys, [make_record(number, 30_000) for number in range(40)])
        assert answers.count(Answer.HIT) == sum(made) // 32_768 == 12, "512 KiB of 900 are left to others"
        assert write(store, keys[30:], [make_record(number, 30_000) for number in range(30, 40)]) == [Answer.HIT] * 10
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "nearly full" in caplog.text


def test_a_clock_that_was_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used in the future is as old as what is used when the store is opened."""
    with monkeypatch.context() as patch, closing(open_in(tmp_path)) as store:
        real = time.time_ns
        patch.setattr(time, "time_ns", lambda: real() + 30 * 86_400 * 10**9)
        old = filled(store, 20)
    with closing(open_in(tmp_path)) as store:
        new = [StoreKey(b"n" * 16, bytes([number]) * 32, 0) for number in range(25)]
        for key in new:
            write(store, [key], [make_record(1, 30_000)])
        kept = store.exists([*new, *old])
        assert kept[:25] == [Answer.HIT] * 25 and kept[25:].count(Answer.HIT) <= 7


def test_a_smaller_capacity_holds_when_writers_are_done(tmp_path: Path) -> None:
    """Slabs that are being written are not dropped; later saves drop what is too much."""
    with closing(open_in(tmp_path, 1 << 20)) as first:
        keys = make_keys(24)
        assert first.prepare(keys, [30_000] * 24) == [Answer.MISS] * 24
        with closing(open_in(tmp_path, 256 << 10)) as second:
            first.put(keys, [make_record(number, 30_000) for number in range(24)])
            first.complete(keys, [True] * 24)
            assert second.facts().slab_bytes > second.facts().capacity
            (key,) = [StoreKey(b"n" * 16, b"p" * 32, 0)]
            assert write(second, [key], [make_record(1, 30_000)]) == [Answer.HIT]
            assert second.facts().slab_bytes <= second.facts().capacity == 256 << 10


def test_a_start_with_less_drops_a_slab_at_a_time(tmp_path: Path) -> None:
    """So that other processes save meanwhile."""
    with closing(open_in(tmp_path, slab_bytes=128 << 10)) as store:
        keys = filled(store, 30)
        assert read(store, keys[0], 30_000) is not None
    sums: list[int] = []
    really = slab_allocator.SlabAllocator.drop_coldest

    def noted(self: Any, index: sqlite3.Connection, capacity: int, only: int | None = None) -> bool:
        sums.append(index.execute("SELECT SUM(num_bytes) FROM slabs").fetchone()[0])
        return really(self, index, capacity, only)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab_allocator.SlabAllocator, "drop_coldest", noted)
        with closing(open_in(tmp_path, 512 << 10, slab_bytes=128 << 10)) as store:
            assert store.facts().slab_bytes == 512 << 10 and len(list(store.entries())) == 16
    assert sums == sorted(sums, reverse=True) and len(sums) > 3


def test_a_busy_index_is_not_called_damaged(tmp_path: Path) -> None:
    with closing(open_in(tmp_path)):
        pass
    with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError) as caught:
            open_in(tmp_path, busy_seconds=0.01)
    assert "try again" in caught.value.fix and "no store of yours" not in caught.value.fix


def test_records_that_no_slab_takes_are_refused() -> None:
    with TemporaryDirectory() as folder, closing(open_in(Path(folder), 1 << 20)) as store:
        check_records(store, 1 << 20)
        with pytest.raises(InvalidInput, match="takes none above 1,048,576"):
            check_records(store, (1 << 20) + 1)

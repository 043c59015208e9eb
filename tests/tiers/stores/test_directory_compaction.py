"""A directory frees the disk space that it does not need, also while other processes have it open."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quire.errors import StoreError
from quire.testing.contracts.records import make_key, make_keys, make_record, read, write
from quire.tiers.store import Answer, StoreKey
from quire.tiers.stores.directory import DirectoryStore
from tests.tiers.stores.directory_medium import DirectoryMedium

SIZE = 30_000
SLAB = 128 << 10  # 4 records


def scattered(path: Path) -> tuple[DirectoryStore, list[StoreKey]]:
    """Slabs of four, of which one record each is left; and these in order."""
    store = DirectoryStore(path, 1 << 20, slab_bytes=SLAB)
    keys = make_keys(24)
    assert write(store, keys, [make_record(number, SIZE) for number in range(24)]) == [Answer.HIT] * 24
    assert store.remove([key for number, key in enumerate(keys) if number % 4]) == 18
    assert DirectoryMedium(path).disk_bytes() == 6 * SLAB
    return store, keys[::4]


def all_right(store: DirectoryStore, keys: list[StoreKey]) -> bool:
    return [read(store, key, SIZE) for key in keys] == [make_record(4 * n, SIZE) for n in range(len(keys))]


def test_slabs_with_nothing_in_them_go(tmp_path: Path) -> None:
    """At once, and their bytes with them, though another store reads from them."""
    with (
        closing(DirectoryStore(tmp_path, 1 << 20, slab_bytes=SLAB)) as store,
        closing(DirectoryStore(tmp_path, None)) as b,
    ):
        keys = make_keys(12)
        assert write(store, keys, [make_record(number, SIZE) for number in range(12)]) == [Answer.HIT] * 12
        held = [os.open(path, os.O_RDONLY) for path in (tmp_path / "slabs").iterdir()]
        assert read(b, keys[0], SIZE) is not None
        assert store.remove(keys[:8]) == 8
        assert DirectoryMedium(tmp_path).disk_bytes() == SLAB
        assert sum(os.fstat(file).st_blocks for file in held) * 512 == SLAB
        for file in held:
            os.close(file)
        assert [read(b, key, SIZE) is not None for key in keys] == [False] * 8 + [True] * 4
        assert write(b, keys[:8], [make_record(number, SIZE) for number in range(8)]) == [Answer.HIT] * 8
        assert [read(store, key, SIZE) for key in keys] == [make_record(number, SIZE) for number in range(12)]
    DirectoryMedium(tmp_path).check()


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    """A slab in which a slot is held for a writer is neither dropped nor emptied."""
    store, keys = scattered(tmp_path)
    with closing(store):
        late = make_key(50)
        assert store.prepare([late], [SIZE]) == [Answer.MISS]
        assert store.remove(keys) == 6
        store.compact()
        assert DirectoryMedium(tmp_path).disk_bytes() == SLAB
        assert store.put([late], [make_record(50, SIZE)]) == [Answer.HIT]
        assert store.complete([late], [True]) == [Answer.HIT]
        assert read(store, late, SIZE) == make_record(50, SIZE)
    DirectoryMedium(tmp_path).check()


def test_records_move_together(tmp_path: Path) -> None:
    """Six records of six slabs come to lie in two, in the same order of use, and are right for other processes."""
    store, keys = scattered(tmp_path)
    with closing(store), closing(DirectoryStore(tmp_path, None)) as other:
        assert all_right(other, keys)
        before = DirectoryMedium(tmp_path).query("SELECT name FROM records ORDER BY used")
        store.compact()
        medium = DirectoryMedium(tmp_path)
        assert medium.disk_bytes() == 2 * SLAB and medium.keys() == set(keys)
        assert medium.query("SELECT name FROM records ORDER BY used") == before
        assert all_right(other, keys) and all_right(store, keys)
        store.compact()
        assert medium.disk_bytes() == 2 * SLAB
    medium.check()
    with pytest.raises(StoreError, match="closed"):
        store.compact()


def test_a_record_that_changes_while_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was removed, and another was stored under its key: that one stays."""
    store, keys = scattered(tmp_path)
    with closing(store), closing(DirectoryStore(tmp_path, None)) as other:
        really = store._files.write
        changed: list[StoreKey] = []

        def late(places: Any) -> list[bool]:
            if not changed:
                changed.extend(keys[:3])
                assert other.remove(changed) == 3
                assert write(other, keys[:1], [make_record(99, 700)]) == [Answer.HIT]
            return really(places)

        monkeypatch.setattr(store._files, "write", late)
        store.compact()
        assert read(store, keys[0], 700) == make_record(99, 700)
        assert [read(store, key, SIZE) for key in keys[1:3]] == [None, None]
        assert [read(store, key, SIZE) for key in keys[3:]] == [make_record(4 * n, SIZE) for n in range(3, 6)]
    DirectoryMedium(tmp_path).check()


@pytest.mark.parametrize("how", ["removed", "moved"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_slab_that_goes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, when: str
) -> None:
    """Another process gives it to the disk, and other records come to lie elsewhere: a MISS, or the right bytes."""
    store, keys = scattered(tmp_path)
    with closing(store), closing(DirectoryStore(tmp_path, None)) as reader:
        really = reader._files.read

        def change() -> None:
            if how == "removed":
                assert store.remove(keys) == 6
            else:
                store.compact()
            others = [make_key(200 + number) for number in range(24)]
            assert write(store, others, [make_record(number, SIZE) for number in range(24)]) == [Answer.HIT] * 24

        def late(places: Any) -> list[bool]:
            if when == "before":
                change()
                return really(places)
            done = really(places)
            change()
            return done

        monkeypatch.setattr(reader._files, "read", late)
        buffers = [bytearray(SIZE) for _ in keys]
        answers = reader.get(keys, buffers)
        assert Answer.MISS in answers and reader.statistics["overtaken"] == answers.count(Answer.MISS)
        for number, (answer, buffer) in enumerate(zip(answers, buffers, strict=True)):
            assert answer is Answer.MISS or bytes(buffer) == make_record(4 * number, SIZE)


@pytest.mark.parametrize("how", ["unreadable", "unwritable", "interrupted"])
def test_what_cannot_move_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    store, keys = scattered(tmp_path)
    with closing(store):

        def fails(places: Any) -> list[bool]:
            if how == "interrupted":
                raise KeyboardInterrupt
            return [False for _ in places]

        with monkeypatch.context() as patched:
            patched.setattr(store._files, "read" if how == "unreadable" else "write", fails)
            if how == "interrupted":
                with pytest.raises(KeyboardInterrupt):
                    store.compact()
            else:
                store.compact()
        assert all_right(store, keys)
        assert DirectoryMedium(tmp_path).query("SELECT COUNT(*) FROM records") == [(6,)]
        DirectoryMedium(tmp_path).check()

"""A directory in which another user of the machine has been: nothing outside of it is read, written or truncated."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from quire.errors import StoreError
from quire.owned_files import check_folder, open_owned
from quire.testing.contracts.records import read
from tests.tiers.stores.directory_medium import DirectoryMedium
from tests.tiers.stores.test_directory import filled, open_in

NOBODY = 65534

Plant = Callable[[Path, Path], None]


def by_symbolic_link(at: Path, target: Path) -> None:
    at.symlink_to(target)


def by_hard_link(at: Path, target: Path) -> None:
    os.link(target, at)


def check_a_slab_is_not_followed(folder: Path, plant: Plant) -> None:
    """A slab that leads elsewhere is a miss, and what it leads to stays as it is."""
    foreign = folder / "foreign"
    with closing(open_in(folder / "store")) as store:
        [key] = filled(store, 1)
    slab = DirectoryMedium(folder / "store").slab_of(key)
    content = os.urandom(slab.stat().st_size)
    foreign.write_bytes(content)
    slab.unlink()
    plant(slab, foreign)
    with closing(open_in(folder / "store", None)) as store:
        assert read(store, key, 30_000) is None
        filled(store, 3)
    assert foreign.read_bytes() == content


@pytest.mark.parametrize("plant", [by_symbolic_link, by_hard_link])
def test_a_slab_that_leads_elsewhere_is_not_followed(tmp_path: Path, plant: Plant) -> None:
    check_a_slab_is_not_followed(tmp_path, plant)


def test_a_slab_that_is_dropped_truncates_nothing_else(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"precious")
    with closing(open_in(tmp_path / "store")) as store:
        files = store._files
        files.path(7).symlink_to(foreign)
        files.drop(7)
        assert not files.path(7).is_symlink()
    assert foreign.read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal", "index.sqlite-journal", "slabs", "owners"])
def test_what_a_store_begins_with_is_no_link(tmp_path: Path, name: str) -> None:
    store, foreign = tmp_path / "store", tmp_path / "foreign"
    open_in(store).close()
    at = store / name
    if at.exists():
        at.rename(foreign)
    at.symlink_to(foreign)
    with pytest.raises(StoreError, match="cannot be used"):
        open_in(store, None)
    assert at.is_symlink(), "the link was removed"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "store"
    open_in(path).close()
    path.chmod(mode)
    with pytest.raises(StoreError, match="other users can write"):
        open_in(path, None)
    path.chmod(0o755)
    open_in(path, None).close()


def test_the_path_itself_may_be_a_link_of_the_operator(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    with closing(open_in(tmp_path / "store")) as store:
        assert read(store, filled(store, 1)[0], 30_000) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_of_another_user_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with closing(open_in(path)) as store:
        [key] = filled(store, 1)
    os.chown(DirectoryMedium(path).slab_of(key), NOBODY, NOBODY)
    with closing(open_in(path, None)) as store:
        assert read(store, key, 30_000) is None
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(StoreError, match=f"of user {NOBODY}"):
        open_in(path, None)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        open_owned(tmp_path / "pipe", os.O_RDWR)


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="a link"):
        check_folder(tmp_path / "link")

"""What of storage is refused, and chosen, before weights are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quire.engine.before_load import open_tiers, storage_size
from quire.engine.config import engine_config
from quire.errors import PlanError, StoreError
from quire.testing.contracts.records import make_key, make_record, write
from quire.tiers.store import Answer
from quire.tiers.stores.directory import DirectoryStore


def test_a_new_disk_is_a_new_directory(tmp_path: Path) -> None:
    """A filesystem that was just made holds a folder of its own."""
    (tmp_path / "lost+found").mkdir()
    config = engine_config(storage=str(tmp_path))
    assert 0 < (storage_size(config) or 0) <= shutil.disk_usage(tmp_path).total // 2
    opened = open_tiers(config)
    assert isinstance(opened.store, DirectoryStore)
    opened.store.close()
    assert storage_size(config) is None, "from now on it is as it is"


def test_what_is_no_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(StoreError, match=r"holds 'letters\.txt'"):
        open_tiers(engine_config(storage=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


def test_a_size_that_holds_no_page(tmp_path: Path) -> None:
    """Refused with the least size that does, given now or by whoever made the directory; that size holds a page."""
    path = tmp_path / "store"
    with pytest.raises(PlanError, match="hold no page") as caught:
        open_tiers(engine_config(storage=str(path), storage_size="4KiB", page_size=256))
    assert not path.exists()
    DirectoryStore(path, 4 << 10).close()
    with pytest.raises(PlanError, match="hold no page") as found:
        open_tiers(engine_config(storage=str(path), page_size=256))
    assert found.value.fix == caught.value.fix
    least = found.value.fix.partition("--storage-size ")[2].partition(" ")[0]
    opened = open_tiers(engine_config(storage=str(path), storage_size=least, page_size=256))
    assert isinstance(opened.store, DirectoryStore) and opened.store.facts().num_owners == 1
    size = opened.num_bytes or 0
    assert write(opened.store, [make_key(0)], [make_record(0, size)]) == [Answer.HIT]
    opened.store.close()

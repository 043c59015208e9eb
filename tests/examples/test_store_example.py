"""The store of examples/09_store.py keeps the contract of all stores."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from quire.testing.contracts.store import StoreContract
from quire.tiers.store import Store, StoreKey
from quire.tiers.stores.registry import open_store
from tests.examples.generated_sections import ROOT


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("store_example", ROOT / "examples" / "09_store.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = load_example()  # it registers its scheme


class FilesMedium:
    """The files, without the store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: StoreKey) -> bytes | None:
        path = self._folder / str(key)
        return path.read_bytes() if path.exists() else None

    def write(self, key: StoreKey, record: bytes) -> None:
        (self._folder / str(key)).write_bytes(record)

    def delete(self, key: StoreKey) -> None:
        (self._folder / str(key)).unlink()

    def keys(self) -> set[StoreKey]:
        return {entry.key for entry in EXAMPLE.FileStore(self._folder).entries()}


class TestFileStore(StoreContract):
    bounded = lru = exclusive = False

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make_store(self, capacity: int | None) -> Store:
        return self.open_again()

    def open_again(self) -> Store:
        return open_store(f"files://{self.path}")

    def medium(self) -> FilesMedium:
        return FilesMedium(self.path)

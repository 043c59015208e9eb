"""The directory store: the contract of all stores, and what only a directory can go through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.testing.contracts.store import StoreContract
from quire.tiers.stores.directory import DirectoryStore
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

"""The default store: records in slab files of a local directory, read and written without the page cache."""

from __future__ import annotations

from quire.tiers.stores.directory.store import DirectoryStore

__all__ = ["DirectoryStore"]

"""The embedded default: records in slab files of a local directory, read and written around the page cache."""

from __future__ import annotations

from quire.tiers.stores.directory.store import DirectoryStore

__all__ = ["DirectoryStore"]

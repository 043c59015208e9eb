"""Medium: the disk or server below a store, which tests read and damage directly."""

from __future__ import annotations

from typing import Protocol

from quire.tiers.store import StoreKey


class Medium(Protocol):
    """Bypasses a store: raw bytes on the disk, a plain client of the server."""

    def read(self, key: StoreKey) -> bytes | None:
        """The bytes of a visible record, None where there is none."""

    def write(self, key: StoreKey, record: bytes) -> None:
        """Replace a visible record by bytes of its length or shorter: a damaged or truncated medium."""

    def delete(self, key: StoreKey) -> None:
        """Delete the bytes of a visible record."""

    def keys(self) -> set[StoreKey]:
        """All visible records."""

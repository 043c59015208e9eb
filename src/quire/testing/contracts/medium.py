"""Medium: what lies below a store, looked at and damaged without asking the store."""

from __future__ import annotations

from typing import Protocol

from quire.tiers.store import StoreKey


class Medium(Protocol):
    """Goes around a store: raw bytes on the disk, a plain client of the server."""

    def read(self, key: StoreKey) -> bytes | None:
        """The bytes of a visible record, None where there is none."""

    def write(self, key: StoreKey, record: bytes) -> None:
        """Put other bytes in the place of a visible record, of its length or shorter: a medium that was damaged or cut
        behind the store's back."""

    def delete(self, key: StoreKey) -> None:
        """Make a visible record's bytes go away."""

    def keys(self) -> set[StoreKey]:
        """All visible records."""

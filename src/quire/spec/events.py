"""What the cache says of itself to routers and observers: pages stored, removed, cleared."""

from __future__ import annotations

from dataclasses import dataclass

from quire.spec.ids import Tier


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for two requests to share pages, besides their tokens: the adapter and the caller's salt."""

    adapter: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesStored:
    """Pages became reusable: consecutive pages of one prefix by their chained hashes, `parent` being the one before."""

    namespace: Namespace
    parent: bytes
    hashes: tuple[bytes, ...]
    tokens: bytes
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesRemoved:
    """Pages are no longer reusable from this tier."""

    namespace: Namespace
    hashes: tuple[bytes, ...]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class AllCleared:
    """Nothing is cached any more."""


CacheEvent = PagesStored | PagesRemoved | AllCleared

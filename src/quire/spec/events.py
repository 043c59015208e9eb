"""Events of the cache for routers and observers: pages stored, removed, cleared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.spec.ids import Tier


@dataclass(frozen=True, slots=True)
class Namespace:
    """What two requests must have in common to share pages, besides tokens: the adapter and the caller's salt."""

    adapter: str = ""
    salt: str = ""


class PageKeys(Protocol):
    """Chained hashes of consecutive pages of one prefix, computed when they are first read."""

    def __len__(self) -> int: ...

    @property
    def parent(self) -> bytes:
        """The hash of the page before them."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """One for each page."""

    @property
    def tokens(self) -> bytes:
        """Their tokens, raw int32 bytes."""


class _PageEvent:
    """Pages of one namespace and tier. Creating one costs nothing per page: hashes are computed when they are read."""

    __slots__ = ("keys", "namespace", "tier")

    def __init__(self, namespace: Namespace, keys: PageKeys, tier: Tier = Tier.DEVICE) -> None:
        self.namespace = namespace
        self.keys = keys
        self.tier = tier

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Chained hashes of the pages, in order."""
        return self.keys.digests

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.namespace}, {len(self.keys)} pages, {self.tier.name})"


class PagesStored(_PageEvent):
    """Consecutive pages of one prefix can be reused now."""

    __slots__ = ()

    @property
    def parent(self) -> bytes:
        """The hash of the page before the first one."""
        return self.keys.parent

    @property
    def tokens(self) -> bytes:
        """The pages' tokens, raw int32 bytes."""
        return self.keys.tokens


class PagesRemoved(_PageEvent):
    """Pages can no longer be reused from this tier."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllCleared:
    """Nothing is cached any more."""


CacheEvent = PagesStored | PagesRemoved | AllCleared

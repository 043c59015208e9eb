"""PageNames: the key of each cached page outside of its cache, and the events of a tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from quire.prefix.hashing import PageHashes, cut_hashes, namespace_seed, scope_of, scope_prefix_of
from quire.prefix.node import Node
from quire.spec.events import AllCleared, CacheEvent, Namespace, PagesRemoved, PagesStored
from quire.spec.ids import Ids, Tier

KEY_BYTES = 32
# There may be a salt per user or per request.
_scope_of, _seed_of = lru_cache(1024)(scope_of), lru_cache(1024)(namespace_seed)
_MOST_AHEAD = 64  # prompts whose keys are stored until their pages are cached


class PageNames:
    """The keys and events of one tree's pages; all chains begin with `identity`, the `layout_identity`. With lower
    tiers, each key is computed when its page is cached, and stored in `keys` [num_pages + 1, 32] by page id. Without
    tiers `num_pages` is 0, and keys are computed when an event is read."""

    def __init__(
        self, page_bytes: int, identity: bytes, emit: Callable[[CacheEvent], None] | None, num_pages: int
    ) -> None:
        self.keys = np.zeros((num_pages + 1, KEY_BYTES), dtype=np.uint8)
        self._has_tiers = num_pages > 0
        self._page_bytes = page_bytes
        self._identity = identity
        self._emit = emit
        self._ahead: dict[bytes, PageHashes] = {}  # keys: that of the page before

    # -- keys

    def keys_of(self, pages: Ids) -> tuple[bytes, ...]:
        """The keys of cached pages."""
        packed = self.keys[pages].tobytes()
        return tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))

    def keys_ahead(self, namespace: Namespace, above: int, tokens: bytes) -> PageHashes:
        """The keys of pages that may be cached later, after page `above` (0: at the beginning)."""
        found = self._chain(self.keys[above].tobytes() if above else self.seed(namespace), tokens)
        self._ahead[found.parent] = found
        if len(self._ahead) > _MOST_AHEAD:
            del self._ahead[next(iter(self._ahead))]
        return found

    def scope(self, namespace: Namespace) -> bytes:
        """The `scope_of` a namespace."""
        return _scope_of(namespace, self._identity)

    @property
    def scope_prefix(self) -> bytes:
        """The first bytes of the scopes of all namespaces."""
        return scope_prefix_of(self._identity)

    def rename(self, identity: bytes) -> None:
        """Use another model's identity from now on. All pages must have been flushed before."""
        self._identity = identity
        self._ahead.clear()

    # -- events

    def follow(self, emit: Callable[[CacheEvent], None]) -> None:
        """Give events to another reader too. Nothing may be cached yet."""
        before = self._emit

        def both(event: CacheEvent) -> None:
            if before is not None:
                before(event)
            emit(event)

        self._emit = both

    def appended(self, node: Node, parent: Node, data: bytes, run: bytes, tier: Tier) -> None:
        """Pages with these tokens and ids are cached after the end of `parent`, as the last ones of `node`."""
        if self._has_tiers:
            above = self.keys[parent.pages[-1]].tobytes() if parent.run else self.seed(parent.namespace)
            hashes = self._chain(above, data)
            made = np.frombuffer(b"".join(hashes.digests), dtype=np.uint8)
            self.keys[np.frombuffer(run, dtype=np.int32)] = made.reshape(-1, KEY_BYTES)
        elif self._emit is not None:
            above_them = parent.hashes[-1] if parent.hashes else self.seed(parent.namespace)
            hashes = PageHashes(above_them, data, self._page_bytes)
        if self._emit is not None:
            node.hashes.append(hashes)
            self._emit(PagesStored(parent.namespace, hashes, tier))

    def cleared(self) -> None:
        """No page can be reused from any tier any more."""
        if self._emit is not None:
            self._emit(AllCleared())

    def tell(self, event: type[PagesStored | PagesRemoved], node: Node, start: int, stop: int, tier: Tier) -> None:
        """Pages `start..stop - 1` of a node can, or cannot, be reused from this tier now."""
        if self._emit is not None and start < stop:
            for hashes in cut_hashes(cut_hashes(node.hashes, stop)[0], start)[1]:
                self._emit(event(node.namespace, hashes, tier))

    def seed(self, namespace: Namespace) -> bytes:
        """The hash before the first page of a namespace."""
        return _seed_of(namespace, self._identity)

    def _chain(self, parent: bytes, tokens: bytes) -> PageHashes:
        """The keys of pages with these tokens; those of `keys_ahead` are not computed again."""
        found = self._ahead.pop(parent, None)
        if found is None or not found.begins_with(tokens):
            return PageHashes(parent, tokens, self._page_bytes)
        here, rest = found.cut(len(tokens) // self._page_bytes)
        if len(here) and len(rest):
            self._ahead[here.last] = rest
        return here

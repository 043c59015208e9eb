"""PageNames: under which key each cached page is known below the device, and under which scope its namespace is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.prefix.hashing import chain_pages, edition_of, namespace_seed, scope_of
from quire.spec.events import Namespace
from quire.spec.ids import Ids

KEY_BYTES = 32
_TOKEN_BYTES = 4
_MOST_SCOPES = 1024
"""Kept, so that they need not be computed again. Salts may be as many as there are users, or requests."""


class PageNames:
    """The keys of one cache's pages, by page id. `identity` is what all chains begin with (`layout_identity`)."""

    def __init__(self, num_pages: int, page_size: int, identity: bytes) -> None:
        self.keys = np.zeros((num_pages + 1, KEY_BYTES), dtype=np.uint8)
        self._page_bytes = page_size * _TOKEN_BYTES
        self._identity = identity
        self._scopes: dict[Namespace, bytes] = {}

    def name(self, namespace: Namespace, above: int, tokens: Ids, pages: Ids) -> None:
        """These cached pages hold `tokens`, behind page `above` (0: at the beginning)."""
        parent = self.key_above(namespace, above)
        self.set_keys(pages, chain_pages(parent, tokens.tobytes(), self._page_bytes))

    def key_above(self, namespace: Namespace, page: int) -> bytes:
        """What the next page's key is chained to."""
        return self.keys[page].tobytes() if page else namespace_seed(namespace, self._identity)

    def set_keys(self, pages: Ids, keys: Sequence[bytes]) -> None:
        """These are the keys of these pages."""
        if len(pages):
            self.keys[pages] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)

    def keys_of(self, pages: Ids) -> tuple[bytes, ...]:
        """The keys of pages that are cached."""
        packed = self.keys[pages].tobytes()
        return tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))

    def scope(self, namespace: Namespace) -> bytes:
        """What records of a namespace are filed under."""
        found = self._scopes.get(namespace)
        if found is None:
            if len(self._scopes) == _MOST_SCOPES:
                del self._scopes[next(iter(self._scopes))]
            found = self._scopes[namespace] = scope_of(namespace, self._identity)
        return found

    @property
    def edition(self) -> bytes:
        """What the scopes of all namespaces begin with."""
        return edition_of(self._identity)

    def rename(self, identity: bytes) -> None:
        """Pages that are cached from now on are of another model. Everything that was cached has been flushed."""
        self._identity = identity
        self._scopes.clear()

"""PageKeys: the keys of pages as their definition says, and which page each one is. None of it is the cache's code."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from quire.spec.events import Namespace
from tests.fuzz.names import Names


class PageKeys:
    """Of caches with these layouts, given by their fingerprints. `key(end)` is that of the page whose last name is
    `end`, and `end_of` has what was asked for before."""

    def __init__(self, names: Names, layouts: Sequence[str]) -> None:
        self.names = names
        self._identity = _digest(b"quire-layouts-1", b"", *[layout.encode() for layout in layouts])
        self._head = b"quire-page-2" + struct.pack("<I", 4 * names.page_size)
        self._keys: dict[int, bytes] = {}
        self.page_size = names.page_size
        self._scopes: dict[Namespace, bytes] = {}
        self.end_of: dict[bytes, int] = {}

    def key(self, end: int) -> bytes:
        """32 bytes."""
        found = self._keys.get(end)
        if found is None:
            ends, namespace = self.names.ends[end], self.names.namespaces[end]
            parent = self.key(ends[-2]) if len(ends) > 1 else self.seed(namespace)
            found = self._keys[end] = self.follow(parent, self.names.data[end][-4 * self.names.page_size :])
            self.end_of[found] = end
        return found

    def follow(self, parent: bytes, tokens: bytes) -> bytes:
        """The key of the page with these tokens, int32 bytes, behind the page of that key."""
        return hashlib.sha256(self._head + parent + tokens).digest()

    def knows(self, end: int) -> bool:
        """Whether that page's key was asked for before: of others, nothing is stored."""
        return end in self._keys

    def scope(self, namespace: Namespace) -> bytes:
        """What records of a namespace are filed under, 16 bytes."""
        found = self._scopes.get(namespace)
        if found is None:
            fields = (self._identity, namespace.adapter.encode(), namespace.salt.encode())
            prefix = _digest(b"quire-edition-1", self._identity)[:8]
            found = self._scopes[namespace] = prefix + _digest(b"quire-scope-1", *fields)[:8]
        return found

    def seed(self, namespace: Namespace) -> bytes:
        """What stands for the page before the first one of a namespace."""
        return _digest(b"quire-namespace-2", self._identity, namespace.adapter.encode(), namespace.salt.encode())


def _digest(domain: bytes, *parts: bytes) -> bytes:
    """As keys are defined: the domain, how many fields there are, and each behind its length."""
    fields = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return hashlib.sha256(domain + struct.pack("<Q", len(parts)) + fields).digest()

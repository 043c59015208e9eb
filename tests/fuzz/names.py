"""Names: what a token's key and value depend on, as one number. A token's name stands for it and all tokens before it.

Two contents are equal exactly if their names are. Everything about a prefix is remembered with the name of its last
token, so that a comparison of contents compares numbers, and mostly the same objects. None of it is the cache's code.
"""

from __future__ import annotations

import numpy as np

from quire.spec.events import Namespace
from quire.spec.ids import Ids

Page = tuple[int, ...]
"""The names of one page's tokens."""


class Names:
    """A tree of all prefixes that were ever named. Name 0 is that of nothing; a namespace has one, too.

    Of a name: the `path` of names from the first token to it, `data` with its tokens as int32 bytes, its own `token`,
    the whole `pages` of the path, and the `ends`, which are the last names of those pages.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._children: list[dict[int, int]] = [{}]
        self._roots: dict[Namespace, int] = {}
        self._named: dict[tuple[Namespace, bytes], int] = {}
        self.namespaces: list[Namespace] = [Namespace()]
        self.path: list[tuple[int, ...]] = [()]
        self.data: list[bytes] = [b""]
        self.pages: list[tuple[Page, ...]] = [()]
        self.ends: list[tuple[int, ...]] = [()]
        self.token: list[int] = [0]

    def root(self, namespace: Namespace) -> int:
        """The name of a namespace, before its first token."""
        if namespace not in self._roots:
            self._roots[namespace] = self._new(namespace, (), b"", (), (), 0)
        return self._roots[namespace]

    def child(self, name: int, token: int) -> int:
        """The name of a token that follows `name`."""
        found = self._children[name].get(token)
        if found is not None:
            return found
        new = len(self.path)
        path = (*self.path[name], new)
        pages, ends = self.pages[name], self.ends[name]
        if not len(path) % self.page_size:
            pages, ends = (*pages, path[-self.page_size :]), (*ends, new)
        data = self.data[name] + token.to_bytes(4, "little")
        self._children[name][token] = new
        return self._new(self.namespaces[name], path, data, pages, ends, token)

    def follow(self, name: int, data: bytes) -> int:
        """The name after these tokens, int32 bytes."""
        for token in np.frombuffer(data, dtype=np.int32).tolist():
            name = self.child(name, token)
        return name

    def named(self, namespace: Namespace, data: bytes) -> int:
        """The name of a whole prefix, int32 bytes. What was asked for before is found at once."""
        found = self._named.get((namespace, data))
        if found is None:
            found = self._named[namespace, data] = self.follow(self.root(namespace), data)
        return found

    def prefix(self, name: int, num_tokens: int) -> int:
        """The name of the first `num_tokens` tokens of a path."""
        if not num_tokens:
            return self._roots[self.namespaces[name]]
        return self.path[name][num_tokens - 1]

    def tokens(self, name: int) -> Ids:
        """The tokens of a path."""
        return np.frombuffer(self.data[name], dtype=np.int32)

    def _new(
        self,
        namespace: Namespace,
        path: tuple[int, ...],
        data: bytes,
        pages: tuple[Page, ...],
        ends: tuple[int, ...],
        token: int,
    ) -> int:
        self._children.append({})
        self.namespaces.append(namespace)
        self.path.append(path)
        self.data.append(data)
        self.pages.append(pages)
        self.ends.append(ends)
        self.token.append(token)
        return len(self.path) - 1

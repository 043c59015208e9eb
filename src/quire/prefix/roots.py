"""Roots: the root of each namespace, and what they begin with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from quire.prefix.node import Node
from quire.spec.events import Namespace

_MOST_NAMESPACES = 8  # others that are looked at to explain a miss


class Roots:
    """`found` are the roots that prompts are matched against. `hidden` are flushed: no prompt is, and they stay while a
    lease holds something below them."""

    def __init__(self) -> None:
        self.found: dict[Namespace, Node] = {}
        self.hidden: list[Node] = []
        self._beginnings: dict[bytes, dict[Node, None]] = {}  # the roots that have a child with that first page

    def get(self, namespace: Namespace) -> Node | None:
        """The root of a namespace, if it has one."""
        return self.found.get(namespace)

    def make(self, namespace: Namespace, now: int) -> Node:
        """The root of a namespace, made where it has none."""
        root = self.found.get(namespace)
        if root is None:
            root = self.found[namespace] = Node(namespace, None, b"", b"", 0, now)
        return root

    def all(self) -> list[Node]:
        """Every root."""
        return [*self.found.values(), *self.hidden]

    def others(self, namespace: Namespace, first: bytes) -> Iterator[Node]:
        """Some roots of other namespaces that have a child with that first page."""
        others = (root for root in self._beginnings.get(first, ()) if root.namespace != namespace)
        return islice(others, _MOST_NAMESPACES)

    def begins(self, root: Node, first: bytes) -> None:
        """The root has a child with that first page."""
        self._beginnings.setdefault(first, {})[root] = None

    def begins_no_more(self, root: Node, first: bytes) -> None:
        """It has none, or none that is found."""
        roots = self._beginnings.get(first, {})
        roots.pop(root, None)
        if not roots:
            self._beginnings.pop(first, None)

    def hide(self, root: Node) -> None:
        """No prompt is matched against this root any more."""
        for first in root.children:
            self.begins_no_more(root, first)
        del self.found[root.namespace]
        self.hidden.append(root)

    def drop(self, root: Node) -> None:
        """Nothing hangs below this root, and no lease holds it."""
        if self.found.get(root.namespace) is root:
            del self.found[root.namespace]
        elif root in self.hidden:
            self.hidden.remove(root)

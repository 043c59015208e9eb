"""Levels: which nodes of a tree leases hold, and how many pages that are."""

from __future__ import annotations

from collections.abc import Callable

from quire.prefix.node import Node


class Levels:
    """A lease changes the levels of its end and of what is above it, as far up as they do change.

    `num_protected` pages on the device are held by at least one lease, `num_shared` of them by at least two. `is_here`
    says whether a node's pages are on the device; None where all are.
    """

    def __init__(self, is_here: Callable[[Node], bool] | None) -> None:
        self._is_here = is_here
        self.num_protected = 0
        self.num_shared = 0

    def hold(self, end: Node) -> None:
        """One lease more ends at this node."""
        end.leases += 1
        node: Node | None = end
        while node is not None:
            node.held += 1
            if node.level == 2:
                return
            node.level += 1
            node.ticket = 0
            if self._is_here is None or self._is_here(node):
                self._count(node.level, node.num_pages)
            node = node.parent

    def let_go(self, end: Node) -> None:
        """One lease less ends at this node."""
        end.leases -= 1
        assert end.leases >= 0
        node: Node | None = end
        while node is not None:
            node.held -= 1
            if node.held >= 2:
                return
            if self._is_here is None or self._is_here(node):
                self._count(node.level, -node.num_pages)
            node.level -= 1
            node = node.parent

    def lengthened(self, num_pages: int) -> None:
        """So many pages were added to a node that one lease holds."""
        self.num_protected += num_pages

    def arrived(self, node: Node) -> None:
        """A node's pages have come to the device."""
        for level in range(1, node.level + 1):
            self._count(level, node.num_pages)

    def _count(self, level: int, num_pages: int) -> None:
        if level == 1:
            self.num_protected += num_pages
        else:
            self.num_shared += num_pages

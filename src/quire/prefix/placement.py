"""Placement: what the tree asks about where the bytes of its pages are. It keeps no record of that itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.prefix.node import Node
from quire.spec.ids import Bools, Ids


class Placement(Protocol):
    """Pages are on the device, below it, or both. Of every path the pages on the device come first."""

    has_lower: bool
    """Whether there is a tier below the device. Without one every page is on the device and nothing else is asked."""

    def on_device(self, page: int) -> bool:
        """Whether a page is on the device, or on its way there."""

    def have_copies(self, pages: Ids) -> Bools:
        """Per page: whether it has a copy below the device."""


class DeviceOnly:
    """There is no tier below the device."""

    has_lower = False

    def on_device(self, page: int) -> bool:
        """It is."""
        return True

    def have_copies(self, pages: Ids) -> Bools:
        """None has."""
        return np.zeros(len(pages), dtype=np.bool_)


class Whereabouts:
    """The same of nodes. All of a node's pages are on the device, or none; of its copies, only those of its first pages
    count."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.has_lower = placement.has_lower

    def is_here(self, node: Node) -> bool:
        """Whether a node's pages are on the device. Roots are."""
        return not self.has_lower or node.parent is None or self._placement.on_device(node.first_page)

    def has_child_here(self, node: Node) -> bool:
        """Whether one of its children is."""
        # What came to the device last is the last child, so this seldom looks at more than one.
        return any(self.is_here(child) for child in reversed(node.children.values()))

    def num_copies(self, node: Node) -> int:
        """How many of a node's pages, from the first on, have copies."""
        if not self.has_lower:
            return 0
        found = self._placement.have_copies(node.pages)
        return int(np.argmin(found)) if not found.all() else len(found)

    def ends_copies(self, node: Node) -> bool:
        """Whether it has copies and none of its children has."""
        if not self.num_copies(node):
            return False
        return not any(self.num_copies(child) for child in reversed(node.children.values()))

    def countable(self, path: Sequence[Node], start: int, stop: int) -> int:
        """Up to which page copies of pages `start..stop - 1` of a path, its end first, would count."""
        for node in reversed(path):
            if node.depth >= stop:
                break
            if node.depth + node.num_pages > start:
                if start - node.depth > self.num_copies(node):
                    return start
                start = min(stop, node.depth + node.num_pages)
        return start

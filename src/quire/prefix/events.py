"""PrefixEvents: tells a listener which pages became reusable, or stopped being, in which tier."""

from __future__ import annotations

from collections.abc import Callable

from quire.prefix.hashing import PageHashes, cut_hashes, namespace_seed
from quire.prefix.node import Node
from quire.spec.events import AllCleared, CacheEvent, PagesRemoved, PagesStored
from quire.spec.ids import Tier


class PrefixEvents:
    """`identity` is what hashes begin with. Without a listener no page is ever hashed."""

    def __init__(self, emit: Callable[[CacheEvent], None] | None, identity: bytes, page_bytes: int) -> None:
        self._emit = emit
        self.identity = identity
        self._page_bytes = page_bytes

    @property
    def on(self) -> bool:
        """Whether there is a listener."""
        return self._emit is not None

    def appended(self, node: Node, parent: Node, data: bytes, tier: Tier) -> None:
        """Pages with these tokens are cached behind the end of `parent`, as the last ones of `node`."""
        if self._emit is not None:
            above = parent.hashes[-1] if parent.hashes else namespace_seed(parent.namespace, self.identity)
            hashes = PageHashes(above, data, self._page_bytes)
            node.hashes.append(hashes)
            self._emit(PagesStored(parent.namespace, hashes, tier))

    def stored(self, node: Node, start: int, stop: int, tier: Tier) -> None:
        """Pages `start..stop - 1` of a node can be reused from that tier now."""
        if self._emit is not None and start < stop:
            for hashes in _between(node, start, stop):
                self._emit(PagesStored(node.namespace, hashes, tier))

    def removed(self, node: Node, start: int, stop: int, tier: Tier) -> None:
        """Pages `start..stop - 1` of a node cannot be reused from that tier any more."""
        if self._emit is not None and start < stop:
            for hashes in _between(node, start, stop):
                self._emit(PagesRemoved(node.namespace, hashes, tier))

    def cleared(self) -> None:
        """Nothing can be reused from any tier any more."""
        if self._emit is not None:
            self._emit(AllCleared())


def _between(node: Node, start: int, stop: int) -> list[PageHashes]:
    return cut_hashes(cut_hashes(node.hashes, stop)[0], start)[1]

"""ContentOracle: the expected content of every token slot of a cache, as names instead of bytes.

The key and value of a token depend on the whole prefix before it. So the name of a content stands for the namespace and
all tokens up to this one, and two contents are equal exactly if their names are. A state has one slot per frame and the
name of its last token. A simulated device calls `write` where a device would store, and `check` where it would read. A
wrong, stale, short or foreign page shows at once, without a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from quire.cache import KVCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier

Contents = npt.NDArray[np.int64]

NOTHING = 0
"""The content of a slot that was never written."""


class ContentOracle:
    """The contents of all frames of one cache. It only reads the cache."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._names: dict[tuple[object, int], int] = {}
        self._per_frame = [1 if group.reach.in_place else cache.page_size for group in cache.groups]
        self._held = [
            np.zeros((cache.plan.frames_of(index) + 1) * slots, dtype=np.int64)
            for index, slots in enumerate(self._per_frame)
        ]

    def contents(self, namespace: Namespace, tokens: Iterable[int]) -> Contents:
        """The name of each token's content, int64 `[num_tokens]`."""
        parent: object = namespace
        found = []
        for token in tokens:
            parent = self._names.setdefault((parent, int(token)), len(self._names) + 1)
            found.append(parent)
        return np.array(found, dtype=np.int64)

    def write(self, group: int, slots: Ids, contents: Contents) -> None:
        """The device stores these contents in these slots."""
        self._held[group][slots] = contents

    def move(self, group: int, sources: Ids, targets: Ids) -> None:
        """The device copies these frames (`CacheParts.moved`)."""
        slots = self._per_frame[group]
        self._held[group][slots_of_frames(targets, slots)] = self._held[group][slots_of_frames(sources, slots)]

    def check(self, group: int, slots: Ids, contents: Contents) -> None:
        """The device reads these slots and expects these contents. Raises AssertionError if one differs."""
        assert len(slots) == len(contents)
        wrong = np.flatnonzero(self._held[group][slots] != contents)
        if len(wrong):
            at = int(wrong[0])
            held = int(self._held[group][slots[at]])
            what = "nothing" if held == NOTHING else f"content {held}"
            raise AssertionError(
                f"token {at} should read content {int(contents[at])} in slot {int(slots[at])} of group {group}, "
                f"which holds {what} ({len(wrong)} of {len(contents)} tokens are wrong)"
            )

    def check_cached(self) -> None:
        """Check that every cached frame has the content that its place in the tree requires. O(cached tokens)."""
        size = self._cache.page_size
        for page_ids, contents in self._cached():
            of_pages = contents.reshape(len(page_ids), size)
            for group, slots in enumerate(self._per_frame):
                column = self._cache.parts.frames.of(Tier.DEVICE, group).frame
                there = column[page_ids] != 0
                frames = column[page_ids[there]]
                self.check(group, slots_of_frames(frames, slots), of_pages[there][:, size - slots :].reshape(-1))

    def _cached(self) -> Iterator[tuple[Ids, Contents]]:
        """The pages of each edge of the tree and their expected contents."""
        prefixes: dict[int, tuple[int, ...]] = {}
        for node in self._cache.tree.nodes():
            before = prefixes.get(id(node.parent), ())
            prefixes[id(node)] = (*before, *np.frombuffer(node.key, dtype=np.int32).tolist())
            yield node.pages, self.contents(node.namespace, prefixes[id(node)])[len(before) :]


def slots_of_frames(frames: Ids, page_size: int) -> Ids:
    """All slots of these frames, in order."""
    slots: Ids = np.repeat(frames * np.int32(page_size), page_size)
    slots += np.tile(np.arange(page_size, dtype=np.int32), len(frames))
    return slots

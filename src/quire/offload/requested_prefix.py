"""RequestedPrefix: pages of a prompt that are neither on device nor host, and how far stored ones would help.

    pages of the prompt     0       start        known         limit
    in the tree             |----------------------|
    groups read whole                              |- looked for -|   their frames are there as long as the pages are
    groups read in part         |-- where they are missing, from what the first page behind `start` needs on --|

Every group can resume behind `start` pages already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.cache.groups import NO_PAGES, GroupCache
from quire.cache.resuming import resident, resume_point
from quire.offload.tiering import Tiering
from quire.prefix.node import Lease, pages_to
from quire.spec.ids import Bools, Ids
from quire.tiers.store import Answer
from quire.tiers.transfer import Answers, Units

Places = np.ndarray  # page numbers of the prompt, int64


class RequestedPrefix:
    """See the module. `lease` pins the known pages, and pages cached behind them later. `keys` are those of the pages
    from `known` on."""

    def __init__(
        self, tiers: Tiering, groups: Sequence[GroupCache], lease: Lease, start: int, keys: Sequence[bytes]
    ) -> None:
        self._tiers = tiers
        self._groups = groups
        self._lease = lease
        self._keys = keys
        self.start = start
        self.known = lease.num_pages
        self.limit = self.known + len(keys)
        self._stored: list[Bools] = [np.zeros(self.limit, dtype=np.bool_) for _ in groups]
        self._asked: list[tuple[int, Places]] = []

    @property
    def path(self) -> Ids:
        """Pages of the prompt that are in the tree now."""
        return pages_to(self._lease.node)

    # -- the store

    def units(self) -> list[Units]:
        """The keys to look up, by group."""
        path, behind = self.path, np.arange(self.known, self.limit)
        for group in self._groups:
            first = self.known if group.reach.whole else group.reach.needed(self.start + 1).start
            lacking = first + np.flatnonzero(~resident(group, path[first:], self._tiers.hosts))
            places = np.concatenate((lacking, behind))
            if len(places):
                self._asked.append((group.index, places))
        return [Units(group, NO_PAGES, NO_PAGES, self.keys(places)) for group, places in self._asked]

    def answered(self, answers: Answers) -> None:
        """Take note of the store's answers to `units`."""
        path = self.path
        for (group, places), found in zip(self._asked, answers, strict=True):
            self._stored[group][places] = [answer is Answer.HIT for answer in found]
            gone = places[[answer is Answer.MISS for answer in found]]
            self._tiers.archiver.not_stored(group, path[gone[gone < len(path)]])

    def lost(self, group: int, place: int) -> None:
        """Take note that the store lacks this page after all."""
        self._stored[group][place] = False
        self._tiers.archiver.not_stored(group, self.path[place : place + 1])

    def keys(self, places: Places) -> tuple[bytes, ...]:
        """Keys of these pages in the store."""
        known = self._tiers.names.keys_of(self.path[places[places < self.known]])
        return (*known, *(self._keys[place - self.known] for place in places[len(known) :].tolist()))

    # -- how far

    def near(self) -> int:
        """The most pages behind which a request could begin now."""
        partial = [group for group in self._groups if not group.reach.whole]
        return resume_point(partial, self.path, self._tiers.hosts)[0]

    def far(self) -> int:
        """The most pages behind which a request could begin if all stored ones were fetched."""
        path = self.path
        usable: Bools = np.ones(self.limit, dtype=np.bool_)
        for group, stored in zip(self._groups, self._stored, strict=True):
            there = stored.copy()
            there[: len(path)] |= resident(group, path, self._tiers.hosts)
            usable &= group.reach.resumable(there)
        ends = np.flatnonzero(usable)
        return int(ends[-1]) + 1 if len(ends) else 0

    def branches(self) -> bool:
        """Whether prompts that branch from this one may find more: groups that are read whole have the first unknown
        page stored, and there are other groups."""
        whole = [stored for group, stored in zip(self._groups, self._stored, strict=True) if group.reach.whole]
        return self.known < self.limit and len(whole) < len(self._groups) and all(s[self.known] for s in whole)

    def lacking(self, wanted: int) -> list[Places]:
        """By group, places to fetch so that a request can begin behind `wanted` pages."""
        path, found = self.path, []
        for group in self._groups:
            needed = group.reach.needed(wanted)
            lacks = np.ones(len(needed), dtype=np.bool_)
            known = path[needed.start : needed.stop]
            lacks[: len(known)] = ~resident(group, known, self._tiers.hosts)
            found.append(needed.start + np.flatnonzero(lacks))
        return found

    def loads(self, wanted: int) -> list[int]:
        """By group, how many frames the device lacks for a request that begins behind `wanted` pages."""
        path, needed = self.path, [group.reach.needed(wanted) for group in self._groups]
        return [
            len(places) - int(np.count_nonzero(group.table.present(path[places.start : places.stop])))
            for group, places in zip(self._groups, needed, strict=True)
        ]

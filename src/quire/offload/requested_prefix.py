"""RequestedPrefix: what of a prompt is neither on the device nor on the host, and how far what is stored would help.

    pages of the prompt     0       start        known         limit
    in the tree             |----------------------|
    groups read whole                              |- looked for -|   their frames are there as long as the pages are
    groups read in part         |-- where they are missing, from what the first page behind `start` needs on --|

Behind `start` pages every group can resume already.
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

Places = np.ndarray
"""Which pages of the prompt, int64."""


class RequestedPrefix:
    """See the module. `lease` pins the known pages, and others that come to be cached behind them; `keys` are those of
    pages from `known` on."""

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
        """The pages that are in the tree by now."""
        return pages_to(self._lease.node)

    # -- the store

    def units(self) -> list[Units]:
        """What the store is asked for."""
        path, behind = self.path, np.arange(self.known, self.limit)
        for group in self._groups:
            first = self.known if group.reach.whole else group.reach.needed(self.start + 1).start
            lacking = first + np.flatnonzero(~resident(group, path[first:], self._tiers.hosts))
            places = np.concatenate((lacking, behind))
            if len(places):
                self._asked.append((group.index, places))
        return [Units(group, NO_PAGES, NO_PAGES, self.keys(places)) for group, places in self._asked]

    def answered(self, answers: Answers) -> None:
        """What the store has of it."""
        path = self.path
        for (group, places), found in zip(self._asked, answers, strict=True):
            self._stored[group][places] = [answer is Answer.HIT for answer in found]
            gone = places[[answer is Answer.MISS for answer in found]]
            self._tiers.archiver.not_stored(group, path[gone[gone < len(path)]])

    def lost(self, group: int, place: int) -> None:
        """The store does not have this after all."""
        self._stored[group][place] = False
        self._tiers.archiver.not_stored(group, self.path[place : place + 1])

    def keys(self, places: Places) -> tuple[bytes, ...]:
        """Under which the store has these pages."""
        known = self._tiers.names.keys_of(self.path[places[places < self.known]])
        return (*known, *(self._keys[place - self.known] for place in places[len(known) :].tolist()))

    # -- how far

    def near(self) -> int:
        """The most pages behind which a request could begin now."""
        partial = [group for group in self._groups if not group.reach.whole]
        return resume_point(partial, self.path, self._tiers.hosts)[0]

    def far(self) -> int:
        """The same, once what is stored has come."""
        path = self.path
        usable: Bools = np.ones(self.limit, dtype=np.bool_)
        for group, stored in zip(self._groups, self._stored, strict=True):
            there = stored.copy()
            there[: len(path)] |= resident(group, path, self._tiers.hosts)
            usable &= group.reach.resumable(there)
        ends = np.flatnonzero(usable)
        return int(ends[-1]) + 1 if len(ends) else 0

    def branches(self) -> bool:
        """Whether prompts that part from this one may find what it did not: the first page behind the known ones is
        stored, as far as all of them need it."""
        whole = [stored for group, stored in zip(self._groups, self._stored, strict=True) if group.reach.whole]
        return self.known < self.limit and len(whole) < len(self._groups) and all(s[self.known] for s in whole)

    def lacking(self, wanted: int) -> list[Places]:
        """By group, what has to come so that a request can begin behind `wanted` pages."""
        path, found = self.path, []
        for group in self._groups:
            needed = group.reach.needed(wanted)
            lacks = np.ones(len(needed), dtype=np.bool_)
            known = path[needed.start : needed.stop]
            lacks[: len(known)] = ~resident(group, known, self._tiers.hosts)
            found.append(needed.start + np.flatnonzero(lacks))
        return found

    def loads(self, wanted: int) -> list[int]:
        """By group, the frames that the device lacks for a request that begins behind `wanted` pages."""
        path, needed = self.path, [group.reach.needed(wanted) for group in self._groups]
        return [
            len(places) - int(np.count_nonzero(group.frames.resident(path[places.start : places.stop])))
            for group, places in zip(self._groups, needed, strict=True)
        ]

"""Hold: these pages stay, for this reason, until it is released.

    a path of the tree        a lease on its end: none of its pages is evicted, in any tier
    frames                    of groups whose frames may go before their pages: that tier does not reclaim them
    private pages             of a running request: pages that it gives up stay until the hold is released

A running request is a hold of its own kind: it has a lease and, in its row, private pages. What launched steps may
still touch waits in `Fences`. `Holds` lists and counts all of them; the others are made by `Holds.add`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from quire.cache.fences import Fences, Retired
from quire.cache.groups import NO_PAGES
from quire.cache.request_kv import RequestKV
from quire.errors import LeaseError
from quire.memory.residency import Residency
from quire.prefix.node import Lease
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Ids, Tier
from quire.spec.rank import Rank


class Reason(StrEnum):
    """Why pages are held."""

    BEGIN = "request that begins"
    SAVE = "save"
    LOAD = "load"
    READ_AHEAD = "prompt that is read ahead"
    RETAIN = "retention"
    DAMAGE = "damaged prefix"
    TRANSFER = "transfer to a peer"


@dataclass(frozen=True, slots=True, eq=False)
class HeldFrames:
    """Pages of one group whose frames are held in one tier."""

    group: int
    tier: Tier
    pages: Ids


@dataclass(slots=True, eq=False)
class Hold:
    """Made by `Holds.add`. `lease` holds a path, if any; `private` are pages of a running request."""

    reason: Reason
    label: str
    lease: Lease | None
    private: Ids
    frames: tuple[HeldFrames, ...] = ()
    released: bool = False

    @property
    def path(self) -> Lease:
        """The lease on its path. Only for a hold that has one."""
        assert self.lease is not None, "this hold has no path"
        return self.lease


class Holds:
    """The live holds of one cache, beside its running `requests` and what waits in `fences`. `give_back` takes private
    pages that were given up and are held no longer."""

    def __init__(
        self,
        tree: RadixCache,
        table: Residency,
        requests: Mapping[int, RequestKV],
        fences: Fences,
        give_back: Callable[[Ids], None],
    ) -> None:
        self._tree = tree
        self._table = table
        self._requests = requests
        self._fences = fences
        self._give_back = give_back
        self._live: dict[Hold, None] = {}
        self._private: Counter[int] = Counter()  # holds of each private page
        self._waiting: set[int] = set()  # of them, pages that were given up

    def add(
        self,
        reason: Reason,
        *,
        lease: Lease | None = None,
        frames: Sequence[HeldFrames] = (),
        private: Ids = NO_PAGES,
        rank: Rank = Rank.PASSED,
        label: str = "",
    ) -> Hold:
        """Hold these until `release`. The hold owns `lease`. Its frames are idle with `rank` afterwards."""
        hold = Hold(reason, label, lease, private)
        self._live[hold] = None
        self._pin(hold, frames, rank)
        self._private.update(private.tolist())
        return hold

    def change(
        self, hold: Hold, frames: Sequence[HeldFrames], *, lease: Lease | None = None, rank: Rank = Rank.PASSED
    ) -> None:
        """Hold these frames instead, and the path of `lease`, if given. Frames held before and after stay pinned."""
        before, path = hold.frames, hold.lease
        self._pin(hold, frames, rank)
        self._unpin(before)
        if lease is not None:
            hold.lease = lease
            if path is not None:
                self._tree.release(path)

    def release(self, hold: Hold) -> None:
        """End a hold. Raises LeaseError the second time."""
        if hold.released:
            raise LeaseError(f"the hold of a {hold.reason} was released twice.")
        hold.released = True
        del self._live[hold]
        self._unpin(hold.frames)
        if hold.lease is not None:
            self._tree.release(hold.lease)
        if len(hold.private):
            self._private.subtract(hold.private.tolist())
            self._private = +self._private
            free = [page for page in hold.private.tolist() if page in self._waiting and page not in self._private]
            self._waiting.difference_update(free)
            self._give_back(np.array(free, dtype=np.int32))

    def free_of(self, pages: Ids) -> Ids:
        """The given-up private pages without a hold. The others wait until theirs is released."""
        if not self._private:
            return pages
        held = np.array([page in self._private for page in pages.tolist()], dtype=np.bool_)
        self._waiting.update(pages[held].tolist())
        free: Ids = pages[~held]
        return free

    def __len__(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> list[int]:
        """Private pages that were given up and are still held, ascending."""
        return sorted(self._waiting)

    def leases(self) -> list[Lease]:
        """The leases of running requests, of what waits for launched steps, and of live holds."""
        holders: tuple[RequestKV | Retired | Hold, ...] = (*self._requests.values(), *self._fences.waiting, *self._live)
        return [holder.lease for holder in holders if holder.lease is not None]

    def readers(self, group: int, tier: Tier) -> Ids:
        """Pages of a group whose frames are held in a tier, once for each hold; empty where no frame is reclaimed."""
        if not self._table.of(tier, group).reclaims:
            return NO_PAGES
        runs = [each.pages for hold in self._live for each in hold.frames if each.group == group and each.tier is tier]
        return np.concatenate(runs) if runs else NO_PAGES

    def summary(self, num_pinned: int = 0) -> str:
        """What holds pages, in words: running requests, and the number of holds of each reason and of launched steps
        that something waits for. Callers have pinned `num_pinned` pages."""
        counts = Counter[str](hold.reason for hold in self._live)
        if self._fences.waiting:
            counts["launched step"] = self._fences.num_open
        others = ", ".join(f"{count} {reason}{'s' if count > 1 else ''}" for reason, count in counts.items())
        beside = f", beside {others}" if others else ""
        pinned = f", but for {num_pinned} pages that callers have pinned" if num_pinned else ""
        return f"{len(self._requests)} running requests hold the rest{beside}{pinned}"

    def _pin(self, hold: Hold, frames: Sequence[HeldFrames], rank: Rank) -> None:
        hold.frames = tuple(frames)
        for each in frames:
            self._table.of(each.tier, each.group).pin(each.pages, rank)

    def _unpin(self, frames: Sequence[HeldFrames]) -> None:
        for each in frames:
            self._table.of(each.tier, each.group).unpin(each.pages)

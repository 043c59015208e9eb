"""Tiering: which cached pages are where, and when they are moved. One thread, the engine's; bytes are moved by others.

    save      device -> host      when a page is cached, used again, or has to go (`WritePolicy`)
    load      host -> device      when a request begins on it; steps wait for it layer by layer
    archive   host -> storage     after a save, in the order of the prefix (`quire.offload.archiver`)
    fetch     storage -> host     while a request waits (`quire.offload.prefetcher`)

All frames that a page has move together and count together or not at all. What is on its way is pinned: its path in the
tree, and single frames where groups are read in part. A record that is not what it should be is counted, set aside, and
what depended on it is forgotten; a request that waited for it begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.cache.groups import GroupCache
from quire.cache.hold import HeldFrames, Reason
from quire.cache.offload import CacheParts
from quire.cache.resuming import needed_pages
from quire.memory.residency import State
from quire.offload.archiver import Archiver, PendingPaths
from quire.offload.below import Below, Moving, Part, worth_saving
from quire.offload.deletion import DamagedPaths
from quire.offload.host_groups import HostGroup
from quire.offload.tier_settings import TierSettings, WritePolicy
from quire.prefix.node import Lease, Node, pages_to
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.rank import Rank
from quire.tiers.transfer import GOOD, UNDAMAGED, Lane, Transfer

_MOST_SAVES = 64  # of those that had to wait, begun at a time
_WAIT_S = 0.05  # between looks at a copy that eviction waits for


class Tiering(Below):
    """The tiers of one cache, which has these parts. See the module."""

    def __init__(self, settings: TierSettings, parts: CacheParts) -> None:
        super().__init__(settings, parts)
        self._tree = parts.tree
        self._holds = parts.holds
        self._groups = parts.groups
        self._give_back = parts.give_back
        self._page_size = parts.plan.page_size
        self.on_host = parts.frames.anchor(Tier.HOST)
        self.moving: dict[Transfer, Moving] = {}
        self.damaged_paths = DamagedPaths(parts.tree, parts.holds, parts.give_back)
        self.archiver = Archiver(self, parts.tree, parts.seconds)
        self._ended: list[Transfer] = []
        self._unsaved = PendingPaths(parts.tree)  # of which a copy was wanted when too much was on its way
        self._saves_wait = False  # until a save has ended

    # -- what was flushed

    def abandon(self, namespace: Namespace | None) -> None:
        """What is on its way of a namespace, or at all, counts for nothing when it arrives."""
        for moving in self.moving.values():
            moving.abandoned |= namespace in (None, moving.hold.path.node.namespace)

    def forget_stored(self, namespace: Namespace | None) -> None:
        """Have the store delete a namespace, or all that is of this model, behind all that it was given; until it has,
        nothing of that is looked for there."""
        if namespace is None:
            self.archiver.forget_all()
        if self.settings.stores:
            self.deletion.flush(namespace)

    # -- asking

    def missing(self, pages: Ids) -> list[Ids]:
        """By group, which pages of a path a request that begins behind it reads and the device has not."""
        needed = [needed_pages(group, pages) for group in self._groups]
        return [part[~group.frames.resident(part)] for group, part in zip(self._groups, needed, strict=True)]

    def is_too_much(self, loads: Sequence[int]) -> bool:
        """Whether to load so many frames, by group, would leave a request no frame to go on in."""
        return any(count >= group.num_frames for group, count in zip(self._groups, loads, strict=True) if count)

    @property
    def num_dropped(self) -> int:
        """Changes that make an older hit wrong."""
        return self.damaged.num_marked + sum(host.dropped_frames for host in self.hosts)

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, frames of the host by group, and scopes that the store has still to forget."""
        health = self.settings.health
        return {
            **self.counters.to_dict(),
            "host": {host.name: host.statistics() for host in self.hosts},
            "host_pages": self._tree.num_below,
            "forgetting": len(self.deletion.scopes),
            "owed_paths": len(self.archiver.pending),
            "forget_failures": self.deletion.num_failed,
            "store_lost": list(health.lost),
            "store_refused": {lane.name: count for lane, count in health.refused.items()},
        }

    # -- saving

    def save(
        self, node: Node, pages: Ids, *, ends: Sequence[int], first: int = 0, goes: bool = False
    ) -> Transfer | None:
        """Copy what the host lacks of a path from its page `first` on. What finds no room there is left out, from the
        end. `ends` are numbers of pages behind which requests may begin: what they read in part goes with it. What
        `WritePolicy.BACK` keeps for later is saved only where it `goes`.
        """
        if not len(pages):
            return None
        if self._saves_wait and not goes:
            self._unsaved.add(node, ends)
            return None
        later = self.settings.write is WritePolicy.BACK and not goes
        wanted = []
        for group, host in zip(self._groups, self.hosts, strict=True):
            at = self._lacks_copies(group, pages, ends)
            wanted.append(at[:0] if later and host.whole else at[at >= first])
        wanted = worth_saving(wanted, self.settings, self._page_size)
        if not any(map(len, wanted)):
            return None
        lease = self._tree.pin(node)
        rooms = [self.host_room(host, len(at)) for host, at in zip(self.hosts, wanted, strict=True)]
        cuts = [
            at[room] for host, at, room in zip(self.hosts, wanted, rooms, strict=True) if host.whole and room < len(at)
        ]
        ends_at = min(cuts, default=len(pages))  # groups that are read as a whole keep the same pages
        parts = []
        for group, host, at, room in zip(self._groups, self.hosts, wanted, rooms, strict=True):
            taken = at[at < ends_at] if host.whole else at[:room]
            self.counters.unsaved_frames += len(at) - len(taken)
            if len(taken):
                saved = pages[taken]
                ranks = group.table.rank[saved] if group.table.reclaims else None
                parts.append(Part(group.index, saved, taken, group.frames.column[saved], host.take(len(taken)), ranks))
        if not parts:
            self._tree.release(lease)
            return None
        move = self._submit(Lane.SAVE, lease, parts)
        if move is None and not goes:
            self._saves_wait = bool(self.moving)
            self._unsaved.add(node, ends)
        return move

    def _save_the_rest(self) -> None:
        """Copies that could not be made when they were wanted."""
        if self._saves_wait:
            return
        refused = self.counters.refused_moves
        for key, node, ends in self._unsaved.first(_MOST_SAVES):
            self._unsaved.remove(key)
            self.save(node, pages_to(node), ends=ends)
            if self.counters.refused_moves > refused:
                return

    def _lacks_copies(self, group: GroupCache, pages: Ids, ends: Sequence[int]) -> np.ndarray:
        """Places of pages with a device frame that the host should have and has not."""
        host = self.hosts[group.index]
        lacks = group.frames.resident(pages) & ~host.good(pages) & ~self.damaged.are(pages)
        lacks &= ~host.table.has(pages, State.ARRIVING) & ~group.table.has(pages, State.ARRIVING)
        if group.table.reclaims:
            useful: Bools = group.table.rank[pages] >= Rank.MARKED
            for end in ends:
                if end <= len(pages):
                    needed = group.reach.needed(end)
                    useful[needed.start : needed.stop] = True
            lacks &= useful
        return np.flatnonzero(lacks)

    def host_room(self, host: HostGroup, wanted: int) -> int:
        """Make room for host frames; how many of those wanted there are."""
        short = wanted - host.num_free
        if short > 0:
            self.archiver.go_on(hurries=True)
        if short > 0 and host.whole:
            self.evict_host(short)
        elif short > 0:
            host.evict(short)
        return max(0, min(wanted, host.num_free))

    def evict_host(self, num_pages: int) -> bool:
        """Give up copies on the host, of pages that are not used; whether there were any."""
        evicted = self._tree.evict_lower(num_pages, self._left_host)
        num_evicted = len(evicted.removed) + evicted.num_moved
        self.counters.host_evicted_pages += num_evicted
        self._give_back(evicted.removed)
        return num_evicted > 0

    def _left_host(self, pages: Ids) -> None:
        """These pages are on the device only."""
        for host in self.hosts:
            host.drop(host.unpinned(pages))
        self.table.went(Tier.HOST, pages)

    def keep(self, node: Node) -> int:
        """For eviction from the device: make copies of an unleased node's pages that have none; returns how many of its
        first pages have one then."""
        if self._tree.num_copies(node) < node.num_pages:
            pages = pages_to(node)
            self._save_at_once(node, pages, node.depth)
            if self.settings.stores:  # what is above it goes too: what stays on the device for good is never saved else
                self._save_at_once(node, pages, self.archiver.storable(pages))
        return self._tree.num_copies(node)

    def _save_at_once(self, node: Node, pages: Ids, first: int) -> None:
        move = self.save(node, pages, ends=(len(pages),), first=first, goes=True)
        if move is not None:
            self.mover.complete(move)
            self._ended += self.mover.finished()
            self._ended.remove(move)
            self.counters.ended(move)
            self._saved(move)

    def left_device(self, pages: Ids) -> None:
        """These pages are on the host only."""
        self.counters.demoted_pages += len(pages)
        for group in self._groups:
            group.forget(pages)
        self.table.went(Tier.DEVICE, pages)

    def forgotten(self, pages: Ids) -> None:
        """These pages have left the cache, or never were in it."""
        for host in self.hosts:
            host.drop(pages)
        self.table.went(Tier.HOST, pages)
        self.damaged.mend(pages)
        self._unsaved.forgotten(len(pages))
        self.archiver.forgotten(pages)
        self.on_host.unmark(pages, State.FETCHED)

    # -- loading

    def load(self, node: Node, pages: Ids, missing: Sequence[Ids]) -> Transfer | None:
        """Bring what the device lacks of a leased path to it; there is room for all of it. None where too much is on
        its way already."""
        lease = self._tree.pin(node)
        parts = []
        num_here = int(np.count_nonzero(self.table.anchor(Tier.DEVICE).present(pages)))
        for group, lacking in zip(self._groups, missing, strict=True):
            if len(lacking):
                at = np.flatnonzero(np.isin(pages, lacking))
                host = self.hosts[group.index].column[lacking].copy()
                assert host.all(), "a page is loaded that is nowhere"
                parts.append(Part(group.index, lacking, at, group.restore(lacking), host))
        move = self._submit(Lane.LOAD, lease, parts)
        if move is not None:
            self._tree.arrive(lease, num_here, len(pages))
            self.table.came(pages[num_here:])
        return move

    def have_copies(self, lease: Lease, first: int, pages: Ids, grafted: int) -> None:
        """Pages of a path from its page `first` on are below the device now, those from `grafted` on and no longer."""
        if not self.table.anchored:
            known = pages[: grafted - first]
            lacking = ~self.table.anchor(Tier.HOST).present(known)
            self.table.came(known[lacking], Tier.HOST)
            self.table.came(pages[grafted - first :], Tier.HOST)
            for place in (first + np.flatnonzero(lacking)).tolist():
                self._tree.copied(lease, place, place + 1)

    def loads_of(self, pages: Ids) -> list[Transfer]:
        """Loads that some of these pages come with."""
        loads = [move for move in self.moving if move.lane is Lane.LOAD]
        if not loads:
            return []
        arriving = [pages[group.table.has(pages, State.ARRIVING)] for group in self._groups]
        return [
            move
            for move in loads
            if any(np.isin(part.pages, arriving[part.group]).any() for part in self.moving[move].parts)
        ]

    # -- what has ended

    def wait(self) -> bool:
        """Wait a little for bytes on their way, which keep pages from going; False where nothing is. What no longer has
        to be waited for has gone."""
        return bool(self.damaged_paths.delete() or self._ended or (self.moving and self.mover.wait(_WAIT_S)))

    def settle(self, fetched: Callable[[Transfer], None]) -> int:
        """Take note of every move that has ended, those of the prefetcher with `fetched`; returns how many did, and how
        many paths were forgotten at last."""
        ended = self._ended + self.mover.finished()
        self._ended = []
        for move in ended:
            self.counters.ended(move)
            self.settings.health.ended(move)
            if move.lane is Lane.FORGET:
                self.deletion.ended(move)
            elif move.lane is Lane.SAVE:
                self._saved(move)
            elif move.lane is Lane.LOAD:
                self._loaded(move)
            elif move.lane is Lane.ARCHIVE:
                self.archiver.ended(move)
            else:
                if move.marked:
                    self.archiver.forget_all()  # of another's flush: what was stored there is not, or not for long
                    self.deletion.found(move.marked)
                fetched(move)
        self.deletion.go_on()
        self._save_the_rest()
        self.archiver.go_on()
        return len(ended) + self.damaged_paths.delete()

    def _saved(self, move: Transfer) -> None:
        moving = self._release(move)
        self._saves_wait = False
        if not move.is_whole or moving.abandoned:
            self.counters.failed_moves += not move.is_whole
            for part in moving.parts:
                self.hosts[part.group].untake(part.host)
            self._holds.release(moving.hold)
            return
        self.break_even.moved(Lane.SAVE, move.moved_bytes, move.seconds)
        self.counters.saved_bytes += move.moved_bytes
        for part in moving.parts:
            self._bind(part, moving.hold.path)
        self.archiver.archive(moving.hold.path.node)
        self._holds.release(moving.hold)

    def _bind(self, part: Part, lease: Lease) -> None:
        """Saved frames count from now on, but for those that the tree has no use for."""
        host = self.hosts[part.group]
        had = host.resident(part.pages)
        host.drop_damaged(part.pages)
        good = ~host.resident(part.pages)
        if host.whole:
            for start, stop in _runs(part.at):
                run = (part.at >= start) & (part.at < stop)
                good[run] &= part.at[run] < self._tree.countable(lease, start, stop)
                host.bind(part.pages[run & good], part.host[run & good])
                for first, last in _runs(part.at[run & good & ~had]) if self.table.is_anchor(host.index) else ():
                    self._tree.copied(lease, first, last)
        else:
            assert part.ranks is not None
            host.bind(part.pages[good], part.host[good], np.maximum(part.ranks, Rank.MARKED)[good])
        if not good.all():
            host.untake(part.host[~good])
        self.archiver.came(part.pages[good])
        self.counters.saved_frames += int(np.count_nonzero(good))

    def _loaded(self, move: Transfer) -> None:
        moving = self._release(move)
        if move.is_whole:
            self.break_even.moved(Lane.LOAD, move.moved_bytes, move.seconds)
            self.counters.loaded_bytes += move.moved_bytes
            self.counters.loaded_frames += sum(len(part.pages) for part in moving.parts)
            self._holds.release(moving.hold)
            return
        self.counters.failed_moves += 1
        bad, places = [], []
        for part, defects in zip(moving.parts, move.defects, strict=True):
            wrong = np.array([defect not in UNDAMAGED for defect in defects], dtype=np.bool_)
            self.counters.corrupt(Tier.HOST, defects)
            self.hosts[part.group].damage(part.pages[wrong])
            here = sum(defect == GOOD for defect in defects)  # the first ones; the device has them
            self.counters.loaded_frames += here
            bad.append(part.pages[here:])
            places += part.at[here:].tolist()
        self.damaged.mark(np.unique(np.concatenate(bad)))
        self.damaged_paths.add(moving.hold.path.node, min(places))
        self._holds.release(moving.hold)

    # -- inside

    def _submit(self, lane: Lane, lease: Lease, parts: list[Part]) -> Transfer | None:
        """Start a transfer. None, and what was taken for it is given back, where too much is on its way."""
        saves = lane is Lane.SAVE
        move = self.move_of(lane, parts, self.names.scope(lease.node.namespace))
        if not self.mover.submit(move):
            self.counters.refused_moves += 1
            for part in parts:
                if saves:
                    self.hosts[part.group].untake(part.host)
                else:
                    self._groups[part.group].frames.drop(part.pages)
            self._tree.release(lease)
            return None
        for part in parts:
            arrives = self.hosts[part.group].table if saves else self._groups[part.group].table
            arrives.mark(part.pages, State.ARRIVING)
        touched = (Tier.DEVICE,) if saves else (Tier.DEVICE, Tier.HOST)
        frames = [HeldFrames(part.group, tier, part.pages) for part in parts for tier in touched]
        hold = self._holds.add(Reason.SAVE if saves else Reason.LOAD, lease=lease, frames=frames)
        self.moving[move] = Moving(hold, parts)
        return move

    def _release(self, move: Transfer) -> Moving:
        """A transfer has ended; its frames may go, its path may not yet."""
        moving = self.moving.pop(move)
        self._holds.change(moving.hold, ())
        for part in moving.parts:
            arrived = self._groups[part.group].table if move.lane is Lane.LOAD else self.hosts[part.group].table
            arrived.unmark(part.pages, State.ARRIVING)
        return moving


def _runs(places: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive places as (first, after the last)."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, cuts) if len(run)]

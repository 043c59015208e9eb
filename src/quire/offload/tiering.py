"""Tiering: which cached pages are where, and when they are moved. One thread, the engine's; bytes are moved by others.

    save      device -> host      when a page is cached, used again, or has to go (`WritePolicy`)
    load      host -> device      when a request begins on it; steps wait for it layer by layer
    archive   host -> storage     after a save, in the order of the prefix (`quire.offload.archiver`)
    fetch     storage -> host     while a request waits (`quire.offload.prefetcher`)

All frames that a page has move together and count together or not at all. What is on its way is pinned: its path in the
tree, and single frames where groups are read in part. A record that is not what it should be is counted, set aside, and
what depended on it is forgotten; whoever waited for it begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.cache.groups import GroupCache
from quire.cache.hold import HeldFrames, Hold, Reason
from quire.cache.offload import CacheParts
from quire.cache.prefix_hit import PrefixHit
from quire.cache.request_kv import RequestKV
from quire.cache.resuming import resume_point
from quire.memory.residency import State
from quire.offload.archiver import Archiver
from quire.offload.below import Below, Moving, Part, worth_saving
from quire.offload.deletion import DamagedPaths
from quire.offload.host_groups import HostGroup
from quire.offload.owed_paths import OwedPaths
from quire.offload.tier_settings import TierSettings, WritePolicy
from quire.prefix.node import Lease, Node, pages_to
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.rank import Rank
from quire.tiers.transfer import GOOD, UNDAMAGED, Lane, Transfer

_MOST_SAVES = 64  # of those that had to wait, begun at a time
_WAIT_S = 0.05  # between looks at a copy that eviction waits for


class Tiering:
    """The tiers of one cache, which has these parts. See the module."""

    def __init__(self, settings: TierSettings, parts: CacheParts) -> None:
        groups, tree = parts.groups, parts.tree
        self.below = below = Below(settings, parts)
        self.settings = settings
        self.mover, self.break_even = below.mover, below.break_even
        self.counters, self.hosts = below.counters, below.hosts
        self.names, self.damaged, self.deletion = below.names, below.damaged, below.deletion
        self._holds = parts.holds
        self.damaged_paths = DamagedPaths(tree, parts.holds, parts.give_back)
        self._groups = groups
        self._tree = tree
        self._forget = parts.give_back
        self._table = parts.frames
        self.moving: dict[Transfer, Moving] = {}
        self._partial = tuple(group for group in groups if not group.reach.whole)
        self._page_size = parts.plan.page_size
        self._on_host = parts.frames.anchor(Tier.HOST)
        self._ended: list[Transfer] = []
        self._unsaved = OwedPaths(tree)  # of which a copy was wanted when too much was on its way
        self._saves_wait = False  # until a save has ended
        self.archiver = Archiver(below, tree, parts.seconds)
        self.fetched: Callable[[Transfer], None] = _nobody

    # -- what was flushed

    def abandon(self, namespace: Namespace | None) -> None:
        """What is on its way of a namespace, or at all, counts for nothing when it arrives."""
        scope = self.names.scope(namespace) if namespace is not None else None
        for moving in self.moving.values():
            moving.abandoned |= scope in (None, moving.scope)

    def forget_stored(self, namespace: Namespace | None) -> None:
        """Have the store delete a namespace, or all that is of this model, behind all that it was given; until it has,
        nothing of that is looked for there."""
        if namespace is None:
            self.archiver.forget_all()
        if self.settings.stores:
            self.deletion.flush(namespace)

    # -- what becomes of prefixes

    def num_fetched(self, pages: Ids) -> int:
        """How many of these came from the store, and were not used since."""
        return int(np.count_nonzero(self._on_host.has(pages, State.FETCHED)))

    def resume_point(self, pages: Ids, *, below: bool) -> tuple[int, str]:
        """As `quire.cache.resuming`, with what the device has or `below` with what the host has, too."""
        return resume_point(self._partial, pages, self.hosts if below else ())

    def is_too_much(self, loads: Sequence[int]) -> bool:
        """Whether to load so many frames, by group, would leave a request no frame to go on in."""
        return any(count >= group.num_frames for group, count in zip(self._groups, loads, strict=True) if count)

    def begun(self, kv: RequestKV, hit: PrefixHit, *, resumed: bool) -> None:
        """A request has begun on this hit."""
        choice, pages = hit.choice, hit.pages
        if not resumed:
            self.counters.host_hit_tokens += (choice.host_pages - choice.storage_pages) * self._page_size
            self.counters.storage_hit_tokens += choice.storage_pages * self._page_size
            self.counters.declined_tokens += choice.declined_pages * self._page_size
        self._on_host.unmark(pages, State.FETCHED)
        if self.settings.write is WritePolicy.SELECTIVE:
            self.save(kv.namespace, kv.lease.node, pages, ends=(len(pages),))

    def committed(self, kv: RequestKV, pages: Ids, start: int, new: int) -> None:
        """Pages of a request are cached: those from `start` on since now, and those from `new` on are its own."""
        if new > start:
            kv.loads += self.loads_of(pages[start:new])
            self.damaged.mend(pages[start:new])
        if self.settings.write is not WritePolicy.SELECTIVE:
            self.save(kv.namespace, kv.lease.node, pages, ends=tuple(kv.marks))

    def finished(self, kv: RequestKV, pages: Ids, *, returns: bool) -> None:
        """A request that ends has left these pages cached. `returns` where it will go on, and will want them."""
        if returns or self.settings.write is not WritePolicy.SELECTIVE:
            self.save(kv.namespace, kv.lease.node, pages, ends=(*kv.marks, len(pages)))
        self.archiver.owe(kv.lease.node)

    def hold(self, pages: Ids, label: str) -> Hold:
        """Keep what device and host have of single frames that a request needs to begin behind `pages`."""
        held = []
        for group in self._partial:
            needed = group.reach.needed(len(pages))
            part = pages[needed.start : needed.stop]
            for tier, column in ((Tier.DEVICE, group.table), (Tier.HOST, self.hosts[group.index].table)):
                held.append(HeldFrames(group.index, tier, part[column.present(part)]))
        return self._holds.add(Reason.BEGIN, frames=held, label=label)

    def wait(self) -> bool:
        """Wait a little for bytes on their way, which keep pages from going; False where nothing is. What nobody needs
        to wait for any more has gone."""
        waiting = len(self.damaged_paths)
        if waiting:
            self.damaged_paths.delete()
        return (
            len(self.damaged_paths) < waiting or bool(self._ended) or (bool(self.moving) and self.mover.wait(_WAIT_S))
        )

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, frames of the host by group, and scopes that the store has still to forget."""
        hosts = {host.name: host.statistics() for host in self.hosts}
        gauges: dict[str, Any] = {"host_pages": self._tree.num_below, "forgetting": len(self.deletion.scopes)}
        gauges |= {"owed_paths": len(self.archiver.owed)}
        health = self.settings.health
        gauges |= {"forget_failures": self.deletion.num_failed, "store_lost": list(health.lost)}
        refused = {link.name: count for link, count in health.refused.items()}
        return {**self.counters.to_dict(), "host": hosts, **gauges, "store_refused": refused}

    @property
    def num_dropped(self) -> int:
        """Changes that make an older hit wrong."""
        return self.damaged.num_marked + sum(host.dropped_frames for host in self.hosts)

    # -- saving

    def save(
        self, namespace: Namespace, node: Node, pages: Ids, *, ends: Sequence[int], first: int = 0, goes: bool = False
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
        wanted = [self._lacks_copies(group, pages, ends) for group in self._groups]
        wanted = [at[at >= first] for at in wanted]
        if self.settings.write is WritePolicy.BACK and not goes:
            wanted = [at[:0] if host.whole else at for at, host in zip(wanted, self.hosts, strict=True)]
        wanted = worth_saving(wanted, self.settings, self._page_size)
        if not any(map(len, wanted)):
            return None
        lease = self._tree.pin(node)
        scope = self.names.scope(namespace)
        parts = []
        rooms = [self.host_room(host, len(at)) for host, at in zip(self.hosts, wanted, strict=True)]
        ends_at = len(pages)  # in groups that are read as a whole: those keep the same pages
        for host, at, room in zip(self.hosts, wanted, rooms, strict=True):
            if host.whole and room < len(at):
                ends_at = min(ends_at, int(at[room]))
        for group, host, at, room in zip(self._groups, self.hosts, wanted, rooms, strict=True):
            taken = at[at < ends_at] if host.whole else at[:room]
            self.counters.unsaved_frames += len(at) - len(taken)
            if len(taken):
                saved = pages[taken]
                ranks = group.table.idle.rank[saved] if group.table.idle is not None else None
                parts.append(Part(group.index, saved, taken, group.frames.column[saved], host.take(len(taken)), ranks))
        if not parts:
            self._tree.release(lease)
            return None
        move = self._submit(Lane.SAVE, lease, parts, scope)
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
            self.save(node.namespace, node, pages_to(node), ends=ends)
            if self.counters.refused_moves > refused:
                return

    def _lacks_copies(self, group: GroupCache, pages: Ids, ends: Sequence[int]) -> np.ndarray:
        """Places of pages with a device frame that the host should have and has not."""
        host = self.hosts[group.index]
        lacks = ~host.good(pages)
        lacks &= ~host.table.has(pages, State.ARRIVING) & ~self.damaged.are(pages)
        lacks &= ~group.table.has(pages, State.ARRIVING)
        lacks &= group.frames.resident(pages)
        if group.table.idle is not None:
            useful: Bools = group.table.idle.rank[pages] >= Rank.MARKED
            for end in ends:
                if end <= len(pages):
                    needed = group.reach.needed(end)
                    useful[needed.start : needed.stop] = True
            lacks &= useful
        places: np.ndarray = lacks.nonzero()[0]
        return places

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
        """Give up copies on the host, of pages that are used by nobody; whether there were any."""
        evicted = self._tree.evict_lower(num_pages, self._left_host)
        num_evicted = len(evicted.removed) + evicted.num_moved
        self.counters.host_evicted_pages += num_evicted
        self._forget(evicted.removed)
        return num_evicted > 0

    def _left_host(self, pages: Ids) -> None:
        """These pages are on the device only."""
        for host in self.hosts:
            host.drop(host.unpinned(pages))
        self._table.went(Tier.HOST, pages)

    @property
    def keeps(self) -> Callable[[Node], int] | None:
        """What makes copies of pages that have to leave the device; None where they are made before, or not."""
        return self.keep if self.settings.write is WritePolicy.BACK else None

    def keep(self, node: Node) -> int:
        """For eviction from the device: copies of an unleased node's pages that have none, as the policy has it."""
        if self.settings.write is WritePolicy.BACK and self._tree.num_copies(node) < node.num_pages:
            pages = pages_to(node)
            self._save_at_once(node, pages, node.depth)
            if self.settings.stores:  # what is above it goes too: what stays on the device for good is never saved else
                self._save_at_once(node, pages, self.archiver.storable(pages))
        return self._tree.num_copies(node)

    def _save_at_once(self, node: Node, pages: Ids, first: int) -> None:
        move = self.save(node.namespace, node, pages, ends=(len(pages),), first=first, goes=True)
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
        self._table.went(Tier.DEVICE, pages)

    def forgotten(self, pages: Ids) -> None:
        """These pages have left the cache, or never were in it."""
        for host in self.hosts:
            host.drop(pages)
        self._table.went(Tier.HOST, pages)
        self.damaged.mend(pages)
        self._unsaved.forgotten(len(pages))
        self.archiver.forgotten(pages)
        self._on_host.unmark(pages, State.FETCHED)

    def stored(self, group: int, pages: Ids) -> None:
        """The frames of these pages in that group have come from the store."""
        self.archiver.stored(group, pages)
        self._on_host.mark(pages, State.FETCHED)

    def not_stored(self, group: int, pages: Ids) -> None:
        """The store does not have the frames of these pages in that group: it is given them when they are here."""
        self.archiver.not_stored(group, pages)

    def owed_to_storage(self, pages: Ids) -> None:
        """These pages, of which a part has come from the store, can be reused now."""
        if self._partial:
            self._on_host.mark(pages, State.FETCHED)

    # -- loading

    def missing(self, pages: Ids) -> list[Ids]:
        """By group, which pages of a path a request that begins behind it reads and the device has not."""
        found = []
        for group in self._groups:
            needed = group.reach.needed(len(pages))
            part = pages[needed.start : needed.stop]
            found.append(part[~group.frames.resident(part)])
        return found

    def load(self, namespace: Namespace, node: Node, pages: Ids, missing: Sequence[Ids]) -> Transfer | None:
        """Bring what the device lacks of a leased path to it; there is room for all of it. None where too much is on
        its way already."""
        lease = self._tree.pin(node)
        parts = []
        num_here = int(np.count_nonzero(self._table.anchor(Tier.DEVICE).present(pages)))
        for group, lacking in zip(self._groups, missing, strict=True):
            if len(lacking):
                at = np.flatnonzero(np.isin(pages, lacking))
                host = self.hosts[group.index].column[lacking].copy()
                assert host.all(), "a page is loaded that is nowhere"
                parts.append(Part(group.index, lacking, at, group.restore(lacking), host))
        move = self._submit(Lane.LOAD, lease, parts, self.names.scope(namespace))
        if move is None:
            return None
        self._tree.arrive(lease, num_here, len(pages))
        self._table.came(pages[num_here:])
        return move

    def is_anchor(self, group: int) -> bool:
        """Whether this group says which pages are on a tier at all."""
        return self._table.is_anchor(group)

    def have_copies(self, lease: Lease, first: int, pages: Ids, grafted: int) -> None:
        """Pages of a path from its page `first` on are below the device now, those from `grafted` on and no longer."""
        if not self._table.anchored:
            known = pages[: grafted - first]
            lacking = ~self._table.anchor(Tier.HOST).present(known)
            self._table.came(known[lacking], Tier.HOST)
            self._table.came(pages[grafted - first :], Tier.HOST)
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

    # -- looking, for audits

    def host_frames_of_moves(self, group: int) -> Ids:
        """Host frames that saves have taken and that are no page's yet."""
        runs = [
            part.host
            for move, moving in self.moving.items()
            if move.lane is Lane.SAVE
            for part in moving.parts
            if part.group == group
        ]
        return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)

    # -- what has ended

    def settle(self) -> int:
        """Take note of every move that has ended; returns how many did, and how many paths were forgotten at last."""
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
                self.fetched(move)
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
        self.archiver.owe(moving.hold.path.node)
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
                for first, last in _runs(part.at[run & good & ~had]) if self._table.is_anchor(host.index) else ():
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
            if wrong.any():
                self.counters.corrupt(Tier.HOST, [defect for defect in defects if defect not in UNDAMAGED])
                self.hosts[part.group].damage(part.pages[wrong])
            here = sum(defect == GOOD for defect in defects)  # the first ones; the device has them
            self.counters.loaded_frames += here
            bad.append(part.pages[here:])
            places += part.at[here:].tolist()
        self.damaged.mark(np.unique(np.concatenate(bad)))
        self.damaged_paths.add(moving.hold.path.node, min(places))
        self._holds.release(moving.hold)

    # -- inside

    def _submit(self, lane: Lane, lease: Lease, parts: list[Part], scope: bytes) -> Transfer | None:
        """Start a transfer. None, and what was taken for it is given back, where too much is on its way."""
        saves = lane is Lane.SAVE
        move = self.below.move_of(lane, parts, scope)
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
        self.moving[move] = Moving(hold, parts, scope)
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


def _nobody(move: Transfer) -> None:
    raise AssertionError("a fetch has ended that nobody asked for")

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
from quire.cache.offload import CacheParts
from quire.cache.prefix_hit import PrefixHit
from quire.cache.request_kv import RequestKV
from quire.cache.resuming import resume_point
from quire.memory.residency import Column
from quire.offload.archiver import NOT_DAMAGED, Archiver
from quire.offload.below import Below
from quire.offload.condemned import Condemned
from quire.offload.forgetting import Stored
from quire.offload.host_groups import HostGroup
from quire.offload.moving import Moving, Part
from quire.offload.owed_paths import OwedPaths
from quire.offload.tier_settings import TierSettings, WritePolicy
from quire.offload.worth_saving import worth_saving
from quire.prefix.node import Lease, Node, pages_to
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.rank import Rank
from quire.tiers.transfer import GOOD, Lane, Transfer

_MOST_SAVES = 64  # of those that had to wait, begun at a time
_WAIT_S = 0.05  # between looks at a copy that eviction waits for


class Tiering:
    """The tiers of one cache, which has these parts. See the module."""

    def __init__(self, settings: TierSettings, parts: CacheParts) -> None:
        groups, tree, num_pages = parts.groups, parts.tree, parts.frames.num_pages
        self.below = below = Below(settings, parts)
        self.settings = settings
        self.mover, self.break_even = below.mover, below.break_even
        self.counters, self.hosts = below.counters, below.hosts
        self.names, self.damaged, self.forgetting = below.names, below.damaged, below.forgetting
        self.condemned = Condemned(tree, parts.give_back)
        self._groups = groups
        self._tree = tree
        self._forget = parts.give_back
        self._flushed_as: dict[Namespace | None, bytes] = {}  # until that is gone: the model may change meanwhile
        self._table = parts.frames
        self.moving: dict[Transfer, Moving] = {}
        self._partial = tuple(group for group in groups if not group.reach.whole)
        self._page_size = parts.plan.page_size
        self._saving = np.zeros((len(groups), num_pages + 1), dtype=np.bool_)
        self._fetched = np.zeros(num_pages + 1, dtype=np.bool_)  # from the store, and not used since
        self._arriving = np.zeros((len(groups), num_pages + 1), dtype=np.int32)  # serial of the load; 0: none
        self._loads: dict[int, Transfer] = {}
        self._serial = 0
        self._ended: list[Transfer] = []
        self._unsaved = OwedPaths(tree)  # of which a copy was wanted when too much was on its way
        self._saves_wait = False  # until a save has ended
        self.archiver = Archiver(below, tree, num_pages, parts.seconds)
        self.fetched: Callable[[Transfer], None] = _nobody

    # -- what was flushed

    def abandon(self, namespace: Namespace | None) -> None:
        """What is on its way of a namespace, or at all, counts for nothing when it arrives."""
        scope = self.names.scope(namespace) if namespace is not None else None
        for moving in self.moving.values():
            moving.abandoned |= scope in (None, moving.scope)

    def forget_stored(self, namespace: Namespace | None) -> None:
        """Have the store forget a namespace, or all that is of this model, behind all that it was given; until it has,
        nothing of that is looked for there."""
        self.abandon(namespace)
        if namespace is None:
            self.archiver.forget_all()
        if self.settings.stores:
            self._flushed_as[namespace] = self._covered(namespace)
            self.forgetting.begin(self._flushed_as[namespace])

    def stored_state(self, namespace: Namespace | None) -> tuple[Stored, bool]:
        """What has become of a flush in storage, and whether that may change soon."""
        if not self.settings.stores:
            return Stored.NONE, False
        scope = self._flushed_as.get(namespace, self._covered(namespace))
        if (state := self.forgetting.state(scope)) is Stored.GONE:
            self._flushed_as.pop(namespace, None)
        return state, self.forgetting.is_tried(scope)

    def _covered(self, namespace: Namespace | None) -> bytes:
        return self.names.edition if namespace is None else self.names.scope(namespace)

    # -- what becomes of prefixes

    def num_fetched(self, pages: Ids) -> int:
        """How many of these came from the store, and were not used since."""
        return int(np.count_nonzero(self._fetched[pages]))

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
        self._fetched[pages] = False
        if self.settings.write is WritePolicy.SELECTIVE:
            self.save(kv.namespace, kv.lease.node, pages, ends=(len(pages),))

    def committed(self, kv: RequestKV, tokens: Ids, pages: Ids, start: int, new: int) -> None:
        """A request's `tokens` are cached in `pages`: from page `start` on since now, from `new` on in pages of its
        own."""
        if new > start:
            kv.loads += self.loads_of(pages[start:new])
            self.damaged.mend(pages[start:new])
        if new < len(pages):
            above = int(pages[new - 1]) if new else 0
            self.names.name(kv.namespace, above, tokens[new * self._page_size :], pages[new:])
        if self.settings.write is not WritePolicy.SELECTIVE:
            self.save(kv.namespace, kv.lease.node, pages, ends=tuple(kv.marks))

    def finished(self, kv: RequestKV, pages: Ids, *, returns: bool) -> None:
        """A request that ends has left these pages cached. `returns` where it will go on, and will want them."""
        if returns or self.settings.write is not WritePolicy.SELECTIVE:
            self.save(kv.namespace, kv.lease.node, pages, ends=(*kv.marks, len(pages)))
        self.archiver.owe(kv.lease.node)

    def hold(self, pages: Ids) -> list[tuple[Column, Ids]]:
        """Keep what device and host have of single frames that a request needs to begin behind `pages`."""
        held = []
        for group in self._partial:
            host, needed = self.hosts[group.index], group.reach.needed(len(pages))
            part = pages[needed.start : needed.stop]
            for column in (group.table, host.table):
                kept = part[column.present(part)]
                if len(kept):
                    column.pin(kept)
                    held.append((column, kept))
        return held

    def let_go(self, held: list[tuple[Column, Ids]]) -> None:
        """Undo `hold`."""
        for column, pages in held:
            column.unpin(pages)

    def wait(self) -> bool:
        """Wait a little for bytes on their way, which keep pages from going; False where nothing is. What nobody needs
        to wait for any more has gone."""
        waiting = len(self.condemned)
        if waiting:
            self.condemned.discard()
        return len(self.condemned) < waiting or bool(self._ended) or (bool(self.moving) and self.mover.wait(_WAIT_S))

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, frames of the host by group, and scopes that the store has still to forget."""
        hosts = {host.name: host.statistics() for host in self.hosts}
        gauges: dict[str, Any] = {"host_pages": self._tree.num_below, "forgetting": len(self.forgetting.scopes)}
        gauges |= {"owed_paths": len(self.archiver.owed)}
        health = self.settings.health
        gauges |= {"forget_failures": self.forgetting.num_failed, "store_lost": list(health.lost)}
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
        moving = Moving(lease, parts, scope, on_device=True, on_host=False)
        if not parts:
            self._tree.release(lease)
            return None
        move = self._submit(Lane.SAVE, moving)
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
        lacks = ~host.resident(pages) | host.is_distrusted(pages)
        lacks &= ~self._saving[group.index, pages] & ~self.damaged.bad[pages]
        lacks &= self._arriving[group.index, pages] == 0
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
        self._fetched[pages] = False

    def stored(self, group: int, pages: Ids) -> None:
        """The frames of these pages in that group have come from the store."""
        self.archiver.stored(group, pages)
        self._fetched[pages] = True

    def not_stored(self, group: int, pages: Ids) -> None:
        """The store does not have the frames of these pages in that group: it is given them when they are here."""
        self.archiver.not_stored(group, pages)

    def owed_to_storage(self, pages: Ids) -> None:
        """These pages, of which a part has come from the store, can be reused now."""
        if self._partial:
            self._fetched[pages] = True

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
        moving = Moving(lease, parts, self.names.scope(namespace), on_device=True, on_host=True)
        move = self._submit(Lane.LOAD, moving)
        if move is None:
            return None
        self._serial += 1
        moving.serial = self._serial
        self._loads[self._serial] = move
        for part in parts:
            self._arriving[part.group, part.pages] = self._serial
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
        if not self._loads:
            return []
        return [self._loads[serial] for serial in np.unique(self._arriving[:, pages]).tolist() if serial]

    # -- looking, for audits

    def leases(self) -> list[Lease]:
        """What moves, and what is to be forgotten, hold of the tree."""
        return [moving.lease for moving in self.moving.values()] + [lease for lease, _ in self.condemned.paths]

    def readers(self, group: int, tier: Tier) -> Ids:
        """Pages of a group that is read in part, once for each move that touches their frames in that tier."""
        runs = [
            part.pages
            for moving in self.moving.values()
            if (moving.on_device if tier is Tier.DEVICE else moving.on_host)
            for part in moving.parts
            if part.group == group
        ]
        return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)

    def host_frames_of_moves(self, group: int) -> Ids:
        """Host frames that saves have taken and that are no page's yet."""
        runs = [
            part.host
            for moving in self.moving.values()
            if not moving.on_host
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
                self.forgetting.ended(move)
            elif move.lane is Lane.SAVE:
                self._saved(move)
            elif move.lane is Lane.LOAD:
                self._loaded(move)
            elif move.lane is Lane.ARCHIVE:
                self.archiver.ended(move)
            else:
                if move.marked:
                    self.archiver.forget_all()  # of another's flush: what was stored there is not, or not for long
                    self.forgetting.found(move.marked)
                self.fetched(move)
        self.forgetting.go_on()
        self._save_the_rest()
        self.archiver.go_on()
        return len(ended) + self.condemned.discard()

    def _saved(self, move: Transfer) -> None:
        moving = self._release(move)
        self._saves_wait = False
        for part in moving.parts:
            self._saving[part.group, part.pages] = False
        if not move.is_whole or moving.abandoned:
            self.counters.failed_moves += not move.is_whole
            for part in moving.parts:
                self.hosts[part.group].untake(part.host)
            self._tree.release(moving.lease)
            return
        self.break_even.moved(Lane.SAVE, move.moved_bytes, move.seconds)
        self.counters.saved_bytes += move.moved_bytes
        for part in moving.parts:
            self._bind(part, moving.lease)
        self.archiver.owe(moving.lease.node)
        self._tree.release(moving.lease)

    def _bind(self, part: Part, lease: Lease) -> None:
        """Saved frames count from now on, but for those that the tree has no use for."""
        host = self.hosts[part.group]
        had = host.resident(part.pages)
        host.let_go(part.pages)
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
        del self._loads[moving.serial]
        for part in moving.parts:
            self._arriving[part.group, part.pages] = 0
        if move.is_whole:
            self.break_even.moved(Lane.LOAD, move.moved_bytes, move.seconds)
            self.counters.loaded_bytes += move.moved_bytes
            self.counters.loaded_frames += sum(len(part.pages) for part in moving.parts)
            self._tree.release(moving.lease)
            return
        self.counters.failed_moves += 1
        bad, places = [], []
        for part, defects in zip(moving.parts, move.defects, strict=True):
            wrong = np.array([defect not in NOT_DAMAGED for defect in defects], dtype=np.bool_)
            if wrong.any():
                self.counters.corrupt(Tier.HOST, [defect for defect in defects if defect not in NOT_DAMAGED])
                self.hosts[part.group].distrust(part.pages[wrong])
            here = sum(defect == GOOD for defect in defects)  # the first ones; the device has them
            self.counters.loaded_frames += here
            bad.append(part.pages[here:])
            places += part.at[here:].tolist()
        self.damaged.mark(np.unique(np.concatenate(bad)))
        self.condemned.add(moving.lease.node, min(places))
        self._tree.release(moving.lease)

    # -- inside

    def _submit(self, link: Lane, moving: Moving) -> Transfer | None:
        """Start a move. None, and what was taken for it is given back, where too much is on its way."""
        move = self.below.move_of(link, moving.parts, moving.scope)
        if not self.mover.submit(move):
            self.counters.refused_moves += 1
            for part in moving.parts:
                if link is Lane.SAVE:
                    self.hosts[part.group].untake(part.host)
                else:
                    self._groups[part.group].frames.drop(part.pages)
            self._tree.release(moving.lease)
            return None
        if link is Lane.SAVE:
            for part in moving.parts:
                self._saving[part.group, part.pages] = True
        moving.pin(self._groups, self.hosts)
        self.moving[move] = moving
        return move

    def _release(self, move: Transfer) -> Moving:
        """A move has ended; its frames may go, its path may not yet."""
        moving = self.moving.pop(move)
        moving.unpin(self._groups, self.hosts)
        return moving


def _runs(places: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive places as (first, after the last)."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, cuts) if len(run)]


def _nobody(move: Transfer) -> None:
    raise AssertionError("a fetch has ended that nobody asked for")

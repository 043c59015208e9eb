"""Tiering: which tiers have a cached page, and when its frames move. It runs on the engine's thread; a mover copies.

    save      device -> host      when a page is cached, used again, or evicted (`WritePolicy`)
    load      host -> device      when a request begins on it; steps wait for it
    archive   host -> store       after a save, ancestors first (`quire.offload.archiver`)
    fetch     store -> host       while a request waits (`quire.offload.prefetcher`)

All frames of a page move together. A transfer holds its path, and its frames in groups that are read in part. A damaged
record is counted and quarantined, and the pages after it are deleted; a request that waited for it begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from quire.cache.hold import HeldFrames, Hold, Reason
from quire.cache.offload import CacheParts
from quire.cache.states import GroupCache
from quire.counters import Section, counter, gauge, labelled
from quire.memory.allocator.host import HostTokenToKVPoolAllocator
from quire.memory.residency import State
from quire.offload.archiver import Archiver, PendingPaths, transfer_of
from quire.offload.deletion import StoreDeletion
from quire.offload.host_groups import GroupPages, HostFrameCounts, HostGroup, PageIdGroup
from quire.offload.tier_settings import TierCounters, TierSettings
from quire.prefix.node import Lease, Node, pages_to
from quire.settings.fields import WritePolicy
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.rank import Rank
from quire.tiers.transfer import GOOD, UNDAMAGED, Lane, Transfer

TRIAL_BYTES: Final = 16 << 20  # the most of a save that measures the speed of saving
_MOST_SAVES = 64  # pending saves started at a time
_WAIT_S = 0.05


@dataclass(slots=True, eq=False)
class Moving:
    """A save or load in flight. `hold` holds its path, and its frames in groups that are read in part."""

    hold: Hold
    parts: list[GroupPages]
    cancelled: bool = False  # flushed meanwhile: its pages are dropped when they arrive


@dataclass(frozen=True, kw_only=True)
class TierGauges:
    """Beside `TierCounters`: the state of host memory and of the store."""

    host: dict[str, HostFrameCounts] = labelled("group", HostFrameCounts)
    host_pages: int = 0
    scopes_to_delete: int = 0
    pending_paths: int = gauge(
        "Cached prefixes of which something is on its way to storage or has to wait.", name="tier_pending_paths"
    )
    failed_deletions: int = 0
    store_lost: list[str] = gauge(
        "1 while the store has answered nothing for some moves in a row.",
        "kind",
        start=list,
        name="store_lost",
        known=("read", "write"),
    )
    store_refused: dict[str, int] = counter(
        "Records of which the store could say nothing now.", "link", start=dict, name="tier_unanswered_records"
    )


class Tiering:
    """The tiers of the cache that has these parts. `hosts` has the host frames of each group. See the module."""

    def __init__(self, settings: TierSettings, parts: CacheParts) -> None:
        self.settings = settings
        self.mover = settings.mover
        self.break_even = settings.break_even
        self.table = parts.frames
        self.on_host = parts.frames.anchor(Tier.HOST)
        self.names = parts.tree.names
        self.damaged = parts.damaged
        self.counters = TierCounters()
        self.hosts = tuple(_host_group(parts, settings, group) for group in parts.groups)
        self.deletion = StoreDeletion(settings.mover, self.names, parts.seconds)
        self.archiver = Archiver(settings, parts, self.hosts, self.counters, self.deletion)
        self.moving: dict[Transfer, Moving] = {}
        self.damaged_paths: list[tuple[Hold, int]] = []  # and the first page of each to delete
        self._tree = parts.tree
        if settings.write is WritePolicy.BACK:
            parts.tree.compare_copies()
        self._holds = parts.holds
        self._groups = parts.groups
        self._free = parts.free
        self._rooms = parts.rooms
        parts.fixed.append(self._in_transfer)
        self._page_size = parts.plan.page_size
        self._ended: list[Transfer] = []
        self._unsaved = PendingPaths(parts.tree)  # paths whose save the lane refused
        self._saves_wait = False  # until a save has ended

    def _in_transfer(self, group: int) -> list[Ids]:
        """Device frames of a group that transfers read or write."""
        return [part.device for moving in self.moving.values() for part in moving.parts if part.group == group]

    def cancel(self, namespace: Namespace | None) -> None:
        """Drop the pages of saves and loads in flight, of a namespace or all (None), when they arrive."""
        for moving in self.moving.values():
            moving.cancelled |= namespace in (None, moving.hold.path.node.namespace)

    def delete_stored(self, namespace: Namespace | None) -> None:
        """Delete a namespace, or all (None), in the store after pending archives. No lookup finds it meanwhile."""
        if self.settings.stores:
            self.deletion.flush(namespace)

    def missing(self, pages: Ids) -> list[Ids]:
        """Pages of each group that a request reads if it begins after this path, and that the device lacks."""
        needed = [group.needed_pages(pages) for group in self._groups]
        return [part[~group.table.present(part)] for group, part in zip(self._groups, needed, strict=True)]

    def is_too_much(self, loads: Iterable[int]) -> bool:
        """Whether loading so many frames, by group, would leave a request too few to continue in, with its drafts."""
        counts = [n + group.needs(1, 0) for group, n in zip(self._groups, loads, strict=True)]
        return any(room.lack(counts) > 0 for room in self._rooms)

    def copied_bytes(self, counts: Iterable[int]) -> int:
        """Bytes that are copied between device and host for so many pages, by group."""
        return sum(count * host.copied_bytes for count, host in zip(counts, self.hosts, strict=True))

    def _num_copied(self, part: GroupPages, num_frames: int) -> int:
        return num_frames if self.hosts[part.group].copied_bytes else 0

    @property
    def num_read_ids(self) -> int:
        """Page ids that cannot be allocated again at once when their pages are evicted."""
        return sum(host.num_read_ids for host in self.hosts)

    @property
    def num_dropped(self) -> int:
        """A version: hits from before its last change may be wrong."""
        return self.damaged.num_marked + sum(host.dropped_frames for host in self.hosts)

    def sections(self) -> list[Section]:
        """Counters, and gauges now."""
        health = self.settings.health
        gauges = TierGauges(
            host={host.name: host.counters() for host in self.hosts},
            host_pages=self._tree.num_below,
            scopes_to_delete=len(self.deletion.scopes),
            pending_paths=len(self.archiver.pending),
            failed_deletions=self.deletion.num_failed,
            store_lost=list(health.lost),
            store_refused={lane.name: count for lane, count in health.refused.items()},
        )
        return [("tiers", self.counters), ("tiers", gauges)]

    # -- saving

    def save(
        self, node: Node, pages: Ids, ends: Sequence[int], *, first: int = 0, evicts: bool = False, label: str = ""
    ) -> Transfer | None:
        """Save the pages of a path from page `first` on that the host lacks. If there is no room, the last ones are not
        saved. `ends` are numbers of pages after which requests may begin: frames that they read in part are saved too.
        If the caller `evicts` the path from the device, it is saved under every `WritePolicy`. The request that needs
        the room is named by its `label`.
        """
        if not len(pages):
            return None
        if self._saves_wait and not evicts:
            self._unsaved.add(node, ends)
            return None
        later = self.settings.write is WritePolicy.BACK and not evicts
        wanted = []
        for group, host in zip(self._groups, self.hosts, strict=True):
            at = self._lacks_copies(group, pages, ends)
            wanted.append(at[:0] if later and host.whole else at[at >= first])
        wanted = worth_saving(wanted, self.copied_bytes(map(len, wanted)), self.settings, self._page_size)
        if not any(map(len, wanted)):
            return None
        lease = self._tree.pin(node)
        fits = [
            at[: host.num_savable(len(at), partial(self.host_room, host, label=label))]
            for host, at in zip(self.hosts, wanted, strict=True)
        ]
        both = [(at, len(fit)) for at, fit, host in zip(wanted, fits, self.hosts, strict=True) if host.whole]
        cuts = [at[num_fit] for at, num_fit in both if num_fit < len(at)]
        end = min(cuts, default=len(pages))  # all groups that are read whole save the same pages
        parts = []
        for group, host, fit in zip(self._groups, self.hosts, fits, strict=True):
            taken = fit[fit < end] if host.whole else fit
            if len(taken):
                saved, frames = pages[taken], host.take_for(pages[taken])
                ranks = group.table.rank[saved] if group.table.reclaims else None
                parts.append(GroupPages(group.index, saved, taken, group.table.frame[saved], frames, ranks))
        self.counters.unsaved_frames += sum(map(len, wanted)) - sum(len(part.pages) for part in parts)
        if not parts:
            self._tree.release(lease)
            return None
        move = self._submit(Lane.SAVE, lease, parts)
        if move is None and not evicts:
            self._saves_wait = bool(self.moving)
            self._unsaved.add(node, ends)
        return move

    def _save_the_rest(self) -> None:
        if self._saves_wait:
            return
        refused = self.counters.refused_moves
        for key, node, ends in self._unsaved.first(_MOST_SAVES):
            self._unsaved.remove(key)
            self.save(node, pages_to(node), ends=ends)
            if self.counters.refused_moves > refused:
                return

    def _lacks_copies(self, group: GroupCache, pages: Ids, ends: Sequence[int]) -> np.ndarray:
        """Places of pages with a device frame that the host lacks and should have."""
        host = self.hosts[group.index]
        lacks = group.table.present(pages) & ~host.good(pages) & ~self.damaged.are(pages)
        lacks &= ~host.table.has(pages, State.ARRIVING) & ~group.table.has(pages, State.ARRIVING)
        if group.table.reclaims:
            useful: Bools = group.table.rank[pages] >= Rank.MARKED
            for end in ends:
                if end <= len(pages):
                    needed = group.reach.needed(end)
                    useful[needed.start : needed.stop] = True
            lacks &= useful
        return np.flatnonzero(lacks)

    def host_room(self, host: HostGroup, wanted: int, label: str = "") -> int:
        """Make room for host frames, and return how many of the `wanted` ones are free."""
        short = wanted - host.num_free
        if short > 0:
            self.archiver.go_on(urgent=True)
            evict: Callable[[int], object] = partial(self.evict_host, label=label) if host.whole else host.evict
            evict(short)
        return min(wanted, host.num_free)

    def evict_host(self, num_pages: int, label: str = "") -> bool:
        """Evict host copies of up to so many unused pages; returns whether there were any."""
        evicted = self._tree.evict_lower(num_pages, self._leave_host, label)
        num_evicted = len(evicted.removed) + evicted.num_moved
        self.counters.host_evicted_pages += num_evicted
        self._free(evicted.removed)
        return num_evicted > 0

    def _leave_host(self, pages: Ids) -> None:
        for host in self.hosts:
            host.drop(host.unpinned(pages))
        self.table.remove_pages(Tier.HOST, pages)

    def write_back(self, node: Node) -> int:
        """Before eviction: save the pages of an unleased node, and return how many first ones have copies now."""
        if self._tree.num_copies(node) < node.num_pages:
            pages = pages_to(node)
            self._save_now(node, pages, node.depth)
            if self.settings.stores:  # ancestors too: those that always stay on the device would never be stored
                self._save_now(node, pages, self.archiver.storable(pages))
        return self._tree.num_copies(node)

    def _save_now(self, node: Node, pages: Ids, first: int) -> None:
        move = self.save(node, pages, ends=(len(pages),), first=first, evicts=True)
        if move is not None:
            self.mover.complete(move)
            self._ended += self.mover.finished()
            self._ended.remove(move)
            self.counters.links[move.lane.name].add(move)
            self._saved(move)

    def leave_device(self, pages: Ids) -> None:
        """Free the device frames of these pages, which are on the host."""
        self.counters.demoted_pages += len(pages)
        for group in self._groups:
            group.frames.drop(pages)
        self.table.remove_pages(Tier.DEVICE, pages)

    def removed(self, pages: Ids) -> Ids:
        """These pages have left the cache, or were never in it. Returns those whose ids can be allocated again."""
        for host in self.hosts:
            host.drop(pages)
        self.table.remove_pages(Tier.HOST, pages)
        self.damaged.mend(pages)
        self._unsaved.removed(len(pages))
        self.archiver.removed(pages)
        self.on_host.unmark(pages, State.FETCHED)
        for host in self.hosts:
            pages = host.free_ids(pages)
        return pages

    # -- reading for peers

    def read(self, namespace: Namespace, tokens: Ids, places: Sequence[Ids]) -> list[Ids] | None:
        """Host frames of a prompt's pages, by group, which stay until `end_reading`. None: a page lacks one."""
        pages, found = self._tree.match(namespace, tokens).pages, []
        for host, at in zip(self.hosts, places, strict=True):
            if (len(at) and int(at.max()) >= len(pages)) or not host.good(pages[at]).all():
                return None
            found.append(host.table.frame[pages[at]])
        for host, frames in zip(self.hosts, found, strict=True):
            host.begin_reading(frames)
        return found

    def is_saving(self, namespace: Namespace, tokens: Ids, places: Sequence[Ids]) -> bool:
        """Whether saves of some of these pages of a prompt, by group, are in flight, or any saves wait for others."""
        pages = self._tree.match(namespace, tokens).pages
        arriving = [
            host.table.has(pages[at[at < len(pages)]], State.ARRIVING).any()
            for host, at in zip(self.hosts, places, strict=True)
        ]
        return self._saves_wait or any(arriving)

    def save_prompt(self, namespace: Namespace, tokens: Ids) -> bool:
        """Save what is cached of a prompt and lacks host copies; returns whether a save has begun."""
        found = self._tree.match(namespace, tokens)
        if not found.num_here:
            return False
        lease = self._tree.pin_path(found, found.num_here)
        begun = self.save(lease.node, pages_to(lease.node), ends=(found.num_here,)) is not None
        self._tree.release(lease)
        return begun

    def end_reading(self, frames: Sequence[Ids]) -> None:
        """Nothing reads these frames, which `read` returned, any more."""
        for host, each in zip(self.hosts, frames, strict=True):
            host.end_reading(each)

    # -- loading

    def load(self, node: Node, pages: Ids, missing: Sequence[Ids]) -> Transfer | None:
        """Load the `missing` pages, by group, of a leased path; there is room. Returns None if the lane refuses."""
        lease = self._tree.pin(node)
        parts = []
        num_here = int(np.count_nonzero(self.table.anchor(Tier.DEVICE).present(pages)))
        for group, lacking in zip(self._groups, missing, strict=True):
            if len(lacking):
                at = np.flatnonzero(np.isin(pages, lacking))
                host = self.hosts[group.index].table.frame[lacking].copy()
                assert host.all(), "a page is loaded that is nowhere"
                parts.append(GroupPages(group.index, lacking, at, group.restore(lacking), host))
        move = self._submit(Lane.LOAD, lease, parts)
        if move is not None:
            self._tree.arrive(lease, num_here, len(pages))
            self.table.add_pages(pages[num_here:])
        return move

    def check_records(self, node: Node, pages: Ids) -> None:
        """Check the records of pages of a leased path that came to the device without a load, as a load does."""
        for group in self._groups:
            unchecked = group.frames.take_unchecked()
            if not len(unchecked):
                continue
            at = np.flatnonzero(np.isin(pages, unchecked))
            part = GroupPages(group.index, pages[at], at, pages[at], pages[at])
            if self._submit(Lane.LOAD, self._tree.pin(node), [part]) is None:
                group.restore(part.pages)
                self._damaged_at(node, part.pages)

    def _damaged_at(self, node: Node, pages: Ids) -> None:
        """Records of these pages of a path are damaged, and there are no other copies."""
        found = np.flatnonzero(np.isin(pages_to(node), pages))
        if len(found):
            self.damaged.mark(pages)
            self._delete_later(node, int(found[0]))

    def have_copies(self, lease: Lease, first: int, pages: Ids, new: int) -> None:
        """Pages of a path from page `first` on are on lower tiers now; those from page `new` on are new to it."""
        if self.table.anchor_group is None:
            lacking = ~self.on_host.present(pages)
            self.table.add_pages(pages[lacking], Tier.HOST)
            self.copied(lease, first + np.flatnonzero(lacking[: new - first]))

    def copied(self, lease: Lease, places: np.ndarray) -> None:
        """Tell the tree that pages at these places of a path, ascending, have host copies now."""
        for first, last in _runs(places):
            self._tree.copied(lease, first, last)

    def loads_of(self, pages: Ids) -> list[Transfer]:
        """Loads in flight of some of these pages."""
        loads = [(move, moving.parts) for move, moving in self.moving.items() if move.lane is Lane.LOAD]
        if not loads:
            return []
        arriving = [pages[group.table.has(pages, State.ARRIVING)] for group in self._groups]
        return [m for m, parts in loads if any(np.isin(part.pages, arriving[part.group]).any() for part in parts)]

    # -- what has ended

    def wait(self) -> bool:
        """Wait a little for a transfer that prevents eviction, or delete damaged paths; False if there are none."""
        is_moving = self.moving or self.num_read_ids
        return bool(self._delete_damaged() or self._ended or (is_moving and self.mover.wait(_WAIT_S)))

    def settle(self, fetched: Callable[[Transfer], None]) -> int:
        """Process ended transfers; `fetched` gets those of the prefetcher. Returns how many, with deleted paths."""
        ended = self._ended + self.mover.finished()
        self._ended = []
        for move in ended:
            self.counters.links[move.lane.name].add(move)
            self.settings.health.ended(move)
            if move.lane is Lane.DELETE:
                self.deletion.ended(move)
            elif move.lane is Lane.SAVE:
                self._saved(move)
            elif move.lane is Lane.LOAD:
                self._loaded(move)
            elif move.lane is Lane.ARCHIVE:
                for node, pages in self.archiver.ended(move):
                    self._damaged_at(node, pages)
            else:
                fetched(move)
        self.deletion.go_on()
        self._save_the_rest()
        self.archiver.go_on()
        return len(ended) + self._delete_damaged()

    def _saved(self, move: Transfer) -> None:
        moving = self._release(move)
        self._saves_wait = False
        if move.is_whole and not moving.cancelled:
            self.break_even.moved(Lane.SAVE, move.moved_bytes, move.seconds)
            self.counters.saved_bytes += move.moved_bytes
            for part in moving.parts:
                bound = self.bind(part, moving.hold.path)
                self.counters.saved_frames += self._num_copied(part, len(bound))
            self.archiver.archive(moving.hold.path.node)
        else:
            self.counters.failed_moves += not move.is_whole
            for part in moving.parts:
                self.hosts[part.group].untake_for(part.host)
        self._holds.release(moving.hold)

    def bind(self, part: GroupPages, lease: Lease, new: int | None = None) -> Ids:
        """Bind host frames to pages of a path that lack good ones, except those that the tree cannot count as copies.
        Returns these pages, and frees the other frames. The tree has counted copies of pages from `new` on already."""
        host = self.hosts[part.group]
        had = host.table.present(part.pages)
        host.drop(host.unpinned(part.pages[host.table.has(part.pages, State.DAMAGED)]))
        good = ~host.table.present(part.pages)
        for start, stop in _runs(part.at) if host.whole else ():
            run = (part.at >= start) & (part.at < stop)
            good[run] &= part.at[run] < self._tree.countable(lease, start, stop)
            host.bind(part.pages[run & good], part.host[run & good])
            if self.table.anchor_group == host.index:
                uncounted = run & good & ~had
                self.copied(lease, part.at[uncounted if new is None else uncounted & (part.at < new)])
        if not host.whole:
            assert part.ranks is not None
            host.bind(part.pages[good], part.host[good], np.maximum(part.ranks, Rank.MARKED)[good])
        host.untake_for(part.host[~good])
        self.archiver.saved(part.pages[good])
        return part.pages[good]

    def _loaded(self, move: Transfer) -> None:
        moving = self._release(move)
        if move.is_whole:
            self.break_even.moved(Lane.LOAD, move.moved_bytes, move.seconds)
            self.counters.loaded_bytes += move.moved_bytes
            self.counters.loaded_frames += sum(self._num_copied(part, len(part.pages)) for part in moving.parts)
            self._holds.release(moving.hold)
            return
        self.counters.failed_moves += 1
        bad, places = [], []
        for part, defects in zip(moving.parts, move.defects, strict=True):
            wrong = np.array([defect not in UNDAMAGED for defect in defects], dtype=np.bool_)
            self.counters.corrupt("host", defects)
            self.hosts[part.group].damage(part.pages[wrong])
            here = sum(defect == GOOD for defect in defects)  # the first ones, which are on the device
            self.counters.loaded_frames += self._num_copied(part, here)
            bad.append(part.pages[here:])
            places += part.at[here:].tolist()
        self.damaged.mark(np.unique(np.concatenate(bad)))
        self._delete_later(moving.hold.path.node, min(places))
        self._holds.release(moving.hold)

    def _delete_later(self, node: Node, first: int) -> None:
        """Delete the path to a node from its page `first` on, as soon as nothing else holds it."""
        self.damaged_paths.append((self._holds.add(Reason.DAMAGE, lease=self._tree.pin(node)), first))

    def _delete_damaged(self) -> int:
        """Delete damaged paths that nothing else holds, and return their number."""
        waiting = [(hold.path.node, first) for hold, first in self.damaged_paths]
        for hold, _ in self.damaged_paths:  # all first: paths with common pages must not hold each other
            self._holds.release(hold)
        self.damaged_paths = []
        for end, first in waiting:
            node = end
            while node.depth > first and node.parent is not None:
                node = node.parent
            if node.parent is None or node.depth + node.num_pages <= first:
                continue  # deleted with another path
            pages = self._tree.discard(node, first - node.depth)
            if pages is None:
                self._delete_later(end, first)
            else:
                self._free(pages)
        return len(waiting) - len(self.damaged_paths)

    # -- inside

    def _submit(self, lane: Lane, lease: Lease, parts: list[GroupPages]) -> Transfer | None:
        """Start a transfer. Returns None, with its frames freed, if the lane refuses."""
        saves = lane is Lane.SAVE
        move = transfer_of(lane, parts, self.names.scope(lease.node.namespace), self.names, self.hosts)
        if not self.mover.submit(move):
            self.counters.refused_moves += 1
            for part in parts:
                if saves:
                    self.hosts[part.group].untake_for(part.host)
                else:
                    self._groups[part.group].frames.drop(part.pages)
            self._tree.release(lease)
            return None
        for part in parts:
            self.table.of(Tier.HOST if saves else Tier.DEVICE, part.group).mark(part.pages, State.ARRIVING)
        tiers = (Tier.DEVICE,) if saves else (Tier.DEVICE, Tier.HOST)
        frames = [HeldFrames(part.group, tier, part.pages) for part in parts for tier in tiers]
        self.moving[move] = Moving(self._holds.add(Reason.SAVE if saves else Reason.LOAD, frames, lease=lease), parts)
        return move

    def _release(self, move: Transfer) -> Moving:
        """A transfer has ended: unpin its frames, but still hold its path."""
        moving = self.moving.pop(move)
        self._holds.change(moving.hold, ())
        tier = Tier.DEVICE if move.lane is Lane.LOAD else Tier.HOST
        for part in moving.parts:
            self.table.of(tier, part.group).unmark(part.pages, State.ARRIVING)
        return moving


def _host_group(parts: CacheParts, settings: TierSettings, group: GroupCache) -> HostGroup:
    index, table, size = group.index, parts.frames.of(Tier.HOST, group.index), parts.plan.page_size
    num_frames, record_bytes = settings.host_frames[index], settings.record_bytes[index]
    if not group.frames.are_page_ids:
        allocator = HostTokenToKVPoolAllocator(num_frames * size, size, name=table.name)
        return HostGroup(index, table, allocator, record_bytes)
    assert isinstance(parts.pages, HostTokenToKVPoolAllocator) and num_frames == parts.pages.num_pages
    return PageIdGroup(index, table, parts.pages, record_bytes, num_frames - parts.plan.num_pages)


def _runs(places: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive places as (first, after the last)."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, cuts) if len(run)]


def worth_saving(
    places: Sequence[np.ndarray], num_bytes: int, settings: TierSettings, page_size: int
) -> list[np.ndarray]:
    """The places of a path, by group, to copy to the host, which are `num_bytes`: all if loading them, as slow as
    saving, is faster than computing them, or if a store needs them; the first few if the speed is unknown."""
    if settings.always or settings.stores:
        return list(places)
    even, most = settings.break_even, max(map(len, places))
    if not num_bytes or not even.decide(Lane.SAVE, most * page_size, num_bytes):
        most = 0
    elif not even.is_measured(Lane.SAVE):
        most = 0 if settings.mover.in_flight(Lane.SAVE) else max(1, most * TRIAL_BYTES // num_bytes)
    return [at[:most] for at in places]

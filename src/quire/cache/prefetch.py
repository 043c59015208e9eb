"""Prefetcher: pages of waiting requests come from storage to the host, so that they are there when their turn comes.

    look      what of the prompt is stored and nowhere else, and how far a request could begin with it (`Sought`)
    fetch     that, in pieces in the order of the prompt; each piece counts as soon as it is whole and checked
    stop      when computing would have been quicker, or the policy has enough; what has come is kept

A piece that is damaged, or gone meanwhile, ends it there, or where a request can begin without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.groups import NO_PAGES, GroupCache
from quire.cache.host_groups import HostGroup
from quire.cache.sought import Places, Sought
from quire.cache.tier_settings import PrefetchPolicy
from quire.cache.tiering import Tiering
from quire.errors import OutOfPages
from quire.memory.allocator import BaseTokenToKVPoolAllocator
from quire.prefix.hashing import chain_pages
from quire.prefix.node import Lease
from quire.prefix.shelf import Rank
from quire.prefix.tiered import TieredRadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier
from quire.tiers.moves import FAILED, GOOD, MISSING, REFUSED, Link, Move, Units

_PIECE_BYTES = 8 << 20
_LEAST_PATIENCE = 0.02
"""Of the time that a prompt takes to compute, what its request waits to hear whether any of it is stored; more where
that was often the case: waiting must not cost what it seldom brings."""
_LEARNS = 0.2
_MOST_AT_ONCE = 16
"""Requests that read ahead: each keeps the prefix that it has already, which others could not use then."""


class Prefetch:
    """What one request waits for. Behind `start` pages of its prompt it could begin when it asked, behind `wanted` it
    is to, and all that it needs up to `limit` has come; `stop_at` is when waiting stops being worth it."""

    __slots__ = (
        "abandoned",
        "done",
        "fetching",
        "held",
        "holds",
        "last",
        "lease",
        "limit",
        "move",
        "name",
        "namespace",
        "num_waiting",
        "since",
        "sought",
        "start",
        "stop_at",
        "stopped",
        "tokens",
        "wanted",
    )

    def __init__(self, namespace: Namespace, tokens: Ids, name: bytes, sought: Sought, lease: Lease) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.name = name  # the key of the first page that is in no tier here, or of the last page
        self.sought = sought
        self.start = self.limit = self.wanted = sought.start
        self.lease = lease
        self.held: list[tuple[HostGroup, Ids]] = []  # pages whose host frames it counts on, in groups read in part
        self.move: Move | None = None
        self.fetching: list[tuple[int, Places, Ids]] = []  # (group, places on the path, host frames) of the piece
        self.last = self.start  # the page behind that piece
        self.since = self.stop_at = 0.0
        self.done = self.stopped = self.abandoned = False
        self.holds = True  # the path of its lease, and those frames
        self.num_waiting = 1  # requests, which begin with the same pages

    def leads_on(self, tokens: Ids) -> bool:
        """Whether a request that waited for it may find more, now that it has ended: where it brought something, or its
        own prompt ends elsewhere than that request's."""
        if self.num_waiting < 2 or not self.done:
            return False
        return self.limit > self.start or (self.sought.branches() and not np.array_equal(tokens, self.tokens))


class Prefetcher:
    """Reads ahead for one cache. `pages` hands out page ids."""

    def __init__(
        self,
        tiering: Tiering,
        tree: TieredRadixCache,
        groups: Sequence[GroupCache],
        pages: BaseTokenToKVPoolAllocator,
        seconds: Callable[[], float],
    ) -> None:
        self._tiering = tiering
        self._tree = tree
        self._groups = groups
        self._pages = pages
        self._seconds = seconds
        self._size = pages.page_size
        self._record_bytes = tiering.settings.record_bytes
        self._found = 0.5  # of the tokens that the last requests asked for, the share that was stored
        self._running: dict[Move, Prefetch] = {}
        self._named: dict[bytes, Prefetch] = {}
        tiering.fetched = self._ended

    @property
    def has_room(self) -> bool:
        """Whether another request may read ahead now."""
        return len(self._running) < _MOST_AT_ONCE

    @property
    def in_flight(self) -> tuple[Prefetch, ...]:
        """Those that have not ended."""
        return tuple(self._running.values())

    def leases(self) -> list[Lease]:
        """What it holds of the tree."""
        return [prefetch.lease for prefetch in self._running.values() if prefetch.holds]

    def host_frames(self, group: int) -> Ids:
        """Host frames that pieces on their way have taken."""
        runs = [frames for each in self._running.values() for at, _, frames in each.fetching if at == group]
        return np.concatenate(runs) if runs else NO_PAGES

    def readers(self, group: int) -> Ids:
        """Pages of a group that is read in part, once for each that keeps their host frames."""
        host = self._tiering.hosts[group]
        runs = [pages for each in self._running.values() for holder, pages in each.held if holder is host]
        return np.concatenate(runs) if runs else NO_PAGES

    def begin(self, tokens: Ids, namespace: Namespace) -> Prefetch | None:
        """Look for what a request lacks to begin at the end of its prompt; None where that is nothing, or none can be
        stored. Where another request's prompt goes on with the same page, it is waited for that one's."""
        tiering = self._tiering
        if not self.has_room or tiering.forgetting.covers(tiering.scope(namespace)):
            return None
        limit = max(0, len(tokens) - 1) // self._size
        found = self._tree.match(namespace, tokens)
        known = min(found.num_pages, limit)
        start, _ = tiering.resumable(found.pages[:known], below=True)
        if start == limit or tiering.bad[found.pages].any():
            return None
        above = int(found.pages[known - 1]) if known else 0
        parent = tiering.key_above(namespace, above)
        keys = chain_pages(parent, tokens[known * self._size : limit * self._size].tobytes(), self._size * 4)
        name = keys[0] if keys else parent
        other = self._named.get(name)
        if other is not None:
            other.num_waiting += 1
            return other
        lease = self._tree.pin_path(found, known)
        sought = Sought(tiering, self._groups, lease, start, keys)
        prefetch = Prefetch(namespace, tokens, name, sought, lease)
        prefetch.since = self._seconds()
        patience = max(_LEAST_PATIENCE, self._found)
        prefetch.stop_at = prefetch.since + patience * tiering.break_even.deadline((limit - start) * self._size, 0)
        if not self._submit(prefetch, Move(Link.LOOK, sought.units(), tiering.scope(namespace))):
            self._let_go(prefetch)
            return None
        self._named[name] = prefetch
        return prefetch

    def is_awaited(self, prefetch: Prefetch, least_wait: float = 0.0) -> bool:
        """Whether its request should go on waiting, which takes `least_wait` seconds or more. Where it should not, no
        more is fetched for it."""
        settings = self._tiering.settings
        if prefetch.done or prefetch.abandoned:
            return False
        if self._tiering.break_even.is_off(Link.FETCH) and not settings.always:
            self.leave(prefetch)
            return False
        if settings.prefetch is PrefetchPolicy.WAIT_COMPLETE:
            return True
        if settings.prefetch is PrefetchPolicy.BEST_EFFORT:
            until = prefetch.since
        elif settings.prefetch is PrefetchPolicy.TIMEOUT:
            until = prefetch.since + settings.prefetch_seconds
        else:
            until = prefetch.stop_at - least_wait
        if self._seconds() < until:
            return True
        self.stop(prefetch)
        return False

    def leave(self, prefetch: Prefetch) -> None:
        """A request waits no more. Where no other one does, no more is fetched."""
        prefetch.num_waiting -= 1
        if not prefetch.num_waiting:
            self.stop(prefetch)

    def stop(self, prefetch: Prefetch) -> None:
        """No more pieces; the one on its way is kept if it comes."""
        prefetch.stopped = True
        if prefetch.move is not None:
            prefetch.move.stop()

    def abandon(self, namespace: Namespace | None) -> None:
        """What is on its way of a namespace, or at all, counts for nothing when it arrives."""
        for prefetch in self._running.values():
            if namespace in (None, prefetch.namespace):
                prefetch.abandoned = True
                self.stop(prefetch)

    def give_way(self) -> bool:
        """Nobody who reads ahead keeps anything any more, since memory is short; whether anybody did."""
        kept = [prefetch for prefetch in self._running.values() if prefetch.holds]
        for prefetch in kept:
            prefetch.abandoned = True
            self._let_go(prefetch)
            self.stop(prefetch)
        return bool(kept)

    # -- inside

    def _let_go(self, prefetch: Prefetch) -> None:
        if prefetch.holds:
            prefetch.holds = False
            self._let_go_frames(prefetch)
            self._tree.unpin(prefetch.lease)

    def _let_go_frames(self, prefetch: Prefetch) -> None:
        for host, pages in prefetch.held:
            host.unpin(pages)
        prefetch.held = []

    def _hold_frames(self, prefetch: Prefetch) -> None:
        """Keep what the host has of single frames that it counts on: making room for the others must not take them."""
        held, path = [], prefetch.sought.path
        for group, host in zip(self._groups, self._tiering.hosts, strict=True):
            if host.shelf is not None:
                needed = group.reach.needed(prefetch.wanted)
                part = path[needed.start : needed.stop]
                held.append((host, part[host.resident(part)]))
                host.pin(held[-1][1])
        self._let_go_frames(prefetch)
        prefetch.held = held

    def _submit(self, prefetch: Prefetch, move: Move) -> bool:
        if not self._tiering.mover.submit(move):
            return False
        prefetch.move = move
        self._running[move] = prefetch
        return True

    def _ended(self, move: Move) -> None:
        prefetch = self._running.pop(move)
        prefetch.move = None
        for defects in move.defects:
            found = [defect for defect in defects if defect not in (GOOD, MISSING, REFUSED, FAILED)]
            self._tiering.counters.corrupt(Tier.STORAGE, found)
        if prefetch.abandoned:
            self._give_up(prefetch.fetching)
            prefetch.fetching = []
        elif move.link is Link.LOOK:
            self._looked(prefetch, move)
        else:
            self._fetched(prefetch, move)
        if prefetch.stopped or prefetch.limit >= prefetch.wanted or not self._fetch(prefetch):
            self._finish(prefetch)

    def _finish(self, prefetch: Prefetch) -> None:
        prefetch.done = True
        del self._named[prefetch.name]
        if prefetch.holds and prefetch.limit > prefetch.start:
            self._tiering.archiver.owe(prefetch.lease.node)  # what is above it is of use, too
        self._let_go(prefetch)

    def _looked(self, prefetch: Prefetch, move: Move) -> None:
        """The store has answered."""
        if not move.is_whole or not move.answers:
            self._tiering.counters.failed_moves += bool(move.error)
            return
        sought = prefetch.sought
        sought.answered(move.answers)
        share = max(0, sought.far() - prefetch.start) / (sought.limit - prefetch.start)
        self._found += _LEARNS * (share - self._found)
        self._decide(prefetch)

    def _decide(self, prefetch: Prefetch) -> None:
        """How far to fetch: behind the last page where every group could resume, if that is worth it."""
        tiering, sought = self._tiering, prefetch.sought
        near, wanted = sought.near(), sought.far()
        prefetch.limit = prefetch.wanted = min(prefetch.limit, near)
        if wanted <= near or tiering.bad[sought.path].any() or tiering.is_too_much(sought.loads(wanted)):
            return
        tokens = (wanted - near) * self._size
        num_bytes = sum(
            len(places) * size for places, size in zip(sought.lacking(wanted), self._record_bytes, strict=True)
        )
        if not num_bytes:
            return
        even, mover = tiering.break_even, tiering.mover
        if not tiering.settings.always and not even.worth(Link.FETCH, tokens, num_bytes, mover.in_flight(Link.FETCH)):
            tiering.counters.declined_tokens += tokens
            return
        prefetch.wanted = wanted
        prefetch.stop_at = prefetch.since + even.deadline(tokens, num_bytes)
        self._hold_frames(prefetch)

    def _fetch(self, prefetch: Prefetch) -> bool:
        """Fetch the next piece; False where there is no room for any of it."""
        while prefetch.limit < prefetch.wanted and not prefetch.stopped:
            last, places = self._piece(prefetch)
            if last <= prefetch.limit or self._pages.num_free_pages < last - prefetch.lease.num_pages:
                return False
            if any(map(len, places)):
                return self._bring(prefetch, last, places)
            self._keep(prefetch, last)  # whoever begins behind these pages reads nothing of them
        return False

    def _piece(self, prefetch: Prefetch) -> tuple[int, list[Places]]:
        """The page behind the next piece, and by group the places of what has to come, for which there is room."""
        places = prefetch.sought.lacking(prefetch.wanted)
        num_bytes = np.zeros(prefetch.wanted, dtype=np.int64)
        for at, size in zip(places, self._record_bytes, strict=True):
            num_bytes[at] += size
        least = max(prefetch.limit + 1, int(np.argmax(np.append(num_bytes, 1) > 0)) + 1)
        last = min(prefetch.wanted, max(least, int(np.searchsorted(np.cumsum(num_bytes), _PIECE_BYTES, side="right"))))
        places = [at[at < last] for at in places]
        for host, at in zip(self._tiering.hosts, places, strict=True):
            room = self._tiering.host_room(host, len(at))
            if room < len(at):
                last = min(last, int(at[room]))
        return last, [at[at < last] for at in places]

    def _bring(self, prefetch: Prefetch, last: int, places: list[Places]) -> bool:
        """Start to fetch a piece; False where too much is on its way."""
        tiering = self._tiering
        fetching: list[tuple[int, Places, Ids]] = []
        units = []
        for group, host, at in zip(self._groups, tiering.hosts, places, strict=True):
            if len(at):
                frames = host.take(len(at))
                fetching.append((group.index, at, frames))
                units.append(Units(group.index, NO_PAGES, frames, prefetch.sought.keys(at)))
        num_bytes = sum(len(at) * self._record_bytes[group] for group, at, _ in fetching)
        prefetch.fetching, prefetch.last = fetching, last
        if not self._submit(prefetch, Move(Link.FETCH, units, tiering.scope(prefetch.namespace), num_bytes)):
            self._give_up(fetching)
            return False
        return True

    def _give_up(self, fetching: list[tuple[int, Places, Ids]]) -> None:
        for group, _, frames in fetching:
            self._tiering.hosts[group].untake(frames)

    def _fetched(self, prefetch: Prefetch, move: Move) -> None:
        """Keep the pages up to the first that has not come whole, in every group."""
        tiering, fetching = self._tiering, prefetch.fetching
        prefetch.fetching = []
        tiering.break_even.moved(Link.FETCH, move.moved_bytes, move.seconds)
        tiering.counters.failed_moves += bool(move.error)
        end = prefetch.last
        for (_, at, _), defects in zip(fetching, move.defects, strict=True):
            wrong = [place for place, defect in zip(at.tolist(), defects, strict=True) if defect]
            end = min([end, *wrong])
        first = prefetch.lease.num_pages
        if end > prefetch.limit:
            self._keep(prefetch, end)
        if end > first:
            self._tree.keep(prefetch.lease, first, end)  # what another request has cached meanwhile, too
        self._bind(prefetch, fetching, end)
        if end < prefetch.last:
            prefetch.wanted = prefetch.limit  # nothing behind it is of use
            if not prefetch.stopped and not any(REFUSED in defects or FAILED in defects for defects in move.defects):
                prefetch.sought.lost(end)
                self._decide(prefetch)
        elif prefetch.limit < prefetch.wanted:
            self._hold_frames(prefetch)
        else:
            tiering.owed_to_storage(prefetch.sought.path[prefetch.start : prefetch.limit])

    def _bind(self, prefetch: Prefetch, fetching: list[tuple[int, Places, Ids]], end: int) -> None:
        """What has come of pages before `end` counts, but for what the cache has got elsewhere meanwhile."""
        tiering, cached = self._tiering, prefetch.sought.path
        counted = self._tree.kept_on(prefetch.lease)
        for group, at, frames in fetching:
            host = tiering.hosts[group]
            good = at < min(end, len(cached))
            if host.shelf is None:
                good[good] = counted[at[good]]
            pages = cached[at[good]]
            fresh = ~host.resident(pages)
            ranks = np.full(len(pages), Rank.USED, dtype=np.int8)[fresh] if host.shelf is not None else None
            host.bind(pages[fresh], frames[good][fresh], ranks)
            host.untake(np.concatenate((frames[~good], frames[good][~fresh])))
            tiering.counters.fetched_frames += int(np.count_nonzero(fresh))
            tiering.counters.fetched_bytes += int(np.count_nonzero(fresh)) * self._record_bytes[group]
            tiering.stored(group, pages[fresh])

    def _keep(self, prefetch: Prefetch, end: int) -> None:
        """The first `end` pages of the prompt are cached from now on, those that were not yet below the device."""
        first = prefetch.lease.num_pages
        if end > first:
            try:
                pages = self._pages.alloc_pages(end - first)
            except OutOfPages:
                prefetch.stopped = True
                return
            inserted = self._tree.graft(prefetch.lease, prefetch.tokens[first * self._size : end * self._size], pages)
            mine = len(inserted.duplicates)
            if mine:
                self._pages.free_pages(np.sort(inserted.duplicates))
            self._tiering.set_keys(inserted.pages[mine:], prefetch.sought.keys_between(first + mine, end))
        prefetch.limit = end

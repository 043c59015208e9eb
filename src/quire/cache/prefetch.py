"""Prefetcher: pages of waiting requests come from storage to the host, so that they are there when their turn comes.

    look      which of the prompt's next pages are stored, and behind which of them a request could resume
    fetch     these, in pieces in the order of the prompt; each piece counts as soon as it is whole and checked
    stop      when computing them would have been quicker, or the policy has enough; what has come is kept

A piece that is damaged, or gone meanwhile, ends it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.groups import NO_PAGES, GroupCache
from quire.cache.tier_settings import PrefetchPolicy
from quire.cache.tiering import Tiering
from quire.errors import OutOfPages
from quire.memory.allocator import BaseTokenToKVPoolAllocator
from quire.prefix.hashing import chain_pages
from quire.prefix.node import Lease
from quire.prefix.shelf import Rank
from quire.prefix.tiered import TieredRadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids, Tier
from quire.tiers.moves import FAILED, GOOD, MISSING, REFUSED, Link, Move, Units
from quire.tiers.store import Answer

_PIECE_BYTES = 8 << 20
_LEAST_PATIENCE = 0.02
"""Of the time that a prompt takes to compute, what its request waits to hear whether any of it is stored; more where
that was often the case: waiting must not cost what it seldom brings."""
_LEARNS = 0.2
_MOST_AT_ONCE = 16
"""Requests that read ahead: each keeps the prefix that it has already, which others could not use then."""


class Prefetch:
    """What one request waits for. `start` pages of its prompt were cached when it was asked for, `wanted` are to be,
    `stop_at` is when waiting stops being worth it."""

    __slots__ = (
        "abandoned",
        "done",
        "fetching",
        "holds",
        "keys",
        "last",
        "lease",
        "limit",
        "move",
        "namespace",
        "num_waiting",
        "since",
        "start",
        "stop_at",
        "stopped",
        "tokens",
        "wanted",
    )

    def __init__(self, namespace: Namespace, tokens: Ids, keys: Sequence[bytes], start: int, lease: Lease) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.keys = keys  # of pages from `start` on
        self.start = self.limit = self.wanted = start
        self.lease = lease
        self.move: Move | None = None
        self.fetching: list[tuple[int, Ids, Ids]] = []  # (group, places on the path, host frames) of the piece
        self.last = start  # the page behind that piece
        self.since = self.stop_at = 0.0
        self.done = self.stopped = self.abandoned = False
        self.holds = True  # the path of its lease
        self.num_waiting = 1  # requests, which begin with the same pages


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
        self._first: dict[bytes, Prefetch] = {}  # by the first page that each one asks for
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

    def begin(self, tokens: Ids, namespace: Namespace) -> Prefetch | None:
        """Look for what of a prompt is stored and not cached; None where nothing can be. Where another request's prompt
        goes on with the same page, it is waited for that one's."""
        tiering = self._tiering
        if not self.has_room or tiering.forgetting.covers(tiering.scope(namespace)):
            return None
        limit = max(0, len(tokens) - 1) // self._size
        found = self._tree.match(namespace, tokens)
        start = min(found.num_pages, limit)
        if start == limit or tiering.bad[found.pages].any():
            return None
        above = int(found.pages[start - 1]) if start else 0
        parent = tiering.key_above(namespace, above)
        keys = chain_pages(parent, tokens[start * self._size : limit * self._size].tobytes(), self._size * 4)
        other = self._first.get(keys[0])
        if other is not None:
            other.num_waiting += 1
            return other
        units = [Units(group.index, NO_PAGES, NO_PAGES, keys) for group in self._groups]
        prefetch = Prefetch(namespace, tokens, keys, start, self._tree.pin_path(found, start))
        prefetch.since = self._seconds()
        patience = max(_LEAST_PATIENCE, self._found)
        prefetch.stop_at = prefetch.since + patience * tiering.break_even.deadline((limit - start) * self._size, 0)
        if not self._submit(prefetch, Move(Link.LOOK, units, tiering.scope(namespace))):
            self._let_go(prefetch)
            return None
        self._first[keys[0]] = prefetch
        return prefetch

    def is_awaited(self, prefetch: Prefetch, least_wait: float = 0.0) -> bool:
        """Whether its request should go on waiting, which takes `least_wait` seconds or more. Where it should not, no
        more is fetched for it."""
        settings = self._tiering.settings
        if prefetch.done or prefetch.abandoned or (self._tiering.break_even.is_off(Link.FETCH) and not settings.always):
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
            self._tree.unpin(prefetch.lease)

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
        del self._first[prefetch.keys[0]]
        self._let_go(prefetch)

    def _looked(self, prefetch: Prefetch, move: Move) -> None:
        """Decide how far to fetch: behind the last page where every group could resume."""
        if not move.is_whole or not move.answers:
            self._tiering.counters.failed_moves += bool(move.error)
            return
        stored = [np.array([a is Answer.HIT for a in answers], dtype=np.bool_) for answers in move.answers]
        cached = self._tiering.path(prefetch.lease.node)
        usable: Bools = np.ones(len(cached) + len(prefetch.keys), dtype=np.bool_)
        for group, found in zip(self._groups, stored, strict=True):
            usable &= group.reach.resumable(np.concatenate((self._resident(group, cached), found)))
        ends = np.flatnonzero(usable) + 1
        wanted = int(ends[-1]) if len(ends) else 0
        share = max(0, wanted - prefetch.start) / len(prefetch.keys)
        self._found += _LEARNS * (share - self._found)
        if wanted <= prefetch.start:
            return
        tokens = (wanted - prefetch.start) * self._size
        num_bytes = sum(
            len(self._places(group, prefetch, wanted)) * size
            for group, size in zip(self._groups, self._record_bytes, strict=True)
        )
        if not num_bytes:
            return
        even, mover = self._tiering.break_even, self._tiering.mover
        if not self._tiering.settings.always and not even.worth(
            Link.FETCH, tokens, num_bytes, mover.in_flight(Link.FETCH)
        ):
            self._tiering.counters.declined_tokens += tokens
            return
        prefetch.wanted = wanted
        prefetch.stop_at = prefetch.since + even.deadline(tokens, num_bytes)

    def _places(self, group: GroupCache, prefetch: Prefetch, wanted: int) -> np.ndarray:
        """Places on the path of what has to come of a group so that a request can resume behind `wanted` pages."""
        needed = group.reach.needed(wanted)
        places = np.arange(needed.start, needed.stop)
        cached = self._tiering.path(prefetch.lease.node)
        before = places[places < len(cached)]
        lacking = before[~self._resident(group, cached[before])]
        found: np.ndarray = np.concatenate((lacking, places[places >= len(cached)]))
        return found

    def _resident(self, group: GroupCache, pages: Ids) -> Bools:
        resident: Bools = group.frames.resident(pages) | self._tiering.hosts[group.index].resident(pages)
        return resident

    def _fetch(self, prefetch: Prefetch) -> bool:
        """Fetch the next piece; False where there is no room for any of it."""
        while prefetch.limit < prefetch.wanted and not prefetch.stopped:
            last, places = self._piece(prefetch)
            if last <= prefetch.limit or self._pages.num_free_pages < last - prefetch.limit:
                return False
            if any(map(len, places)):
                return self._bring(prefetch, last, places)
            self._keep(prefetch, prefetch.limit, last)  # whoever begins behind these pages reads nothing of them
        return False

    def _piece(self, prefetch: Prefetch) -> tuple[int, list[np.ndarray]]:
        """The page behind the next piece, and by group the places of what has to come, for which there is room."""
        per_page = max(1, sum(self._record_bytes))
        last = min(prefetch.wanted, prefetch.limit + max(1, _PIECE_BYTES // per_page))
        places = [self._places(group, prefetch, prefetch.wanted) for group in self._groups]
        places = [at[at < last] for at in places]
        for host, at in zip(self._tiering.hosts, places, strict=True):
            room = self._tiering.host_room(host, len(at))
            if room < len(at):
                last = min(last, int(at[room]))
        return last, [at[at < last] for at in places]

    def _bring(self, prefetch: Prefetch, last: int, places: list[np.ndarray]) -> bool:
        """Start to fetch a piece; False where too much is on its way."""
        tiering = self._tiering
        fetching: list[tuple[int, Ids, Ids]] = []
        units = []
        for group, host, at in zip(self._groups, tiering.hosts, places, strict=True):
            if len(at):
                frames = host.take(len(at))
                fetching.append((group.index, at, frames))
                units.append(Units(group.index, NO_PAGES, frames, tuple(self._key(prefetch, i) for i in at.tolist())))
        num_bytes = sum(len(at) * self._record_bytes[group] for group, at, _ in fetching)
        prefetch.fetching, prefetch.last = fetching, last
        if not self._submit(prefetch, Move(Link.FETCH, units, tiering.scope(prefetch.namespace), num_bytes)):
            self._give_up(fetching)
            return False
        return True

    def _key(self, prefetch: Prefetch, place: int) -> bytes:
        if place >= prefetch.start:
            return prefetch.keys[place - prefetch.start]
        page = self._tiering.path(prefetch.lease.node)[place : place + 1]
        return self._tiering.keys_of(page)[0]

    def _give_up(self, fetching: list[tuple[int, Ids, Ids]]) -> None:
        for group, _, frames in fetching:
            self._tiering.hosts[group].untake(frames)

    def _fetched(self, prefetch: Prefetch, move: Move) -> None:
        """Keep the pages up to the first that has not come whole, in every group."""
        tiering, fetching = self._tiering, prefetch.fetching
        prefetch.fetching = []
        tiering.break_even.moved(Link.FETCH, move.moved_bytes, move.seconds)
        end = prefetch.last
        for (_, at, _), defects in zip(fetching, move.defects, strict=True):
            wrong = [place for place, defect in zip(at.tolist(), defects, strict=True) if defect]
            end = min([end, *wrong])
        if move.error:
            tiering.counters.failed_moves += 1
        if end < prefetch.last:
            prefetch.wanted = prefetch.limit  # nothing behind it is of use
        first = prefetch.limit
        if end > first:
            self._keep(prefetch, first, end)
            self._tree.keep(prefetch.lease, first, end)  # what another request has cached meanwhile, too
        cached = tiering.path(prefetch.lease.node)
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

    def _keep(self, prefetch: Prefetch, first: int, end: int) -> None:
        """Pages `first..end - 1` of the path are cached from now on, below the device."""
        try:
            pages = self._pages.alloc_pages(end - first)
        except OutOfPages:
            prefetch.stopped = True
            return
        tokens = prefetch.tokens[first * self._size : end * self._size]
        inserted = self._tree.graft(prefetch.lease, tokens, pages)
        mine = len(inserted.duplicates)
        if mine:
            self._pages.free_pages(np.sort(inserted.duplicates))
        self._tiering.set_keys(
            inserted.pages[mine:], prefetch.keys[first + mine - prefetch.start : end - prefetch.start]
        )
        prefetch.limit = end

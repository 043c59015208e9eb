"""Prefetch: pages of one waiting prompt that are fetched from the store to the host, in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache.groups import NO_PAGES, resident
from quire.cache.hold import HeldFrames, Hold
from quire.cache.offload import CacheParts
from quire.cache.states import GroupCache
from quire.errors import OutOfPages
from quire.memory.residency import State
from quire.offload.host_groups import GroupPages, HostGroup
from quire.offload.tiering import Tiering
from quire.prefix.node import Lease, pages_to
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.rank import Rank
from quire.tiers.prefill import PrefillAsk
from quire.tiers.store import Answer
from quire.tiers.transfer import FAILED, REFUSED, Answers, Lane, Transfer, Units

Places = np.ndarray  # page numbers of the prompt, int64

PIECE_BYTES = 8 << 20
_MOST_RETRIES = 4  # repeated fetches of a request, after damage in host memory


class RequestedPrefix:
    """Pages of a prompt that are neither on device nor host, and how far stored ones would help.

    pages of the prompt     0       start        known         limit
    in the tree             |----------------------|
    groups read whole                              |- looked for -|   their frames are there as long as the pages are
    groups read in part         |-- where they are missing, from what the page after `start` pages needs on --|

    Every group can resume after `start` pages already. `lease` pins the known pages, and later the pages cached after
    them. `keys` are those of the pages from `known` on."""

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

    def units(self) -> list[Units]:
        """The keys to look up, by group."""
        path, unknown = self.path, np.arange(self.known, self.limit)
        for group in self._groups:
            first = self.known if group.reach.whole else group.reach.needed(self.start + 1).start
            lacking = first + np.flatnonzero(~resident(group, path[first:], self._tiers.hosts))
            places = np.concatenate((lacking, unknown))
            if len(places):
                self._asked.append((group.index, places))
        return [Units(group, NO_PAGES, NO_PAGES, self.keys(places)) for group, places in self._asked]

    def answered(self, answers: Answers) -> None:
        """Record the store's answers to `units`."""
        path = self.path
        for (group, places), found in zip(self._asked, answers, strict=True):
            self._stored[group][places] = [answer is Answer.HIT for answer in found]
            missing = places[[answer is Answer.MISS for answer in found]]
            self._tiers.table.of(Tier.STORAGE, group).unmark(path[missing[missing < len(path)]], State.RESIDENT)

    def lost(self, group: int, place: int) -> None:
        """Record that the store lacks this page after all."""
        self._stored[group][place] = False
        self._tiers.table.of(Tier.STORAGE, group).unmark(self.path[place : place + 1], State.RESIDENT)

    def keys(self, places: Places) -> tuple[bytes, ...]:
        """Keys of these pages in the store."""
        known = self._tiers.names.keys_of(self.path[places[places < self.known]])
        return (*known, *(self._keys[place - self.known] for place in places[len(known) :].tolist()))

    def far(self) -> int:
        """The most pages after which a request could begin if all stored ones were fetched."""
        path, usable = self.path, np.ones(self.limit, dtype=np.bool_)
        for group, stored in zip(self._groups, self._stored, strict=True):
            there = stored.copy()
            there[: len(path)] |= resident(group, path, self._tiers.hosts)
            usable &= group.reach.resumable(there)
        ends = np.flatnonzero(usable)
        return int(ends[-1]) + 1 if len(ends) else 0

    def branches(self) -> bool:
        """Whether prompts that branch from this one may find more: only groups that are read in part lack pages."""
        whole = [stored for group, stored in zip(self._groups, self._stored, strict=True) if group.reach.whole]
        return self.known < self.limit and len(whole) < len(self._groups) and all(s[self.known] for s in whole)

    def lacking(self, wanted: int, hosts: Sequence[HostGroup] | None = None) -> list[Places]:
        """Places by group without a frame on the device or in `hosts` (default: all), read if begun after `wanted`."""
        path, found = self.path, []
        for group in self._groups:
            needed = group.reach.needed(wanted)
            there = resident(group, path[needed.start : needed.stop], self._tiers.hosts if hosts is None else hosts)
            places = np.arange(needed.start, needed.stop)
            found.append(np.concatenate((places[: len(there)][~there], places[len(there) :])))
        return found


@dataclass(slots=True, eq=False)
class Piece:
    """Pages of a prompt before page `last` that are fetched, or that a peer writes: by group, their places on the path
    and the host frames. `move` is None if no group reads any of them."""

    last: int
    is_stored: bool
    fetching: list[tuple[HostGroup, Places, Ids]] = field(default_factory=list)
    move: Transfer | None = None

    def parts(self) -> Iterator[tuple[HostGroup, Places, Ids, Bools]]:
        """Groups with their places, frames, and which frames are suspect."""
        suspect = self.move.suspect if self.move is not None else ()
        for at, (host, places, frames) in enumerate(self.fetching):
            yield host, places, frames, np.array([(at, row) in suspect for row in range(len(frames))], dtype=np.bool_)

    def page_ids(self) -> tuple[Places, Ids] | None:
        """Places, and host frames that are the ids of their pages; None if no group has such frames."""
        return next(((at, frames) for host, at, frames in self.fetching if host.are_page_ids), None)

    def cached_meanwhile(self, path: Ids) -> Places:
        """Places whose page on the path is not the one that a frame of the piece is the id of."""
        at, ids = self.page_ids() or (np.empty(0, np.int64), NO_PAGES)
        known = at[at < len(path)]
        others: Places = known[path[known] != ids[: len(known)]]
        return others

    def discard(self) -> None:
        """Free its frames."""
        for host, _, frames, suspect in self.parts():
            host.untake_checked(frames, suspect)


@dataclass(slots=True, eq=False)
class Prefetch:
    """A fetch of one prompt's pages from the store, then of the rest from a peer, for all requests with this prompt. In
    pages of the prompt: requests could begin after `prefix.start` pages at first, can begin after `limit` now, and will
    begin after `wanted`. Pages before `stored` come from the store. `hold` holds the path, and the host frames that
    they need in groups that are read in part.

    running      until the store has answered and all pieces have ended
    stopped      fetches no more pieces; those that arrive are cached
    cancelled    drops what arrives
    done         nothing is under way any more
    """

    tiers: Tiering
    parts: CacheParts
    namespace: Namespace
    tokens: Ids
    name: bytes  # the key of the first page that is not cached, or of the last page
    prefix: RequestedPrefix
    hold: Hold
    is_trial: bool  # a lane that is off is tried
    at_once: int  # the most bytes in flight
    since: float
    stop_at: float  # the time at which computing would have been faster
    may_ask: bool  # a peer, which was not tried yet

    ask: PrefillAsk | None = None  # what a peer computes
    limit: int = field(init=False)
    wanted: int = field(init=False)
    stored: int = field(init=False)
    num_waiting: int = 1  # requests
    shared: bool = False  # several requests wait for it, now or earlier
    done: bool = False
    until: float = 0.0  # when it was done
    stopped: bool = False
    cancelled: bool = False

    look: Transfer | None = None
    pieces: deque[Piece] = field(default_factory=deque)  # not bound yet, in the order of the prompt
    last: int = field(init=False)  # the page after these pieces
    lost: bool = False  # a page has not arrived: pieces after it are useless
    num_bytes: int = 0  # host frames for fetched pages

    fetching_since: float | None = None
    fetched_before: int = 0  # bytes, for any request
    seconds: float = 0.0  # work on its pieces
    own_bytes: int = 0  # fetched in these seconds
    in_rounds: bool = False  # some pieces began only after others had arrived
    _num_retries: int = 0

    def __post_init__(self) -> None:
        self.limit = self.wanted = self.stored = self.last = self.prefix.start

    @property
    def num_pages(self) -> int:
        """Pages of the prompt."""
        return self.prefix.limit

    @property
    def moves(self) -> list[Transfer]:
        """Transfers in flight, and those that have ended and are not bound yet."""
        looking = [self.look] if self.look is not None else []
        return looking + [piece.move for piece in self.pieces if piece.move is not None]

    @property
    def is_fetching(self) -> bool:
        """Whether more stored pages may arrive."""
        is_next = self.last < self.stored and not self.stopped and not self.lost
        return is_next or any(piece.is_stored for piece in self.pieces)

    @property
    def has_all(self) -> bool:
        """Whether all pages have arrived, and only an answer to `look` may come."""
        return self.look is not None and self.last >= self.wanted and not self.pieces

    def leads_on(self, tokens: Ids) -> bool:
        """Whether another prefetch may find more for a request that waited for this one."""
        if not self.shared or not self.done:
            return False
        return self.limit > self.prefix.start or (self.prefix.branches() and not np.array_equal(tokens, self.tokens))

    def stop(self, cause: str = "") -> None:
        """Fetch no more. Pieces that still arrive are cached, and `look` counts. For `cause` see `PrefillAsk.stop`."""
        self.stopped = True
        for move in self.moves:
            if move.lane is Lane.FETCH:  # what has arrived from a peer is checked
                move.stop()
        self._stop_peer(cause)

    def _stop_peer(self, cause: str) -> None:
        if self.ask is not None and not self.done:
            self.ask.stop(cause)

    def hold_frames(self, end: int) -> None:
        """Hold the host frames of partial groups that a request needs to begin after `end` pages."""
        held, path = [], self.prefix.path
        for group, host in zip(self.parts.groups, self.tiers.hosts, strict=True):
            needed = group.reach.needed(end)
            part = path[needed.start : needed.stop]
            if not group.reach.whole:
                held.append(HeldFrames(group.index, Tier.HOST, part[host.table.present(part)]))
        self.parts.holds.change(self.hold, held)

    def next_piece(self) -> Piece | None:
        """The next piece, with host frames. None: there is nothing to fetch, no room, or enough in flight."""
        is_stored = self.last < self.stored
        is_enough = is_stored and sum(move.num_bytes for move in self.moves) >= self.at_once
        if self.last >= self.wanted or self.stopped or self.lost or is_enough:
            return None
        last, places = self._cut(self.stored if is_stored else self.wanted)
        if last <= self.last or self.parts.pages.num_free_pages < last - self.hold.path.num_pages:
            return None
        hosts, num_bytes = self.tiers.hosts, self.tiers.settings.num_bytes(map(len, places))
        fetching = [(host, at, host.take(len(at))) for host, at in zip(hosts, places, strict=True) if len(at)]
        if not fetching:
            return Piece(last, is_stored)  # no request that begins after these pages reads them
        units = [Units(host.index, NO_PAGES, frames, self.prefix.keys(at)) for host, at, frames in fetching]
        lane = Lane.FETCH if is_stored else Lane.RECEIVE
        return Piece(
            last, is_stored, fetching, Transfer(lane, units, self.tiers.names.scope(self.namespace), num_bytes)
        )

    def _cut(self, end: int) -> tuple[int, list[Places]]:
        """The page after the next piece, at most `end`, and by group the places to fetch, as far as there is room."""
        places = [at[at >= self.last] for at in self.prefix.lacking(end)]
        num_bytes = np.zeros(end, dtype=np.int64)
        for at, size in zip(places, self.tiers.settings.record_bytes, strict=True):
            num_bytes[at] += size
        least = max(self.last + 1, int(np.argmax(np.append(num_bytes, 1) > 0)) + 1)
        last = min(end, max(least, int(np.searchsorted(np.cumsum(num_bytes), PIECE_BYTES, side="right"))))
        places = [at[at < last] for at in places]
        for host, at in zip(self.tiers.hosts, places, strict=True):
            room = self.tiers.host_room(host, len(at))
            if room < len(at):
                last = min(last, int(at[room]))
        return last, [at[at < last] for at in places]

    def fetched(self, piece: Piece) -> None:
        """Bind the pages of a piece, up to the first that is incomplete in some group."""
        defects = piece.move.defects if piece.move is not None else ()
        end = piece.last
        for (_, at, _), found in zip(piece.fetching, defects, strict=True):
            end = min([end, *at[[bool(defect) for defect in found]].tolist()])
        self._bind(piece, end, self._cache(piece, end) if end > self.limit else end)
        if end < piece.last:
            self._lose(piece, end)
            return
        if self.limit < self.wanted:
            self.hold_frames(self.wanted)
        is_fetched = piece.is_stored and self.limit == self.stored
        if is_fetched and not all(host.whole for host in self.tiers.hosts):  # a path that is fetched in part counts
            self.tiers.on_host.mark(self.prefix.path[self.prefix.start : self.limit], State.FETCHED)

    def _cache(self, piece: Piece, end: int) -> int:
        """Cache the first `end` pages of the prompt; returns the first page that is new to the tree."""
        first = new = self.hold.path.num_pages
        pages, tree = self.parts.pages, self.parts.tree
        if end > first:
            fetched = piece.page_ids()
            try:
                if fetched is None:
                    taken = pages.alloc_pages(end - first)
                else:
                    taken = fetched[1][(fetched[0] >= first) & (fetched[0] < end)]
            except OutOfPages:
                self.stopped = True
                return first
            tree.tenants.got_pages(taken, self.hold.path.node.tenant)
            size = self.parts.plan.page_size
            inserted = tree.graft(self.hold.path, self.tokens[first * size : end * size], taken)
            if fetched is None and len(inserted.duplicates):
                pages.free_pages(np.sort(inserted.duplicates))
            new = first + len(inserted.duplicates)
            self.tiers.have_copies(self.hold.path, first, inserted.pages, new)
        self.limit = end
        return new

    def _bind(self, piece: Piece, end: int, new: int) -> None:
        """Bind the fetched frames of pages before `end`. Pages from `new` on are new to the tree."""
        tiers, cached = self.tiers, self.prefix.path
        others = piece.cached_meanwhile(cached)
        for host, at, frames, suspect in piece.parts():
            arrived = (at < min(end, len(cached))) & ~np.isin(at, others)
            host.untake_checked(frames[~arrived], suspect[~arrived])
            pages, at = cached[at[arrived]], at[arrived]
            ranks = np.full(len(pages), Rank.USED, dtype=np.int8)
            part = GroupPages(host.index, pages, at, NO_PAGES, frames[arrived], ranks)
            bound = tiers.bind(part, self.hold.path, new=new)
            if not piece.is_stored:
                continue
            tiers.table.of(Tier.STORAGE, host.index).mark(bound, State.RESIDENT)
            tiers.on_host.mark(bound, State.FETCHED)
            tiers.counters.fetched_frames += len(bound)
            tiers.counters.fetched_bytes += len(bound) * tiers.settings.record_bytes[host.index]

    def _lose(self, piece: Piece, end: int) -> None:
        """Page `end` has not arrived. After bad host memory fetch it again, else the store may have lost it. A peer
        that has sent a damaged page is not asked for more."""
        assert piece.move is not None
        self.wanted, self.lost = self.limit, True
        if self.ask is not None:
            self.fetching_since = None  # until the peer's pages have arrived, which says nothing about the store
        is_refused = any(REFUSED in defects or FAILED in defects for defects in piece.move.defects)
        if is_refused and (self.ask is None or not piece.is_stored):  # else the peer computes what the store refuses
            self.stopped = True
        elif self._num_retries < _MOST_RETRIES and any(end in at[suspect] for _, at, _, suspect in piece.parts()):
            self._num_retries += 1
        elif piece.is_stored and not self.stopped:
            for host, at, _ in piece.fetching:
                if end in at:
                    self.prefix.lost(host.index, end)
        for move in self.moves:
            move.stop()
        if self.stopped or not piece.is_stored:
            self._stop_peer("" if self.stopped else "damaged")

"""Prefetcher: pages of waiting requests come from storage to the host, so that they are there when their turn comes.

    look      what of the prompt is stored and nowhere else, and how far a request could begin with it (`Sought`)
    fetch     that, in pieces in the order of the prompt; each piece counts as soon as it and those before it are whole
              and checked. So many are on their way at once that the link is not idle until somebody looks again
    stop      when computing would have been quicker, or the policy has enough; what has come is kept
    hold      what has come, until all who waited for it have begun or gone away (`leave`), or memory is short

A piece that is damaged, or gone meanwhile, ends it there, or where a request can begin without it. Where the host's
memory is at fault and not the store's record, that is set aside and the piece comes again.
"""

from __future__ import annotations

import numpy as np

from quire.cache.damaged import DamagedPages
from quire.cache.groups import NO_PAGES
from quire.cache.hold import HeldFrames, Reason
from quire.cache.offload import CacheParts
from quire.cache.resuming import resume_point
from quire.errors import OutOfPages
from quire.offload.host_groups import HostGroup
from quire.offload.prefetch import Piece, Prefetch
from quire.offload.sought import Places, Sought
from quire.offload.tier_settings import PrefetchPolicy
from quire.offload.tiering import Tiering
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.rank import Rank
from quire.tiers.store import Answer
from quire.tiers.transfer import FAILED, GOOD, MISSING, REFUSED, Lane, Transfer, Units

_PIECE_BYTES = 8 << 20
_FIRST_BYTES = 4 * _PIECE_BYTES
_MOST_BYTES = 512 << 20
"""Bytes that one request has on their way: at first, and at most. It is twice as many whenever all had arrived by the
time that somebody looked."""
_LEAST_PATIENCE = 0.02
"""Of the time that a prompt takes to compute, what its request waits to hear whether any of it is stored; more where
that was often the case: waiting must not cost what it seldom brings."""
_LEARNS = 0.2
_LEAST_SECONDS = 1e-3  # what ended sooner was not waited for
_MOST_AGAIN = 4
"""Times that one request fetches again what came to memory that is at fault."""
_MOST_AT_ONCE = 16
"""Requests that read ahead or hold what they have read: each keeps its whole prefix from others."""
_MOST_OF_HOST = 0.5
"""Beyond that share of the host's bytes nobody else begins to read: the rest is for what running requests leave."""


class Prefetcher:
    """Reads ahead for one cache, which has these parts."""

    def __init__(self, tiering: Tiering, parts: CacheParts) -> None:
        self._tiering = tiering
        self._tree = parts.tree
        self._holds = parts.holds
        self._groups = parts.groups
        self._partial = tuple(group for group in parts.groups if not group.reach.whole)
        self._pages = parts.pages
        self._seconds = parts.seconds
        self._size = parts.plan.page_size
        self._record_bytes = tiering.settings.record_bytes
        self._found = 0.5  # of the tokens that the last requests asked for, the share that was stored
        self._host_bytes = sum(
            host.num_frames * size for host, size in zip(tiering.hosts, self._record_bytes, strict=True)
        )
        self._running: dict[Transfer, Prefetch] = {}
        self._holding: dict[Prefetch, None] = {}  # those that hold something, oldest first
        self._refused: dict[Prefetch, None] = {}  # those that wait until there is room on the link
        self._named: dict[bytes, Prefetch] = {}
        self._fetched_bytes = 0
        self._at_once = _FIRST_BYTES
        tiering.fetched = self._ended

    @property
    def has_room(self) -> bool:
        """Whether another request may read ahead now."""
        taken = [each for each in {*self.in_flight, *self._holding} if each.num_waiting]
        most = self._host_bytes * _MOST_OF_HOST
        return len(taken) < _MOST_AT_ONCE and sum(prefetch.num_bytes for prefetch in taken) <= most

    @property
    def in_flight(self) -> tuple[Prefetch, ...]:
        """Those that have not ended."""
        return tuple(dict.fromkeys((*self._running.values(), *self._refused)))

    @property
    def num_holding(self) -> int:
        """Prefetches that hold something."""
        return len(self._holding)

    def host_frames(self, group: int) -> Ids:
        """Host frames that pieces on their way have taken."""
        runs = [
            frames
            for each in self.in_flight
            for piece in each.pieces
            for at, _, frames in piece.fetching
            if at == group
        ]
        return np.concatenate(runs) if runs else NO_PAGES

    def begin(self, tokens: Ids, namespace: Namespace) -> Prefetch | None:
        """Look for what a request lacks to begin at the end of its prompt; None where that is nothing, or none can be
        stored. Where another request's prompt goes on with the same page, it is waited for that one's. Whoever gets one
        has to `leave` it, when its request has begun or goes away."""
        tiering = self._tiering
        if not self.has_room or tiering.forgetting.covers(tiering.names.scope(namespace)):
            return None
        limit = max(0, len(tokens) - 1) // self._size
        found = self._tree.match(namespace, tokens)
        known = min(found.num_pages, limit)
        start, _ = resume_point(self._partial, found.pages[:known], tiering.hosts)
        if start == limit or tiering.damaged.are(found.pages).any():
            return None
        above = int(found.pages[known - 1]) if known else 0
        ahead = tiering.names.keys_ahead(namespace, above, tokens[known * self._size : limit * self._size].tobytes())
        keys = ahead.digests
        name = keys[0] if keys else ahead.parent
        other = self._named.get(name)
        if other is not None and not other.stopped:
            other.num_waiting += 1
            other.shared = True
            return other
        if self._is_off and not self._is_tried(start, limit):
            return None
        lease = self._tree.pin_path(found, known)
        sought = Sought(tiering, self._groups, lease, start, keys)
        prefetch = Prefetch(namespace, tokens, name, sought, self._holds.add(Reason.READ_AHEAD, lease=lease))
        prefetch.tries = self._is_off
        self._holding[prefetch] = None
        prefetch.at_once = self._at_once
        prefetch.since = self._seconds()
        patience = max(_LEAST_PATIENCE, self._found)
        prefetch.stop_at = prefetch.since + patience * tiering.break_even.deadline((limit - start) * self._size, 0)
        whole = [group.index for group in self._groups if group.reach.whole]
        look = Transfer(Lane.LOOK, sought.units(), tiering.names.scope(namespace), whole=whole)
        if not self._submit(prefetch, look):
            self._let_go(prefetch)
            tiering.break_even.untried(Lane.FETCH)
            return None
        prefetch.look = look
        self._named[name] = prefetch
        return prefetch

    def is_awaited(self, prefetch: Prefetch, least_wait: float = 0.0) -> bool:
        """Whether its request should go on waiting, which takes `least_wait` seconds or more. Where it should not, no
        more is fetched for it."""
        settings = self._tiering.settings
        if prefetch.done or prefetch.abandoned:
            return False
        if self._is_off and not prefetch.tries:
            self.stop(prefetch)
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
        """A request has begun, or waits no more. Where no other one does, no more is fetched and nothing held."""
        prefetch.num_waiting -= 1
        assert prefetch.num_waiting >= 0, "a request has left twice"
        if not prefetch.num_waiting:
            self.stop(prefetch)
            if prefetch.done:
                self._let_go(prefetch)

    def stop(self, prefetch: Prefetch) -> None:
        """No more pieces; those on their way are kept if they come. What the store has is still heard: it says how long
        others should wait for that."""
        prefetch.stopped = True
        for piece in prefetch.pieces:
            if piece.move is not None:
                piece.move.stop()

    def abandon(self, namespace: Namespace | None) -> None:
        """What is on its way of a namespace, or at all, counts for nothing when it arrives, and what has come is not
        held."""
        for prefetch in list(self._holding):
            if prefetch.done and namespace in (None, prefetch.namespace):
                self._let_go(prefetch)
        for prefetch in self.in_flight:
            if namespace in (None, prefetch.namespace):
                prefetch.abandoned = True
                self.stop(prefetch)

    def give_way(self) -> bool:
        """Whoever was the last to read ahead holds nothing any more, since memory is short; whether anybody did."""
        if not self._holding:
            return False
        prefetch = next(reversed(self._holding))
        prefetch.abandoned = not prefetch.done
        self._let_go(prefetch)
        self.stop(prefetch)
        return True

    def lose(self, damaged: DamagedPages) -> None:
        """Hold nothing that begins with damaged pages, so that they can be forgotten."""
        for prefetch in list(self._holding):
            if prefetch.done and damaged.are(prefetch.sought.path).any():
                self._let_go(prefetch)

    # -- inside

    @property
    def _is_off(self) -> bool:
        return self._tiering.break_even.is_off(Lane.FETCH) and not self._tiering.settings.always

    def _is_tried(self, start: int, limit: int) -> bool:
        """Whether a link that is off is tried with a request that lacks these pages: as if all of them were stored."""
        pages = [range(max(start, group.reach.needed(limit).start), limit) for group in self._groups]
        num_bytes = sum(len(each) * size for each, size in zip(pages, self._record_bytes, strict=True))
        return self._tiering.break_even.decide(Lane.FETCH, (limit - start) * self._size, num_bytes)

    def _let_go(self, prefetch: Prefetch) -> None:
        if prefetch.holds:
            self._holding.pop(prefetch)
            self._holds.release(prefetch.hold)

    def _hold_frames(self, prefetch: Prefetch, end: int) -> None:
        """Keep what the host has of single frames that are needed behind `end` pages: making room must not take
        them."""
        held, path = [], prefetch.sought.path
        for group in self._partial:
            needed = group.reach.needed(end)
            part = path[needed.start : needed.stop]
            there = self._tiering.hosts[group.index].resident(part)
            held.append(HeldFrames(group.index, Tier.HOST, part[there]))
        self._holds.change(prefetch.hold, held)

    def _submit(self, prefetch: Prefetch, move: Transfer) -> bool:
        if not self._tiering.mover.submit(move):
            return False
        self._running[move] = prefetch
        return True

    def _ended(self, move: Transfer) -> None:
        prefetch = self._running.pop(move)
        for at, defects in enumerate(move.defects):
            for place, defect in enumerate(defects):
                if defect not in (GOOD, MISSING, REFUSED, FAILED):
                    tier = Tier.HOST if (at, place) in move.suspect else Tier.STORAGE
                    self._tiering.counters.corrupt(tier, [defect])
        if move is prefetch.look:
            prefetch.look = None
            if prefetch.tries and prefetch.stopped:  # it has waited as long as is worth it, for an answer
                prefetch.tries = False
                self._tiering.break_even.failed(Lane.FETCH, move.seconds)
            if not prefetch.abandoned:
                self._looked(prefetch, move)
        else:
            self._report(prefetch, move, asked=move.asked_bytes)
            self._fetched_bytes += move.moved_bytes
            prefetch.seconds += move.seconds
            prefetch.own_bytes += move.moved_bytes
            if prefetch.at_once < _MOST_BYTES and all(other.done for other in prefetch.moves):
                self._widen(prefetch)
        waiting, self._refused = self._refused, {}
        for each in (prefetch, *waiting):
            self._go_on(each)

    def _widen(self, prefetch: Prefetch) -> None:
        """More is to be on its way from now on, for others too; how fast it was with less says little about that."""
        self._at_once = max(self._at_once, prefetch.at_once)
        prefetch.at_once = min(2 * prefetch.at_once, _MOST_BYTES)
        if prefetch.last < prefetch.wanted and prefetch.fetching_since is not None:
            prefetch.fetching_since, prefetch.fetched_before = self._seconds(), self._fetched_bytes
            prefetch.seconds, prefetch.own_bytes, prefetch.in_rounds = 0.0, 0, False

    def _go_on(self, prefetch: Prefetch) -> None:
        """Keep what has come, and have more brought; or that was all."""
        self._take(prefetch)
        while self._fetch(prefetch):
            self._take(prefetch)
        if prefetch.look is None and not prefetch.pieces and prefetch not in self._refused:
            self._finish(prefetch)

    def _take(self, prefetch: Prefetch) -> None:
        """Keep the pieces that have come behind all those before them."""
        while prefetch.pieces and prefetch.pieces[0].move not in self._running:
            piece = prefetch.pieces.popleft()
            if prefetch.abandoned or prefetch.lost >= 0:
                self._give_up(piece)
            else:
                self._fetched(prefetch, piece)
        if prefetch.lost >= 0 and not prefetch.pieces and not prefetch.stopped:
            if not prefetch.repeats:
                for group in prefetch.lost_in:
                    prefetch.sought.lost(group, prefetch.lost)
            prefetch.lost, prefetch.last = -1, prefetch.limit
            self._decide(prefetch)

    def _finish(self, prefetch: Prefetch) -> None:
        prefetch.done = True
        self._measure(prefetch)
        if prefetch.tries:
            self._tiering.break_even.untried(Lane.FETCH)
        if self._named.get(prefetch.name) is prefetch:
            del self._named[prefetch.name]
        if prefetch.holds and prefetch.limit > prefetch.start:
            self._tiering.archiver.owe(prefetch.lease.node)  # what is above it is of use, too
        if prefetch.holds and prefetch.num_waiting and not prefetch.abandoned and prefetch.limit > prefetch.start:
            self._hold_frames(prefetch, prefetch.sought.near())
        else:
            self._let_go(prefetch)

    def _measure(self, prefetch: Prefetch) -> None:
        """How fast the link is for those who wait: what it has brought meanwhile, for anybody, in the time that passed.
        Where that was one step of others, nobody could have begun before its end; then only the work counts."""
        if prefetch.fetching_since is not None:
            seconds = self._seconds() - prefetch.fetching_since
            num_bytes = self._fetched_bytes - prefetch.fetched_before
            if not prefetch.in_rounds and prefetch.seconds * num_bytes < seconds * prefetch.own_bytes:
                num_bytes, seconds = prefetch.own_bytes, prefetch.seconds
            self._tiering.break_even.moved(Lane.FETCH, num_bytes, seconds)

    def _looked(self, prefetch: Prefetch, move: Transfer) -> None:
        """The store has answered."""
        answers = [answer for found in move.answers for answer in found]
        if not move.is_whole or answers.count(Answer.RETRY) > answers.count(Answer.HIT):
            self._report(prefetch, move, asked=1)
            return
        self._tiering.break_even.looked(move.seconds)
        if not answers:
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
        prefetch.limit = prefetch.wanted = prefetch.last = min(prefetch.limit, near)
        if wanted <= near or tiering.damaged.are(sought.path).any() or tiering.is_too_much(sought.loads(wanted)):
            return
        tokens = (wanted - near) * self._size
        num_bytes = sum(
            len(places) * size for places, size in zip(sought.lacking(wanted), self._record_bytes, strict=True)
        )
        if not num_bytes:
            return
        even, mover = tiering.break_even, tiering.mover
        is_asked = not (tiering.settings.always or prefetch.tries)
        if is_asked and not even.decide(Lane.FETCH, tokens, num_bytes, mover.in_flight(Lane.FETCH)):
            tiering.counters.declined_tokens += tokens
            return
        prefetch.wanted = wanted
        prefetch.stop_at = prefetch.since + even.deadline(tokens, num_bytes)
        prefetch.num_bytes = max(prefetch.num_bytes, num_bytes)
        self._hold_frames(prefetch, wanted)

    def _fetch(self, prefetch: Prefetch) -> bool:
        """Fetch the next piece; False where there is none, or no room for any of it, or enough is on its way."""
        if prefetch.last >= prefetch.wanted or prefetch.stopped or prefetch.lost >= 0:
            return False
        if sum(piece.move.num_bytes for piece in prefetch.pieces if piece.move is not None) >= prefetch.at_once:
            return False
        last, places = self._piece(prefetch)
        if last <= prefetch.last or self._pages.num_free_pages < last - prefetch.lease.num_pages:
            return False
        if any(map(len, places)):
            return self._bring(prefetch, last, places)
        prefetch.pieces.append(Piece(last))  # whoever begins behind these pages reads nothing of them
        prefetch.last = last
        return True

    def _piece(self, prefetch: Prefetch) -> tuple[int, list[Places]]:
        """The page behind the next piece, and by group the places of what has to come, for which there is room."""
        places = [at[at >= prefetch.last] for at in prefetch.sought.lacking(prefetch.wanted)]
        num_bytes = np.zeros(prefetch.wanted, dtype=np.int64)
        for at, size in zip(places, self._record_bytes, strict=True):
            num_bytes[at] += size
        least = max(prefetch.last + 1, int(np.argmax(np.append(num_bytes, 1) > 0)) + 1)
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
        move = Transfer(Lane.FETCH, units, tiering.names.scope(prefetch.namespace), num_bytes)
        piece = Piece(last, fetching, move)
        if not self._submit(prefetch, move):
            self._give_up(piece)
            if not prefetch.pieces and tiering.mover.in_flight(Lane.FETCH):
                self._refused[prefetch] = None  # until one of those has ended
            return False
        prefetch.pieces.append(piece)
        prefetch.last = last
        if prefetch.fetching_since is None:
            prefetch.fetching_since, prefetch.fetched_before = self._seconds(), self._fetched_bytes
        prefetch.in_rounds |= prefetch.seconds > 0
        return True

    def _give_up(self, piece: Piece) -> None:
        for (group, _, frames), suspect in zip(piece.fetching, piece.suspect(), strict=True):
            _give_back(self._tiering.hosts[group], frames, suspect)

    def _fetched(self, prefetch: Prefetch, piece: Piece) -> None:
        """Keep the pages up to the first that has not come whole, in every group."""
        tiering, fetching = self._tiering, piece.fetching
        all_defects = piece.move.defects if piece.move is not None else ()
        end = piece.last
        for (_, at, _), defects in zip(fetching, all_defects, strict=True):
            wrong = [place for place, defect in zip(at.tolist(), defects, strict=True) if defect]
            end = min([end, *wrong])
        first = prefetch.lease.num_pages
        grafted = self._keep(prefetch, end) if end > prefetch.limit else end
        counted = self._tree.countable(prefetch.lease, first, end) if end > first else end
        self._bind(prefetch, piece, end, counted, grafted)
        if end < piece.last:
            prefetch.wanted = prefetch.limit
            prefetch.lost, prefetch.lost_in = end, [group for group, at, _ in fetching if end in at]
            suspect = zip(fetching, piece.suspect(), strict=True)
            prefetch.repeats = prefetch.again < _MOST_AGAIN and any(end in at[rows] for (_, at, _), rows in suspect)
            prefetch.again += prefetch.repeats
            if any(REFUSED in defects or FAILED in defects for defects in all_defects):
                prefetch.stopped = True
            for move in prefetch.moves:
                move.stop()
        elif prefetch.limit < prefetch.wanted:
            self._hold_frames(prefetch, prefetch.wanted)
        else:
            tiering.owed_to_storage(prefetch.sought.path[prefetch.start : prefetch.limit])

    def _report(self, prefetch: Prefetch, move: Transfer, asked: int) -> None:
        """Say where a move brought less than half of what the store was asked for, or nothing by the time at which it
        was stopped and all should have come: that ends a trial, for which everybody has waited long enough."""
        even = self._tiering.break_even
        expected = 0.0 if prefetch.tries else even.load_seconds(Lane.FETCH, move.num_bytes) or 0.0
        expected = max(_LEAST_SECONDS, expected)
        is_late = move.stopping and not move.moved_bytes and move.seconds >= expected
        brought = 2 * move.moved_bytes >= asked and not is_late
        if not brought:
            even.failed(Lane.FETCH, move.seconds)
        prefetch.tries &= brought
        self._tiering.counters.failed_moves += bool(move.error) or not brought

    def _bind(self, prefetch: Prefetch, piece: Piece, end: int, counted: int, grafted: int) -> None:
        """What has come of pages before `end` counts (in groups that are read as a whole, before `counted`), but for
        what the cache has got elsewhere meanwhile. Pages from `grafted` on are cached since now."""
        tiering, cached = self._tiering, prefetch.sought.path
        for (group, at, frames), suspect in zip(piece.fetching, piece.suspect(), strict=True):
            host = tiering.hosts[group]
            good = at < min(counted if host.whole else end, len(cached))
            pages = cached[at[good]]
            fresh = ~host.resident(pages)
            ranks = np.full(len(pages), Rank.USED, dtype=np.int8)[fresh] if not host.whole else None
            host.bind(pages[fresh], frames[good][fresh], ranks)
            if tiering.is_anchor(group):
                for place in at[good][fresh & (at[good] < grafted)].tolist():
                    self._tree.copied(prefetch.lease, place, place + 1)
            _give_back(host, frames[~good], suspect[~good])
            host.untake(frames[good][~fresh])
            tiering.counters.fetched_frames += int(np.count_nonzero(fresh))
            tiering.counters.fetched_bytes += int(np.count_nonzero(fresh)) * self._record_bytes[group]
            tiering.stored(group, pages[fresh])

    def _keep(self, prefetch: Prefetch, end: int) -> int:
        """The first `end` pages of the prompt are cached from now on; returns the first of those that were not, which
        are below the device."""
        first = grafted = prefetch.lease.num_pages
        if end > first:
            try:
                pages = self._pages.alloc_pages(end - first)
            except OutOfPages:
                prefetch.stopped = True
                return first
            inserted = self._tree.graft(prefetch.lease, prefetch.tokens[first * self._size : end * self._size], pages)
            mine = len(inserted.duplicates)
            if mine:
                self._pages.free_pages(np.sort(inserted.duplicates))
            grafted = first + mine
            self._tiering.have_copies(prefetch.lease, first, inserted.pages, grafted)
        prefetch.limit = end
        return grafted


def _give_back(host: HostGroup, frames: Ids, suspect: Bools) -> None:
    """These frames are nobody's; those that are suspect are set aside."""
    host.untake(frames[~suspect])
    host.quarantine(frames[suspect])

"""Prefetcher: fetches stored pages to the host for waiting requests, and has a peer compute and write the others.

    look      which pages of the prompt are only in the store, and how far they would help (`RequestedPrefix`)
    fetch     these in pieces, in the order of the prompt; a piece is bound when it and all before it are checked.
              Enough of them are under way at once that the lane is not idle until the next step
    ask       a peer for the pages after the stored ones, if there is one. It computes them while the others are fetched
    stop      when computing would have been quicker, or the policy has enough; fetched pages stay cached
    hold      fetched pages, until all requests that waited for them have begun or ended, or memory is short

A piece that is damaged or missing ends the fetch at the last page after which a request can begin. If the host memory
was bad and not the record, its frame is quarantined and the piece is fetched again.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from quire.cache.groups import NO_PAGES, resume_point
from quire.cache.hold import Reason
from quire.cache.offload import CacheParts
from quire.offload.prefetch import PIECE_BYTES, Piece, Prefetch, RequestedPrefix
from quire.offload.tiering import Tiering
from quire.scheduler.prefetching import ReadAhead
from quire.settings.fields import PrefetchPolicy
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.tiers.prefill import PrefillPeers
from quire.tiers.store import Answer
from quire.tiers.transfer import UNDAMAGED, Lane, Transfer

_FIRST_BYTES = 4 * PIECE_BYTES  # in flight for one request; they double when all have arrived by the next step
_MOST_BYTES = 512 << 20
_LEAST_PATIENCE = 0.02  # share of a prompt's compute time to wait for the answer to a look; more if prompts were stored
_LEARNS = 0.2
_LEAST_SECONDS = 1e-3  # a shorter transfer is never late
_MOST_AT_ONCE = 16  # prefetches that run or hold pages: each holds a whole prefix
_MOST_OF_HOST = 0.5  # share of the host's bytes for prefetches; running requests need the rest


class Prefetcher(ReadAhead[Prefetch]):
    """Prefetches for the cache that has these parts."""

    loads = True

    def __init__(self, tiers: Tiering, parts: CacheParts) -> None:
        self._tiers = tiers
        self._parts = parts
        peers = tiers.settings.peers
        self.peers = PrefillPeers() if peers is None else peers
        self._has_peers = peers is not None
        self._policy = tiers.settings.prefetch
        self._size = parts.plan.page_size
        self._partial = tuple(group for group in parts.groups if not group.reach.whole)
        self._host_bytes = tiers.settings.num_bytes(host.num_frames for host in tiers.hosts)
        self._found = 0.5  # share of the last prompts that was stored
        self._running: dict[Transfer, Prefetch] = {}
        self._holding: dict[Prefetch, None] = {}  # those with a live hold, oldest first
        self._refused: dict[Prefetch, None] = {}  # those that wait for room on the lane
        self._named: dict[bytes, Prefetch] = {}
        self._fetched_bytes = 0
        self._at_once = _FIRST_BYTES
        self._landed: deque[Transfer] = deque()  # written by peers, to be checked
        parts.damaged.holders.append(self.release_damaged)

    # -- transfers of all lanes

    def settle_moves(self) -> bool:
        num_received = self._receive()
        if not self._tiers.settle(self._ended) and not num_received:
            return False
        self._parts.damaged.release_holds()
        self._parts.sweep()
        self._parts.changed()
        return True

    def wait_moves(self, seconds: float) -> bool:
        mover = self._tiers.mover
        return not mover.idle and mover.wait(seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        self._tiers.break_even.computed(num_tokens, seconds)

    # -- requests that wait

    @property
    def prefetches(self) -> bool:
        return self._tiers.settings.stores or self.peers.asks

    @property
    def can_prefetch(self) -> bool:
        taken = [each for each in {*self.in_flight, *self._holding} if each.num_waiting]
        has_room = sum(prefetch.num_bytes for prefetch in taken) <= self._host_bytes * _MOST_OF_HOST
        return self.prefetches and len(taken) < _MOST_AT_ONCE and has_room

    def prefetch(self, tokens: Ids, namespace: Namespace, *, may_ask: bool = True) -> Prefetch | None:
        """A prompt that continues with the same page as another one shares its prefetch."""
        tiers, parts = self._tiers, self._parts
        scope = tiers.names.scope(namespace)
        if not self.can_prefetch or tiers.deletion.covers(scope):
            return None
        limit = max(0, len(tokens) - 1) // self._size
        found = parts.tree.match(namespace, tokens)
        known = min(found.num_pages, limit)
        start, _ = resume_point(self._partial, found.pages[:known], tiers.hosts)
        if start == limit or tiers.damaged.are(found.pages).any():
            return None
        above = int(found.pages[known - 1]) if known else 0
        ahead = tiers.names.keys_ahead(namespace, above, tokens[known * self._size : limit * self._size].tobytes())
        keys, name = ahead.digests, ahead.digests[0] if ahead.digests else ahead.parent
        other = self._named.get(name)
        asks = other is not None and (other.may_ask or other.ask is not None)
        if other is not None and not other.stopped and (may_ask or not asks):
            other.num_waiting += 1
            other.shared = True
            return other
        num_missing = (limit - start) * self._size
        may_ask &= self._has_peers
        looks = tiers.settings.stores
        if is_trial := looks and self._is_off:  # a request tries the lane as if all missing pages were stored
            counts = [limit - max(start, group.reach.needed(limit).start) for group in parts.groups]
            looks = is_trial = tiers.break_even.decide(Lane.FETCH, num_missing, tiers.settings.num_bytes(counts))
        if not looks and not may_ask:
            return None
        hold = parts.holds.add(Reason.READ_AHEAD, lease=parts.tree.pin_path(found, known))
        prefix = RequestedPrefix(tiers, parts.groups, hold.path, start, keys)
        share = max(_LEAST_PATIENCE, self._found) if self._policy is PrefetchPolicy.BREAK_EVEN else 1.0
        now = parts.seconds()
        stop_at, at_once = now + share * self._patience(num_missing, 0), self._at_once
        prefetch = Prefetch(
            tiers, parts, namespace, tokens, name, prefix, hold, is_trial, at_once, now, stop_at, may_ask
        )
        self._holding[prefetch] = None
        self._named[name] = prefetch
        if not (looks and self._look(prefetch, scope)) and not self._asks_now(prefetch):
            self._named.pop(name, None)
            self._release(prefetch)
            return None
        return prefetch

    def _look(self, prefetch: Prefetch, scope: bytes) -> bool:
        """Look up the pages in the store; returns False if the lane refuses."""
        whole = [group.index for group in self._parts.groups if group.reach.whole]
        look = Transfer(Lane.LOOK, prefetch.prefix.units(), scope, whole=whole)
        if not self._tiers.mover.submit(look):
            self._tiers.break_even.untried(Lane.FETCH)
            prefetch.is_trial = False
            return False
        self._running[look] = prefetch
        prefetch.look = look
        return True

    def _asks_now(self, prefetch: Prefetch) -> bool:
        """Ask a peer without the store's answer; returns whether there is one to ask."""
        if prefetch.may_ask:
            self._decide(prefetch)
            self._go_on(prefetch)
        return prefetch.ask is not None

    def is_awaited(self, prefetch: Prefetch) -> bool:
        if prefetch.done or prefetch.cancelled:
            return False
        # A request cannot begin before the current step ends, so waiting takes at least that long.
        least = self._parts.step_seconds() if self._policy is PrefetchPolicy.BREAK_EVEN else 0.0
        ask, expired = prefetch.ask, {move.lane for move in prefetch.moves if move.expired}
        is_late = self._parts.seconds() >= prefetch.stop_at - least or Lane.RECEIVE in expired
        if ask is None:
            is_late |= bool(expired)
            is_over = self._is_off and not prefetch.is_trial
        else:
            is_over = prefetch.has_all or Lane.FETCH in expired or (ask.is_over and not prefetch.is_fetching)
        if not is_late and not is_over:
            return True
        if ask is None and prefetch.look is not None and self._asks_now(prefetch):
            return True
        prefetch.stop("deadline" if is_late else "")
        return False

    def stop_prefetch(self, prefetch: Prefetch) -> None:
        prefetch.num_waiting -= 1
        assert prefetch.num_waiting >= 0, "a request has left twice"
        if not prefetch.num_waiting:
            prefetch.stop()
            prefetch.cancelled |= prefetch.ask is not None and not prefetch.done  # a peer may never answer
            if prefetch.done or prefetch.cancelled:
                self._release(prefetch)

    def release_prefetched(self) -> bool:
        if not self._holding:
            return False
        self._cancel(next(reversed(self._holding)))
        self._parts.sweep()  # flushed pages must be freed before they could be evicted to the host and stored
        return True

    def cancel(self, namespace: Namespace | None) -> None:
        """Drop, and do not hold, fetched pages of a namespace, or any (None)."""
        for prefetch in [*self._holding, *self.in_flight]:
            if namespace in (None, prefetch.namespace):
                self._cancel(prefetch)

    def _cancel(self, prefetch: Prefetch) -> None:
        prefetch.cancelled = not prefetch.done
        self._release(prefetch)
        prefetch.stop()

    def release_damaged(self) -> None:
        """Release holds of paths with damaged pages, so that these can be deleted."""
        for prefetch in list(self._holding):
            if prefetch.done and self._parts.damaged.are(prefetch.prefix.path).any():
                self._release(prefetch)

    @property
    def in_flight(self) -> tuple[Prefetch, ...]:
        """Prefetches that have not ended."""
        return tuple(dict.fromkeys((*self._running.values(), *self._refused)))

    def host_frames(self, group: int) -> Ids:
        """Host frames of pieces that are not bound yet."""
        fetching = [part for each in self.in_flight for piece in each.pieces for part in piece.fetching]
        return np.concatenate([NO_PAGES, *(frames for host, _, frames in fetching if host.index == group)])

    @property
    def _is_off(self) -> bool:
        return bool(self._tiers.break_even.why_off(Lane.FETCH)) and not self._tiers.settings.always

    def _patience(self, tokens: int, num_bytes: int) -> float:
        """Seconds that a request waits for these tokens."""
        fixed = {
            PrefetchPolicy.WAIT_COMPLETE: math.inf,
            PrefetchPolicy.BEST_EFFORT: 0.0,
            PrefetchPolicy.TIMEOUT: self._tiers.settings.prefetch_seconds,
        }
        return fixed[self._policy] if self._policy in fixed else self._tiers.break_even.deadline(tokens, num_bytes)

    def _decide(self, prefetch: Prefetch) -> None:
        """Decide how far to fetch: to the last page where groups can resume, if it pays. A peer computes the rest."""
        tiers, prefix = self._tiers, prefetch.prefix
        near, far = resume_point(self._partial, prefix.path, tiers.hosts)[0], prefix.far()
        prefetch.limit = prefetch.wanted = prefetch.stored = prefetch.last = min(prefetch.limit, near)
        if tiers.damaged.are(prefix.path).any():
            return
        if far > near and self._pays(prefetch, near, far):
            near = prefetch.stored = prefetch.wanted = far
        if prefetch.may_ask and not prefetch.stopped:
            tokens, prefetch.may_ask = prefetch.tokens[: prefix.limit * self._size], False
            prefetch.ask = self.peers.ask(tokens, prefetch.namespace, (prefix.limit - near) * self._size)
            if prefetch.ask is not None:
                prefetch.stop_at = self._parts.seconds() + prefetch.ask.seconds
        is_asked = prefetch.ask is not None and not prefetch.ask.why
        if is_asked and not tiers.is_too_much(map(len, prefix.lacking(prefix.limit, ()))):
            prefetch.wanted = prefix.limit
        if prefetch.wanted > prefetch.limit:
            num_bytes = tiers.settings.num_bytes(map(len, prefix.lacking(prefetch.wanted)))
            prefetch.num_bytes = max(prefetch.num_bytes, num_bytes)
            prefetch.hold_frames(prefetch.wanted)

    def _pays(self, prefetch: Prefetch, near: int, far: int) -> bool:
        """Whether it is worth it to fetch what is stored of the pages from `near` to `far`."""
        tiers, lacking = self._tiers, prefetch.prefix.lacking(far)
        tokens, num_bytes = (far - near) * self._size, tiers.settings.num_bytes(map(len, lacking))
        if not num_bytes or tiers.is_too_much(map(len, prefetch.prefix.lacking(far, ()))):
            return False
        queued = tiers.mover.in_flight(Lane.FETCH)
        is_sure = tiers.settings.always or prefetch.is_trial
        if not is_sure and not tiers.break_even.decide(Lane.FETCH, tokens, num_bytes, queued):
            tiers.counters.declined_tokens += tokens
            return False
        if prefetch.ask is None:
            prefetch.stop_at = prefetch.since + self._patience(tokens, num_bytes)
        return True

    # -- what has ended

    def _receive(self) -> int:
        """Check what peers have written, and process parts that they have not; returns the number of these."""
        num_failed = 0
        for move, why in self.peers.settle():
            if why:
                num_failed += 1
                move.end(why)
                self._ended(move)
            else:
                self._landed.append(move)
        while self._landed and self._tiers.mover.submit(self._landed[0]):
            self._landed.popleft()
        return num_failed

    def _ended(self, move: Transfer) -> None:
        prefetch = self._running.pop(move)
        for at, defects in enumerate(move.defects):
            for place, defect in enumerate(defects):
                if defect not in UNDAMAGED:
                    far = move.lane.far.value if move.lane is Lane.RECEIVE else "storage"
                    self._tiers.counters.corrupt("host" if (at, place) in move.suspect else far, [defect])
        if move is prefetch.look:
            self._looked(prefetch, move)
        elif move.lane is Lane.FETCH:
            self._report(prefetch, move, asked=move.asked_bytes)
            self._fetched_bytes += move.moved_bytes
            prefetch.seconds += move.seconds
            prefetch.own_bytes += move.moved_bytes
            if prefetch.at_once < _MOST_BYTES and all(other.done for other in prefetch.moves):
                self._widen(prefetch)
            has_fetched = prefetch.last >= prefetch.stored
            if prefetch.ask is not None and has_fetched and all(m.done for m in prefetch.moves if m.lane is move.lane):
                self._measure(prefetch)  # without the time of the peer
        waiting, self._refused = self._refused, {}
        for each in (prefetch, *waiting):
            self._go_on(each)

    def _looked(self, prefetch: Prefetch, move: Transfer) -> None:
        """The store has answered."""
        prefetch.look = None
        is_late = prefetch.stopped or prefetch.ask is not None
        if prefetch.is_trial and is_late:
            prefetch.is_trial = False
            self._tiers.break_even.failed(Lane.FETCH, move.seconds)
        if prefetch.cancelled:
            return
        if move.deleted_scopes:
            self._tiers.archiver.store_is_empty()
            self._tiers.deletion.found(move.deleted_scopes)
        answers = [answer for found in move.answers for answer in found]
        if not move.is_whole or answers.count(Answer.RETRY) > answers.count(Answer.HIT):
            self._report(prefetch, move, asked=1)
        else:
            self._tiers.break_even.moved(Lane.LOOK, 1, move.seconds)
            if answers:
                prefix = prefetch.prefix
                prefix.answered(move.answers)
                share = max(0, prefix.far() - prefix.start) / (prefix.limit - prefix.start)
                self._found += _LEARNS * (share - self._found)
        if prefetch.ask is None:
            self._decide(prefetch)

    def _report(self, prefetch: Prefetch, move: Transfer, asked: int) -> None:
        """Report a transfer that brought less than half of the requested bytes, or nothing in time: it ends a trial."""
        even = self._tiers.break_even
        expected = 0.0 if prefetch.is_trial else even.load_seconds(Lane.FETCH, move.num_bytes) or 0.0
        is_late = move.stopping and not move.moved_bytes and move.seconds >= max(_LEAST_SECONDS, expected)
        brought = 2 * move.moved_bytes >= asked and not is_late
        if not brought:
            even.failed(Lane.FETCH, move.seconds)
        prefetch.is_trial &= brought
        self._tiers.counters.failed_moves += bool(move.error) or not brought

    def _go_on(self, prefetch: Prefetch) -> None:
        """Bind pieces that have arrived, and fetch more; or finish."""
        self._bind_arrived(prefetch)
        while (piece := prefetch.next_piece()) is not None and self._submit(prefetch, piece):
            self._bind_arrived(prefetch)
        if prefetch.look is None and not prefetch.pieces and prefetch not in self._refused:
            self._finish(prefetch)

    def _bind_arrived(self, prefetch: Prefetch) -> None:
        """Bind pieces that have arrived, if all before them have."""
        while prefetch.pieces and prefetch.pieces[0].move not in self._running:
            piece = prefetch.pieces.popleft()
            if prefetch.cancelled or prefetch.lost:
                piece.discard()
            else:
                prefetch.fetched(piece)
        if prefetch.lost and not prefetch.pieces and not prefetch.stopped:
            prefetch.lost, prefetch.last = False, prefetch.limit
            self._decide(prefetch)

    def _submit(self, prefetch: Prefetch, piece: Piece) -> bool:
        """Submit a piece; returns False if the lane refuses."""
        move = piece.move
        if move is not None and move.lane is Lane.RECEIVE:
            assert prefetch.ask is not None
            self._running[move] = prefetch
            prefetch.ask.want(move, [places for _, places, _ in piece.fetching])
        elif move is not None:
            if not self._tiers.mover.submit(move):
                piece.discard()
                if not prefetch.pieces and self._tiers.mover.in_flight(Lane.FETCH):
                    self._refused[prefetch] = None  # until one has ended
                return False
            self._running[move] = prefetch
            if prefetch.fetching_since is None:
                prefetch.fetching_since, prefetch.fetched_before = self._parts.seconds(), self._fetched_bytes
            prefetch.in_rounds |= prefetch.seconds > 0
        prefetch.pieces.append(piece)
        prefetch.last = piece.last
        return True

    def _finish(self, prefetch: Prefetch) -> None:
        prefetch.done, prefetch.until = True, self._parts.seconds()
        if prefetch.ask is None:
            self._measure(prefetch)
        else:
            prefetch.ask.release(max(0, prefetch.limit - prefetch.stored) * self._size)
        if prefetch.is_trial:
            self._tiers.break_even.untried(Lane.FETCH)
        if self._named.get(prefetch.name) is prefetch:
            del self._named[prefetch.name]
        has_arrived = not prefetch.hold.released and prefetch.limit > prefetch.prefix.start
        if has_arrived:
            self._tiers.archiver.archive(prefetch.hold.path.node)  # this touches its ancestors
        if has_arrived and prefetch.num_waiting and not prefetch.cancelled:
            prefetch.hold_frames(resume_point(self._partial, prefetch.prefix.path, self._tiers.hosts)[0])
        else:
            self._release(prefetch)

    def _release(self, prefetch: Prefetch) -> None:
        if not prefetch.hold.released:
            self._holding.pop(prefetch)
            self._parts.holds.release(prefetch.hold)

    # -- measured speed

    def _widen(self, prefetch: Prefetch) -> None:
        """Allow more bytes in flight, for later prefetches too, and measure again: the speed with fewer differs."""
        self._at_once = max(self._at_once, prefetch.at_once)
        prefetch.at_once = min(2 * prefetch.at_once, _MOST_BYTES)
        if prefetch.last < min(prefetch.stored, prefetch.wanted) and prefetch.fetching_since is not None:
            prefetch.fetching_since, prefetch.fetched_before = self._parts.seconds(), self._fetched_bytes
            prefetch.seconds, prefetch.own_bytes, prefetch.in_rounds = 0.0, 0, False

    def _measure(self, prefetch: Prefetch) -> None:
        """Measure the lane: bytes for any request over time, or over seconds of work if one long step held it up."""
        if prefetch.fetching_since is not None:
            seconds = self._parts.seconds() - prefetch.fetching_since
            num_bytes = self._fetched_bytes - prefetch.fetched_before
            if not prefetch.in_rounds and prefetch.seconds * num_bytes < seconds * prefetch.own_bytes:
                num_bytes, seconds = prefetch.own_bytes, prefetch.seconds
            self._tiers.break_even.moved(Lane.FETCH, num_bytes, seconds)
            prefetch.fetching_since = None

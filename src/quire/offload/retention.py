"""Retention: prefixes that callers asked to keep, under one budget, each until its time is over.

    soft     leased until it expires, but let go of before a running request is refused a page: the lowest priority
             first, then what would expire first
    pinned   leased until it expires; all pins together leave room for the longest request there may be, so that
             one alone always runs

Whoever asks is told how much is kept, and why not more. Only what is cached can be kept, in whole pages; nothing that
is kept once is let go of for others who ask. A prefix of what is kept costs nothing more: pages are counted once.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.cache.damaged import DamagedPages
from quire.cache.hold import Hold, Reason
from quire.cache.offload import CacheParts
from quire.errors import InvalidInput
from quire.lazy_queue import LazyQueue
from quire.offload.host_groups import HostGroup
from quire.offload.kept_frames import KeptFrames
from quire.prefix.hashing import namespace_seed
from quire.prefix.match import Match
from quire.prefix.node import Lease, Node, pages_to
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.pages import pages_for
from quire.spec.rank import Rank

RETAIN_SHARE = 0.25
"""Of the plan's pages: what may be kept, where nothing else is said."""

MOST_SECONDS = 86_400.0
"""The longest time for which something can be kept without asking again."""

MOST_RETENTIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The answer to `Retention.retain`: of `asked_tokens`, the first `granted_tokens` are kept.

    `reason` says why not more; it is "" where all are. `retention_id` is what releases it, and "" where nothing is
    kept: it cannot be guessed, and is told only to who asks for the same tokens of the same namespace. Of what is kept,
    `host_tokens` are below the device now: they are loaded when they are used.
    """

    retention_id: str
    asked_tokens: int
    granted_tokens: int
    expires_in_seconds: float
    pinned: bool
    reason: str
    host_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """One retention as others may see it: neither its id, nor its tokens, nor whose they are."""

    tokens: int
    priority: int
    pinned: bool
    expires_in_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedList:
    """What is kept, in tokens, each page counted once, of what may be."""

    budget_tokens: int
    retained_tokens: int
    retentions: tuple[Retained, ...]


class _Kept:
    """One retention. `expires_at` is in seconds of the clock; `order` tells those apart that are equal."""

    __slots__ = (
        "expires_at",
        "hold",
        "key",
        "namespace",
        "order",
        "pinned",
        "priority",
        "retention_id",
        "ticket",
    )

    def __init__(self, key: bytes, namespace: Namespace, order: int, hold: Hold, priority: int) -> None:
        self.retention_id = f"retention-{secrets.token_hex(16)}"
        self.key = key
        self.namespace = namespace
        self.order = order
        self.hold = hold
        self.expires_at = 0.0
        self.priority = priority
        self.pinned = False
        self.ticket = 0  # of the entry that says when it expires

    @property
    def lease(self) -> Lease:
        """The path that is kept."""
        return self.hold.path


class Retention:
    """What callers asked to keep of a cache, at most `share` of the plan's pages. It holds paths of the tree, whatever
    tier they are in, and of groups that are read in part the frames that are needed at their ends. To keep is not to
    use: nothing is counted as a hit.

    Single-threaded, like the cache. Whenever something is kept no longer, requests that wait for room may try again.
    """

    def __init__(self, parts: CacheParts, share: float, hosts: Sequence[HostGroup] = ()) -> None:
        plan = parts.plan
        self._tree = parts.tree
        self._holds = parts.holds
        self._groups = parts.groups
        self._ids = parts.pages
        largest = pages_for(plan.largest_request, plan.page_size)
        self._frames = KeptFrames(parts.groups, parts.damaged, hosts, largest=largest)
        self._size = plan.page_size
        self._seconds = parts.seconds
        self._on_let_go = parts.changed
        self.budget = int(share * plan.num_pages)  # pages
        self._pin_budget = max(0, min(self.budget, plan.num_pages - largest))
        self._largest = plan.largest_request
        self._kept: dict[str, _Kept] = {}
        self._by_key: dict[bytes, _Kept] = {}
        self._expiries: LazyQueue[_Kept] = LazyQueue(self._expires, by_key=True)
        self._order = itertools.count()
        self._pages = _PageCounts()
        self._pins = _PageCounts()
        self.num_expired = self.num_given_up = self.num_lost = 0

    # -- asking

    def retain(
        self, tokens: Ids, namespace: Namespace, *, ttl_seconds: float, priority: int = 0, pin: bool = False
    ) -> Granted:
        """Keep the cached part of `tokens` for so long, and say how much that is.

        Asked again for the same tokens, it keeps what was cached since as well, and the later time, the higher priority
        and the pin of all that was asked: use `release` for less. Raises InvalidInput for a time that cannot be.
        """
        if not 0 < ttl_seconds <= MOST_SECONDS:
            raise InvalidInput(
                f"ttl_seconds must be above 0 and at most {MOST_SECONDS:,.0f}, got {ttl_seconds:g}.",
                fix="ask again before the time is over to keep it longer.",
            )
        now = self._seconds()
        self.expire(now)
        key = hashlib.sha256(namespace_seed(namespace) + tokens.tobytes()).digest()
        kept = self._by_key.get(key)
        pin = pin or (kept is not None and kept.pinned)
        match = self._tree.match(namespace, tokens)
        num_pages, reason = self._grant(len(tokens), match, kept, pin)
        if kept is None and not num_pages:
            return Granted(
                retention_id="",
                asked_tokens=len(tokens),
                granted_tokens=0,
                expires_in_seconds=0.0,
                pinned=False,
                reason=reason,
            )
        if kept is None:
            frames = self._frames.needed_by(match.pages[:num_pages])
            lease = self._tree.pin_path(match, num_pages)
            hold = self._holds.add(Reason.RETAIN, lease=lease, frames=frames, rank=Rank.USED)
            self._frames.count(frames, 1, hard=False)
            kept = _Kept(key, namespace, next(self._order), hold, priority)
            self._kept[kept.retention_id] = self._by_key[key] = kept
            self._pages.add(match.pages[:num_pages])
        elif num_pages > kept.lease.num_pages:
            self._lengthen(kept, match, num_pages)
        if pin and not kept.pinned and self._may_pin(match.pages[:num_pages]):
            kept.pinned = True
            self._pins.add(match.pages[:num_pages])
            self._frames.harden(kept.hold.frames)
        kept.priority = max(kept.priority, priority)
        if now + ttl_seconds > kept.expires_at:
            kept.expires_at = now + ttl_seconds
            self._remember(kept)
        return Granted(
            retention_id=kept.retention_id,
            asked_tokens=len(tokens),
            granted_tokens=kept.lease.num_pages * self._size,
            expires_in_seconds=kept.expires_at - now,
            pinned=kept.pinned,
            reason=reason,
            host_tokens=(kept.lease.num_pages - self._num_here(kept.lease.node)) * self._size,
        )

    def release(self, retention_id: str) -> bool:
        """Keep it no longer; False where there is none of that id, or none any more."""
        kept = self._kept.get(retention_id)
        if kept is None:
            return False
        self._let_go(kept)
        return True

    def forget(self, namespace: Namespace | None) -> int:
        """Keep nothing more of that namespace, or of any; returns how many retentions that were."""
        gone = [kept for kept in self._kept.values() if namespace is None or kept.namespace == namespace]
        for kept in gone:
            self._let_go(kept)
        return len(gone)

    def lose(self, damaged: DamagedPages) -> int:
        """Keep nothing that goes through a damaged page: it cannot be had any more. Returns how many retentions that
        were."""
        gone = [kept for kept in self._kept.values() if damaged.are(pages_to(kept.lease.node)).any()]
        for kept in gone:
            self._let_go(kept)
        self.num_lost += len(gone)
        return len(gone)

    # -- making room

    @property
    def due_at(self) -> float:
        """When `expire` may next have something to do, in seconds of the clock; infinite where nothing is kept."""
        return float(self._expiries.first_key(math.inf))

    def expire(self, now: float | None = None) -> int:
        """Let go of what has been kept for its time; returns how many retentions that were. O(1) if it is none."""
        now = self._seconds() if now is None else now
        gone = 0
        while self._expiries.first_key(math.inf) <= now:
            if (entry := self._expiries.pop()) is not None:
                self._let_go(entry.item)
                gone += 1
        self.num_expired += gone
        return gone

    @property
    def num_soft(self) -> int:
        """Pages on the device that soft retentions alone keep from being evicted. O(nodes kept)."""
        return sum(node.num_pages for node in self._only_soft() if self._tree.is_here(node))

    def num_soft_of(self, match: Match, num_pages: int) -> int:
        """Which of `num_soft` a request would hold itself that begins on the first `num_pages` pages of a match."""
        if not self._kept:
            return 0
        only = self._only_soft()
        path = [node for node in match.path if node in only and self._tree.is_here(node)]
        return sum(max(0, min(node.num_pages, num_pages - node.depth)) for node in path)

    def num_soft_frames(self, group: int) -> int:
        """The same of frames of a group that is read in part."""
        return self._frames.num_soft(group)

    def num_soft_frames_of(self, group: int, pages: Ids) -> int:
        """Which of these a request would hold itself that begins behind `pages`."""
        return self._frames.num_soft_of(group, pages)

    def give_way(self, wanted: Sequence[int], num_new: int) -> bool:
        """Let go of what is kept softly until so many frames, by group, and page ids could be had, or nothing would
        help; whether anything was let go of."""
        if not self._kept:
            return False
        before, tree = self.num_let_go, self._tree
        short = [n - group.num_free - group.num_evictable for group, n in zip(self._groups, wanted, strict=True)]
        whole = [n for n, group in zip(short, self._groups, strict=True) if group.reach.whole]
        pages = num_new - self._ids.num_free_pages - tree.num_evictable - tree.num_below
        self.give_up(max(pages, *whole, 0))
        for group, n in zip(self._groups, short, strict=True):
            if not group.reach.whole and n > 0:
                self.give_up_frames(group.index, n)
        return self.num_let_go > before

    def give_up(self, num_pages: int) -> int:
        """Let go of soft retentions until so many pages on the device have become evictable, the lowest priority first,
        then what would expire first, and of the last one no more than is needed, from its end; returns how many have.
        Where others hold the same pages, letting go would bring nothing, and they are kept."""
        if num_pages <= 0 or not self._kept:
            return 0
        self.expire()
        before, only = self._tree.num_protected, self._only_soft()
        left = sorted((kept for kept in self._soft() if self._last_here(kept.lease.node) in only), key=_least)
        while left and (short := num_pages - before + self._tree.num_protected) > 0:
            at = next((i for i, kept in enumerate(left) if kept.lease.node.level == 1), 0)
            self._let_go_of_end(left.pop(at), short)
            self.num_given_up += 1
        return before - self._tree.num_protected

    def give_up_frames(self, group: int, num_frames: int) -> int:
        """Likewise, until so many frames of a group that is read in part are to be had."""
        gained = 0
        self.expire()
        for kept in sorted(self._soft(), key=_least):
            if gained >= num_frames:
                break
            if self._frames.gain(kept.hold.frames, group):
                self._let_go(kept)
                self.num_given_up += 1
                gained += self._frames.gained(kept.hold.frames, group)
        return gained

    # -- looking

    def __len__(self) -> int:
        """Retentions there are."""
        return len(self._kept)

    @property
    def num_pages(self) -> int:
        """Pages kept, each counted once: never above `budget`."""
        return self._pages.distinct

    @property
    def num_pinned(self) -> int:
        """Of these, pages that are pinned."""
        return self._pins.distinct

    @property
    def num_let_go(self) -> int:
        """How often it let go of something by itself."""
        return self.num_expired + self.num_given_up + self.num_lost

    def listing(self) -> RetainedList:
        """What is kept, in the order in which it would be let go of, pins last."""
        now = self._seconds()
        self.expire(now)
        retentions = tuple(
            Retained(
                tokens=kept.lease.num_pages * self._size,
                priority=kept.priority,
                pinned=kept.pinned,
                expires_in_seconds=kept.expires_at - now,
            )
            for kept in sorted(self._kept.values(), key=_least)
        )
        return RetainedList(
            budget_tokens=self.budget * self._size,
            retained_tokens=self.num_pages * self._size,
            retentions=retentions,
        )

    # -- inside

    @property
    def _pin_room(self) -> int:
        return self._pin_budget - self._pins.distinct

    def _soft(self) -> Iterator[_Kept]:
        return (kept for kept in self._kept.values() if not kept.pinned)

    def _grant(self, asked: int, match: Match, kept: _Kept | None, pin: bool) -> tuple[int, str]:
        """How many pages to keep of a match of `asked` tokens, and why not more of them. What is kept already stays."""
        size, cached = self._size, match.num_pages
        num_pages, limited = self._frames.end(match.pages)
        reason = ""
        if num_pages < cached:
            because = f"group '{limited}' can resume" if limited else "damaged bytes let requests begin"
            reason = f"{cached * size:,} of them are cached, and {because} no further on than that"
        elif cached < asked // size:
            found = f"only {cached * size:,} of them are" if cached else "none of them is"
            reason = f"{found} cached; ask again when they have been computed"
        elif cached * size < asked:
            reason = f"the last {asked - cached * size} are less than a page of {size}"
        room = self.budget - self.num_pages
        if kept is None and len(self) >= MOST_RETENTIONS:
            num_pages, reason = 0, f"{MOST_RETENTIONS:,} retentions are the most there may be"
        elif self._pages.cost(match.pages[:num_pages]) > room:
            most = self._pages.shared(match.pages[:num_pages]) + room
            num_pages, reason = self._frames.end(match.pages[:most])[0], self._no_budget(room)
        if pin and self._pins.cost(match.pages[:num_pages]) > self._pin_room:
            pinned = self._pins.shared(match.pages) + self._pin_room
            reason = (
                f"pins may take {self._pin_budget * size:,} tokens, of which {self._pin_room * size:,} were left: the "
                f"longest request, {self._largest:,} tokens, must find room beside them"
            )
            if kept is not None and pinned < kept.lease.num_pages:
                return num_pages, f"kept, but not pinned: {reason}."
            num_pages = self._frames.end(match.pages[:pinned])[0]
        if pin and num_pages and not self._frames.has_room(match.pages[:num_pages]):
            reason = "what the longest request needs of groups that are read in part must find room beside pins"
            if kept is not None and kept.pinned:
                return min(num_pages, kept.lease.num_pages), f"kept as before: {reason}."
            return num_pages, f"kept, but not pinned: {reason}."
        return num_pages, f"granted {num_pages * size:,} of {asked:,} tokens: {reason}." if reason else ""

    def _no_budget(self, room: int) -> str:
        budget = f"the budget of {self.budget * self._size:,} tokens"
        if not self.budget:
            return f"{budget} keeps nothing; raise --retain-share"
        if room:
            return f"{budget} had {room * self._size:,} left"
        return f"{budget} is taken by {len(self)} retention{'s' if len(self) > 1 else ''}"

    def _may_pin(self, pages: Ids) -> bool:
        return self._pins.cost(pages) <= self._pin_room and self._frames.has_room(pages)

    def _lengthen(self, kept: _Kept, match: Match, num_pages: int) -> None:
        """Keep more of the same prefix: the new pins first, so that what is kept is at no moment free to go."""
        fresh = match.pages[kept.lease.num_pages : num_pages]
        self._move(kept, self._tree.pin_path(match, num_pages), match.pages[:num_pages])
        self._pages.add(fresh)
        if kept.pinned:
            self._pins.add(fresh)

    def _move(self, kept: _Kept, lease: Lease, pages: Ids) -> None:
        """Keep the path of `lease` instead."""
        before, frames = kept.hold.frames, self._frames.needed_by(pages)
        self._holds.change(kept.hold, frames, lease=lease, rank=Rank.USED)
        self._frames.count(frames, 1, hard=kept.pinned)
        self._frames.count(before, -1, hard=kept.pinned)

    def _let_go_of_end(self, kept: _Kept, num_pages: int) -> None:
        """Keep a soft retention for so many pages on the device less, or no longer."""
        here = self._num_here(kept.lease.node)
        pages = pages_to(kept.lease.node)
        left = here - num_pages if self._num_alone(kept.lease.node) > num_pages else 0
        left, _ = self._frames.end(pages[: max(0, left)])
        if not left:
            self._let_go(kept)
            return
        self._move(kept, self._tree.pin_part(kept.lease, left), pages[:left])
        self._pages.remove(pages[left:])
        self._on_let_go()

    def _let_go(self, kept: _Kept) -> None:
        del self._kept[kept.retention_id], self._by_key[kept.key]
        pages = pages_to(kept.lease.node)
        self._pages.remove(pages)
        if kept.pinned:
            self._pins.remove(pages)
        self._frames.count(kept.hold.frames, -1, hard=kept.pinned)
        self._holds.release(kept.hold)
        self._on_let_go()

    def _remember(self, kept: _Kept) -> None:
        """When it ends."""
        kept.ticket = next(self._order)
        self._expiries.push(kept.ticket, kept, kept.expires_at)

    def _expires(self, ticket: int, kept: _Kept) -> _Kept | None:
        return kept if kept.ticket == ticket and kept.retention_id in self._kept else None

    def _only_soft(self) -> set[Node]:
        """Nodes that soft retentions hold and nobody else.

        A node is held by the leases that end at it and by the levels of its children. Where those of soft retentions
        make up all of that, and the same is so of these children, nobody else is there. From the leaves up.
        """
        if not self._kept:
            return set()
        own = Counter(kept.lease.node for kept in self._soft())
        waiting = set(own)
        for end in own:
            node = end.parent
            while node is not None and node not in waiting:
                waiting.add(node)
                node = node.parent
        below: dict[Node, int] = dict.fromkeys(waiting, 0)
        only: set[Node] = set()
        for node in sorted((node for node in waiting if node.parent is not None), key=_deepest):
            if node.held == own[node] + below[node]:
                only.add(node)
                assert node.parent is not None
                below[node.parent] += node.level
        return only

    def _last_here(self, end: Node) -> Node:
        """The last node of a path that is on the device, or its root."""
        node = end
        while not self._tree.is_here(node) and node.parent is not None:
            node = node.parent
        return node

    def _num_here(self, end: Node) -> int:
        """Pages of a path that are on the device."""
        node = self._last_here(end)
        return node.depth + node.num_pages

    def _num_alone(self, end: Node) -> int:
        """Pages on the device that nobody holds but one who holds the path to `end`; they are its last ones there."""
        count = 0
        node: Node | None = end
        while node is not None and node.level == 1:
            count += node.num_pages if self._tree.is_here(node) else 0
            node = node.parent
        return count


class _PageCounts:
    """How often each page is kept, by id. What keeps a page keeps those before it too."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    @property
    def distinct(self) -> int:
        """Pages that are kept."""
        return len(self._counts)

    def shared(self, pages: Ids) -> int:
        """How many of these, from the first on, are kept already."""
        return sum(page in self._counts for page in pages.tolist())

    def cost(self, pages: Ids) -> int:
        """How many of these are not kept yet."""
        return len(pages) - self.shared(pages)

    def add(self, pages: Ids) -> None:
        """Keep these once more."""
        self._counts.update(pages.tolist())

    def remove(self, pages: Ids) -> None:
        """Keep these once less."""
        self._counts.subtract(pages.tolist())
        self._counts = +self._counts


def _least(kept: _Kept) -> tuple[bool, int, float, int]:
    return kept.pinned, kept.priority, kept.expires_at, kept.order


def _deepest(node: Node) -> int:
    return -node.depth

"""Retention: prefixes that callers asked to keep for a time, under one budget.

    soft     held until it expires, but given up before a running request is refused a page: the lowest priority first,
             then the earliest expiry
    pinned   held until it expires; all pins together leave room for the longest possible request

Only cached whole pages can be retained. A new retention never ends another one. Shared pages count once.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.cache.damaged import DamagedPages
from quire.cache.groups import GroupCache
from quire.cache.hold import HeldFrames, Reason
from quire.cache.offload import CacheParts, RetentionPort
from quire.cache.resuming import needed_pages, resume_point
from quire.errors import InvalidInput
from quire.lazy_queue import LazyQueue
from quire.offload.host_groups import HostGroup
from quire.offload.retained_prefixes import RetainedPrefix, frames_of, frames_only_held_by, nodes_of, only_held_by
from quire.prefix.hashing import namespace_seed
from quire.prefix.match import Match
from quire.prefix.node import Node, pages_to, path_to
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier
from quire.spec.pages import pages_for
from quire.spec.rank import Rank

RETAIN_SHARE = 0.25
"""The default budget, as a share of the plan's pages."""

MOST_SECONDS = 86_400.0
"""The longest time of one retention."""

MOST_RETENTIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The answer to `Retention.retain`: the first `granted_tokens` of `asked_tokens` are kept.

    `reason` says why not more, or is "". `retention_id` releases them, and is "" if none are kept; it cannot be
    guessed. `host_tokens` of the granted ones are below the device, and are loaded when they are used.
    """

    retention_id: str = ""
    asked_tokens: int
    granted_tokens: int = 0
    expires_in_seconds: float = 0.0
    pinned: bool = False
    reason: str
    host_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """One retention, without its id, tokens and namespace."""

    tokens: int
    priority: int
    pinned: bool
    expires_in_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedList:
    """All retentions. `retained_tokens` counts shared pages once."""

    budget_tokens: int
    retained_tokens: int
    retentions: tuple[Retained, ...]


class Retention(RetentionPort):
    """The retentions of one cache, at most `share` of the plan's pages. Single-threaded, like the cache.

    A retention holds a path of the tree in any tier. In groups that are read in part it also holds the frames that a
    request needs to begin at its end: those on the device, or else on the host.
    """

    def __init__(self, parts: CacheParts, share: float, hosts: Sequence[HostGroup] = ()) -> None:
        plan = parts.plan
        self._parts = parts
        self._tree = parts.tree
        self._holds = parts.holds
        self._groups = parts.groups
        self._partial = tuple(group for group in parts.groups if not group.reach.whole)
        self._hosts = hosts
        self._on_device = parts.frames.anchor(Tier.DEVICE)
        self._size = plan.page_size
        self._seconds = parts.seconds
        largest = pages_for(plan.largest_request, plan.page_size)
        self.budget = int(share * plan.num_pages)  # pages
        self._pin_budget = max(0, min(self.budget, plan.num_pages - largest))
        self._frame_room = [max(0, group.num_frames - group.reach.held(largest)) for group in self._partial]
        self._kept: dict[str, RetainedPrefix] = {}  # by id
        self._by_key: dict[bytes, RetainedPrefix] = {}
        self._expiries: LazyQueue[RetainedPrefix] = LazyQueue(self._expires, by_key=True)
        self._order = itertools.count()
        self.num_expired = self.num_given_up = self.num_lost = 0

    # -- asking

    def retain(
        self, tokens: Ids, namespace: Namespace, *, ttl_seconds: float, priority: int = 0, pin: bool = False
    ) -> Granted:
        """Keep the cached part of `tokens` for so long, and say how much that is.

        A repeated call for the same tokens also keeps what was cached since. It takes the later expiry, the higher
        priority and the pin of all calls; use `release` for less. Raises InvalidInput for an impossible time.
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
        if kept is None:
            if not num_pages:
                return Granted(asked_tokens=len(tokens), reason=reason)
            frames = self._needed_by(match.pages[:num_pages])
            lease = self._tree.pin_path(match, num_pages)
            hold = self._holds.add(Reason.RETAIN, lease=lease, frames=frames, rank=Rank.USED)
            kept = RetainedPrefix(key, namespace, next(self._order), hold, priority)
            self._kept[kept.retention_id] = self._by_key[key] = kept
        elif num_pages > kept.hold.path.num_pages:
            lease = self._tree.pin_path(match, num_pages)
            self._holds.change(kept.hold, self._needed_by(match.pages[:num_pages]), lease=lease, rank=Rank.USED)
        kept.pinned = kept.pinned or (pin and self._may_pin(kept))
        kept.priority = max(kept.priority, priority)
        if now + ttl_seconds > kept.expires_at:
            kept.expires_at = now + ttl_seconds
            kept.ticket = next(self._order)
            self._expiries.push(kept.ticket, kept, kept.expires_at)
        return Granted(
            retention_id=kept.retention_id,
            asked_tokens=len(tokens),
            granted_tokens=kept.hold.path.num_pages * self._size,
            expires_in_seconds=kept.expires_at - now,
            pinned=kept.pinned,
            reason=reason,
            host_tokens=(kept.hold.path.num_pages - self._num_here(kept.hold.path.node)) * self._size,
        )

    def release(self, retention_id: str) -> bool:
        """End a retention; False if there is none with that id."""
        kept = self._kept.get(retention_id)
        if kept is not None:
            self._end(kept)
        return kept is not None

    def forget(self, namespace: Namespace | None) -> int:
        """End all retentions of a namespace, or of any (None), and return how many."""
        return self._end_all([kept for kept in self._kept.values() if namespace in (None, kept.namespace)])

    def lose(self, damaged: DamagedPages) -> int:
        """End all retentions of paths with damaged pages, and return how many."""
        gone = self._end_all([kept for kept in self._kept.values() if damaged.are(pages_to(kept.hold.path.node)).any()])
        self.num_lost += gone
        return gone

    def expire(self, now: float | None = None) -> int:
        now = self._seconds() if now is None else now
        gone = 0
        while self._expiries.first_key(math.inf) <= now:
            if (entry := self._expiries.pop()) is not None:
                self._end(entry.item)
                gone += 1
        self.num_expired += gone
        return gone

    # -- making room; O(retained nodes), or O(retained frames)

    @property
    def _soft(self) -> list[RetainedPrefix]:
        return [kept for kept in self._kept.values() if not kept.pinned]

    @property
    def _pinned(self) -> list[RetainedPrefix]:
        return [kept for kept in self._kept.values() if kept.pinned]

    @property
    def num_soft(self) -> int:
        return _num_pages(node for node in only_held_by(self._soft) if self._tree.is_here(node))

    def num_soft_of(self, match: Match, num_pages: int) -> int:
        if not self._kept:
            return 0
        only = only_held_by(self._soft)
        path = [node for node in match.path if node in only and self._tree.is_here(node)]
        return sum(max(0, min(node.num_pages, num_pages - node.depth)) for node in path)

    def num_soft_frames(self, group: int) -> int:
        return len(frames_only_held_by(self._soft, self._groups[group]))

    def num_soft_frames_of(self, group: int, pages: Ids) -> int:
        # A request takes over a carried frame that it begins on.
        only = frames_only_held_by(self._soft, self._groups[group])
        if not len(only) or self._groups[group].reach.carried:
            return 0
        return len(np.intersect1d(needed_pages(self._groups[group], pages), only, assume_unique=True))

    def give_way(self, wanted: Sequence[int], num_new: int) -> bool:
        if not self._kept:
            return False
        before, tree = self.num_expired + self.num_given_up, self._tree
        short = [n - group.num_free - group.num_evictable for group, n in zip(self._groups, wanted, strict=True)]
        whole = [n for n, group in zip(short, self._groups, strict=True) if group.reach.whole]
        pages = num_new - self._parts.pages.num_free_pages - tree.num_evictable - tree.num_below
        self.give_up(max(pages, *whole, 0))
        for group in self._partial:
            if short[group.index] > 0:
                self._give_up_frames(group, short[group.index])
        return self.num_expired + self.num_given_up > before

    def give_up(self, num_pages: int) -> int:
        """Give up soft retentions until so many device pages have become evictable; returns how many have. The last
        retention only becomes shorter. Retentions that free no page are kept."""
        if num_pages <= 0 or not self._kept:
            return 0
        self.expire()
        before = self._tree.num_protected
        soft = sorted(self._soft, key=lambda kept: kept.rank)
        only = {node for node in only_held_by(soft) if self._tree.is_here(node)}
        left = [kept for kept in soft if not only.isdisjoint(path_to(kept.hold.path.node))]
        while left and (short := num_pages - before + self._tree.num_protected) > 0:
            at = next((i for i, kept in enumerate(left) if kept.hold.path.node.level == 1), 0)
            self._shorten(left.pop(at), short)
            self.num_given_up += 1
        return before - self._tree.num_protected

    def _give_up_frames(self, group: GroupCache, num_frames: int) -> None:
        """Likewise for frames of a group that is read in part."""
        self.expire()
        # A request takes over a carried frame that it alone pins.
        most = int(group.reach.carried)
        soft = sorted(self._soft, key=lambda kept: kept.rank)
        only = frames_only_held_by(soft, group, others=most)
        for kept in soft:
            if num_frames <= 0:
                break
            mine = kept.frames(group.index)
            if any(np.isin(pages, only).any() for pages in mine):
                self._end(kept)
                self.num_given_up += 1
                num_frames -= sum(int(np.count_nonzero(group.table.pins[pages] <= most)) for pages in mine)

    # -- looking

    def __len__(self) -> int:
        """Number of retentions."""
        return len(self._kept)

    @property
    def num_pages(self) -> int:
        """Retained pages, each counted once: at most `budget`. O(retained nodes)."""
        return _num_pages(nodes_of(self._kept.values()))

    @property
    def num_pinned(self) -> int:
        return _num_pages(nodes_of(self._pinned))

    def listing(self) -> RetainedList:
        """All retentions, in the order in which they would be given up, pinned ones last."""
        now = self._seconds()
        self.expire(now)
        retentions = tuple(
            Retained(
                tokens=kept.hold.path.num_pages * self._size,
                priority=kept.priority,
                pinned=kept.pinned,
                expires_in_seconds=kept.expires_at - now,
            )
            for kept in sorted(self._kept.values(), key=lambda kept: kept.rank)
        )
        return RetainedList(
            budget_tokens=self.budget * self._size,
            retained_tokens=self.num_pages * self._size,
            retentions=retentions,
        )

    # -- how much is kept

    def _grant(self, asked: int, match: Match, kept: RetainedPrefix | None, pin: bool) -> tuple[int, str]:
        """How many pages of a match of `asked` tokens to retain, and why not more."""
        size, cached = self._size, match.num_pages
        num_pages, limited = self._resumes(match.pages)
        reason = ""
        if num_pages < cached:
            because = f"group '{limited}' can resume" if limited else "damaged bytes let requests begin"
            reason = f"{cached * size:,} of them are cached, and {because} no further on than that"
        elif cached < asked // size:
            found = f"only {cached * size:,} of them are" if cached else "none of them is"
            reason = f"{found} cached; ask again when they have been computed"
        elif cached * size < asked:
            reason = f"the last {asked - cached * size} are less than a page of {size}"
        nodes = nodes_of(self._kept.values())
        room = self.budget - _num_pages(nodes)
        most = _shared(match, nodes) + room
        if kept is None and len(self) >= MOST_RETENTIONS:
            num_pages, reason = 0, f"{MOST_RETENTIONS:,} retentions are the most there may be"
        elif num_pages > most:
            num_pages, reason = self._resumes(match.pages[:most])[0], self._no_budget(room)
        if not pin:
            return num_pages, _granted(num_pages * size, asked, reason)
        pinned = nodes_of(self._pinned)
        pin_room = self._pin_budget - _num_pages(pinned)
        most = _shared(match, pinned) + pin_room
        if num_pages > most:
            reason = (
                f"pins may take {self._pin_budget * size:,} tokens, of which {pin_room * size:,} were left: the "
                f"longest request, {self._parts.plan.largest_request:,} tokens, must find room beside them"
            )
            if kept is not None and most < kept.hold.path.num_pages:
                return num_pages, f"kept, but not pinned: {reason}."
            num_pages = self._resumes(match.pages[:most])[0]
        if num_pages and not self._has_frame_room(match.pages[:num_pages]):
            reason = "what the longest request needs of groups that are read in part must find room beside pins"
            if kept is not None and kept.pinned:
                return min(num_pages, kept.hold.path.num_pages), f"kept as before: {reason}."
            return num_pages, f"kept, but not pinned: {reason}."
        return num_pages, _granted(num_pages * size, asked, reason)

    def _no_budget(self, room: int) -> str:
        budget = f"the budget of {self.budget * self._size:,} tokens"
        if not self.budget:
            return f"{budget} keeps nothing; raise --retain-share"
        if room:
            return f"{budget} had {room * self._size:,} left"
        return f"{budget} is taken by {len(self)} retention{'s' if len(self) > 1 else ''}"

    def _may_pin(self, kept: RetainedPrefix) -> bool:
        fits = _num_pages(nodes_of([*self._pinned, kept])) <= self._pin_budget
        return fits and self._has_frame_room(pages_to(kept.hold.path.node))

    def _has_frame_room(self, pages: Ids) -> bool:
        """Whether the longest request finds frames if those that a request needs behind `pages` are pinned too."""
        return all(
            len(np.union1d(frames_of(self._pinned, group.index), needed_pages(group, pages))) <= room
            for group, room in zip(self._partial, self._frame_room, strict=True)
        )

    def _resumes(self, pages: Ids) -> tuple[int, str]:
        """The most pages of a cached path behind which a request could begin, and the group that limits it, or ""."""
        return resume_point(self._partial, pages[: self._parts.damaged.before(pages)], self._hosts)

    # -- keeping

    def _needed_by(self, pages: Ids) -> list[HeldFrames]:
        """Frames that a request needs to begin behind these pages, where they are."""
        found = []
        for group in self._partial:
            needed = needed_pages(group, pages)
            here = group.table.present(needed)
            found.append(HeldFrames(group.index, Tier.DEVICE, needed[here]))
            if not here.all():
                found.append(HeldFrames(group.index, Tier.HOST, needed[~here]))
        return found

    def _shorten(self, kept: RetainedPrefix, num_pages: int) -> None:
        """Shorten a soft retention by so many device pages, or end it."""
        end = kept.hold.path.node
        pages = pages_to(end)
        left = self._num_here(end) - num_pages if self._num_alone(end) > num_pages else 0
        left, _ = self._resumes(pages[: max(0, left)])
        if not left:
            self._end(kept)
            return
        lease = self._tree.pin_part(kept.hold.path, left)
        self._holds.change(kept.hold, self._needed_by(pages[:left]), lease=lease, rank=Rank.USED)
        self._parts.changed()

    def _end(self, kept: RetainedPrefix) -> None:
        del self._kept[kept.retention_id], self._by_key[kept.key]
        self._holds.release(kept.hold)
        self._parts.changed()

    def _end_all(self, gone: Sequence[RetainedPrefix]) -> int:
        for kept in gone:
            self._end(kept)
        return len(gone)

    def _expires(self, ticket: int, kept: RetainedPrefix) -> RetainedPrefix | None:
        return kept if kept.ticket == ticket and kept.retention_id in self._kept else None

    def _num_here(self, end: Node) -> int:
        """Pages of a path that are on the device: the first ones."""
        return int(np.count_nonzero(self._on_device.present(pages_to(end))))

    def _num_alone(self, end: Node) -> int:
        """Device pages that only the lease on the path to `end` holds: the last ones there."""
        alone = [node for node in path_to(end) if node.level == 1]
        return _num_pages(node for node in alone if self._tree.is_here(node))


def _num_pages(nodes: Iterable[Node]) -> int:
    return sum(node.num_pages for node in nodes)


def _shared(match: Match, nodes: set[Node]) -> int:
    """How many first pages of a match these nodes have; all nodes above them are in `nodes` too."""
    last = next((node for node in reversed(match.path) if node in nodes), None)
    return last.depth + last.num_pages if last is not None else 0


def _granted(granted: int, asked: int, reason: str) -> str:
    return f"granted {granted:,} of {asked:,} tokens: {reason}." if reason else ""

"""Retention: prefixes that callers asked to retain for a time, under one budget.

    soft     held until it expires, but ended before a running request is refused a page: the lowest priority first,
             then the earliest expiry
    pinned   held until it expires; all pins together leave room for the longest possible request

Only cached whole pages can be retained. A new retention never ends another one. Shared pages count once.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache.groups import NO_PAGES, resume_point
from quire.cache.hold import Hold, Reason
from quire.cache.offload import CacheParts, RetentionPort
from quire.cache.states import GroupCache
from quire.errors import InvalidInput
from quire.lazy_queue import LazyQueue
from quire.offload.host_groups import HostGroup, frames_behind
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
    """The answer to `Retention.retain`: the first `granted_tokens` of `asked_tokens` are retained.

    `reason` says why not more, or is "". `retention_id` releases them, and is "" if none are retained; it cannot be
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


@dataclass(slots=True, eq=False)
class RetainedPrefix:
    """One retention: `hold` holds its path until `expires_at`, in seconds of the clock. It is *soft* if not pinned."""

    key: bytes
    namespace: Namespace
    order: int  # in which retentions were made
    hold: Hold
    priority: int
    retention_id: str = field(default_factory=lambda: f"retention-{secrets.token_hex(16)}")
    expires_at: float = 0.0
    pinned: bool = False
    ticket: int = 0  # of its entry in the queue of expiries

    @property
    def end(self) -> Node:
        """The last node of its path."""
        return self.hold.path.node

    def frames(self, group: int) -> list[Ids]:
        """Pages whose device frames in a group that is read in part it holds."""
        return [frames.pages for frames in self.hold.frames if (frames.group, frames.tier) == (group, Tier.DEVICE)]


class Retention(RetentionPort):
    """The retentions of one cache, at most `share` of the plan's pages. Single-threaded, like the cache.

    A retention holds a path of the tree in any tier. In groups that are read in part it also holds the frames that a
    request needs to begin at its end: those on the device, or else on the host.
    """

    def __init__(self, parts: CacheParts, share: float, hosts: Sequence[HostGroup] = ()) -> None:
        plan = parts.plan
        self._parts = parts
        self._tree = parts.tree
        self._groups = parts.groups
        self._partial = tuple(group for group in parts.groups if not group.reach.whole)
        self._hosts = hosts
        self._on_device = parts.frames.anchor(Tier.DEVICE)
        self._size = plan.page_size
        largest = pages_for(plan.largest_request, plan.page_size)
        self.budget = int(share * plan.num_pages)  # pages
        self._pin_budget = max(0, min(self.budget, plan.num_pages - largest))
        self._frame_room = [max(0, group.num_frames - group.reach.held(largest)) for group in self._partial]
        self._by_id: dict[str, RetainedPrefix] = {}
        self._by_key: dict[bytes, RetainedPrefix] = {}
        self._expiries: LazyQueue[RetainedPrefix] = LazyQueue(
            lambda ticket, item: item if item.ticket == ticket and not item.hold.released else None, by_key=True
        )
        self._order = itertools.count()
        self.num_expired = self.num_given_up = self.num_lost = 0

    # -- verbs of callers

    def retain(
        self, tokens: Ids, namespace: Namespace, *, ttl_seconds: float, priority: int = 0, pin: bool = False
    ) -> Granted:
        """Retain the cached part of `tokens` for so long, and say how much that is.

        A repeated call for the same tokens also retains what was cached since. It takes the later expiry, the higher
        priority and the pin of all calls; use `release` for less. Raises InvalidInput for an impossible time.
        """
        if not 0 < ttl_seconds <= MOST_SECONDS:
            raise InvalidInput(
                f"ttl_seconds must be above 0 and at most {MOST_SECONDS:,.0f}, got {ttl_seconds:g}.",
                fix="ask again before the time is over to keep it longer.",
            )
        now = self._parts.seconds()
        self.expire()
        key = hashlib.sha256(namespace_seed(namespace) + tokens.tobytes()).digest()
        prefix = self._by_key.get(key)
        pin = pin or (prefix is not None and prefix.pinned)
        match = self._tree.match(namespace, tokens)
        num_pages, reason = self._grant(len(tokens), match, prefix, pin)
        if prefix is None and not num_pages:
            return Granted(asked_tokens=len(tokens), reason=reason)
        if prefix is None or num_pages > prefix.hold.path.num_pages:
            frames = frames_behind(self._partial, match.pages[:num_pages])
            lease = self._tree.pin_path(match, num_pages)
            if prefix is None:
                hold = self._parts.holds.add(Reason.RETAIN, lease=lease, frames=frames, rank=Rank.USED)
                prefix = RetainedPrefix(key, namespace, next(self._order), hold, priority)
                self._by_id[prefix.retention_id] = self._by_key[key] = prefix
            else:
                self._parts.holds.change(prefix.hold, frames, lease=lease, rank=Rank.USED)
        prefix.pinned = prefix.pinned or (pin and self._may_pin(prefix))
        prefix.priority = max(prefix.priority, priority)
        if now + ttl_seconds > prefix.expires_at:
            prefix.expires_at = now + ttl_seconds
            prefix.ticket = next(self._order)
            self._expiries.push(prefix.ticket, prefix, prefix.expires_at)
        num_retained = prefix.hold.path.num_pages
        return Granted(
            retention_id=prefix.retention_id,
            asked_tokens=len(tokens),
            granted_tokens=num_retained * self._size,
            expires_in_seconds=prefix.expires_at - now,
            pinned=prefix.pinned,
            reason=reason,
            host_tokens=(num_retained - self._num_here(pages_to(prefix.end))) * self._size,
        )

    def release(self, retention_id: str) -> bool:
        """End a retention; False if there is none with that id."""
        prefix = self._by_id.get(retention_id)
        return prefix is not None and self._end(prefix) > 0

    def release_all(self, namespace: Namespace | None) -> int:
        """End all retentions of a namespace, or of any (None), and return how many."""
        return self._end(*[prefix for prefix in self._by_id.values() if namespace in (None, prefix.namespace)])

    def listing(self) -> RetainedList:
        """All retentions, in the order in which they would be ended, pinned ones last."""
        now = self._parts.seconds()
        self.expire()
        retentions = tuple(
            Retained(
                tokens=prefix.hold.path.num_pages * self._size,
                priority=prefix.priority,
                pinned=prefix.pinned,
                expires_in_seconds=prefix.expires_at - now,
            )
            for prefix in sorted(self._by_id.values(), key=_rank)
        )
        return RetainedList(
            budget_tokens=self.budget * self._size,
            retained_tokens=self.num_pages * self._size,
            retentions=retentions,
        )

    def __len__(self) -> int:
        """Number of retentions."""
        return len(self._by_id)

    # -- verbs of the cache. What soft retentions hold is counted in O(retained nodes), or O(retained frames)

    def release_damaged(self) -> None:
        """End all retentions of paths with damaged pages."""
        are = self._parts.damaged.are
        self.num_lost += self._end(*[each for each in self._by_id.values() if are(pages_to(each.end)).any()])

    def expire(self) -> int:
        now, num_ended = self._parts.seconds(), 0
        while self._expiries.first_key(math.inf) <= now:
            if (entry := self._expiries.pop()) is not None:
                num_ended += self._end(entry.item)
        self.num_expired += num_ended
        return num_ended

    @property
    def num_pages(self) -> int:
        """Retained pages, each counted once: at most `budget`. O(retained nodes)."""
        return _num_pages(nodes_of(self._by_id.values()))

    @property
    def num_pinned(self) -> int:
        return _num_pages(nodes_of(self._pinned))

    @property
    def num_soft(self) -> int:
        return _num_pages(self._only_soft()) if self._by_id else 0

    def num_soft_of(self, match: Match, num_pages: int) -> int:
        if not self._by_id:
            return 0
        only = self._only_soft()
        return sum(max(0, min(node.num_pages, num_pages - node.depth)) for node in match.path if node in only)

    def num_soft_frames(self, group: int) -> int:
        return len(frames_only_held_by(self._soft, self._groups[group]))

    def num_soft_frames_of(self, group: int, pages: Ids) -> int:
        # A request takes over a carried frame that it begins on.
        only = frames_only_held_by(self._soft, self._groups[group])
        if not len(only) or self._groups[group].reach.carried:
            return 0
        return len(np.intersect1d(self._groups[group].needed_pages(pages), only, assume_unique=True))

    def give_way(self, wanted: Sequence[int], num_new: int) -> bool:
        if not self._by_id:
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
        """End soft retentions until so many device pages have become evictable; returns how many have. The last
        one only becomes shorter. Retentions that free no page go on."""
        if num_pages <= 0 or not self._by_id:
            return 0
        self.expire()
        before = self._tree.num_protected
        only = self._only_soft()
        left = [prefix for prefix in sorted(self._soft, key=_rank) if not only.isdisjoint(path_to(prefix.end))]
        while left and (short := num_pages - before + self._tree.num_protected) > 0:
            at = next((i for i, prefix in enumerate(left) if prefix.end.level == 1), 0)
            self._shorten(left.pop(at), short)
            self.num_given_up += 1
        return before - self._tree.num_protected

    def _give_up_frames(self, group: GroupCache, num_frames: int) -> None:
        """Likewise for frames of a group that is read in part."""
        self.expire()
        # A request takes over a carried frame that it alone pins.
        others = int(group.reach.carried)
        soft = self._soft
        only = frames_only_held_by(soft, group, others)
        for prefix in sorted(soft, key=_rank):
            if num_frames <= 0:
                break
            held = prefix.frames(group.index)
            if any(np.isin(pages, only).any() for pages in held):
                self._end(prefix)
                self.num_given_up += 1
                num_frames -= sum(int(np.count_nonzero(group.table.pins[pages] <= others)) for pages in held)

    # -- how much is granted

    def _grant(self, asked: int, match: Match, prefix: RetainedPrefix | None, pin: bool) -> tuple[int, str]:
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
        most, room = _room_for(match, self._by_id.values(), self.budget)
        if prefix is None and len(self) >= MOST_RETENTIONS:
            num_pages, reason = 0, f"{MOST_RETENTIONS:,} retentions are the most there may be"
        elif num_pages > most:
            num_pages, reason = self._resumes(match.pages[:most])[0], self._no_budget(room)
        if not pin:
            return num_pages, _granted(num_pages * size, asked, reason)
        most, room = _room_for(match, self._pinned, self._pin_budget)
        if num_pages > most:
            reason = (
                f"pins may take {self._pin_budget * size:,} tokens, of which {room * size:,} were left: the "
                f"longest request, {self._parts.plan.largest_request:,} tokens, must find room beside them"
            )
            if prefix is not None and most < prefix.hold.path.num_pages:
                return num_pages, f"kept, but not pinned: {reason}."
            num_pages = self._resumes(match.pages[:most])[0]
        if num_pages and not self._has_frame_room(match.pages[:num_pages]):
            reason = "what the longest request needs of groups that are read in part must find room beside pins"
            if prefix is not None and prefix.pinned:
                return min(num_pages, prefix.hold.path.num_pages), f"kept as before: {reason}."
            return num_pages, f"kept, but not pinned: {reason}."
        return num_pages, _granted(num_pages * size, asked, reason)

    def _no_budget(self, room: int) -> str:
        budget = f"the budget of {self.budget * self._size:,} tokens"
        if not self.budget:
            return f"{budget} keeps nothing; raise --retain-share"
        if room:
            return f"{budget} had {room * self._size:,} left"
        return f"{budget} is taken by {len(self)} retention{'s' if len(self) > 1 else ''}"

    def _may_pin(self, prefix: RetainedPrefix) -> bool:
        fits = _num_pages(nodes_of([*self._pinned, prefix])) <= self._pin_budget
        return fits and self._has_frame_room(pages_to(prefix.end))

    def _has_frame_room(self, pages: Ids) -> bool:
        """Whether the longest request finds frames if those that a request needs behind `pages` are pinned too."""
        return all(
            len(np.union1d(frames_of(self._pinned, group.index), group.needed_pages(pages))) <= room
            for group, room in zip(self._partial, self._frame_room, strict=True)
        )

    def _resumes(self, pages: Ids) -> tuple[int, str]:
        """The most pages of a cached path behind which a request could begin, and the group that limits it, or ""."""
        return resume_point(self._partial, pages[: self._parts.damaged.before(pages)], self._hosts)

    # -- inside

    @property
    def _soft(self) -> list[RetainedPrefix]:
        return [prefix for prefix in self._by_id.values() if not prefix.pinned]

    @property
    def _pinned(self) -> list[RetainedPrefix]:
        return [prefix for prefix in self._by_id.values() if prefix.pinned]

    def _only_soft(self) -> set[Node]:
        """Nodes on the device that soft retentions hold and nothing else does."""
        return {node for node in only_held_by(self._soft) if self._tree.is_here(node)}

    def _shorten(self, prefix: RetainedPrefix, num_pages: int) -> None:
        """Shorten a soft retention by so many device pages, or end it."""
        pages = pages_to(prefix.end)
        alone = _num_pages(node for node in path_to(prefix.end) if node.level == 1 and self._tree.is_here(node))
        left, _ = self._resumes(pages[: self._num_here(pages) - num_pages if alone > num_pages else 0])
        if not left:
            self._end(prefix)
            return
        lease = self._tree.pin_part(prefix.hold.path, left)
        self._parts.holds.change(prefix.hold, frames_behind(self._partial, pages[:left]), lease=lease, rank=Rank.USED)
        self._parts.changed()

    def _end(self, *prefixes: RetainedPrefix) -> int:
        for prefix in prefixes:
            del self._by_id[prefix.retention_id], self._by_key[prefix.key]
            self._parts.holds.release(prefix.hold)
            self._parts.changed()
        return len(prefixes)

    def _num_here(self, pages: Ids) -> int:
        """How many pages of a path are on the device: the first ones."""
        return int(np.count_nonzero(self._on_device.present(pages)))


def nodes_of(retained: Iterable[RetainedPrefix]) -> set[Node]:
    """The nodes whose pages these retentions hold, without roots. O(these nodes)."""
    found: set[Node] = set()
    for each in retained:
        node = each.end
        while node.parent is not None and node not in found:
            found.add(node)
            node = node.parent
    return found


def only_held_by(retained: Sequence[RetainedPrefix]) -> set[Node]:
    """Nodes that these retentions hold and nothing else does. O(nodes that they hold).

    A node is held by leases that end at it and by the levels of its children. If these retentions account for both,
    and for these children likewise, nothing else holds it. From the leaves up.
    """
    own = Counter(each.end for each in retained)
    below: Counter[Node | None] = Counter()
    only: set[Node] = set()
    for node in sorted(nodes_of(retained), key=lambda node: -node.depth):
        if node.held == own[node] + below[node]:
            only.add(node)
            below[node.parent] += node.level
    return only


def frames_of(retained: Iterable[RetainedPrefix], group: int) -> Ids:
    """Pages whose device frames in a group these retentions hold, once for each retention."""
    return np.concatenate([NO_PAGES, *(pages for each in retained for pages in each.frames(group))])


def frames_only_held_by(retained: Iterable[RetainedPrefix], group: GroupCache, others: int = 0) -> Ids:
    """Pages whose device frames in a group these retentions hold, and at most so many `others`."""
    if not group.table.reclaims or not len(held := frames_of(retained, group.index)):
        return NO_PAGES
    pages, counts = np.unique(held, return_counts=True)
    found: Ids = pages[group.table.pins[pages] - counts <= others]
    return found


def _rank(prefix: RetainedPrefix) -> tuple[bool, int, float, int]:
    """The lowest is ended first; pinned ones come last."""
    return prefix.pinned, prefix.priority, prefix.expires_at, prefix.order


def _num_pages(nodes: Iterable[Node]) -> int:
    return sum(node.num_pages for node in nodes)


def _room_for(match: Match, retained: Iterable[RetainedPrefix], budget: int) -> tuple[int, int]:
    """How many first pages of a match fit in a budget that these retentions share, and how much of it is left."""
    nodes = nodes_of(retained)
    room = budget - _num_pages(nodes)
    last = next((node for node in reversed(match.path) if node in nodes), None)  # all nodes above it are in `nodes`
    return (last.depth + last.num_pages if last is not None else 0) + room, room


def _granted(granted: int, asked: int, reason: str) -> str:
    return f"granted {granted:,} of {asked:,} tokens: {reason}." if reason else ""

"""Retention: prefixes that callers asked to retain for a time, under one budget.

    soft     held until it expires, but ended before a running request is refused a page: the lowest priority first,
             then the earliest expiry
    pinned   held until it expires; all pins together leave room for the longest possible request

Only cached whole pages can be retained. A new retention never ends another one. Shared pages count once.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quire.cache.groups import NO_PAGES, resume_point
from quire.cache.hold import Hold, Reason
from quire.cache.offload import CacheParts, RetentionPort
from quire.cache.running import Lengths
from quire.cache.states import GroupCache
from quire.counters import counter, gauge
from quire.errors import InvalidInput
from quire.offload.host_groups import HostGroup, needed_frames
from quire.plan.budget import MemoryPlan
from quire.prefix.hashing import namespace_seed
from quire.prefix.match import Match
from quire.prefix.node import Node, pages_to, path_to
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier
from quire.spec.pages import pages_for

RETAIN_SHARE = 0.25  # the default budget, as a share of the plan's pages
MOST_SECONDS = 86_400.0  # the longest retention
MOST_RETENTIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The first `granted_tokens` of `asked_tokens` are retained; `reason` says why not more, or is "". `retention_id`
    releases them, and cannot be guessed; "" if there are none. `host_tokens` of them are on lower tiers."""

    retention_id: str = ""
    asked_tokens: int
    granted_tokens: int = 0
    expires_in_seconds: float = 0.0
    pinned: bool = False
    reason: str
    host_tokens: int = 0


@dataclass(kw_only=True)
class RetentionCounters:
    """Counters of retentions, and gauges."""

    retentions: int = gauge("Prefixes that callers asked to keep.")
    retained_pages: int = gauge("Pages that these keep, each counted once.")
    retentions_expired: int = counter("Retentions whose time was over.")
    retentions_given_up: int = counter("Retentions that were released for running requests.")
    retentions_lost: int = counter("Retentions that ended because what they kept was damaged.")

    @property
    def num_ended(self) -> int:
        """Retentions that ended without a fault."""
        return self.retentions_expired + self.retentions_given_up


@dataclass(frozen=True, slots=True)
class Retained:
    """One retention, without its id, tokens and namespace."""

    tokens: int
    priority: int
    pinned: bool
    expires_in_seconds: float


@dataclass(frozen=True, slots=True)
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
    owner: str
    hold: Hold
    priority: int
    retention_id: str = field(default_factory=lambda: f"retention-{secrets.token_hex(16)}")
    expires_at: float = 0.0
    pinned: bool = False

    @property
    def end(self) -> Node:
        """The last node of its path."""
        return self.hold.path.node


class Retention(RetentionPort):
    """The retentions of one cache, at most `share` of the plan's pages. Each holds a path of the tree, in any tier, and
    in groups that are read in part the frames that a request needs to begin at its end."""

    def __init__(self, parts: CacheParts, share: float, hosts: Sequence[HostGroup] = ()) -> None:
        plan = parts.plan
        self._parts = parts
        self._tree = parts.tree
        self._groups = parts.groups
        self._partial = tuple(group for group in parts.groups if not group.reach.whole)
        self._hosts = hosts
        self._on_device = parts.frames.anchor(Tier.DEVICE)
        self._size = plan.page_size
        self._share = share
        self._resized(plan)
        parts.resized.append(self._resized)
        self._by_id: dict[str, RetainedPrefix] = {}
        self._by_key: dict[bytes, RetainedPrefix] = {}
        self._next_expiry = math.inf  # no retention ends before
        self.totals = RetentionCounters()
        parts.damaged.holders.append(self.release_damaged)

    def _resized(self, plan: MemoryPlan) -> None:
        self._plan = plan
        self._largest = pages_for(plan.largest_request, plan.page_size)
        self.budget = int(self._share * plan.num_pages)  # pages

    def most_pinned(self, plan: MemoryPlan) -> int:
        """Pages beside which the longest request finds room, with this plan, and what tenants are promised."""
        promised = self._tree.tenants.promised_in(plan)
        return max(0, plan.num_pages - pages_for(plan.largest_request, plan.page_size) - promised)

    @property
    def _pin_budget(self) -> int:
        return min(self.budget, self.most_pinned(self._plan))

    def counters(self) -> RetentionCounters:
        """Counters and gauges now."""
        return replace(self.totals, retentions=len(self), retained_pages=self.num_pages)

    # -- verbs of callers

    def retain(
        self,
        tokens: Ids,
        namespace: Namespace,
        *,
        ttl_seconds: float,
        priority: int = 0,
        pin: bool = False,
        owner: str = "",
    ) -> Granted:
        """Retain the cached part of `tokens` for so long. A repeated call of an owner also retains pages that
        were cached since. It takes the latest expiry, the highest priority and any pin of all calls. Raises
        InvalidInput for an impossible time.
        """
        if not 0 < ttl_seconds <= MOST_SECONDS:
            asked = f"ttl_seconds must be above 0 and at most {MOST_SECONDS:,.0f}, got {ttl_seconds:g}."
            raise InvalidInput(asked, fix="ask again before the time is over to keep it longer.")
        now = self._parts.seconds()
        self.expire()
        whose = namespace_seed(namespace) + hashlib.sha256(owner.encode()).digest()
        key = hashlib.sha256(whose + tokens.tobytes()).digest()
        prefix = self._by_key.get(key)
        pin = pin or (prefix is not None and prefix.pinned)
        match = self._tree.match(namespace, tokens)
        capped = pin and self._tree.tenants.is_capped(namespace)
        pin = pin and not capped
        num_pages, reason = self._grant(len(tokens), match, prefix, pin)
        if capped:
            reason = "kept, but not pinned: its tenant has a ceiling, within which its longest request must find room."
        if prefix is None and not num_pages:
            return Granted(asked_tokens=len(tokens), reason=reason)
        if prefix is None or num_pages > prefix.hold.path.num_pages:
            frames = needed_frames(self._partial, match.pages[:num_pages])
            lease = self._tree.pin_path(match, num_pages)
            if prefix is None:
                hold = self._parts.holds.add(Reason.RETAIN, frames, lease=lease)
                prefix = RetainedPrefix(key, namespace, owner, hold, priority)
                self._by_id[prefix.retention_id] = self._by_key[key] = prefix
            else:
                self._parts.holds.change(prefix.hold, frames, lease=lease)
        if pin and not prefix.pinned:
            fits = _num_pages(nodes_of([*self._pinned, prefix])) <= self._pin_budget
            prefix.pinned = fits and self._has_frame_room(pages_to(prefix.end))
        prefix.priority = max(prefix.priority, priority)
        prefix.expires_at = max(prefix.expires_at, now + ttl_seconds)
        self._next_expiry = min(self._next_expiry, prefix.expires_at)
        num_retained = prefix.hold.path.num_pages
        return Granted(
            retention_id=prefix.retention_id,
            asked_tokens=len(tokens),
            granted_tokens=num_retained * self._size,
            expires_in_seconds=round(prefix.expires_at - now, 6),  # as was asked, and not a rounding error more
            pinned=prefix.pinned,
            reason=reason,
            host_tokens=(num_retained - self._num_here(pages_to(prefix.end))) * self._size,
        )

    def release(self, retention_id: str, owner: str | None = None) -> bool:
        """End a retention of an owner, or of any; returns False if none has that id."""
        prefix = self._by_id.get(retention_id)
        return prefix is not None and owner in (None, prefix.owner) and self._end(prefix) > 0

    def release_all(self, namespace: Namespace | None) -> int:
        """End all retentions of a namespace, or of any (None), and return their number."""
        return self._end(*[prefix for prefix in self._by_id.values() if namespace in (None, prefix.namespace)])

    def listing(self) -> RetainedList:
        """All retentions, in the order in which they would be ended, pinned ones last."""
        now, size = self._parts.seconds(), self._size
        self.expire()
        retentions = tuple(
            Retained(each.hold.path.num_pages * size, each.priority, each.pinned, each.expires_at - now)
            for each in sorted(self._by_id.values(), key=_rank)
        )
        return RetainedList(self.budget * size, self.num_pages * size, retentions)

    def __len__(self) -> int:
        return len(self._by_id)

    # -- methods that the cache calls. Counting soft retentions costs O(retained nodes), or O(retained frames)

    def release_damaged(self) -> None:
        """End all retentions of paths with damaged pages."""
        are = self._parts.damaged.are
        self.totals.retentions_lost += self._end(
            *[each for each in self._by_id.values() if are(pages_to(each.end)).any()]
        )

    def expire(self) -> int:
        now = self._parts.seconds()
        if now < self._next_expiry:
            return 0
        in_order = sorted(self._by_id.values(), key=lambda prefix: prefix.expires_at)
        num_ended = self._end(*[prefix for prefix in in_order if prefix.expires_at <= now])
        self._next_expiry = min((prefix.expires_at for prefix in in_order[num_ended:]), default=math.inf)
        self.totals.retentions_expired += num_ended
        return num_ended

    @property
    def num_pages(self) -> int:
        """Retained pages, each counted once: at most `budget`. O(retained nodes)."""
        return _num_pages(nodes_of(self._by_id.values()))

    @property
    def num_pinned(self) -> int:
        return _num_pages(nodes_of(self._pinned))

    def num_soft(self, group: GroupCache | None = None) -> int:
        if not self._by_id:
            return 0
        return _num_pages(self._only_soft()) if group is None else len(frames_only_held_by(self._soft, group))

    def num_soft_of(self, match: Match, num_pages: int, group: GroupCache | None = None) -> int:
        if not self._by_id or (group is not None and group.reach.in_place):  # a request takes over the frame of a state
            return 0
        if group is not None:
            only = frames_only_held_by(self._soft, group)
            return len(np.intersect1d(group.needed_pages(match.pages[:num_pages]), only, assume_unique=True))
        nodes = self._only_soft()
        return sum(max(0, min(node.num_pages, num_pages - node.depth)) for node in match.path if node in nodes)

    def soft_by_tenant(self, match: Match, num_pages: int) -> Lengths:
        counts, own = np.zeros(self._tree.tenants.num_tenants, dtype=np.int64), {id(node) for node in match.path}
        for node in self._only_soft() if self._by_id else ():
            counts[node.tenant] += node.num_pages - (
                max(0, min(node.num_pages, num_pages - node.depth)) if id(node) in own else 0
            )
        return counts

    def give_way(self, wanted: Sequence[int], num_new: int, lack: int = 0) -> bool:
        if not self._by_id:
            return False
        before, tree = self.totals.num_ended, self._tree
        whole = [self._short(group, wanted) for group in self._groups if group.reach.whole]
        pages = num_new - self._parts.pages.num_free_pages - tree.num_evictable - tree.num_below
        self.give_up(max(pages, *whole, lack, 0))
        for group in self._partial:
            self._give_up_frames(group, self._short(group, wanted))
        return self.totals.num_ended > before

    def _short(self, group: GroupCache, wanted: Sequence[int]) -> int:
        """Frames of a group that would make room for the `wanted` ones of all groups, if as many became evictable."""
        lack = group.room.lack([each.num_held + n for each, n in zip(self._groups, wanted, strict=True)])
        return -(-lack // group.room.strides[group.room.indices.index(group.index)])

    def give_up(self, num_pages: int) -> int:
        """End soft retentions until so many device pages have become evictable; returns their number. The last one only
        becomes shorter. Retentions that free no page stay."""
        if num_pages <= 0 or not self._by_id:
            return 0
        self.expire()
        before = self._tree.num_protected
        only = self._only_soft()
        left = [prefix for prefix in self._in_order() if not only.isdisjoint(path_to(prefix.end))]
        while left and (short := num_pages - before + self._tree.num_protected) > 0:
            at = next((i for i, prefix in enumerate(left) if prefix.end.level == 1), 0)
            self._shorten(left.pop(at), short)
            self.totals.retentions_given_up += 1
        return before - self._tree.num_protected

    def _give_up_frames(self, group: GroupCache, num_frames: int) -> None:
        """Give up frames of a group that is read in part."""
        if num_frames <= 0:
            return
        self.expire()
        others = int(group.reach.in_place)  # a request takes over the frame of a state that it alone pins
        only = frames_only_held_by(self._soft, group, others)
        for prefix in self._in_order():
            held = frames_of([prefix], group.index)
            if num_frames > 0 and np.isin(held, only).any():
                self.totals.retentions_given_up += self._end(prefix)
                num_frames -= int(np.count_nonzero(group.table.pins[held] <= others))

    def _grant(self, asked: int, match: Match, prefix: RetainedPrefix | None, pin: bool) -> tuple[int, str]:
        """How many pages of a match of `asked` tokens to retain, and why not more."""
        size, cached, reason = self._size, match.num_pages, ""
        num_pages, limited = self._resumes(match.pages)
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
            num_pages, budget = self._resumes(match.pages[:most])[0], f"the budget of {self.budget * size:,} tokens"
            taken = f"is taken by {len(self)} retention{'s' if len(self) > 1 else ''}"
            left = f"had {room * size:,} left" if room else taken
            reason = f"{budget} {left if self.budget else 'keeps nothing; raise --retain-share'}"
        most, room = _room_for(match, self._pinned, self._pin_budget)
        if pin and num_pages > most:
            longest = f"the longest request, {self._plan.largest_request:,} tokens, must find room beside them"
            reason = f"pins may take {self._pin_budget * size:,} tokens, of which {room * size:,} were left: {longest}"
            if prefix is not None and most < prefix.hold.path.num_pages:
                return num_pages, f"kept, but not pinned: {reason}."
            num_pages = self._resumes(match.pages[:most])[0]
        if pin and num_pages and not self._has_frame_room(match.pages[:num_pages]):
            reason = "what the longest request needs of groups that are read in part must find room beside pins"
            if prefix is not None and prefix.pinned:
                return min(num_pages, prefix.hold.path.num_pages), f"kept as before: {reason}."
            return num_pages, f"kept, but not pinned: {reason}."
        return num_pages, f"granted {num_pages * size:,} of {asked:,} tokens: {reason}." if reason else ""

    def _has_frame_room(self, pages: Ids) -> bool:
        """Whether the longest request finds frames if those that a request needs after `pages` are pinned too."""
        both = [np.union1d(frames_of(self._pinned, group.index), group.needed_pages(pages)) for group in self._groups]
        pinned = [len(pages) + self.num_pinned if g.reach.whole else len(both[g.index]) for g in self._groups]
        counts = [n + group.reach.held(self._largest) for n, group in zip(pinned, self._groups, strict=True)]
        return all(group.room.lack(counts) <= 0 for group in self._partial)

    def _resumes(self, pages: Ids) -> tuple[int, str]:
        """The most pages of a cached path after which a request could begin, and the group that limits it, or ""."""
        return resume_point(self._partial, pages[: self._parts.damaged.before(pages)], self._hosts)

    @property
    def _soft(self) -> list[RetainedPrefix]:
        return [prefix for prefix in self._by_id.values() if not prefix.pinned]

    def _in_order(self) -> list[RetainedPrefix]:
        """Soft retentions that may end for the request that lacks room, in order."""
        return [each for each in sorted(self._soft, key=_rank) if self._tree.tenants.is_over(each.namespace)]

    @property
    def _pinned(self) -> list[RetainedPrefix]:
        return [prefix for prefix in self._by_id.values() if prefix.pinned]

    def _only_soft(self) -> set[Node]:
        """Nodes on the device that only soft retentions hold. O(nodes that these hold)."""
        soft = self._soft
        ending = Counter(each.end for each in soft)
        below: Counter[Node | None] = Counter()  # levels of the children that only soft retentions hold
        only: set[Node] = set()
        for node in sorted(nodes_of(soft), key=lambda node: -node.depth):
            if node.held == ending[node] + below[node]:
                below[node.parent] += node.level
                if self._tree.is_here(node):
                    only.add(node)
        return only

    def _shorten(self, prefix: RetainedPrefix, num_pages: int) -> None:
        """Shorten a soft retention by so many device pages, or end it."""
        pages = pages_to(prefix.end)
        alone = _num_pages(node for node in path_to(prefix.end) if node.level == 1 and self._tree.is_here(node))
        left, _ = self._resumes(pages[: self._num_here(pages) - num_pages if alone > num_pages else 0])
        if not left:
            self._end(prefix)
            return
        lease = self._tree.pin_part(prefix.hold.path, left)
        self._parts.holds.change(prefix.hold, needed_frames(self._partial, pages[:left]), lease=lease)
        self._parts.changed()

    def _end(self, *prefixes: RetainedPrefix) -> int:
        for prefix in prefixes:
            del self._by_id[prefix.retention_id], self._by_key[prefix.key]
            self._parts.holds.release(prefix.hold)
            self._parts.changed()
        return len(prefixes)

    def _num_here(self, pages: Ids) -> int:
        """How many first pages of a path are on the device."""
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


def frames_of(retained: Iterable[RetainedPrefix], group: int) -> Ids:
    """Pages whose device frames in a group these retentions hold, once for each retention."""
    held = [frames for each in retained for frames in each.hold.frames]
    runs = [frames.pages for frames in held if (frames.group, frames.tier) == (group, Tier.DEVICE)]
    return np.concatenate([NO_PAGES, *runs])


def frames_only_held_by(retained: Iterable[RetainedPrefix], group: GroupCache, others: int = 0) -> Ids:
    """Pages whose device frames in a group these retentions hold, and at most so many `others`."""
    if not group.table.reclaims or not len(held := frames_of(retained, group.index)):
        return NO_PAGES
    pages, counts = np.unique(held, return_counts=True)
    return pages[group.table.pins[pages] - counts <= others]


def _rank(prefix: RetainedPrefix) -> tuple[bool, int, float]:
    """The lowest is ended first, of equal ones the oldest; pinned ones come last."""
    return prefix.pinned, prefix.priority, prefix.expires_at


def _num_pages(nodes: Iterable[Node]) -> int:
    return sum(node.num_pages for node in nodes)


def _room_for(match: Match, retained: Iterable[RetainedPrefix], budget: int) -> tuple[int, int]:
    """How many first pages of a match fit in a budget that these retentions share, and how much of it is left."""
    nodes = nodes_of(retained)
    room = budget - _num_pages(nodes)
    last = next((node for node in reversed(match.path) if node in nodes), None)  # all nodes above it are in `nodes`
    return (last.depth + last.num_pages if last is not None else 0) + room, room

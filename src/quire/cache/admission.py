"""Admission: whether one more request fits, whether a hit still holds, and why a prompt misses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from quire.cache.offload import CacheParts, RetentionPort
from quire.cache.request_kv import PrefixHit, RequestKV
from quire.cache.running import NO_ROWS, Lengths, Rows
from quire.cache.states import GroupCache, StateGroup
from quire.observe.explain import Cause, Explanation, FromPeer, Reason, arrived_tokens, never_seen
from quire.prefix.match import find_divergence
from quire.prefix.node import Node
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.rank import Rank


class Claim(NamedTuple):
    """A request of `num_pages` pages that begins on a hit, or in the row of a session. Beside it running `rows` keep
    what they need until each has `reached[i]` pages, and `reserve` more pages for each."""

    begins: PrefixHit | RequestKV
    num_pages: int
    rows: Rows = NO_ROWS
    reached: Lengths = NO_ROWS
    reserve: int = 0

    @property
    def namespace(self) -> Namespace:
        """That of the request."""
        return self.begins.match.namespace if isinstance(self.begins, PrefixHit) else self.begins.namespace


class Admission:
    """What a scheduler asks before a request begins or grows. No answer changes what is held or cached."""

    def __init__(self, parts: CacheParts, retention: RetentionPort) -> None:
        self._pages = parts.pages
        self._tree = parts.tree
        self._groups = parts.groups
        self._rooms = parts.rooms
        self._seconds = parts.seconds
        self._rows = parts.rows
        self._retention = retention
        self._size = parts.plan.page_size
        self._plan = parts.plan
        self._partial = [group for group in parts.groups if not group.reach.whole]
        self._states = [group for group in parts.groups if isinstance(group, StateGroup)]
        self._windows = [group for group in self._partial if group not in self._states]
        self.frees_early = bool(self._partial)  # whether a commit may free frames before its request ends
        self.has_states = bool(self._states)

    @property
    def num_available_pages(self) -> int:
        """Pages that `extend` can have: free ones, evictable ones, and those that are retained softly."""
        return self._pages.num_free_pages + self._tree.num_evictable + self._retention.num_soft()

    @property
    def num_dropped(self) -> int:
        """Frames that cached pages have lost on the device since the start."""
        return sum([group.dropped_frames for group in self._groups])

    def is_current(self, hit: PrefixHit) -> bool:
        """Whether a hit is still valid: no edge was split, no page lost a frame, and its loads are still possible."""
        is_same = hit.match.version == self._tree.version and hit.num_dropped == self.num_dropped
        return is_same and hit.choice.stands()

    def explain(self, tokens: Ids, hit: PrefixHit, asked: Sequence[FromPeer] = ()) -> Explanation:
        """The cause for each prompt token that is not reused; `hit` must be current. Peers were `asked` for tokens."""
        num_tokens, size, now = len(tokens), self._size, self._seconds()
        divergence = find_divergence(self._tree.roots, hit.match, tokens, size)
        reasons: list[Reason] = []
        at = 0

        def until(
            stop: int,
            cause: Cause,
            detail: str = "",
            by: str = "",
            ago: float | None = None,
            tier: str = "",
            end: Node | None = None,
        ) -> None:
            nonlocal at
            stop = min(stop, num_tokens)
            if stop > at:
                reasons.append(Reason(cause, at, stop - at, detail, by, ago, tier, *self._forecast(end)))
                at = stop

        choice, limited_by = hit.choice, hit.choice.limited_by
        near = choice.num_pages - choice.host_pages
        until(near * size, Cause.HIT, tier="device", end=hit.match.path[-1] if near else None)
        arrived = arrived_tokens(asked, at, choice.num_pages * size)
        end = choice.num_pages * size - sum(arrived.values())
        until(end - choice.storage_pages * size, Cause.HIT, "from host memory", tier="host")
        until(end, Cause.HIT, "from storage", tier="storage")
        for peer, count in arrived.items():
            until(at + count, Cause.HIT, f"from {peer}", peer, tier="peer")
        if choice.declined_pages:
            until(at + choice.declined_pages * size, Cause.SLOWER, "in host memory, and faster to compute than to load")
        if limited_by:
            usable = min(hit.match.num_pages, max(0, num_tokens - 1) // size)
            until(usable * size, Cause.GROUP, f"group '{limited_by}' has dropped what it needs to resume further on")
        if hit.lacks_room:
            until(hit.match.num_pages * size, Cause.ROOM, "computed again: beside it, its request has no room")
        if hit.most_tokens < num_tokens:
            until(hit.match.num_pages * size, Cause.LOGPROBS, "computed again: its log-probabilities are reported")
        last = "a prompt's last token is always computed, with its page"
        until(hit.match.num_pages * size, Cause.LAST_TOKEN, last)
        for part in asked:
            if part.stop > max(at, part.end):
                until(part.stop, Cause.PEER, part.why_here(), part.peer)
                until(num_tokens, Cause.LAST_TOKEN, last)
        for pages, edge in divergence.evicted:
            assert edge.eviction is not None
            ago = max(0.0, now - edge.eviction.seconds)
            by = edge.eviction.cause or "a request to evict"
            until(at + pages * size, Cause.EVICTED, f"evicted {ago:.1f} s ago for {by}", by, ago, end=edge)
        whole_only = f"seen, but not as a page: only whole pages of {size} tokens are reused"
        until(at + divergence.common, Cause.PAGE, whole_only)
        if divergence.elsewhere is not None:
            namespace, pages = divergence.elsewhere
            until(pages * size, Cause.NAMESPACE, f"cached for requests {_with(namespace)}")
        return Explanation(num_tokens, (*reasons, *never_seen(at, num_tokens)))

    def _forecast(self, node: Node | None) -> tuple[str, float | None, float | None]:
        """The last fields of a `Reason`."""
        found = self._tree.policy.forecast(node) if node is not None else None
        return ("", None, None) if found is None else (found.kind, round(found.chance, 3), round(found.seconds, 1))

    def at_once(self, kv: RequestKV, count: int) -> int:
        """How many of `count` tokens, at least one, to `extend` at once if the frames of a window are short. The rest
        fits when these tokens have settled and their window has moved on."""
        slack = -self._rows.allocated(kv) % self._size
        held = [group.num_held - self._soft(group) for group in self._groups]
        rooms = {id(group.room): group.room for group in self._windows}.values()
        pages = [-room.lack(held) // sum(room.strides) for room in rooms]
        return max(1, min(count, slack + min(pages) * self._size)) if pages else count

    def will_leave(self, kv: RequestKV, num_pages: int) -> bool:
        """Whether a running request will still compute its first `num_pages` pages, or store a resume point after them.
        Marks that place as a resume point, because another request waits for the prefix."""
        row = self._rows.row_of(kv)
        if not kv.shares:
            return False
        kv.marks.setdefault(num_pages, Rank.USED)
        kv.last_mark = max(kv.last_mark, num_pages)
        return num_pages > kv.lease.num_pages or any(group.is_pending(row, num_pages) for group in self._states)

    def why_not(self, claim: Claim, more: Sequence[int] = ()) -> str:
        """Why a request does not fit now; "" if it fits, or would if `more` frames of each group, and page ids, were
        available. Beside running rows, what their rooms spare is left to what is cached."""
        *found, (left, ids, spare_ids) = self._claims(claim)
        *frames, more_ids = more or [0] * (len(found) + 1)
        counts, num_running = [sum(each) - n for each, n in zip(found, frames, strict=True)], len(claim.rows)
        for room in self._rooms:
            if (lack := room.lack(counts) + room.leaving + room.spared * (num_running > 0)) > 0:
                pairs = zip(room.groups, room.strides, strict=True)
                group, stride = max(pairs, key=lambda each: found[each[0].index][1])
                _, own, spare = found[group.index]
                fit = own + spare - frames[group.index] - -(-lack // stride)
                return _refusal(group.name, own, spare, fit, num_running)
        return _refusal("all groups", ids, spare_ids, left, num_running) if ids + spare_ids > left + more_ids else ""

    def check(self, namespace: Namespace, prompt: int, max_tokens: int) -> None:
        """Refuse a request that the plan admits, and that a request of its namespace can never have."""

    def largest_request(self, namespace: Namespace) -> int:
        """The longest request of a namespace that is ever admitted, prompt and output together, in tokens."""
        return self._plan.largest_request

    def units_for(self, requests: Sequence[tuple[Namespace, int]]) -> list[int]:
        """Units that each room must have, so that any of these requests can run, each with so many pages."""
        most = max((num_pages for _, num_pages in requests), default=0)
        needs = [group.needs(most, 0) if most else 0 for group in self._groups]
        return [sum(needs[at] * n for at, n in zip(room.indices, room.strides, strict=True)) for room in self._rooms]

    def _soft(self, group: GroupCache) -> int:
        """Frames of a group that only soft retentions hold."""
        return self._retention.num_soft(None if group.reach.whole else group)

    def _claims(self, claim: Claim) -> Iterator[tuple[int, int, int]]:
        """For each group the frames that stay, and those needed and reserved; then for page ids how many are available,
        needed and reserved. What *stays* cannot be had, or is the request's own prefix, or reserved for `reached`."""
        retention, num_spare = self._retention, len(claim.rows) * claim.reserve
        *reserved, reserved_ids = [int(each.sum()) for each in self._reserved(claim)]
        *needs, ids = self._needs(claim)
        hit = claim.begins if isinstance(claim.begins, PrefixHit) else None
        soft_of_hit = retention.num_soft_of(hit.match, hit.num_pages) if hit is not None else 0
        for group, own, later in zip(self._groups, needs, reserved, strict=True):
            stay = group.num_held - self._soft(group) + later
            if hit is not None:
                soft = soft_of_hit if group.reach.whole else retention.num_soft_of(hit.match, hit.num_pages, group)
                stay += group.would_pin(hit.pages, hit.num_evictable) + soft
            yield stay, own, 0 if group.reach.in_place else num_spare
        left = self.num_available_pages - reserved_ids - soft_of_hit
        yield left - (hit.num_evictable if hit is not None else 0), ids, num_spare

    def _needs(self, claim: Claim) -> list[int]:
        """Frames of each group, and page ids in the last place, that the request itself allocates."""
        begins, num_pages = claim.begins, claim.num_pages
        if isinstance(begins, PrefixHit):
            loads = begins.choice.loads or [0] * len(self._groups)
            needs = [g.needs(num_pages, begins.num_pages) + n for g, n in zip(self._groups, loads, strict=True)]
            return [*needs, num_pages - begins.num_pages]
        row, have = np.array([begins.row]), np.array([-(-self._rows.allocated(begins) // self._size)])
        after = np.maximum(have, num_pages)
        return [*(int(g.remaining(row, have, after)[0]) for g in self._groups), int((after - have)[0])]

    def _reserved(self, claim: Claim) -> Iterator[Lengths]:
        """For each group, and for page ids, what each running row needs until it has `reached`."""
        have = -(-self._rows.num_allocated[claim.rows] // self._size)
        for group in self._groups:
            yield group.remaining(claim.rows, have, claim.reached)
        yield claim.reached - have


def _refusal(name: str, own: int, spare: int, left: int, num_running: int) -> str:
    available = f"{max(0, left)} are available, {num_running} running requests hold the rest"
    return f"needs {own} pages of '{name}' and {spare} in reserve; {available}"


def _with(namespace: Namespace) -> str:
    """A namespace in words. A salt is a secret, so it is not shown."""
    adapter = f"adapter '{namespace.adapter}'" if namespace.adapter else ""
    salt = "a salt of their own" if namespace.salt else ""
    return f"with {' and '.join(filter(None, (adapter, salt)))}" if adapter or salt else "without adapter and salt"

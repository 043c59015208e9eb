"""Sessions: rows that stay between the turns of a conversation, so that a turn computes only its new tokens.

When a turn ends, its session holds what the turn had: the lease on its cached pages, its private last page, and its
states. The next turn continues in the same row, if its prompt begins with the tokens of that row:

    turn 1    |-- prompt, computed --|-- answer --|                      the row is held
    turn 2    |-- the same tokens ----------------|-- new, computed --|  its row

A session holds one row at most, that of the newest turn that has ended. It is held until the session expires, gives way
to requests that lack room, or is closed. Its whole pages are cached as those of any request, so a session that has lost
its row only costs the tokens after the last whole page, and the states. Turns of a session may run at once: one of them
continues, the others begin as requests without a session. No step in flight writes to a row that is continued.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Protocol
from weakref import WeakValueDictionary

from quire.cache.offload import CacheParts, Offload
from quire.cache.request_kv import CacheUse, RequestKV
from quire.cache.session import (
    HeldRow,
    Session,
    SessionCounters,
    SessionGrant,
    SessionKey,
    SessionList,
    SessionSettings,
    SessionState,
    Start,
    Turn,
)
from quire.cache.states import StateGroup
from quire.cache.statistics import CacheCounters
from quire.observe.explain import Cause, Explanation, Reason, never_seen
from quire.plan.budget import MemoryPlan
from quire.prefix.node import Node, User, path_to
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.pages import pages_for

MOST_SESSIONS = 4096
"""Beyond this, the owner with most sessions loses the one that was not used for the longest time."""


class TurnCache(Protocol):
    """What `Sessions` needs of its cache."""

    @property
    def explains(self) -> bool: ...
    @property
    def counters(self) -> CacheCounters: ...
    @property
    def offload(self) -> Offload: ...
    def commit(self, kvs: RequestKV, tokens: Ids) -> None: ...
    def finish(
        self, kv: RequestKV, tokens: Ids | None = None, *, returns: bool = False, idle: bool = False
    ) -> None: ...


class _Pages:
    """Pages of rows, each counted once, as they are when a row is added. O(nodes of its path) for each."""

    def __init__(self, num_private: Callable[[RequestKV], int]) -> None:
        self.count = 0
        self._num_private = num_private
        self._holders = Counter[Node]()
        self._of: dict[RequestKV, tuple[int, list[tuple[Node, int]]]] = {}

    def add(self, kv: RequestKV) -> None:
        nodes = [(node, node.num_pages) for node in path_to(kv.lease.node)]
        num_private, _ = self._of[kv] = self._num_private(kv), nodes
        self.count += num_private + sum(num_pages for node, num_pages in nodes if node not in self._holders)
        self._holders.update(node for node, _ in nodes)

    def remove(self, kv: RequestKV) -> None:
        num_private, nodes = self._of.pop(kv)
        self._holders.subtract(node for node, _ in nodes)
        self.count -= num_private + sum(num_pages for node, num_pages in nodes if not self._holders[node])


class Sessions:
    """The sessions of one cache, for the step loop alone. `shorten(kv, num_tokens)` frees a row's further tokens."""

    def __init__(
        self, parts: CacheParts, settings: SessionSettings, cache: TurnCache, shorten: Callable[[RequestKV, int], None]
    ) -> None:
        self._parts = parts
        self._rows = parts.rows
        self._fences = parts.holds.fences
        self._cache = cache
        self._shorten = shorten
        self._size = parts.plan.page_size
        self._ttl_s = settings.ttl_s
        self._share = settings.share
        self._resized(parts.plan)
        parts.resized.append(self._resized)
        self._states = [group for group in parts.groups if isinstance(group, StateGroup)]
        self._trims = not self._states and parts.plan.tokens_per_step == 1 and not parts.plan.groups_on_host
        self._by_key: dict[SessionKey, Session] = {}  # those used last come last
        self._num_of = Counter[str]()  # sessions by owner
        self._users: WeakValueDictionary[SessionKey, User] = WeakValueDictionary()  # also users of expired sessions
        self._next_expiry = math.inf  # no session expires before
        self.num_held = 0
        self.last_fence = 0  # the last one of any row
        self.totals = SessionCounters()
        parts.flushed.append(self._flushed)
        parts.audits.append(self._faults)

    def _resized(self, plan: MemoryPlan) -> None:
        self.budget = int(self._share * plan.num_pages)  # pages

    def __len__(self) -> int:
        return len(self._by_key)

    # -- turns

    def open(self, key: SessionKey, arrival: int, *, is_last: bool = False) -> Turn:
        """A turn of a session arrives; `end` or `leave` follows. If it `is_last`, the session closes then."""
        self.expire()
        session = self._by_key.pop(key, None)
        if session is None:
            self._num_of[key.owner] += 1
            most = [owner for owner, count in self._num_of.most_common() if count >= self._num_of[key.owner]]
            idle = (each for owner in most for each in self._by_key.values() if each.is_idle_of(owner))
            if len(self._by_key) >= MOST_SESSIONS and (oldest := next(idle, None)) is not None:
                self._close(oldest)
            session = Session(key=key)
            session.user = self._users.setdefault(key, session.user)
        self._by_key[key] = session
        session.running_turns += 1
        session.expires_at = math.inf
        return Turn(session, arrival, refusal="it was the session's last turn" if is_last else "", is_last=is_last)

    def resumable(self, turn: Turn, tokens: Ids, num_cached: int) -> int:
        """After how many tokens of a prompt the turn can continue in the session's row; 0 if in none, or if the
        `num_cached` tokens of the prefix cache are more. -1: a step in flight still computes the row."""
        row = turn.session.row
        if row is None or self._damaged(row.kv):
            return 0
        held = len(row.tokens)
        common = min(held, len(tokens) - 1)
        same = tokens[:common] == row.tokens[:common]
        if not same.all():
            common = int(same.argmin())
        if common < held and (not self._trims or common < self._rows.committed(row.kv) // self._size * self._size):
            return 0
        if not common or common < num_cached:
            return 0
        return common if self._fences.has_passed(row.fence) else -1

    def resume(
        self, turn: Turn, tokens: Ids, num_tokens: int, *, num_cached: int, priority: int, again: bool, label: str
    ) -> RequestKV:
        """The turn continues in the session's row, after the `num_tokens` tokens that `resumable` found; the prefix
        cache has `num_cached` of them. The row is the caller's until `end`. One that begins `again` is not counted."""
        session, row = turn.session, turn.session.row
        assert row is not None
        self._drop(session)
        kv, held = row.kv, len(row.tokens)
        self._rows.go_on(kv, row.serial, min(num_tokens, self._rows.committed(kv)))
        if num_tokens < held:
            self._shorten(kv, num_tokens)
        self._parts.tree.use(kv.lease, priority)
        kv.use, kv.num_prompt, kv.label = CacheUse(num_tokens), len(tokens), label
        kv.loads, kv.marks, kv.explanation = [], {}, None
        if self._cache.explains and not again:
            hit = Reason(Cause.HIT, 0, num_tokens, "held by its session", tier="device")
            kv.explanation = Explanation(len(tokens), (hit, *never_seen(num_tokens, len(tokens))))
        last = max(0, len(tokens) - 1) // self._size
        kv.mark_ends(num_tokens // self._size, num_tokens // self._size, last)
        if not again:
            self._cache.counters.begun(len(tokens), num_tokens, kv.explanation)
            self._begun(turn, Start.CONTINUED if num_tokens == held else Start.TRIMMED, len(tokens), num_tokens)
        turn.resumed_tokens = num_tokens
        self.totals.sessions_continued += 1
        session.resumed_tokens += num_tokens
        session.partial_tokens += num_tokens - num_cached
        self.totals.session_resumed_tokens += num_tokens
        self.totals.session_partial_tokens += num_tokens - num_cached
        return kv

    def began(self, turn: Turn, num_prompt: int, num_cached: int, *, again: bool) -> None:
        """The turn has begun as a request without a session. It ends the row of an older turn."""
        session, row = turn.session, turn.session.row
        if again:
            return
        if row is not None:
            start = Start.EDITED
        elif session.running_turns > 1 and not session.lost:
            start = Start.BRANCHED
        else:
            start = Start.LOST if session.lost else Start.NEW
        self._begun(turn, start, num_prompt, num_cached)
        if row is not None and row.arrival < turn.arrival:
            self._end_row(session, "")

    def end(self, turn: Turn, kv: RequestKV, tokens: Ids, num_settled: int, num_launched: int) -> SessionGrant:
        """A running turn ends, with these `tokens`. Its row is held, with the first `num_launched` tokens: a step in
        flight may still compute those after `num_settled`. Or it is finished, and the answer says why."""
        self._cache.commit(kv, tokens[:num_settled])
        num_held = num_launched if self._fences.num_open else num_settled
        refusal = turn.refusal or self._refusal(turn, kv, num_held)
        if refusal:
            self._cache.finish(kv, tokens[:num_settled])
            return self.leave(turn, refusal)
        session = turn.session
        self._end_row(session, "")
        kv.end = self._parts.tree.ended(
            kv.lease, tokens[kv.lease.num_pages * self._size : num_settled], num_settled - kv.num_prompt
        )
        self._cache.offload.finished(kv, self._rows.pages[kv.row, : kv.lease.num_pages], returns=False)
        self._shorten(kv, num_held)
        serial = self._rows.rest(kv)
        self.last_fence = self._fences.next
        session.row = HeldRow(kv, tokens[:num_held].copy(), serial, self.last_fence, turn.arrival)
        session.lost, kv.is_held = "", True
        self.num_held += 1
        return self.leave(turn, "")

    def leave(self, turn: Turn, reason: str) -> SessionGrant:
        """A turn has ended without a row of its own, for this `reason`; "" if its row is held."""
        session = turn.session
        session.running_turns -= 1
        if not session.closed:
            self._by_key[session.key] = self._by_key.pop(session.key)
        if not session.running_turns:
            session.expires_at = self._parts.seconds() + self._ttl_s
            self._next_expiry = min(self._next_expiry, session.expires_at)
        if reason and session.row is None and turn.start is not Start.NONE:
            session.lost = reason
        if turn.is_last and not session.closed:
            self.close(*session.key)
        return SessionGrant(
            session_id=session.key.session_id,
            start=turn.start,
            resumed_tokens=turn.resumed_tokens,
            saved_tokens=session.saved_tokens,
            held_tokens=0 if reason or session.row is None else len(session.row.tokens),
            expires_in_seconds=0.0 if reason else self._ttl_s,
            reason=reason,
        )

    # -- verbs of callers

    def close(self, namespace: Namespace, session_id: str, owner: str | None = None) -> bool:
        """End a session of an owner, or of any, and the hold of its row. Turns that run continue, and are not held.
        Cached pages that no other request has used are evicted first, also after it has expired. False: none found."""
        keys, found = [SessionKey(namespace, session_id, owner or "")], False
        if owner is None:
            keys = [key for key in self._users if key[:2] == (namespace, session_id)]
        for key in keys:
            if (user := self._users.pop(key, None)) is not None:
                self._parts.tree.end(user)
            if (session := self._by_key.get(key)) is not None:
                self._close(session)
                found = True
        return found

    def close_all(self) -> None:
        """End all sessions."""
        for session in list(self._by_key.values()):
            self._close(session)

    def listing(self, namespace: Namespace | None, owner: str | None = None) -> SessionList:
        """The sessions of a namespace, or all; of an owner, or of any."""
        self.expire()
        now = self._parts.seconds()
        found = tuple(
            SessionState(
                session_id=each.key.session_id,
                turns=each.turns,
                running_turns=each.running_turns,
                prompt_tokens=each.prompt_tokens,
                saved_tokens=each.saved_tokens,
                resumed_tokens=each.resumed_tokens,
                partial_tokens=each.partial_tokens,
                held_tokens=len(each.row.tokens) if each.row is not None else 0,
                expires_in_seconds=self._ttl_s if each.running_turns else each.expires_at - now,
                reason=each.lost,
            )
            for each in reversed(self._of(namespace, owner))
        )
        return SessionList(budget_tokens=self.budget * self._size, held_tokens=self.num_tokens, sessions=found)

    def counters(self) -> SessionCounters:
        """Counters and gauges now. Ends sessions that have expired."""
        self.expire()
        return replace(
            self.totals,
            sessions=len(self),
            sessions_held=self.num_held,
            session_held_tokens=self.num_tokens,
            session_held_pages=self.num_pages,
        )

    # -- room

    @property
    def num_tokens(self) -> int:
        """Tokens of the held rows; a prefix of several counts in each."""
        return sum(len(row.tokens) for row in self._held()) if self.num_held else 0

    @property
    def num_pages(self) -> int:
        """Pages of the held rows, each counted once. O(nodes of their paths)."""
        held = _Pages(self._num_private)
        for row in self._held() if self.num_held else ():
            held.add(row.kv)
        return held.count

    @property
    def most_frames(self) -> tuple[int, ...]:
        """At most so many frames of each group, and then page ids, become available if all held rows end."""
        rows = [(row.kv.row, pages_for(self._rows.allocated(row.kv), self._size)) for row in self._held()]
        groups = [sum(group.num_of(*each) for each in rows) for group in self._parts.groups]
        return *groups, sum(num_pages for _, num_pages in rows)

    def expire(self) -> int:
        """End sessions whose time is over; returns how many rows ended. O(1) where no session has expired."""
        if not self._by_key or (now := self._parts.seconds()) < self._next_expiry:
            return 0
        before = self.num_held
        for session in [each for each in self._by_key.values() if each.expires_at <= now]:
            self._close(session)
            self.totals.sessions_expired += 1
        self._next_expiry = min((each.expires_at for each in self._by_key.values()), default=math.inf)
        return before - self.num_held

    def give_way(
        self,
        but: Session | None = None,
        *,
        by: str = "another request",
        num_tokens: int | None = None,
        for_room: bool = False,
        enough: Callable[[HeldRow], bool] = lambda _: True,
    ) -> bool:
        """End the rows of expired sessions, or of the owner who holds most the one that was not used for the longest
        time, except for `but` and rows that a step in flight computes; and so on until it is `enough`, which is called
        with each row that ends. False if it is not; if `but` is to hold `num_tokens`, also if other owners hold less
        than its owner would. Clients are told that the room was needed `by` this, so it names no request: that may be
        another tenant's. Rows of a tenant within its floor do not end `for_room`: no other tenant would get it."""
        if not self.num_held:
            return False
        if self.expire():
            return True
        tokens, rows, is_over = Counter[str](), Counter[str](), self._parts.tree.tenants.is_over
        resting: dict[str, deque[tuple[int, Session, HeldRow]]] = defaultdict(deque)  # rows that may end, by owner
        for at, each in enumerate(self._by_key.values()):
            owner, row = each.key.owner, each.row
            num_held = num_tokens if each is but and num_tokens is not None else 0 if row is None else len(row.tokens)
            tokens[owner] += num_held
            rows[owner] += num_held > 0
            if row is None or each is but or (for_room and not is_over(each.key.namespace)):
                continue
            if self._fences.has_passed(row.fence):
                resting[owner].append((at, each, row))

        def share(owner: str) -> float:
            """What it holds, of the budget or of all rows, whichever is more."""
            budget = max(1, self.budget * self._size)
            return max(tokens[owner] / budget, rows[owner] / self._parts.plan.max_requests)

        order = [(-share(owner), each[0][0], owner) for owner, each in resting.items()]
        heapify(order)
        while order:
            *_, owner = heappop(order)
            if but is not None and num_tokens is not None and share(owner) < share(but.key.owner):
                return False
            _, session, row = resting[owner].popleft()
            is_enough = enough(row)
            self._end_row(session, f"its room was needed by {by}")
            self.totals.sessions_given_up += 1
            if is_enough:
                return True
            tokens[owner] -= len(row.tokens)
            rows[owner] -= 1
            if left := resting[owner]:
                heappush(order, (-share(owner), left[0][0], owner))
        return False

    def give_up(self, turn: Turn) -> None:
        """The row of a turn's session cannot grow to what the turn needs: end it."""
        self._end_row(turn.session, "its next turn did not fit beside it")
        self.totals.sessions_given_up += 1

    def end_readers(self, kvs: Iterable[RequestKV]) -> None:
        """These requests have read damaged pages: end the rows that are theirs. No step may be in flight."""
        damaged = set(kvs)
        for session in self._by_key.values():
            if session.row is not None and session.row.kv in damaged:
                self._end_row(session, "cached pages that it held were damaged", damaged=True)

    # -- inside

    def _begun(self, turn: Turn, start: Start, num_prompt: int, num_cached: int) -> None:
        session = turn.session
        turn.start, turn.num_flushes = start, session.num_flushes
        session.turns += 1
        session.prompt_tokens += num_prompt
        session.saved_tokens += num_cached

    def _refusal(self, turn: Turn, kv: RequestKV, num_tokens: int) -> str:
        """Why the row of a turn that ends is not held with so many tokens; "" if it is. Ends rows of other sessions."""
        session, wanted = turn.session, pages_for(num_tokens, self._size)
        if session.closed:
            return "the session was closed while the turn ran"
        if turn.num_flushes != session.num_flushes:
            return "its pages were flushed while the turn ran"
        if session.row is not None and session.row.arrival > turn.arrival:
            return "a later turn of the session is held"
        if not kv.is_ready or kv.loads or self._damaged(kv):
            return "a part of its prefix was not on the device"
        if not num_tokens:
            return "nothing was computed"
        if wanted > self.budget:
            fix = "raise --session-share" if self.budget else "--session-share is 0"
            return f"{num_tokens:,} tokens are more than the budget of {self.budget * self._size:,}; {fix}"
        by = "a later session, as all have one budget"
        while True:
            held = _Pages(self._num_private)
            for each in (kv, *(row.kv for row in self._held() if row is not session.row)):
                held.add(each)
            if held.count <= self.budget:
                return ""

            def enough(row: HeldRow, held: _Pages = held) -> bool:
                held.remove(row.kv)
                return held.count <= self.budget

            if not self.give_way(session, by=by, num_tokens=num_tokens, enough=enough):
                taken = "is taken by sessions that still compute, or by other keys that hold less"
                return f"the budget of {self.budget * self._size:,} tokens {taken}"

    def _of(self, namespace: Namespace | None, owner: str | None = None) -> list[Session]:
        found = self._by_key.values()
        return [each for each in found if namespace in (None, each.key.namespace) and owner in (None, each.key.owner)]

    def _held(self) -> Iterator[HeldRow]:
        return (each.row for each in self._by_key.values() if each.row is not None)

    def _num_private(self, kv: RequestKV) -> int:
        return pages_for(self._rows.allocated(kv), self._size) - kv.lease.num_pages

    def _damaged(self, kv: RequestKV) -> bool:
        damaged = self._parts.damaged
        return bool(damaged.num_damaged) and bool(damaged.are(self._rows.page_ids(kv)).any())

    def _drop(self, session: Session) -> HeldRow:
        row, session.row = session.row, None
        assert row is not None
        row.kv.is_held = False
        self.num_held -= 1
        return row

    def _end_row(self, session: Session, why: str, *, damaged: bool = False) -> None:
        """End the hold of a session's row, if it has one. Its whole pages stay cached, unless they are `damaged`."""
        if session.row is None:
            return
        row = self._drop(session)
        session.lost = why
        tokens = None if damaged or self._damaged(row.kv) else row.tokens[: self._rows.committed(row.kv)]
        self._cache.finish(row.kv, tokens, idle=self._fences.has_passed(row.fence))
        self._parts.changed()

    def _close(self, session: Session) -> None:
        self._end_row(session, "")
        session.closed = True
        del self._by_key[session.key]
        self._num_of -= Counter([session.key.owner])

    def _flushed(self, namespace: Namespace | None) -> None:
        for session in self._of(namespace):
            session.num_flushes += 1
            self._end_row(session, "its pages were flushed")

    def _faults(self, auditor: object) -> Iterator[str]:
        """For the audit: each held row is live, has its tokens, and no step may write to it."""
        rows, live = self._rows, self._rows.live
        held = list(self._held())
        if len(held) != self.num_held or {row.kv for row in held} != {kv for kv in live.values() if kv.is_held}:
            yield f"{self.num_held} session rows are counted, {len(held)} are held"
        for row in held:
            kv, name, length = row.kv, f"session row {row.kv.row}", len(row.tokens)
            if live.get(kv.row) is not kv or rows.serials[kv.row]:
                yield f"{name} is not at rest"
                continue
            if not rows.committed(kv) <= length == rows.allocated(kv):
                yield f"{name}: {rows.committed(kv)} committed, {length} held, {rows.allocated(kv)} allocated"
            cached = b"".join(node.key for node in reversed(path_to(kv.lease.node)))
            if row.tokens.tobytes()[: len(cached)] != cached:
                yield f"{name}: its tokens are not those of its pages"
            for group in self._states:
                if group.position(kv.row) != length:
                    at = f"{group.position(kv.row)} of {length} tokens"
                    yield f"{name}: group '{group.name}' has the state after {at}"
            yield ""
        for row_id, kv in live.items():
            if not kv.is_held and not rows.serials[row_id]:
                yield f"row {row_id} is at rest and held by no session"

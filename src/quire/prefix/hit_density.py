"""HitDensity: evicts the pages with the fewest expected hits per page and second."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from quire.counters import counter
from quire.prefix.endings import CLASSES, Endings
from quire.prefix.forecast import Forecast
from quire.prefix.node import Node, Returned
from quire.prefix.policy import EvictionPolicy
from quire.prefix.stay_table import StayTable
from quire.spec.ending import Ending

KINDS = 16  # kinds of each ending, and of shared prompts
TOLD = {ending: CLASSES + at for at, ending in enumerate(Ending)}
"""Groups of kinds of endings that are told. Those before are classes of last tokens (`Endings`)."""
GROUPS = CLASSES + len(TOLD)  # those of all endings
SHARED_KINDS = GROUPS * KINDS  # kinds of shared prompts begin here
SHARED = 2  # requests that go on from one end in different ways: it is a shared prompt then
SUPERSEDED = 0.3  # worth of a path whose conversation has left it, as a part of its kind's
PRICED = 0.25  # part of what late pages cost more: with all of it long paths that do not return stay too
LEFT_OUT = 4  # pages, or an eighth of a path: a use that leaves out more is none of the whole path
RANKED, MOST_RANKED = 64, 512  # leaves that are chosen together, and with those that join them
WINDOW = 4096  # leaves, at most, that are compared at once
RANK_AFTER, RANK_AFTER_S = 8, 2.0  # requests or seconds until the next choice, and as many for each 1,024 leaves


@dataclass(slots=True, eq=False)
class Stay:
    """The time between two uses of a path's end. Nodes of one path, cached or evicted, share it."""

    since: float  # begin of the request, in seconds
    turn: int = 1
    pace: float = 0.0  # mean logarithm of the seconds between the begins of turns, the last ones first
    num_pages: int = 0  # pages of the path; 0: its request adds them
    uses: int = 0  # requests that went on from this very end
    kind: int = -1  # -1: the request runs
    number: int = -1  # in the table; -1: it is not counted, or is over
    slot: int = -1  # slot of the last of its nodes that was a candidate
    is_superseded: bool = False


@dataclass(kw_only=True)
class DensityCounters:
    """What was told to the policy."""

    told_endings: dict[str, int] = counter(
        "Outputs whose ending was told to the eviction policy.",
        "ending",
        known=tuple(Ending),
        start=lambda: dict.fromkeys(map(str, Ending), 0),
    )


class HitDensity(EvictionPolicy):
    """A *stay* begins with a request, and ends when its path, cached or evicted, is used again. Its kind is known when
    the request ends: how the output ended, if it is told, else its last token; the turn; and the number of tokens
    generated, with the pace of turns from the second on. The end of a shared prompt, from which several requests went
    on, has stays of its own, whose kind is the number of these. `StayTable` has, for each kind, what a leaf is worth at
    an age in seconds.

    Candidates have slots in arrays. Every few requests the worst are chosen, from all or, if there are many, from a
    window that moves on. A new candidate that is worse joins them. So a victim costs one `pop`.
    """

    knows_worth = True

    def __init__(self) -> None:
        self._seconds: Callable[[], float] = lambda: 0.0
        self._endings = Endings()
        self._counters = DensityCounters()
        self._growth = 0.0
        self._table = StayTable(GROUPS + 1, KINDS)
        self._tickets = count(1)
        self._slots: list[tuple[int, Node] | None] = []  # tickets, and nodes that are candidates if they have them
        self._free: list[int] = []
        self._next_check = 0
        self._kinds = np.full(64, -1)  # kinds by slot, -1 if it is free; the next two are by slot, too
        self._since = np.zeros(64)
        self._parts = np.ones(64)  # `Node.share`, times SUPERSEDED or 1, times what its last page costs to compute
        self._worst: list[tuple[float, int, int]] = []  # minus worth, slot, ticket; the worst last
        self._window = 0
        self._num_requests = self._rank_at = 0
        self._rank_at_s = 0.0

    def timed_by(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds

    def priced_by(self, growth: float) -> None:
        self._growth = PRICED * growth

    # -- learning

    def used(self, node: Node) -> None:
        self._num_requests += 1
        self._table.fit(self._seconds())
        if node.parent is not None:
            before = _stay(node)
            node.memo = self._follow(before, node.depth + node.num_pages, before.uses + 1 if before else 0)

    def stored(self, node: Node, num_pages: int, returned: Returned) -> None:
        before = _stay(node.parent) if node.parent is not None else None
        if num_pages < node.num_pages:  # its end is another one now
            self._not_shared(_stay(node), 0)
        elif returned:  # evicted pages come back: the request goes on from their end, and not from the cached one
            edge = _stay(returned[-1][0])
            self._not_shared(before, before.uses - 1 if before else 0)
            depth = node.depth + sum(num_back for _, num_back in returned)
            node.memo = stay = self._follow(edge, depth, edge.uses if edge else 0)
            if stay.kind < 0 and depth < node.depth + node.num_pages:
                stay.num_pages = 0  # a path of its own from there on
        elif before and not before.num_pages:
            node.memo = before  # its request goes on, and has one stay
        elif before and before.uses < SHARED:
            node.memo = Stay(before.since, before.turn, before.pace)
        else:
            node.memo = Stay(self._seconds())

    def merged(self, child: Node, parent: Node) -> None:
        mine, its = _stay(parent), _stay(child)
        if parent.parent is None or its is None:
            return
        if mine is None or (mine.uses < SHARED and its.since >= mine.since):
            its.uses = mine.uses if mine else 0
            parent.memo = its
        else:
            mine.since = max(mine.since, its.since)

    def _follow(self, before: Stay | None, depth: int, uses: int) -> Stay:
        """The stay of a request that goes on after `depth` pages of a path, which it may leave there."""
        now = self._seconds()
        stay = Stay(now, num_pages=depth, uses=uses)
        if before is None:
            return stay
        left_out = before.num_pages - depth
        if left_out <= max(LEFT_OUT, before.num_pages / 8) and before.number >= 0:
            self._table.end(before.number, now)
            before.number = -1
        if uses >= SHARED:
            stay.kind = SHARED_KINDS + min(KINDS - 1, int(2 * math.log2(uses)))
            stay.number = self._table.begin(stay.kind, now, now)
        elif depth >= before.num_pages / 2:
            gap = math.log(max(1.0, now - before.since))
            stay.pace = gap if before.turn == 1 else 0.6 * before.pace + 0.4 * gap
            stay.turn = before.turn + 1
            if left_out > 1:  # the conversation has left a path
                if not before.is_superseded and self._has_slot(before):
                    self._parts[before.slot] *= SUPERSEDED
                before.is_superseded = True
        return stay

    def _has_slot(self, stay: Stay) -> bool:
        """Whether a node of a stay is in its slot."""
        return stay.slot >= 0 and (entry := self._slots[stay.slot]) is not None and entry[1].memo is stay

    def _not_shared(self, stay: Stay | None, uses: int) -> None:
        """So many requests went on from an end, fewer than it seemed."""
        if stay is None:
            return
        stay.uses = max(0, uses)
        if stay.uses < SHARED and stay.number >= 0:
            self._table.drop(stay.number)
            stay.kind = stay.number = -1

    def _begin(self, node: Node, stay: Stay) -> None:
        """A request has ended at a node."""
        stay.num_pages = node.depth + node.num_pages
        ending, is_new = self._endings.class_of(node.ending)
        if is_new:
            self._table.reset(range(ending * KINDS, (ending + 1) * KINDS))
        if stay.turn == 1:
            kind = (node.answer >= 16) + (node.answer >= 64) + (node.answer >= 256)
        else:
            slow = 0.33 * stay.pace + 0.32 * math.log(node.answer + 1)
            kind = 4 * min(3, stay.turn - 1) + (slow >= 2.4) + (slow >= 2.8) + (slow >= 3.2)
        stay.kind = ending * KINDS + kind
        stay.number = self._table.begin(stay.kind, stay.since, self._seconds())

    def ended(self, node: Node) -> Stay | None:
        if (stay := _stay(node)) is not None and stay.kind < 0:
            self._begin(node, stay)
        return stay

    def told(self, memo: object, ending: Ending) -> None:
        if not isinstance(memo, Stay) or not 0 <= memo.kind < SHARED_KINDS:
            return
        self._counters.told_endings[ending] += 1
        memo.kind = TOLD[ending] * KINDS + memo.kind % KINDS  # until now its last token said how
        if memo.number >= 0:
            self._table.change(memo.number, memo.kind)
        if self._has_slot(memo):
            self._kinds[memo.slot] = memo.kind

    def counters(self) -> DensityCounters:
        return self._counters

    def forecast(self, node: Node) -> Forecast | None:
        stay = _stay(node)
        if stay is None or stay.kind < 0:
            return None
        return Forecast(_named(stay), *self._table.outlook(stay.kind, self._seconds() - stay.since))

    # -- choosing

    def worth(self, node: Node) -> float:
        if (stay := _stay(node)) is None or stay.kind < 0:
            return 0.0
        return self._part(node, stay) * self._table.of(stay.kind, self._seconds() - stay.since)

    def _part(self, node: Node, stay: Stay) -> float:
        part = node.share * (SUPERSEDED if stay.is_superseded else 1.0)
        return part * (1 + self._growth * (node.depth + node.num_pages))

    def offered(self, node: Node) -> None:
        stay = _stay(node)
        if stay is None:
            node.memo = stay = Stay(self._seconds())
        if stay.kind < 0:
            self._begin(node, stay)
        slot = self._free.pop() if self._free else self._new_slot()
        node.ticket = ticket = next(self._tickets)
        self._slots[slot], stay.slot = (ticket, node), slot
        self._kinds[slot], self._since[slot] = stay.kind, stay.since
        self._parts[slot] = part = self._part(node, stay)
        if 0 < len(self._worst) < MOST_RANKED:
            loss = -part * self._table.of(stay.kind, self._seconds() - stay.since)
            if loss >= self._worst[0][0]:
                insort(self._worst, (loss, slot, ticket))
        for _ in range(2):  # slots are checked: more than are added
            self._next_check = (self._next_check or len(self._slots)) - 1
            if (entry := self._slots[self._next_check]) is not None and entry[0] != entry[1].ticket:
                self._release(self._next_check)
        if self._table.stale:
            self._table.refresh()

    def victim(self) -> Node | None:
        if self._num_requests >= self._rank_at or self._seconds() >= self._rank_at_s:
            self._rank()
        while self._worst or len(self._free) < len(self._slots):
            while self._worst:
                _, slot, ticket = self._worst.pop()
                entry = self._slots[slot]
                if entry is not None and entry[0] == ticket:
                    node = entry[1]
                    self._release(slot)
                    if node.ticket == ticket:
                        node.ticket = 0
                        return node
            self._rank()
        return None

    def candidates(self) -> Iterator[Node]:
        return (entry[1] for entry in self._slots if entry is not None and entry[0] == entry[1].ticket)

    def _new_slot(self) -> int:
        if len(self._slots) == len(self._kinds):
            self._kinds, self._since, self._parts = (
                np.tile(each, 2) for each in (self._kinds, self._since, self._parts)
            )
            self._kinds[len(self._slots) :] = -1
        self._slots.append(None)
        return len(self._slots) - 1

    def _release(self, slot: int) -> None:
        self._slots[slot] = None
        self._kinds[slot] = -1
        self._free.append(slot)

    def _rank(self) -> None:
        """Choose the worst leaves."""
        now = self._seconds()
        slots = np.flatnonzero(self._kinds[: len(self._slots)] >= 0)
        part = 1 + len(slots) / 1024
        self._rank_at, self._rank_at_s = self._num_requests + int(RANK_AFTER * part), now + RANK_AFTER_S * part
        if len(slots) > WINDOW:
            self._window = (self._window + WINDOW) % len(slots)
            slots = np.roll(slots, -self._window)[:WINDOW]
        losses = -self._parts[slots] * self._table.of_all(self._kinds[slots], now - self._since[slots])
        if len(slots) > RANKED:
            chosen = np.argpartition(losses, -RANKED)[-RANKED:]
            slots, losses = slots[chosen], losses[chosen]
        self._worst = [
            (loss, slot, entry[0])
            for loss, slot in sorted(zip(losses.tolist(), slots.tolist(), strict=True))
            if (entry := self._slots[slot]) is not None
        ]


def _stay(node: Node) -> Stay | None:
    return node.memo if isinstance(node.memo, Stay) else None


def _named(stay: Stay) -> str:
    """The kind of a stay in words."""
    group, kind = divmod(stay.kind, KINDS)
    if group == GROUPS:
        return f"a prompt that {stay.uses} requests went on from"
    ending = next(
        (f"ended: {name}" for name, at in TOLD.items() if at == group), f"ended as class {group} of last tokens"
    )
    turn, pace = divmod(kind, 4)
    told = ("short", "medium", "long", "very long") if not turn else ("quick", "steady", "slow", "very slow")
    return f"turn {turn + 1}{'+' * (turn == 3)}, {told[pace]}, {ending if group else 'ending unknown'}"

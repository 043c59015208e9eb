"""HitDensity: evicts the pages with the fewest expected hits per page and time, and does as LRU where LRU hits more."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import numpy as np

from quire.counters import counter
from quire.prefix.hit_table import HitTable
from quire.prefix.lru_bound import Guard
from quire.prefix.node import ID_BYTES, Node, Returned
from quire.prefix.policy import EvictionPolicy

CLASSES = 4
"""Class 0 has all tokens that are no frequent ending."""
_COUNTED = 12  # tokens, at most: one that ends more than a 13th of the outputs is always counted
_FREQUENT = 8  # times that a token is counted before it is a class of its own


class Endings:
    """Counts last tokens (Misra and Gries), and gives the most frequent a class each. O(1), and bounded memory."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._classes: dict[bytes, int] = {}

    def class_of(self, token: bytes) -> tuple[int, bool]:
        """Count an ending. Returns its class, and whether the class was another token's until now."""
        counts = self._counts
        if not token:
            return 0, False
        if token in counts:
            counts[token] += 1
        elif len(counts) < _COUNTED:
            counts[token] = 1
        else:
            self._counts = {each: times - 1 for each, times in counts.items() if times > 1}
        known = self._classes.get(token)
        if known is not None:
            return known, False
        if self._counts.get(token, 0) < _FREQUENT:
            return 0, False
        if len(self._classes) < CLASSES - 1:
            self._classes[token] = len(self._classes) + 1
            return self._classes[token], False
        rarest = min(self._classes, key=lambda each: self._counts.get(each, 0))
        if self._counts[token] < 2 * self._counts.get(rarest, 0) + _FREQUENT:
            return 0, False
        self._classes[token] = self._classes.pop(rarest)
        return self._classes[token], True


TURNS, HITS, ANSWERS = 4, 3, 4  # levels of each feature of a leaf; the last level has no upper bound
KINDS = TURNS * HITS * ANSWERS  # kinds of each ending
RUNS = 256  # at most; above that, runs of neighbouring ages are merged
SLACK = 256  # invalid entries that are never worth a pass
RANKED = 8  # runs for each tick until the next ranking: it costs as much for each request with few runs as with many
PART = 256  # entries, at most, of a part of a run

_EPOCH_BITS = 48  # bits of a run's key below its kind
_EPOCHS = (1 << _EPOCH_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class EvictionCounters:
    """How this order of eviction compares with LRU."""

    PREFIX: ClassVar = "eviction_"
    switches: int = counter("Times that eviction by hit density gave way to LRU, or decided again.")
    won_pages: int = counter("Pages that were hit and that LRU would not have had.")
    lost_pages: int = counter("Pages that were computed and that LRU would have had.")


@dataclass(slots=True, eq=False)
class Stay:
    """The time between two uses of a path's end. Nodes of one path, cached or evicted, share it."""

    kind: int
    since: int
    open: bool = True


class HitDensity(EvictionPolicy):
    """A *stay* begins when the last lease of a path ends. It ends when the path, cached or evicted, is used again. Its
    kind is the path's turn, the hits on its end, the number of tokens generated at its end, and the last of these:
    models end a call of a tool otherwise than an answer. `HitTable` has, for each kind, the ages at which its stays
    ended. It gives the chance that a stay of age `a` ends within `t` ticks, and the time its pages are held until then.
    The greatest ratio of the two over all `t` is the worth of a leaf. A tick is the begin of a request, and the age of
    a shared prompt is that since its last use by any conversation: nothing depends on a clock or on random numbers.

    Candidates are in runs of one kind and nearly one age. Runs are ranked every few ticks: a victim costs one `pop`. A
    `Guard` compares hits with those of LRU on the same requests, and protects leaves up to an age. These are ranked
    after all others, by age.
    """

    def __init__(self) -> None:
        self.guard = Guard()
        self._bound = self.guard.bound
        self._endings = Endings()
        self._table = HitTable((CLASSES * KINDS, KINDS, HITS * ANSWERS, 1))
        self._runs: dict[int, list[list[Node]]] = {}  # parts, by kind << _EPOCH_BITS | since >> self._shift
        self._shift = 0
        self._num_entries = 0  # entries of runs, with invalid ones: their nodes were leased since, or are there twice
        self._clean_at = SLACK
        self._unclean: list[tuple[int, list[Node]]] = []  # parts, and the keys of their runs
        self._ranked: list[int] = []  # keys of runs, the worst last
        self._losses: list[float] = []  # negative worth of the runs in `_ranked`, ascending
        self._rank_at = 0
        self._young = 0  # leaves of less age are protected

    # -- learning

    def used(self, node: Node) -> None:
        self.guard.used(node)
        if node.memo is not None:
            self._end(node.memo)
            node.memo = None
        if self._bound.now >= self._table.pass_at:
            self._table.begin_pass({key >> _EPOCH_BITS for key in self._runs}, self._bound.now)

    def stored(self, node: Node, num_pages: int, returned: Returned) -> None:
        if num_pages < node.num_pages:
            self.guard.lengthened(node, num_pages)
            return
        for edge, num_back in returned:
            self.guard.returned(edge, num_back)
        self.guard.stored(node)
        if returned and returned[-1][0].memo is not None:
            self._end(returned[-1][0].memo)

    def evicted(self, num_pages: int) -> None:
        self.guard.num_cached = num_pages

    def merged(self, child: Node, parent: Node) -> None:
        child.touched = -abs(child.touched)
        # A path with hits by several requests, such as a system prompt, has a record of its own. Any other path
        # continues the stay of its only conversation.
        parent.memo = child.memo if parent.hits < 2 else None

    def _end(self, stay: object) -> None:
        if isinstance(stay, Stay) and stay.open:
            stay.open = False
            self._table.end(stay.kind, self._bound.now - stay.since)

    def _begin(self, node: Node) -> Stay:
        self.guard.ended(node.depth + len(node.run) // ID_BYTES)
        ending = 0
        if node.ending:
            ending, is_new = self._endings.class_of(node.ending)
            if is_new:
                self._table.reset(range(ending * KINDS, (ending + 1) * KINDS))
        turn, hits, answer = node.turn, node.hits, node.answer
        kind = (
            KINDS * ending
            + (turn - 1 if turn < TURNS else TURNS - 1) * (HITS * ANSWERS)
            + (hits if hits < HITS else HITS - 1) * ANSWERS
            + (0 if answer < 16 else 1 if answer < 64 else 2 if answer < 256 else 3)
        )
        node.memo = stay = Stay(kind, abs(node.touched))
        self._table.begin(kind)
        return stay

    # -- choosing

    def offered(self, node: Node) -> None:
        stay = node.memo
        if not isinstance(stay, Stay):
            stay = self._begin(node)
        node.ticket = 1
        run = self._runs.get(stay.kind << _EPOCH_BITS | stay.since >> self._shift)
        if run is None:
            run = self._new_run(stay)
        elif len(run[-1]) == PART:
            run.append([])
        run[-1].append(node)
        self._num_entries += 1
        if self._table.stale:
            self._table.refresh()
        if self._unclean or self._num_entries > self._clean_at:
            self._clean()

    def victim(self) -> Node | None:
        if self._bound.now >= self._rank_at:
            self._rank()
        while self._ranked:
            where = self._ranked[-1]
            run = self._runs[where]
            while run:
                part = run[-1]
                while part:
                    node = part.pop()
                    self._num_entries -= 1
                    stay = node.memo
                    if (
                        node.ticket
                        and isinstance(stay, Stay)
                        and stay.kind << _EPOCH_BITS | stay.since >> self._shift == where
                    ):
                        node.ticket = 0
                        return node
                run.pop()
            del self._runs[self._ranked.pop()]
            self._losses.pop()
        return None

    def counters(self) -> EvictionCounters:
        guard = self.guard
        return EvictionCounters(switches=guard.num_switches, won_pages=guard.won_pages, lost_pages=guard.lost_pages)

    def candidates(self) -> Iterator[Node]:
        return chain.from_iterable(self._valid(part, where) for where, run in self._runs.items() for part in run)

    def _new_run(self, stay: Stay) -> list[list[Node]]:
        """The run of a stay, which has none, or one only after runs are merged."""
        while len(self._runs) >= RUNS:
            self._merge_runs()
        where = stay.kind << _EPOCH_BITS | stay.since >> self._shift
        run = self._runs.get(where)
        if run is None:
            run = self._runs[where] = [[]]
            age = self._bound.now - stay.since
            loss = -self._table.of(stay.kind, age) if age >= self._young else -2.0 - stay.since
            at = bisect_right(self._losses, loss)
            self._losses.insert(at, loss)
            self._ranked.insert(at, where)
        return run

    def _valid(self, part: list[Node], where: int) -> list[Node]:
        """The candidates in a part of a run, each once."""
        shift = self._shift
        return [
            node
            for node in dict.fromkeys(part)
            if node.ticket
            and isinstance(stay := node.memo, Stay)
            and stay.kind << _EPOCH_BITS | stay.since >> shift == where
        ]

    def _clean(self) -> None:
        """Remove invalid entries of one part. A pass over all begins when there are twice as many as after the last."""
        if not self._unclean:
            self._unclean = [(where, part) for where, run in self._runs.items() for part in run]
        where, part = self._unclean.pop()
        valid = self._valid(part, where)
        self._num_entries -= len(part) - len(valid)
        part[:] = valid
        if not self._unclean:
            self._clean_at = 2 * self._num_entries + SLACK

    def _rank(self) -> None:
        """Order all runs. Afterwards every run is in `_ranked`, so that every candidate can be a victim."""
        now = self._bound.now
        self._rank_at = now + 4 + len(self._runs) // RANKED
        keys = np.fromiter(self._runs, np.int64, len(self._runs))
        kinds, begins = keys >> _EPOCH_BITS, (keys & _EPOCHS) << self._shift
        ages = (now - (1 << self._shift) // 2) - begins
        losses = -self._table.of_all(kinds, ages)
        self._young = self.guard.protected_age()
        if self._young:
            young = ages < self._young
            losses[young] = -2.0 - begins[young]
        order = losses.argsort()
        self._ranked, self._losses = keys[order].tolist(), losses[order].tolist()

    def _merge_runs(self) -> None:
        """Double the range of ages in one run. O(runs and their parts)."""
        self._shift += 1
        runs: dict[int, list[list[Node]]] = {}
        for key in sorted(self._runs):
            run = self._runs[key]
            where = key >> _EPOCH_BITS << _EPOCH_BITS | (key & _EPOCHS) >> 1
            if runs.setdefault(where, run) is not run:
                runs[where] += run
        self._runs = runs
        self._unclean = []
        self._ranked, self._losses = [], []
        self._rank_at = 0  # before the next victim

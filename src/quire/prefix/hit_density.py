"""HitDensity: evicts the pages with the fewest expected hits per page and time, learned from earlier hits."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

import numpy as np
from numpy.typing import NDArray

from quire.lazy_queue import LazyQueue
from quire.prefix.node import Node
from quire.prefix.policy import EvictionPolicy, live

Table = NDArray[np.float64]

TURNS, HITS, ANSWERS = 4, 3, 4  # levels of each feature of a leaf; the last level has no upper bound
KINDS = TURNS * HITS * ANSWERS
STEPS_PER_OCTAVE = 4  # classes of ages, each 19 % wide
AGES = np.unique(np.round(2 ** (np.arange(17 * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE)).astype(np.int64))
WIDTHS = np.diff(np.append(AGES, 2 * AGES[-1])).astype(np.float64)
PRIOR = 20.0  # stays: the weight of the first estimate, and of related kinds against a kind's own record
MEMORY = 20_000  # reuses after which a record counts half
RUNS = 256  # at most; above that, runs of neighbouring ages are merged
TIDIED = 16  # entries of merged runs that each offer checks

_AGES = AGES.tolist()
_FIRST_GUESS = (np.arange(len(AGES)) + 3.0) ** -1.2
_FIRST_GUESS *= 0.5 / _FIRST_GUESS.sum()
_BLOCK = 4  # ages for which `worth` is computed together
_NOT_LATER = np.where(np.arange(len(AGES)) >= np.arange(_BLOCK)[:, None], 0.0, np.inf)


@dataclass(slots=True, eq=False)
class Stay:
    """The time between two uses of a path's end. Nodes of one path, cached or evicted, share it."""

    kind: int
    since: int
    open: bool = True


class HitDensity(EvictionPolicy):
    """A *stay* begins when the last lease of a path ends. It ends when the path, cached or evicted, is used again. Its
    kind is the path's turn, the hits on its end, and the number of tokens generated at its end. Each kind has a
    histogram of the ages at which its stays ended. It gives the chance that a stay of age `a` ends within `t` ticks,
    and the time its pages are held until then. The greatest ratio of the two over all `t` is the worth of a leaf. A
    tick is the begin of a stay: nothing depends on a clock or on random numbers.

    Candidates are in runs of one kind and nearly one age. Runs are ranked every few ticks: a victim costs one `pop`.
    """

    groups: tuple[int, ...] = (KINDS, ANSWERS, 1)
    """Kinds that lend each other their records, in steps: all first, and each alone at last."""

    def __init__(self) -> None:
        self._now = 0
        self._begun = np.zeros(self.groups[0])
        self._reused = np.zeros((self.groups[0], len(AGES)))
        self._num_reused = 0
        self._runs: dict[tuple[int, int], LazyQueue[Node]] = {}  # by kind and epoch: since // self._epoch
        self._untidy: list[LazyQueue[Node]] = []  # recently merged
        self._epoch = 1
        self._ranked: list[tuple[float, tuple[int, int]]] = []  # the worst run last
        self._rank_at = self._learn_at = 0
        self._tickets = count(1)
        self._table = worth(self._begun, self._reused, self.groups)

    # -- learning

    def used(self, node: Node) -> None:
        self._end(node.memo)
        node.memo = None

    def stored(self, node: Node, memo: object | None) -> None:
        self._end(memo)
        node.memo = None

    def merged(self, child: Node, parent: Node) -> None:
        # A path with hits by several requests, such as a system prompt, has a record of its own. Any other path
        # continues the stay of its only conversation.
        parent.memo = child.memo if parent.hits < 2 else None

    def _end(self, stay: object | None) -> None:
        if isinstance(stay, Stay) and stay.open:
            stay.open = False
            self._reused[stay.kind, self._age(stay.since)] += 1
            self._num_reused += 1

    def _begin(self, node: Node) -> Stay:
        self._now += 1
        return self._stay(node, self._kind(node), self._now)

    def _stay(self, node: Node, kind: int, since: int) -> Stay:
        node.memo = stay = Stay(kind, since)
        self._begun[kind] += 1
        return stay

    def _kind(self, node: Node) -> int:
        turn = min(node.turn, TURNS) - 1
        answer = min(max(node.answer.bit_length() - 3, 0) // 2, ANSWERS - 1)  # under 16, 64, 256 tokens; more
        return (turn * HITS + min(node.hits, HITS - 1)) * ANSWERS + answer

    def _age(self, since: int) -> int:
        return bisect_right(_AGES, max(1, self._now - since)) - 1

    # -- choosing

    def offered(self, node: Node) -> None:
        stay = node.memo if isinstance(node.memo, Stay) else self._begin(node)
        where = (stay.kind, stay.since // self._epoch)
        run = self._runs.get(where)
        if run is None:
            while len(self._runs) >= RUNS:
                self._merge_runs()
                where = (stay.kind, stay.since // self._epoch)
            run = self._runs.setdefault(where, LazyQueue(live, newest_first=True))
            insort(self._ranked, (-float(self._table[stay.kind, self._age(stay.since)]), where))
        node.ticket = next(self._tickets)
        run.push(node.ticket, node)
        if self._untidy and self._untidy[-1].tidy(TIDIED):
            self._untidy.pop()

    def victim(self) -> Node | None:
        if self._now >= self._rank_at:
            self._rank()
        while self._ranked:
            where = self._ranked[-1][1]
            entry = self._runs[where].pop()
            if entry is not None:
                entry.item.ticket = 0
                return entry.item
            del self._runs[where]
            self._ranked.pop()
        return None

    def candidates(self) -> Iterator[Node]:
        return chain(*self._runs.values())

    def _learn(self) -> None:
        """Compute the worth of leaves."""
        self._learn_at = self._now + max(64, min(self._now, MEMORY) // 8)
        self._table = worth(self._begun, self._reused, self.groups)
        if self._num_reused > MEMORY // 8:
            self._num_reused = 0
            self._begun *= 0.5**0.125
            self._reused *= 0.5**0.125

    def _rank(self) -> None:
        """Order all runs. Afterwards every run is in `_ranked`, so that every candidate can be a victim."""
        if self._now >= self._learn_at:
            self._learn()
        self._rank_at = self._now + 4 + len(self._runs) // 4
        where = list(self._runs)
        kinds, epochs = np.array(where, dtype=np.int64).reshape(-1, 2).T
        middles = np.maximum(1, self._now - epochs * self._epoch - self._epoch // 2)
        worths = -self._table[kinds, np.searchsorted(AGES, middles, side="right") - 1]
        self._ranked = sorted(zip(worths.tolist(), where, strict=True))

    def _merge_runs(self) -> None:
        """Double the range of ages in one run. O(runs): later offers remove invalid entries."""
        self._epoch *= 2
        runs: dict[tuple[int, int], LazyQueue[Node]] = {}
        for kind, epoch in sorted(self._runs):
            run, where = self._runs[kind, epoch], (kind, epoch // 2)
            if runs.setdefault(where, run) is not run:
                runs[where].join(run)
        self._runs = runs
        self._untidy = list(runs.values())
        self._ranked = []
        self._rank_at = 0  # before the next victim


def worth(begun: Table, reused: Table, groups: tuple[int, ...] = HitDensity.groups) -> Table:
    """Per kind and age [kinds, ages]: the most hits per page and tick that a leaf can earn from this age on. `begun`
    [kinds] counts stays, and `reused` [kinds, ages] those that ended. A short record is completed from those of the
    kinds in larger `groups`, up to that of all kinds. At first this is LRU: reuse becomes rarer with age."""
    guess = _FIRST_GUESS
    padded = np.empty((len(begun), len(AGES) + 2))
    for _ in range(3):  # smoothed: a histogram of few counts is mostly gaps
        padded[:, 1:-1], padded[:, 0], padded[:, -1] = reused, reused[:, 0], reused[:, -1]
        reused = padded[:, 1:-1] * 2
        reused += padded[:, :-2]
        reused += padded[:, 2:]
        reused /= 4
    for width in groups:
        mine = np.repeat(reused.reshape(-1, width, len(AGES)).sum(1), width, axis=0)
        stays = np.repeat(begun.reshape(-1, width).sum(1), width)[:, None]
        guess = (mine + PRIOR * guess) / (stays + PRIOR)
    rows: dict[bytes, int] = {}  # most kinds have no record, and equal rows
    which = [rows.setdefault(row.tobytes(), len(rows)) for row in guess]
    guess = np.frombuffer(b"".join(rows)).reshape(len(rows), -1)
    ends = guess * np.minimum(1, 0.995 / guess.sum(1, keepdims=True))  # chance to end at each age; some stays never end
    hits, held = np.zeros((2, len(ends), len(AGES) + 1))
    np.cumsum(ends, 1, out=hits[:, 1:])
    np.cumsum((1 - hits[:, :-1] - ends / 2) * WIDTHS, 1, out=held[:, 1:])
    best: Table = np.empty_like(ends)
    for first_age in range(0, len(AGES), _BLOCK):
        at = slice(first_age, min(first_age + _BLOCK, len(AGES)))
        spent = held[:, None, first_age + 1 :] - held[:, at, None]
        spent += _NOT_LATER[: spent.shape[1], : spent.shape[2]]
        gained = hits[:, None, first_age + 1 :] - hits[:, at, None]
        gained /= spent
        best[:, at] = np.maximum.reduce(gained, axis=2)
    return best[which]

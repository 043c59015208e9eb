"""HitTable: at which ages paths were used again, by kind, and what a leaf of a kind and age is worth for that."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

STEPS_PER_OCTAVE = 4  # classes of ages, each 19 % wide
AGES = np.unique(np.round(2 ** (np.arange(17 * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE)).astype(np.int64))
PRIOR = 20.0  # stays: the weight of the first estimate, and of related kinds against a kind's own record
MEMORY = 20_000  # reuses after which a record counts half

_LATER = AGES[1:].tolist()
_WIDTHS = np.diff(np.append(AGES, 2 * AGES[-1])).astype(np.float64)
_FIRST_GUESS = (np.arange(len(AGES)) + 3.0) ** -1.2
_FIRST_GUESS *= 0.5 / _FIRST_GUESS.sum()
_FADE = 0.5**0.125


def _smoothed() -> list[Table]:
    """How one reuse of each age counts at all ages [ages, ages]: a histogram of few counts is mostly gaps."""
    found: Table = np.eye(len(AGES))
    for _ in range(3):
        padded = np.pad(found, ((0, 0), (1, 1)), mode="edge")
        found = (padded[:, :-2] + padded[:, 2:] + 2 * found) / 4
    return list(found)


_SMOOTHED = _smoothed()


class HitTable:
    """`groups` are the sizes of kinds that lend each other their records, in steps: all first, and each alone at last.

    A pass begins after an eighth more ticks, at 64 at least. It sums the records of groups. Afterwards each `refresh`
    computes what one kind is worth, and `of` does for a kind that it is asked for first. So no call takes long.
    """

    def __init__(self, groups: tuple[int, ...]) -> None:
        assert groups[-1] == 1
        self._groups = groups
        self._begun = [0.0] * groups[0]
        self._reused = np.zeros((groups[0], len(AGES)))
        self._num_reused = 0
        self._guesses = self._lent()
        self._worth = np.zeros((groups[0], len(AGES)))
        self._rows: list[list[float]] = [[]] * groups[0]  # `_worth` as lists
        self._passes = [0] * groups[0]  # in which each was computed
        self._pass = 1
        self.pass_at = 0
        self._num_ages = len(AGES)
        self.stale: list[int] = []
        """Kinds that wait for `refresh`."""

    def begin(self, kind: int) -> None:
        """A stay of this kind begins."""
        self._begun[kind] += 1

    def end(self, kind: int, age: int) -> None:
        """A stay ends at this age, because its path is used again."""
        row = self._reused[kind]
        row += _SMOOTHED[bisect_right(_LATER, age)]
        self._num_reused += 1

    def reset(self, kinds: range) -> None:
        """These kinds are others from now on."""
        self._begun[kinds.start : kinds.stop] = [0.0] * len(kinds)
        self._reused[kinds.start : kinds.stop] = 0

    def of(self, kind: int, age: int) -> float:
        """What a leaf is worth."""
        self._update(kind)
        return self._rows[kind][bisect_right(_LATER, age)]

    def of_all(self, kinds: NDArray[np.int64], ages: NDArray[np.int64]) -> Table:
        """What leaves [leaves] are worth, of kinds that `of` was asked for before."""
        found: Table = self._worth[kinds, np.searchsorted(AGES[1:], ages, side="right")]
        return found

    def begin_pass(self, kinds: Iterable[int], now: int) -> None:
        """Make all stale. These kinds are computed by the next calls of `refresh`."""
        self.pass_at = now + max(64, min(now, MEMORY) // 8)
        self._num_ages = bisect_right(_LATER, 2 * self.pass_at + 64) + 1  # no leaf is older before the next pass
        if self._num_reused > MEMORY // 8:
            self._num_reused = 0
            self._begun = [_FADE * each for each in self._begun]
            self._reused *= _FADE
        self._guesses = self._lent()
        self._pass += 1
        self.stale = sorted(kinds)

    def refresh(self) -> None:
        """Compute what a stale kind is worth. O(ages)."""
        self._update(self.stale.pop())

    def _lent(self) -> Table:
        """What the smallest groups lend to their kinds: PRIOR stays, by the ages at which they end [groups, ages]. A
        short record is completed from those of larger groups. At first this is LRU: reuse becomes rarer with age."""
        begun = np.array(self._begun)
        guess = _FIRST_GUESS[None]
        for size in self._groups[:-1]:
            stays = begun.reshape(-1, size).sum(1)[:, None]
            reused = self._reused.reshape(-1, size, len(AGES)).sum(1)
            guess = (reused + PRIOR * np.repeat(guess, len(reused) // len(guess), axis=0)) / (stays + PRIOR)
        return np.asarray(PRIOR * guess, dtype=np.float64)

    def _update(self, kind: int) -> None:
        """Compute what a kind is worth, once in a pass."""
        if self._passes[kind] == self._pass:
            return
        counts = self._reused[kind] + self._guesses[kind // self._groups[-2]]
        row = worth(counts, self._begun[kind] + PRIOR, self._num_ages)
        row += row[-1:] * (len(AGES) - len(row))
        self._rows[kind] = row
        self._worth[kind] = row
        self._passes[kind] = self._pass


def worth(reused: Table, begun: float, num_ages: int) -> list[float]:
    """For each of the first ages: the most hits per page and tick that a leaf can earn from this age on, if of so many
    stays `reused` [ages] end at each age. These are slopes of the upper convex hull of hits by the time that pages are
    held."""
    ends = reused[:num_ages] * min(1 / begun, 0.995 / float(reused.sum()))  # some stays never end
    held = ends / 2
    held -= ends.cumsum()
    held += 1.0
    held *= _WIDTHS[:num_ages]
    found: list[float] = []
    hull: list[tuple[float, float, float]] = []  # parts to the right: slope, hits, time; the next last
    for hits, time in zip(ends[::-1].tolist(), held[::-1].tolist(), strict=True):
        slope = hits / time
        while hull and hull[-1][0] >= slope:
            _, more_hits, more_time = hull.pop()
            hits += more_hits
            time += more_time
            slope = hits / time
        found.append(slope)
        hull.append((slope, hits, time))
    found.reverse()
    return found

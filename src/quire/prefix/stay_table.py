"""StayTable: at which ages paths were used again, by kind, and what a leaf of a kind and age is worth for that."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

OPEN = 8192  # stays that are watched at once, the last ones
MEMORY = 20_000  # stays: with more, what was counted fades
FIRST_S = 0.25
PER_OCTAVE = 2
CLASSES = 1 + 17 * PER_OCTAVE  # classes of ages: up to FIRST_S, then parts of octaves, up to nine hours
PRIOR = 50.0  # stays: weight of related kinds, and of the class before, against what is counted
FADES = 0.9  # hazard of a class of which nothing is known, against that of the class before

_EDGES = FIRST_S * np.append(0.0, 2.0 ** (np.arange(CLASSES) / PER_OCTAVE))
_WIDTHS = np.diff(_EDGES)
_GUESS = np.where(np.arange(CLASSES) == 0, 0.3, 0.2 / PER_OCTAVE)  # at first, reuse becomes rarer with age, as in LRU
_SMOOTH = np.array([1, 2, 1]) / 4
_LAST = CLASSES - 1e-3
_LATER = np.tri(CLASSES, CLASSES + 1, dtype=bool)


class StayTable:
    """Kinds are numbers below `groups * size`; each `size` of them are a group, and lend each other their records.

    A *hazard* is the part of the stays that end in a class of ages, of those that reach it. It counts stays that are
    still open, up to their age. `fit` computes it for all kinds, and each `refresh` what one kind is worth, so that no
    call takes long. Memory is bounded: the oldest stays are replaced.
    """

    def __init__(self, groups: int, size: int) -> None:
        self._shape = groups, size, CLASSES
        self._kinds = np.full(OPEN, -1)  # kinds of stays that are open
        self._begins = np.zeros(OPEN)
        self._begun = self._fit_at = 0
        self._ended, self._left = np.zeros((2, groups * size, CLASSES))  # ages at the end, or when they were replaced
        self._hazards = np.tile(_GUESS, (groups * size, 1))
        self._worth = np.tile(worth(_GUESS), (groups * size, 1))
        self.stale: list[int] = []
        """Kinds that wait for `refresh`."""

    def begin(self, kind: int, since: float, now: float) -> int:
        """A stay of this kind has begun at a time in seconds. Returns its number."""
        number = self._begun
        place = number % OPEN
        if (other := self._kinds[place]) >= 0:
            self._left[other, int(_place(now - float(self._begins[place])))] += 1
        self._kinds[place], self._begins[place] = kind, since
        self._begun += 1
        return number

    def end(self, number: int, now: float) -> None:
        """A stay ends, because its path is used again."""
        place = number % OPEN
        if number >= self._begun - OPEN and (kind := self._kinds[place]) >= 0:
            self._ended[kind, int(_place(now - float(self._begins[place])))] += 1
            self._kinds[place] = -1

    def change(self, number: int, kind: int) -> None:
        """A stay, if it is still open, is of this kind."""
        if number >= self._begun - OPEN and self._kinds[number % OPEN] >= 0:
            self._kinds[number % OPEN] = kind

    def drop(self, number: int) -> None:
        """A stay was none."""
        if number >= self._begun - OPEN:
            self._kinds[number % OPEN] = -1

    def reset(self, kinds: range) -> None:
        """These kinds are others from now on."""
        self._ended[kinds.start : kinds.stop] = self._left[kinds.start : kinds.stop] = 0
        self._kinds[(self._kinds >= kinds.start) & (self._kinds < kinds.stop)] = -1

    def fit(self, now: float) -> None:
        """Compute hazards, if there are an eighth more stays than the last time, at least 128. O(OPEN + all cells)."""
        if self._begun < self._fit_at:
            return
        self._fit_at = self._begun + max(128, min(self._begun, MEMORY) // 8)
        if self._ended.sum() + self._left.sum() > MEMORY:
            self._ended *= 0.9
            self._left *= 0.9
        places = np.flatnonzero(self._kinds >= 0)
        cells = self._kinds[places] * CLASSES + _places(now - self._begins[places]).astype(np.int64)
        left = self._left + np.bincount(cells, minlength=self._left.size).reshape(self._left.shape)
        exits = self._ended + left
        at_risk = exits[:, ::-1].cumsum(1)[:, ::-1] - left / 2
        padded = np.pad(self._ended, ((0, 0), (1, 1)))
        events = sum((part * padded[:, at : at + CLASSES] for at, part in enumerate(_SMOOTH)), np.zeros(CLASSES))
        events = np.minimum(events, at_risk)
        guess = np.array(_chained(events.sum(0).tolist(), at_risk.sum(0).tolist()))
        grouped, reached = (each.reshape(self._shape).sum(1) for each in (events, at_risk))
        guesses = ((grouped + PRIOR * guess) / (reached + PRIOR)).repeat(self._shape[1], axis=0)
        self._hazards = (events + PRIOR * guesses) / (at_risk + PRIOR)
        self.stale = np.flatnonzero(exits.any(1)).tolist()

    def refresh(self) -> None:
        """Compute what a stale kind is worth. O(CLASSES squared)."""
        kind = self.stale.pop()
        self._worth[kind] = worth(self._hazards[kind])

    def of(self, kind: int, age: float) -> float:
        """What a leaf is worth."""
        at = _place(age)
        low, row = int(at), self._worth[kind]
        return float(row[low] + (at - low) * (row[low + 1] - row[low]))

    def outlook(self, kind: int, age: float) -> tuple[float, float]:
        """The chance of a use until the last age, and the seconds from now in which half of such uses come."""
        low = int(_place(age))
        used = 1 - np.append(1.0, (1 - self._hazards[kind, low:]).cumprod())
        return float(used[-1]), max(0.0, float(np.interp(used[-1] / 2, used, _EDGES[low:])) - age)

    def of_all(self, kinds: NDArray[np.int64], ages: Floats) -> Floats:
        """What leaves [leaves] are worth."""
        at = _places(ages)
        low = at.astype(np.int64)
        below: Floats = self._worth[kinds, low]
        return below + (at - low) * (self._worth[kinds, low + 1] - below)


def _place(age: float) -> float:
    """Class of an age, with a fraction."""
    at = age / FIRST_S
    return min(_LAST, 1 + PER_OCTAVE * math.log2(at)) if at > 1 else max(0.0, at)


def _places(ages: Floats) -> Floats:
    """Classes of ages, with fractions."""
    at = ages / FIRST_S
    found: Floats = np.clip(np.where(at > 1, 1 + PER_OCTAVE * np.log2(np.maximum(at, 1)), at), 0, _LAST)
    return found


def _chained(events: list[float], at_risk: list[float]) -> list[float]:
    """Hazards of all kinds together. A class that few stays have reached is taken to be like the one before."""
    found = [float(_GUESS[0])]
    for ended, reached, guess in zip(events, at_risk, _GUESS.tolist(), strict=True):
        before = FADES * found[-1] if len(found) > 2 else guess
        found.append((ended + PRIOR * before) / (reached + PRIOR))
    return found[1:]


def worth(hazards: Floats) -> Floats:
    """At each edge of the classes: the most hits per page and second that a leaf can earn from this age on. That is the
    greatest ratio, over all later edges, of the chance of a use until then and the mean time until the use or then."""
    left = np.append(1.0, (1 - hazards).cumprod())
    held = np.append(0.0, ((left[1:] + left[:-1]) / 2 * _WIDTHS).cumsum())
    times = held - held[:-1, None]
    times[_LATER] = np.inf
    best = ((left[:-1, None] - left) / times).max(1)
    return np.append(best, best[-1])

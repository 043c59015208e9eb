"""Selections: which tokens an indexer selects in each step, recorded or synthetic, and how often a hot buffer has them.

A file of selections is an npz with the arrays of `Selections`, described in docs/reference/selections.md.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidInput
from quire.sparse.hot_slots import FoundSlots, HotSlots
from quire.spec.ids import Bools, Ids

_FORMAT = 1


@dataclass(frozen=True, slots=True, eq=False)
class Selections:
    """What newest tokens select, one row each, in the order of the steps. A request selects once per step and index.

    `positions` is `[rows, top_k]`, -1 behind the last one; the other arrays are `[rows]`. All are int32.
    """

    step: Ids
    index: Ids
    request: Ids
    newest: Ids
    positions: Ids

    @property
    def num_requests(self) -> int:
        """Requests are numbered from zero."""
        return int(self.request.max(initial=-1)) + 1

    @property
    def num_indexes(self) -> int:
        """Number of indexers; their ids start at 0."""
        return int(self.index.max(initial=-1)) + 1

    def calls(self) -> Iterator[Selections]:
        """The rows of each step and index, which are one call of `HotSlots.swap_in`."""
        edges = np.flatnonzero((np.diff(self.step) != 0) | (np.diff(self.index) != 0)) + 1
        for part in np.split(np.arange(len(self.step)), edges):
            if len(part):
                yield self.rows(part)

    def rows(self, which: npt.NDArray[np.intp] | Bools) -> Selections:
        """Some of the rows."""
        return Selections(*(getattr(self, field.name)[which] for field in fields(self)))

    def save(self, path: Path) -> None:
        """Write a compressed npz."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        with path.open("wb") as file:
            np.savez_compressed(file, format=np.int32(_FORMAT), **arrays)

    @classmethod
    def load(cls, path: Path) -> Selections:
        """Read what `save` has written. Raises InvalidInput for another file."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                if int(arrays["format"]) != _FORMAT:
                    raise InvalidInput(f"{path} has selections of another version.", fix="record them again.")
                return cls(*(arrays[field.name] for field in fields(cls)))
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InvalidInput(
                f"{path} has no selections: {error}.",
                fix="write it with `python -m bench.sparse.record_selections` in a checkout of Quire.",
            ) from error


class SelectionRecorder(HotSlots):
    """Hot slots that record what is selected. They take the place of those of an engine before its first request.

    Rows whose context is no longer than the selection select all of it. If more than `limit` tokens are selected,
    nothing is recorded, and `is_complete` is False.
    """

    def __init__(self, replaced: HotSlots, *, limit: int = 2**62) -> None:
        super().__init__(*replaced.shape, replaced.buffer_size)
        self.is_complete = True
        self._room = limit
        self._request = np.zeros(self.shape[1], dtype=np.int32)
        self._begun, self._steps = 0, 0
        self._calls: list[Selections] = []

    def swap_in(self, index: int, rows: Ids, positions: Ids, newest: npt.NDArray[np.int64]) -> FoundSlots:
        """As `HotSlots.swap_in`. The layers of a step come in order."""
        self._steps += index == 0
        step, of_index = (np.full(len(rows), value, dtype=np.int32) for value in (self._steps - 1, index))
        request = self._request[rows]
        self._room -= positions.size
        if self._room >= 0:
            self._calls.append(Selections(step, of_index, request, newest.astype(np.int32), positions.copy()))
        else:
            self.is_complete = False
            self._calls.clear()
        return super().swap_in(index, rows, positions, newest)

    def clear(self, rows: Ids) -> None:
        """As `HotSlots.clear`. Each row has another request from now on."""
        self._request[rows] = np.arange(self._begun, self._begun + len(rows))
        self._begun += len(rows)
        super().clear(rows)

    def selections(self) -> Selections:
        """All that were recorded so far."""
        top_k = max((call.positions.shape[1] for call in self._calls), default=0)
        padded = [
            np.pad(call.positions, ((0, 0), (0, top_k - call.positions.shape[1])), constant_values=-1)
            for call in self._calls
        ]
        nothing = np.zeros(0, dtype=np.int32)
        step, index, request, newest = (
            np.concatenate([nothing, *(getattr(call, field.name) for call in self._calls)])
            for field in fields(Selections)[:-1]
        )
        return Selections(step, index, request, newest, np.concatenate([nothing.reshape(0, top_k), *padded]))


class DriftingSelections:
    """Synthetic selections of rows of at most `context` tokens: each request selects the tokens of the highest scores.

    A token's score is a normal number that changes with every step, and the scores of two steps have the correlation
    `drift`. Raises InvalidInput for one that is none.
    """

    def __init__(self, drift: float, *, num_rows: int, context: int, top_k: int, seed: int) -> None:
        if not 0 <= drift <= 1:
            raise InvalidInput(f"a drift of {drift:g}.", fix="give a correlation: 0 to 1.")
        self._drift, self._top_k = drift, top_k
        self._rng = np.random.default_rng(seed)
        self._scores = np.zeros((num_rows, context), dtype=np.float32)

    def begin(self, rows: Ids) -> None:
        """Each row has another request from now on."""
        self._scores[rows] = self._rng.standard_normal((len(rows), self._scores.shape[1]), dtype=np.float32)

    def select(self, rows: Ids, lengths: npt.NDArray[np.int64]) -> tuple[Ids, npt.NDArray[np.int64]]:
        """The positions `[n, k]` that the last of `lengths` tokens of each row selects, -1 at the end, and its own."""
        positions = np.full((len(rows), min(self._top_k, int(lengths.max()))), -1, dtype=np.int32)
        for found, row, length in zip(positions, rows.tolist(), lengths.tolist(), strict=True):
            if length <= self._top_k:
                found[:length] = np.arange(length)
                continue
            scores = self._scores[row, :length]
            found[:] = np.argpartition(scores, length - self._top_k)[length - self._top_k :]
            noise = self._rng.standard_normal(length, dtype=np.float32)
            scores[:] = self._drift * scores + np.sqrt(1 - self._drift**2) * noise
        return positions, lengths - 1


class RecordedSelections:
    """Recorded selections for rows of any length. Each request takes those of the next recorded request and index, and
    begins them again after the last one."""

    def __init__(self, recorded: Selections, *, num_rows: int) -> None:
        # Recorded positions begin again, so no position is that of a newest token for all time.
        old = np.where(recorded.positions == recorded.newest[:, None], np.int32(-1), recorded.positions)
        places = recorded.request.astype(np.int64) * recorded.num_indexes + recorded.index
        self._streams = [old[places == place] for place in np.unique(places)]
        self._newest = int(recorded.newest.max()) + 1
        self._begun = 0
        self._stream = np.zeros(num_rows, dtype=np.int64)
        self._step = np.zeros(num_rows, dtype=np.int64)

    def begin(self, rows: Ids) -> None:
        """Each row has another request from now on."""
        self._stream[rows] = (self._begun + np.arange(len(rows))) % len(self._streams)
        self._step[rows] = 0
        self._begun += len(rows)

    def select(self, rows: Ids, lengths: npt.NDArray[np.int64]) -> tuple[Ids, npt.NDArray[np.int64]]:
        """As `DriftingSelections.select`; the position of each newest token is one that nothing selects."""
        streams = [self._streams[at] for at in self._stream[rows].tolist()]
        steps = self._step[rows].tolist()
        self._step[rows] += 1
        positions = np.stack([each[step % len(each)] for each, step in zip(streams, steps, strict=True)])
        return positions, np.full(len(rows), self._newest, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class HotHits:
    """Selected tokens that hot buffers had, and that were copied; those of the newest tokens are neither."""

    hit_tokens: int
    swapped_tokens: int

    @property
    def rate(self) -> float:
        """The share of hits."""
        return self.hit_tokens / max(1, self.hit_tokens + self.swapped_tokens)


def optimal_hits(selections: Selections, buffer_size: int) -> HotHits:
    """Belady's optimum: the hits of buffers that keep the tokens that are selected again soonest.

    As in a hot buffer, all tokens of a step are in the buffer together. Time: steps times context.
    """
    hits = swapped = 0
    for index in range(selections.num_indexes):
        for request in range(selections.num_requests):
            own = selections.rows((selections.index == index) & (selections.request == request))
            found = _optimal_of_one(own, buffer_size)
            hits, swapped = hits + found.hit_tokens, swapped + found.swapped_tokens
    return HotHits(hits, swapped)


def _optimal_of_one(selections: Selections, buffer_size: int) -> HotHits:
    """Hits of one request and index."""
    steps, width = len(selections.step), int(selections.newest.max(initial=-1)) + 1
    old = (selections.positions >= 0) & (selections.positions != selections.newest[:, None])
    wanted = [row[kept] for row, kept in zip(selections.positions, old, strict=True)]
    soonest, following = np.full(width, steps), []
    for step in reversed(range(steps)):
        following.append(soonest[wanted[step]])
        soonest[wanted[step]] = step
    held, next_use = np.zeros(width, dtype=np.bool_), np.full(width, steps)
    hits = 0
    for step, again in enumerate(reversed(following)):
        hits += int(np.count_nonzero(held[wanted[step]]))
        held[wanted[step]], next_use[wanted[step]] = True, again
        evicts = int(np.count_nonzero(held)) - buffer_size
        if evicts > 0:
            at_risk = held.copy()
            at_risk[wanted[step]] = False
            candidates = np.flatnonzero(at_risk)
            held[candidates[np.argpartition(-next_use[candidates], evicts - 1)[:evicts]]] = False
    return HotHits(hits, sum(map(len, wanted)) - hits)

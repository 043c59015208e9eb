"""Segments of a chunk: the many new rows of one sequence, planned anew in every step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels import segments
from quire.kernels.segments import Segment, Sequences, Source, flatten_ranges, to_device


class ChunkSegments:
    """The segments of one step's chunks, in the order to run them."""

    def __init__(self, sequences: Sequences, window: int, device: torch.device) -> None:
        self._sequences = sequences
        self._window = window
        self._device = device
        self._masks: dict[tuple[int, int, int], Tensor] = {}
        self.found: list[Segment] = []

    def add(self, sequence: int, done: int) -> None:
        """One sequence whose positions up to `done` are read elsewhere: what precedes its rows, then their square."""
        start, stop = (int(self._sequences.starts[at]) for at in (sequence, sequence + 1))
        context = int(self._sequences.contexts[sequence])
        if self._window and context > self._window:
            self._add_windowed(sequence, start, stop)
            return
        fresh = done == int(self._sequences.lows[sequence])
        for source in self._sequences.sources(sequence, done, context - (stop - start), self._device):
            self._add(start, stop, source, 0, len(source), first=fresh)
            fresh = False
        self._add(start, stop, Source(start, stop, new=True), 0, stop - start, causal=True, first=fresh, last=True)

    def _add_windowed(self, sequence: int, start: int, stop: int) -> None:
        """A chunk some of whose rows no longer see the first token. Per block of rows, the keys are
        `[low, edge)` leaving the window row by row, `[edge, begin)` seen by all, and the block's own square.
        """
        window, past = self._window, int(self._sequences.contexts[sequence]) - (stop - start)
        base = max(0, past - window + 1)
        source = self._source(sequence, base, past, start, stop)
        size = max(1, min(segments.BLOCK_ROWS, window - 1))
        for offset in range(0, stop - start, size):
            count = min(size, stop - start - offset)
            at, end = start + offset, start + offset + count
            begin = past + offset
            low = max(0, begin - window + 1)
            edge = min(max(begin + count - window + 1, low), begin)  # the last row sees one key before it, if any
            fresh = True
            if edge - low > 1:
                mask = self._edge_mask(count, edge - low, begin - window + 1 - low)
                self._add(at, end, source, low - base, edge - base, mask=mask, first=True)
                fresh = False
            else:
                edge = low
            if edge < begin:
                self._add(at, end, source, edge - base, begin - base, first=fresh)
                fresh = False
            self._add(at, end, source, begin - base, begin - base + count, causal=True, first=fresh, last=True)

    def _source(self, sequence: int, base: int, past: int, start: int, stop: int) -> Source:
        """The tokens from position `base` to the end of the context, in order."""
        if base == past:
            return Source(start, stop, new=True)
        begins, ends = self._sequences.slot_runs(sequence, base, past + stop - start)
        if len(begins) == 1:
            return Source(int(begins[0]), int(ends[0]))
        return Source(index=to_device(flatten_ranges(begins, ends), self._device))

    def _edge_mask(self, rows: int, keys: int, shift: int) -> Tensor:
        """Row i sees key j of the edge from `j >= i + shift` on (`shift` <= 0 where the context begins inside it)."""
        found = self._masks.get((rows, keys, shift))
        if found is None:
            hidden = np.arange(keys)[None, :] < np.arange(rows)[:, None] + shift
            found = to_device(np.where(hidden, np.float32("-inf"), np.float32(0)), self._device)
            self._masks[rows, keys, shift] = found
        return found

    def _add(
        self,
        begin: int,
        end: int,
        source: Source,
        start: int,
        stop: int,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        first: bool = False,
        last: bool = False,
    ) -> None:
        rows = slice(begin, end)
        self.found.append(Segment(rows, end - begin, source, start, stop, causal, mask, first=first, last=last))

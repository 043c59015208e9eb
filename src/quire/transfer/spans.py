"""Spans of a registered memory: their checks, the target that names them to a peer, and runs of adjacent ones."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from quire.errors import ConnectorError, InvalidInput

Spans = npt.NDArray[np.int64]
"""[n, 2]: offset and length in bytes, in a registered memory."""
Runs = npt.NDArray[np.int64]
"""[n, 3]: offset here, offset there, length."""
Memory = npt.NDArray[np.uint8]

MOST_RUN_BYTES: Final = 4 << 20
_TARGET: Final = struct.Struct("<4sQ")
_MAGIC: Final = b"QTG1"


def check_spans(spans: Spans, num_bytes: int) -> Spans:
    """The spans, if all are within a memory of so many bytes and none is empty. Raises InvalidInput."""
    if spans.ndim != 2 or spans.shape[1] != 2 or not len(spans):
        raise InvalidInput(f"spans have the shape [n, 2], not {list(spans.shape)}.")
    offsets, lengths = spans.T
    if offsets.min() < 0 or lengths.min() < 1 or lengths.max() > num_bytes or (offsets > num_bytes - lengths).any():
        raise InvalidInput(f"a span is empty or outside of a memory of {num_bytes} bytes.")
    return np.ascontiguousarray(spans, dtype=np.int64)


def pack_target(tag: int, spans: Spans) -> bytes:
    """The target of spans that were opened."""
    return _TARGET.pack(_MAGIC, tag) + spans.astype("<i8").tobytes()


def runs_to(tag: int, spans: Spans, target: bytes, num_bytes: int) -> Runs:
    """Runs from local spans to those of a target in a memory of so many bytes. Raises ConnectorError for the target of
    another tag, with other lengths or outside the memory."""
    if len(target) != _TARGET.size + spans.nbytes or target[: _TARGET.size] != _TARGET.pack(_MAGIC, tag):
        raise ConnectorError(f"the target is not one of tag {tag} with {len(spans)} spans.")
    remote = np.frombuffer(target, dtype="<i8", offset=_TARGET.size).reshape(-1, 2)
    if not np.array_equal(remote[:, 1], spans[:, 1]):
        raise ConnectorError("spans here and in the target differ in their lengths.")
    try:
        return join(spans, check_spans(remote, num_bytes))
    except InvalidInput as error:
        raise ConnectorError(f"the target is outside of the peer's memory: {error.message}") from error


def join(here: Spans, there: Spans) -> Runs:
    """Runs of spans that are adjacent on both sides, cut into pieces of up to 4 MiB."""
    lengths = here[:, 1]
    ends = [side[:-1, 0] + lengths[:-1] == side[1:, 0] for side in (here, there)]
    first = np.flatnonzero(np.concatenate(([True], ~(ends[0] & ends[1]))))
    sizes = np.add.reduceat(lengths, first)
    pieces = -(-sizes // MOST_RUN_BYTES)
    run = np.repeat(np.arange(len(first)), pieces)
    done = (np.arange(len(run)) - np.repeat(pieces.cumsum() - pieces, pieces)) * MOST_RUN_BYTES
    starts = [side[first, 0][run] + done for side in (here, there)]
    return np.stack([*starts, np.minimum(sizes[run] - done, MOST_RUN_BYTES)], axis=1)


def batches(runs: Runs, most_runs: int, most_bytes: int) -> Iterator[Runs]:
    """Consecutive runs, so many and of so many bytes at most; a longer run alone."""
    ends = runs[:, 2].cumsum()
    start = 0
    while start < len(runs):
        done = ends[start - 1] if start else 0
        stop = max(start + 1, min(start + most_runs, int(ends.searchsorted(done + most_bytes, side="right"))))
        yield runs[start:stop]
        start = stop

"""The port of connectors, which write spans of this process' memory to spans that a peer has opened.

A connector has one registered memory, the mapping of the host pool. The receiver opens spans under a tag, and gives
the target of that tag to one peer, by other means. The writer writes to the target. A connector neither retries nor
has deadlines. It never reads outside the spans of a write, and never writes outside the spans of an open tag."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import Enum
from typing import ClassVar, Final, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire.errors import ConnectorError, InvalidInput
from quire.spec.ids import Ids

Spans = npt.NDArray[np.int64]
"""[n, 2]: offset and length in bytes, in a registered memory."""
Runs = npt.NDArray[np.int64]
"""[n, 3]: offset here, offset there, length."""
Memory = npt.NDArray[np.uint8]

MOST_RUN_BYTES: Final = 4 << 20
_TARGET: Final = struct.Struct("<4sQ")
_MAGIC: Final = b"QTG1"


class Progress(Enum):
    """State of a write. LANDED: all bytes are in the target's memory. FAILED: this side reads nothing any more, and
    after the receiver has shut the tag, no byte lands."""

    PENDING = "pending"
    LANDED = "landed"
    FAILED = "failed"


class Write:
    """A write in progress. `error` says why it failed."""

    def __init__(self) -> None:
        self.error = ""
        self._progress = Progress.PENDING

    @staticmethod
    def failed(error: str) -> Write:
        """A write that is FAILED with this error."""
        write = Write()
        write.end(error)
        return write

    def poll(self) -> Progress:
        """Its state, at once and at no cost. A write to a stopped peer stays PENDING: deadlines are the caller's."""
        return self._progress

    def end(self, error: str = "") -> None:
        """For connectors: the write has landed or, with an error, failed. The first call counts."""
        if self._progress is Progress.PENDING:
            self.error = error
            self._progress = Progress.FAILED if error else Progress.LANDED


class Records(Protocol):
    """Records of host frames in the registered memory, as those of a `HostPool`."""

    def spans(self, group: int, frames: Ids) -> Spans:
        """Where the records of these frames lie."""


class Connector(Protocol):
    """Seven verbs, called from any thread. The constructor gets the memory, which stays mapped until after `close`."""

    kind: ClassVar[str]
    """Its name in the registry. Peers must have the same."""

    @property
    def problem(self) -> str:
        """Why it moves nothing any more; "" while it may."""
        return ""

    def address(self) -> bytes:
        """What a peer needs to connect."""

    def connect(self, peer: str, address: bytes) -> None:
        """Accept `peer` as a target of writes. Its name has its epoch: a restarted peer has another name. Raises
        ConnectorError for an address of another kind of connector or of another peer."""

    def open(self, tag: int, spans: Spans) -> bytes:
        """The target of a new tag: peers may write these spans until it is shut. Tags are never used twice. Raises
        InvalidInput for spans outside the memory."""

    def write(self, peer: str, tag: int, spans: Spans, target: bytes) -> Write:
        """Begin to copy local spans to those of the target, one to one and with equal lengths. The bytes must not
        change before the write has ended. What is wrong with the peer or the target is the error of the write. Raises
        InvalidInput for spans outside the memory."""

    def shut(self, tag: int) -> bool:
        """End a tag. True: no byte lands under it any more. False: only the word of the writer, or its death, proves
        that."""

    def disconnect(self, peer: str) -> None:
        """End all writes to a peer. Those that a shut tag cannot stop stay PENDING until they have ended."""

    def close(self) -> None:
        """Disconnect all peers and free threads and sockets; can be repeated."""


# -- for connectors: addresses, checks of spans, the target that names them to a peer, and runs of adjacent ones


class Place(msgspec.Struct, frozen=True, array_like=True):
    """An address: which connector it is of, and by which name its peers call it."""

    kind: str
    name: str


AnyPlace = TypeVar("AnyPlace", bound=Place)


def read_place(address: bytes, peer: str, kind: str, place: type[AnyPlace]) -> AnyPlace:
    """The address of a peer. Raises ConnectorError for one of another kind of connector or of another peer."""
    try:
        found = msgspec.msgpack.decode(address, type=place)
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: text that is no UTF-8
        raise ConnectorError(f"the address of '{peer}' is not one of a connector '{kind}': {error}.") from error
    if (found.kind, found.name) != (kind, peer):
        raise ConnectorError(f"the address of '{peer}' is that of '{found.name}', connector '{found.kind}'.")
    return found


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

"""The port of connectors, which write spans of this process' memory to spans that a peer has opened.

A connector has one registered memory, the mapping of the host pool. The receiver opens spans under a tag, and gives
the target of that tag to one peer, by other means. The writer writes to the target. A connector neither retries nor
has deadlines. It never reads outside the spans of a write, and never writes outside the spans of an open tag."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Protocol

from quire.spec.ids import Ids
from quire.transfer.spans import Spans


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

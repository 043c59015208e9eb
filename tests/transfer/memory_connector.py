"""MemoryConnector: peers in one process, with faults to inject. Bytes are copied when a write is polled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from quire.errors import ConnectorError
from quire.transfer.connector import Connector, Memory, Progress, Runs, Spans, Write, check_spans, pack_target, runs_to

_connectors: WeakValueDictionary[str, MemoryConnector] = WeakValueDictionary()
"""Those of this process, by name."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with a write."""

    delay_s: float = 0.0  # bytes land so much later
    drop: bool = False  # no byte lands, and it stays PENDING
    short: bool = False  # it lands without the last run
    swap: bool = False  # it lands with runs of equal length in each other's place
    late: bool = False  # it lands even if its tag is shut, as over a transport that the receiver cannot stop


class MemoryConnector(Connector):
    """The port within a process. `faults` gives the fault of a write to a peer under a tag."""

    kind = "memory"

    def __init__(
        self,
        memory: Memory,
        *,
        name: str,
        secret: bytes = b"",
        host: str = "",
        faults: Callable[[str, int], Fault | None] | None = None,
    ) -> None:
        self._memory = memory
        self._name = name
        self._faults = faults
        self._lock = threading.Lock()
        self._tags: dict[int, bytes] = {}
        self._peers: dict[str, MemoryConnector] = {}
        self._inward: set[_Copy] = set()  # writes of peers that have not ended
        _connectors[name] = self

    def address(self) -> bytes:
        return self._name.encode()

    def connect(self, peer: str, address: bytes) -> None:
        found = _connectors.get(peer)
        if found is None or address != peer.encode():
            raise ConnectorError(f"there is no connector '{peer}' in this process.")
        self._peers[peer] = found

    def open(self, tag: int, spans: Spans) -> bytes:
        target = pack_target(tag, check_spans(spans, len(self._memory)))
        with self._lock:
            assert tag not in self._tags
            self._tags[tag] = target
        return target

    def write(self, peer: str, tag: int, spans: Spans, target: bytes) -> Write:
        spans = check_spans(spans, len(self._memory))
        fault = (self._faults(peer, tag) if self._faults is not None else None) or Fault()
        receiver = self._peers.get(peer)
        if receiver is None:
            return Write.failed(f"'{peer}' is not connected.")
        try:
            runs = runs_to(tag, spans, target, len(receiver._memory))
        except ConnectorError as error:
            return Write.failed(error.message)
        copy = _Copy(self, receiver, tag, target, runs, fault)
        with receiver._lock:
            receiver._inward.add(copy)
        return copy

    def shut(self, tag: int) -> bool:
        with self._lock:
            self._tags.pop(tag, None)
            return not any(copy.tag == tag and copy.fault.late for copy in self._inward)

    def disconnect(self, peer: str) -> None:
        receiver = self._peers.pop(peer, None)
        if receiver is not None:
            with receiver._lock:
                for copy in [each for each in receiver._inward if each.writer is self and not each.fault.late]:
                    copy.end("the peer was disconnected.")

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        with self._lock:
            self._tags.clear()
        _connectors.pop(self._name, None)


class _Copy(Write):
    """A write, which lands when it is polled after its delay."""

    def __init__(
        self, writer: MemoryConnector, receiver: MemoryConnector, tag: int, target: bytes, runs: Runs, fault: Fault
    ) -> None:
        super().__init__()
        self.writer, self.receiver = writer, receiver
        self.tag, self.fault = tag, fault
        self._target, self._runs = target, runs
        self._due = float("inf") if fault.drop else time.monotonic() + fault.delay_s

    def end(self, error: str = "") -> None:
        super().end(error)
        self.receiver._inward.discard(self)

    def poll(self) -> Progress:
        if self._progress is Progress.PENDING and time.monotonic() >= self._due:
            with self.receiver._lock:
                if self._progress is Progress.PENDING:
                    self._land()
        return self._progress

    def _land(self) -> None:
        if not self.fault.late and self.receiver._tags.get(self.tag) != self._target:
            self.end(f"tag {self.tag} is not open.")
            return
        runs = self._runs[:-1] if self.fault.short else self._runs
        if self.fault.swap:
            runs = runs.copy()
            for length in set(runs[:, 2].tolist()):
                same = runs[:, 2] == length
                runs[same, 1] = runs[same, 1][::-1]
        for here, there, length in runs.tolist():
            self.receiver._memory[there : there + length] = self.writer._memory[here : here + length]
        self.end()

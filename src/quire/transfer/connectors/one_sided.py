"""OneSided: what connectors share whose library writes to a peer's memory without its part. One thread calls it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta

from quire.errors import ConnectorError
from quire.transfer.connector import (
    Connector,
    Memory,
    Place,
    Runs,
    Spans,
    Write,
    batches,
    check_spans,
    pack_target,
    read_place,
    runs_to,
)

logger = logging.getLogger(__name__)

_SHORTEST_S: Final = 0.0002
_LONGEST_S: Final = 0.005
_IDLE_S: Final = 0.05
_CLOSE_S: Final = 1.0  # for batches in flight


_Result = TypeVar("_Result")


class MemoryPlace(Place, frozen=True):
    """Where the memory of a peer is, and `how` its library is reached."""

    base: Annotated[int, Meta(ge=0, lt=1 << 62)]
    num_bytes: Annotated[int, Meta(ge=0, lt=1 << 62)]
    how: bytes


class _PeerLink:
    """A peer. The library has one batch of its first write at a time, as `handle`."""

    def __init__(self, place: MemoryPlace, remote: Any) -> None:
        self.place = place
        self.remote = remote
        self.writes: deque[tuple[Write, Iterator[Runs]]] = deque()
        self.handle: Any = None
        self.began = 0.0
        self.is_open = True


class OneSided(Connector):
    """The port over such a library. A subclass sets `kind` and the bounds of a batch, and implements the methods from
    `_start` on, which only the thread calls.

    The receiver takes no part. So a forged target or a shut tag stops nothing: `write` trusts the target, and `shut` is
    always False. A batch that has begun cannot be stopped: its write stays PENDING until the library says that it has
    ended, also after `disconnect`, and for ever after `close`."""

    most_runs: ClassVar[int]
    most_bytes: ClassVar[int]
    listens_s: ClassVar[float | None] = None
    """How often `_listen` is called while tags are open, if it must be. A shut tag may still be written: then too, less
    often."""

    def __init__(self, memory: Memory, *, name: str, secret: bytes = b"", host: str = "127.0.0.1") -> None:
        self._memory = memory
        self._name = name
        self._host = host
        self._lock = threading.Lock()
        self._tags: set[int] = set()
        self._links: dict[str, _PeerLink] = {}
        self._ending: list[_PeerLink] = []  # disconnected, with a batch in flight
        self._calls: deque[Callable[[], object]] = deque()  # for the thread
        self._rung = threading.Event()
        self._closed = False
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name=f"quire-{self.kind}", daemon=True)
        self._thread.start()
        try:
            how = self._ask(self._start)
        except BaseException:
            self.close()
            raise
        base = int(memory.ctypes.data)
        self._address = msgspec.msgpack.encode(MemoryPlace(self.kind, name, base, len(memory), how))

    # -- the port

    @property
    def problem(self) -> str:
        return self._problem

    def address(self) -> bytes:
        return self._address

    def connect(self, peer: str, address: bytes) -> None:
        place = read_place(address, peer, self.kind, MemoryPlace)

        def attach() -> None:
            self._detach_peer(peer)
            self._links[peer] = _PeerLink(place, self._attach(place))

        self._ask(attach)

    def open(self, tag: int, spans: Spans) -> bytes:
        target = pack_target(tag, check_spans(spans, len(self._memory)))
        self._tags.add(tag)
        self._rung.set()
        return target

    def write(self, peer: str, tag: int, spans: Spans, target: bytes) -> Write:
        """As in the port. Writes to one peer begin in order."""
        spans = check_spans(spans, len(self._memory))
        link = self._links.get(peer)
        if link is None:
            return Write.failed(f"'{peer}' is not connected.")
        try:
            runs = runs_to(tag, spans, target, link.place.num_bytes)
        except ConnectorError as error:
            return Write.failed(error.message)
        runs += [self._memory.ctypes.data, link.place.base, 0]
        write = Write()

        def begin() -> None:
            if link.is_open:
                link.writes.append((write, batches(runs, self.most_runs, self.most_bytes)))
            else:
                write.end(f"'{peer}' was disconnected.")

        if not self._post(begin):
            write.end("the connector is closed.")
        return write

    def shut(self, tag: int) -> bool:
        """As in the port; always False."""
        self._tags.discard(tag)
        return False

    def disconnect(self, peer: str) -> None:
        self._post(lambda: self._detach_peer(peer))

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._rung.set()
        self._thread.join()

    # -- the thread

    def _post(self, call: Callable[[], object]) -> bool:
        """Have the thread make a call; False: it has ended."""
        with self._lock:
            if not self._closed:
                self._calls.append(call)
                self._rung.set()
            return not self._closed

    def _ask(self, call: Callable[[], _Result]) -> _Result:
        """The result of a call that the thread makes."""
        future: Future[_Result] = Future()

        def answer() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        if not self._post(answer):
            raise ConnectorError("the connector is closed.")
        return future.result()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            logger.exception("The thread of connector '%s' has failed.", self.kind)
            self._problem = f"{type(error).__name__}: {error}"
            with self._lock:
                self._closed = True
            for peer in list(self._links):
                self._detach_peer(peer)
            while self._calls:
                self._calls.popleft()()

    def _serve(self) -> None:
        while not self._closed:
            self._rung.clear()
            self._work()
            waits = [
                max(_SHORTEST_S, min(_LONGEST_S, (time.monotonic() - link.began) / 16))
                for link in (*self._links.values(), *self._ending)
                if link.handle is not None
            ]
            if self.listens_s is not None:
                self._listen()
                waits.append(self.listens_s if self._tags else _IDLE_S)
            self._rung.wait(min(waits, default=None))
        self._work()
        for peer in list(self._links):
            self._detach_peer(peer)
        gives_up = time.monotonic() + _CLOSE_S
        while self._ending and time.monotonic() < gives_up:
            time.sleep(_SHORTEST_S)
            self._work()
        self._stop()

    def _work(self) -> None:
        """Do all that does not wait for the library."""
        while self._calls:
            self._calls.popleft()()
        while sum(self._step(link) for link in (*self._links.values(), *self._ending)):
            pass
        for link in [each for each in self._ending if each.handle is None]:
            self._ending.remove(link)
            others = (*self._links.values(), *self._ending)
            if link.remote not in [each.remote for each in others]:  # a peer that has connected again is the same one
                self._detach(link.remote)

    def _step(self, link: _PeerLink) -> bool:
        """Begin or end a batch of a peer; False if there is nothing to do now."""
        if not link.writes:
            return False
        write, rest = link.writes[0]
        error = ""
        try:
            if link.handle is None:
                batch = next(rest, None)
                if batch is not None:
                    link.began = time.monotonic()
                    link.handle = self._begin(link.remote, batch)
                    return True
            elif self._has_ended(link.handle):
                link.handle = None
                if link.is_open:
                    return True
                error = "it was disconnected"
            else:
                return False
        except ConnectorError as failure:
            link.handle = None
            error = failure.message
        link.writes.popleft()
        write.end(error and f"a write to '{link.place.name}' failed: {error}.")
        return True

    def _detach_peer(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        link.is_open = False
        while len(link.writes) > (link.handle is not None):
            link.writes.pop()[0].end(f"'{peer}' was disconnected.")
        self._ending.append(link)

    # -- the library

    def _start(self) -> bytes:
        """Start it and register the memory; returns the `how` of the address. Raises ConnectorError."""
        raise NotImplementedError

    def _attach(self, place: MemoryPlace) -> Any:
        """A peer, as `_begin` takes it. Raises ConnectorError."""
        raise NotImplementedError

    def _begin(self, remote: Any, runs: Runs) -> Any:
        """Begin to copy a batch of runs of addresses; returns its handle. Raises ConnectorError."""
        raise NotImplementedError

    def _has_ended(self, handle: Any) -> bool:
        """Whether all bytes of a batch have landed. Raises ConnectorError if it failed and nothing is in flight. The
        handle is freed unless the answer is False."""
        raise NotImplementedError

    def _listen(self) -> None:
        """Progress of writes from peers."""

    def _detach(self, remote: Any) -> None:
        """Free a peer without batches."""

    def _stop(self) -> None:
        """Free everything; also after a start that failed."""
        raise NotImplementedError

"""TcpConnector: writes over TCP sockets, which work anywhere. One thread moves all bytes.

    writer                                              receiver
      both prove the secret, and name the receiver (`prove`)
      tag, number of bytes, the bytes     ------>         straight into the spans of the tag
                                          <------         1: all have landed; 0: refused

The receiver moves bytes into a tag's spans under the lock that `shut` takes, so `shut` is always True. Bytes of a tag
that is unknown or shut are read and dropped. A connection that has proved the secret is trusted. Nothing is encrypted:
across machines use a private network.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections import Counter, deque
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np

from quire.errors import ConnectorError, InvalidInput
from quire.transfer.address import format_address
from quire.transfer.connector import (
    Connector,
    Memory,
    Place,
    Runs,
    Spans,
    Write,
    batches,
    check_spans,
    join,
    pack_target,
    read_place,
    runs_to,
)
from quire.transfer.handshake import PAGES, prove
from quire.transfer.network import (
    READ,
    WRITE,
    Connection,
    Foreign,
    NetworkLoop,
    Steps,
    dial,
    receive,
    receive_exactly,
    send,
)

_HEADER: Final = struct.Struct("<QQ")
_STEP_BYTES: Final = 4 << 20  # moved at once: bounds how long `shut` waits
_STEP_RUNS: Final = 512


class _TcpPlace(Place, frozen=True):
    host: str
    port: int


class _Cursor:
    """A place in runs of a memory."""

    def __init__(self, memory: memoryview, runs: Runs) -> None:
        self._memory = memory
        self._batches = batches(runs, _STEP_RUNS, _STEP_BYTES)
        self._views: list[memoryview] = []

    def views(self) -> list[memoryview]:
        """The next bytes; empty at the end."""
        if not self._views:
            for start, _, length in next(self._batches, np.empty((0, 3), np.int64)).tolist():
                self._views.append(self._memory[start : start + length])
        return self._views

    def advance(self, count: int) -> None:
        """Move on by so many bytes of `views`."""
        for index, view in enumerate(self._views):
            if count < len(view):
                self._views = [view[count:], *self._views[index + 1 :]]
                return
            count -= len(view)
        self._views = []


class _PageConnection(Connection):
    """A connection that carries pages: to a peer, with `writes` in order, or from one, without."""

    def __init__(self, made: socket.socket, peer: str = "") -> None:
        super().__init__(made, dialed=bool(peer))
        self.peer = peer
        self.writes: deque[tuple[Write, int, Runs]] = deque()
        if peer:
            self.gives_up = math.inf  # deadlines of writes are the caller's


class TcpConnector(Connector):
    """The port over TCP. `host` is the address of this machine that is listened on and given to peers."""

    kind = "tcp"

    def __init__(self, memory: Memory, *, name: str, secret: bytes, host: str = "127.0.0.1") -> None:
        if not secret:
            raise InvalidInput("connector 'tcp' needs a shared secret.")
        self._memory = memory.data
        self._name = name
        self._secret = secret
        self._lock = threading.Lock()
        self._tags: dict[int, Runs] = {}
        self._places: dict[str, tuple[socket.AddressFamily, Any]] = {}
        self._links: dict[str, _PageConnection] = {}  # to peers; of the thread
        self._scratch = memoryview(bytearray(1 << 16))
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise ConnectorError(f"connector 'tcp' cannot listen on {host}: {error}.") from error
        self._address = msgspec.msgpack.encode(_TcpPlace("tcp", name, *listener.getsockname()[:2]))
        self._loop = NetworkLoop[_PageConnection]("quire-tcp", listener, accept=self._accept, lose=self._lose)
        self._loop.thread.start()

    @property
    def refused(self) -> Counter[str]:
        """Connections that were foreign, malformed, too many, or slow to prove the secret, by reason."""
        return self._loop.refused

    @property
    def problem(self) -> str:
        return self._loop.problem

    # -- the port

    def address(self) -> bytes:
        return self._address

    def connect(self, peer: str, address: bytes) -> None:
        """As in the port. The first write connects the socket."""
        place = read_place(address, peer, "tcp", _TcpPlace)
        try:
            found = socket.getaddrinfo(
                place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )  # a name might take minutes
        except (OSError, OverflowError, ValueError) as error:  # ValueError: a host that is no name
            raise ConnectorError(f"the address of '{peer}' is not one of a connector 'tcp': {error}.") from error
        family, _, _, _, where = found[0]
        self._places[peer] = family, where

    def open(self, tag: int, spans: Spans) -> bytes:
        spans = check_spans(spans, len(self._memory))
        with self._lock:
            assert tag not in self._tags
            self._tags[tag] = join(spans, spans)
        return pack_target(tag, spans)

    def write(self, peer: str, tag: int, spans: Spans, target: bytes) -> Write:
        """As in the port. Writes to one peer land in order."""
        spans = check_spans(spans, len(self._memory))
        try:
            runs_to(tag, spans, target, 1 << 62)
        except ConnectorError as error:
            return Write.failed(error.message)
        place = self._places.get(peer)
        if place is None:
            return Write.failed(f"'{peer}' is not connected.")
        write, runs = Write(), join(spans, spans)

        def begin() -> None:
            link = self._links.get(peer)
            if link is None:
                try:
                    made = socket.socket(place[0], socket.SOCK_STREAM)
                except OSError as error:  # there are no more descriptors
                    write.end(f"there is no connection to '{peer}': {error}.")
                    return
                link = self._links[peer] = _PageConnection(made, peer)
                link.steps = self._send(link, place[1])
                link.writes.append((write, tag, runs))
                self._loop.add(link)
            else:
                link.writes.append((write, tag, runs))
                self._loop.resume(link)

        if not self._loop.call(begin):
            write.end(f"the connector is closed{self.problem and f': {self.problem}'}.")
        return write

    def shut(self, tag: int) -> bool:
        """As in the port; always True."""
        with self._lock:
            self._tags.pop(tag, None)
        return True

    def disconnect(self, peer: str) -> None:
        self._places.pop(peer, None)

        def drop() -> None:
            if peer in self._links:
                self._loop.drop(self._links[peer], ConnectorError("it was disconnected"))

        self._loop.call(drop)

    def close(self) -> None:
        with self._lock:
            self._tags.clear()
        self._loop.close()

    # -- the thread

    def _accept(self, made: socket.socket) -> _PageConnection:
        link = _PageConnection(made)
        link.steps = self._receive(link)
        return link

    def _lose(self, link: _PageConnection, error: Exception) -> None:
        link.socket.close()
        if not link.is_proven and not isinstance(error, Foreign):
            self.refused["closed"] += 1
        if link.peer:
            del self._links[link.peer]
            reason = error.message if isinstance(error, ConnectorError) else str(error)
            for write, _, _ in link.writes:
                write.end(f"the connection to '{link.peer}' has ended: {reason}.")

    def _send(self, link: _PageConnection, where: Any) -> Steps:
        """The steps of a connection to a peer."""
        at = format_address(where[:2])
        try:
            yield from dial(link.socket, where)
        except OSError as error:
            raise ConnectorError(f"{error.strerror} at {at}") from error
        try:
            yield from prove(link.socket, self._secret, PAGES, dials=True, about=link.peer.encode())
        except (Foreign, EOFError, OSError) as error:  # closed: it has refused the proof
            raise ConnectorError(f"what listens at {at} has another secret, or is another peer") from error
        while True:
            while not link.writes:
                yield READ
                with suppress(BlockingIOError):
                    if not link.writes:
                        raise ConnectorError("closed" if not link.socket.recv(1) else "it spoke out of turn")
            write, tag, runs = link.writes[0]
            yield from send(link.socket, _HEADER.pack(tag, int(runs[:, 2].sum())))
            cursor = _Cursor(self._memory, runs)
            while views := cursor.views():
                with suppress(BlockingIOError):
                    cursor.advance(link.socket.sendmsg(views))
                yield WRITE
            landed = yield from receive(link.socket, 1)
            link.writes.popleft()
            write.end(
                "" if landed == b"\1" else f"'{link.peer}' refused it: tag {tag} is not open, or has other lengths."
            )

    def _receive(self, link: _PageConnection) -> Steps:
        """The steps of a connection from a peer."""
        yield from prove(link.socket, self._secret, PAGES, dials=False, about=self._name.encode())
        link.proven()
        while True:
            tag, left = _HEADER.unpack((yield from receive_exactly(link.socket, _HEADER.size)))
            runs = self._tags.get(tag)
            cursor = _Cursor(self._memory, runs) if runs is not None and runs[:, 2].sum() == left else None
            while left:
                with self._lock:  # so that nothing lands after `shut`
                    if self._tags.get(tag) is not runs:
                        cursor = None
                    try:
                        views = [self._scratch[:left]] if cursor is None else cursor.views()
                        count = link.socket.recvmsg_into(views)[0]
                    except BlockingIOError:
                        count = -1
                if count == 0:
                    raise ConnectorError("closed")
                if count > 0:
                    left -= count
                    if cursor is not None:
                        cursor.advance(count)
                if left:
                    yield READ
            with self._lock:
                landed = cursor is not None and self._tags.get(tag) is runs
            yield from send(link.socket, b"\1" if landed else b"\0")

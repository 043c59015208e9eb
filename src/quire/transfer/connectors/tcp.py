"""TcpConnector: writes over TCP sockets, which work anywhere. One thread moves all bytes.

    writer                                              receiver
      QTCP1, its nonce                    ------>
                                          <------         its nonce
      proof of the secret, both nonces    ------>         nothing more is read or said before it is right
      and the receiver's name             <------         the same proof in its role
      tag, number of bytes, the bytes     ------>         straight into the spans of the tag
                                          <------         1: all have landed; 0: refused

The receiver moves bytes into a tag's spans under the lock that `shut` takes, so `shut` is always True. Bytes of a tag
that is unknown or shut are read and dropped. Until a connection has proved the secret, 5 seconds and a few dozen bytes
are all that it gets; then it is trusted. Nothing is encrypted: across machines use a private network.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np

from quire.errors import ConnectorError, InvalidInput
from quire.transfer.address import format_address
from quire.transfer.connector import Connector, Write
from quire.transfer.spans import Memory, Runs, Spans, batches, check_spans, join, pack_target, runs_to

_MAGIC: Final = b"QTCP1\0\0\0"
_NONCE: Final = 32
_PROOF: Final = 32
_HEADER: Final = struct.Struct("<QQ")
_STEP_BYTES: Final = 4 << 20  # moved at once: bounds how long `shut` waits
_STEP_RUNS: Final = 512
_HANDSHAKE_S: Final = 5.0
_MOST_STRANGERS: Final = 16
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

Steps = Generator[int, None, None]
"""I/O of one socket. It yields the events that it waits for."""


_Resolved = tuple[socket.AddressFamily, Any]


class _Place(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    name: str
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


class _Link:
    """A connection. One to a peer has `writes`, in order; one from a peer has none."""

    steps: Steps

    def __init__(self, sock: socket.socket, peer: str = "") -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer = peer
        self.writes: deque[tuple[Write, int, Runs]] = deque()
        self.gives_up = time.monotonic() + _HANDSHAKE_S


class TcpConnector(Connector):
    """The port over TCP. `host` is the address of this machine that is listened on and given to peers. `refused` counts
    connections that were foreign, malformed, too many, or slow to prove the secret."""

    kind = "tcp"

    def __init__(self, memory: Memory, *, name: str, secret: bytes, host: str = "127.0.0.1") -> None:
        if not secret:
            raise InvalidInput("connector 'tcp' needs a shared secret.")
        self.refused = 0
        self._memory = memory.data
        self._name = name
        self._secret = secret
        self._lock = threading.Lock()
        self._tags: dict[int, Runs] = {}
        self._places: dict[str, _Resolved] = {}
        self._links: dict[str, _Link] = {}  # to peers; of the thread, as are the next two
        self._strangers: set[_Link] = set()
        self._scratch = memoryview(bytearray(1 << 16))
        self._calls: deque[Callable[[], None]] = deque()  # for the thread
        self._closed = False
        self._selector = selectors.DefaultSelector()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise ConnectorError(f"connector 'tcp' cannot listen on {host}: {error}.") from error
        self._address = msgspec.msgpack.encode(_Place("tcp", name, *self._listener.getsockname()[:2]))
        self._bell, self._rung = socket.socketpair()
        for sock in (self._listener, self._bell, self._rung):
            sock.setblocking(False)
        self._selector.register(self._listener, _READ)
        self._selector.register(self._rung, _READ)
        self._thread = threading.Thread(target=self._run, name="quire-tcp", daemon=True)
        self._thread.start()

    # -- the port

    def address(self) -> bytes:
        return self._address

    def connect(self, peer: str, address: bytes) -> None:
        """As in the port. The first write connects the socket."""
        try:
            place = msgspec.msgpack.decode(address, type=_Place)
            found = socket.getaddrinfo(
                place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )  # a name might take minutes
            family, _, _, _, where = found[0]
        except (msgspec.DecodeError, OSError, OverflowError, ValueError) as error:  # ValueError: a host that is no name
            raise ConnectorError(f"the address of '{peer}' is not one of a connector 'tcp': {error}.") from error
        if (place.kind, place.name) != ("tcp", peer):
            raise ConnectorError(f"the address of '{peer}' is that of '{place.name}', connector '{place.kind}'.")
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
                link = self._links[peer] = _Link(made, peer)
                link.steps = self._send(link, place[1])
                self._selector.register(link.sock, _READ, link)
            link.writes.append((write, tag, runs))
            self._resume(link)

        if not self._call(begin):
            write.end("the connector is closed.")
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
                self._drop(self._links[peer], "it was disconnected")

        self._call(drop)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tags.clear()
        self._bell.send(b"\0")
        self._thread.join()
        self._listener.close()
        self._bell.close()
        self._rung.close()
        self._selector.close()

    # -- the thread

    def _call(self, call: Callable[[], None]) -> bool:
        """Have the thread make a call; False: it has ended."""
        with self._lock:
            if not self._closed:
                self._calls.append(call)
                with suppress(BlockingIOError):  # it was rung often enough
                    self._bell.send(b"\0")
            return not self._closed

    def _run(self) -> None:
        while not self._closed:
            patience = min((link.gives_up for link in self._strangers), default=None)
            for key, _ in self._selector.select(patience and max(0.0, patience - time.monotonic())):
                if key.data is not None:
                    self._resume(key.data)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._rung.recv(4096)
            while self._calls:
                self._calls.popleft()()
            for link in [each for each in self._strangers if each.gives_up < time.monotonic()]:
                self._drop(link, "it proved no secret")
        for link in [key.data for key in self._selector.get_map().values() if key.data is not None]:
            self._drop(link, "the connector was closed")

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            time.sleep(0.01)  # for lack of file descriptors: it stays readable
            return
        if len(self._strangers) >= _MOST_STRANGERS:  # a peer needs milliseconds, and must get in beside them
            self._drop(min(self._strangers, key=lambda each: each.gives_up), "there were too many")
        link = _Link(sock)
        link.steps = self._receive(link)
        self._strangers.add(link)
        self._selector.register(sock, _READ, link)

    def _resume(self, link: _Link) -> None:
        if link.sock.fileno() < 0:
            return  # dropped since it was selected
        try:
            events = next(link.steps)
        except (OSError, ConnectorError) as error:
            self._drop(link, error.message if isinstance(error, ConnectorError) else str(error))
            return
        if self._selector.get_key(link.sock).events != events:
            self._selector.modify(link.sock, events, link)

    def _drop(self, link: _Link, reason: str) -> None:
        self._selector.unregister(link.sock)
        link.sock.close()
        if link in self._strangers:
            self._strangers.remove(link)
            self.refused += 1
        if link.peer:
            del self._links[link.peer]
            for write, _, _ in link.writes:
                write.end(f"the connection to '{link.peer}' has ended: {reason}.")

    def _proof(self, role: bytes, name: str, *nonces: bytes) -> bytes:
        return hmac.digest(self._secret, b"".join((_MAGIC, role, *nonces, name.encode())), "sha256")

    def _send(self, link: _Link, where: Any) -> Steps:
        """The steps of a link to a peer."""
        link.sock.connect_ex(where)
        yield _WRITE
        error = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise ConnectorError(f"{os.strerror(error)} at {format_address(where[:2])}")
        mine = secrets.token_bytes(_NONCE)
        yield from _put(link.sock, _MAGIC + mine)
        theirs = yield from _get(link.sock, _NONCE)
        yield from _put(link.sock, self._proof(b"writer", link.peer, theirs, mine))
        try:
            proof = yield from _get(link.sock, _PROOF)
        except (ConnectorError, OSError):  # closed: it has refused the proof
            proof = b""
        if not hmac.compare_digest(proof, self._proof(b"receiver", link.peer, mine, theirs)):
            raise ConnectorError(f"what listens at {format_address(where[:2])} has another secret, or is another peer")
        while True:
            while not link.writes:
                yield _READ
                with suppress(BlockingIOError):
                    if not link.writes:
                        raise ConnectorError("closed" if not link.sock.recv(1) else "it spoke out of turn")
            write, tag, runs = link.writes[0]
            yield from _put(link.sock, _HEADER.pack(tag, int(runs[:, 2].sum())))
            cursor = _Cursor(self._memory, runs)
            while views := cursor.views():
                with suppress(BlockingIOError):
                    cursor.advance(link.sock.sendmsg(views))
                yield _WRITE
            landed = yield from _get(link.sock, 1)
            link.writes.popleft()
            write.end(
                "" if landed == b"\1" else f"'{link.peer}' refused it: tag {tag} is not open, or has other lengths."
            )

    def _receive(self, link: _Link) -> Steps:
        """The steps of a link from a peer."""
        hello = yield from _get(link.sock, len(_MAGIC) + _NONCE)
        if not hello.startswith(_MAGIC):
            raise ConnectorError("it is no connector")
        theirs, mine = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        yield from _put(link.sock, mine)
        proof = yield from _get(link.sock, _PROOF)
        if not hmac.compare_digest(proof, self._proof(b"writer", self._name, mine, theirs)):
            raise ConnectorError("it has another secret")
        yield from _put(link.sock, self._proof(b"receiver", self._name, theirs, mine))
        self._strangers.remove(link)
        while True:
            tag, left = _HEADER.unpack((yield from _get(link.sock, _HEADER.size)))
            runs = self._tags.get(tag)
            cursor = _Cursor(self._memory, runs) if runs is not None and runs[:, 2].sum() == left else None
            while left:
                with self._lock:  # so that nothing lands after `shut`
                    if self._tags.get(tag) is not runs:
                        cursor = None
                    try:
                        views = [self._scratch[:left]] if cursor is None else cursor.views()
                        count = link.sock.recvmsg_into(views)[0]
                    except BlockingIOError:
                        count = -1
                if count == 0:
                    raise ConnectorError("closed")
                if count > 0:
                    left -= count
                    if cursor is not None:
                        cursor.advance(count)
                if left:
                    yield _READ
            with self._lock:
                landed = cursor is not None and self._tags.get(tag) is runs
            yield from _put(link.sock, b"\1" if landed else b"\0")


def _get(sock: socket.socket, count: int) -> Generator[int, None, bytes]:
    """So many bytes."""
    got = b""
    while len(got) < count:
        with suppress(BlockingIOError):
            more = sock.recv(count - len(got))
            if not more:
                raise ConnectorError("closed")
            got += more
            continue
        yield _READ
    return got


def _put(sock: socket.socket, some: bytes) -> Steps:
    """Send a few bytes."""
    while some:
        with suppress(BlockingIOError):
            some = some[sock.send(some) :]
            continue
        yield _WRITE

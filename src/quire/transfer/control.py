"""Control: connections with the peers of an engine, on a thread of its own.

    dialed     to a prefill engine: requests go out, answers come in
    accepted   from a decode engine: requests come in, answers go out

A peer that closes its connection has ended, or its writes to this engine have: `Closed` proves that it writes no more.
`Unreachable` proves nothing. So an accepted connection that is lost stays open, unread, until the owner says `drained`;
until then the same peer is refused, and connects again later. A dialed one is closed at once: its owner writes nothing.
A stopped process keeps its connections: it is `Silent` until it `Speaks`.

Frames are a length and a message; an empty one is a heartbeat. A connection that has not proved the shared secret,
or breaks the protocol, is closed and counted in `refused`, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import msgspec

from quire.errors import AddressInUse, InvalidInput, PeerRefused
from quire.transfer.address import Address, format_address
from quire.transfer.handshake import Foreign, Handshake, Hello, Identity, Role, frame, take_frame
from quire.transfer.messages import MOST_FRAME_BYTES, Message, Request, decode_answer, decode_request, encode

logger = logging.getLogger(__name__)

_Resolved = tuple[socket.AddressFamily, socket.SocketKind, Any]
"""Of a name: family, kind, and what `socket.connect` takes."""

BEAT_S: Final = 0.5
SILENT_S: Final = 2.0
HANDSHAKE_S: Final = 5.0
MOST_QUEUED_BYTES: Final = 256 << 20
MOST_STRANGERS: Final = 64
"""Accepted connections whose handshake has not succeeded. One more ends the oldest."""

_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 0.1, 2.0
_TICK_S = 0.1
_READ_BYTES = 256 << 10
_REQUESTS = get_args(Request)
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


@dataclass(frozen=True, slots=True)
class Connected:
    """The handshake with a peer has succeeded. `dialed`, here and below: by this engine. `address` is what it dialed,
    or the host that the peer connected from."""

    peer: str
    dialed: bool
    hello: Hello
    address: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The peer has ended, or closed the connection after its last write: it writes no more."""

    peer: str
    dialed: bool


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The connection broke: the peer may still write."""

    peer: str
    dialed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Silent:
    """Nothing came from the peer for 2 s: it is stopped, or overloaded."""

    peer: str
    dialed: bool


@dataclass(frozen=True, slots=True)
class Speaks:
    """A silent peer is there again."""

    peer: str
    dialed: bool


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message: a request of a peer that connected to this engine, or an answer of one that it connected to."""

    peer: str
    message: Message


Event = Connected | Closed | Unreachable | Silent | Speaks | Arrived


@dataclass(slots=True, eq=False)
class _Target:
    """An address that this engine connects to."""

    address: Address
    resolved: list[_Resolved] = field(default_factory=list)  # not tried yet
    is_resolving: bool = False
    next_try: float = 0.0
    backoff_s: float = _LEAST_BACKOFF_S
    problem: str = ""  # why there is no connection; "" while there is one
    unproven: str = ""  # a peer that was here and may still write


@dataclass(slots=True, eq=False)
class _Link:
    """A connection."""

    socket: socket.socket
    target: _Target | None  # None if it was accepted
    handshake: Handshake
    since: float
    heard: float
    peer: str = ""  # after the handshake
    is_silent: bool = False
    outbox: bytearray = field(default_factory=bytearray)  # messages; guarded by the lock

    @property
    def dialed(self) -> bool:
        return self.target is not None


class Control:
    """The connections of one engine. `listen` is where it accepts, None for nowhere; `peers` are the addresses that it
    connects to, and again whenever a connection is lost. `wake` is called, on the thread of this object, after each
    event. Raises AddressInUse."""

    def __init__(
        self,
        hello: Hello,
        secret: bytes,
        *,
        listen: Address | None = ("127.0.0.1", 0),
        peers: Sequence[Address] = (),
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        if not secret:
            raise InvalidInput("engines exchange pages only with a shared secret.", fix="set --transfer-secret.")
        self.refused: Counter[str] = Counter()  # connections, by reason; for a PeerRefused its field
        self._hello = hello
        self._secret = secret
        self._wake = wake
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._drained: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._peers: dict[tuple[str, bool], _Link] = {}  # by name and `dialed`, after the handshake
        self._undrained: dict[str, _Link] = {}  # lost, accepted
        self._targets = [_Target(address) for address in peers]
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(listen) if listen is not None else None
        self.address: Address | None = self._listener.getsockname()[:2] if self._listener is not None else None
        self._waker, self._woken = socket.socketpair()
        for each in (self._waker, self._woken):
            each.setblocking(False)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="quire-control", daemon=True)
        self._thread.start()

    # -- any thread

    def events(self) -> list[Event]:
        """Everything that happened since the last call, in order."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    def send(self, peer: str, message: Message) -> bool:
        """Send a message; never blocks. False if there is no connection; its loss is an event. A peer that takes too
        few bytes becomes `Unreachable`."""
        encoded = frame(encode(message))
        with self._lock:
            link = self._peers.get((peer, isinstance(message, _REQUESTS)))
            if link is not None:
                link.outbox += encoded
        self._interrupt()
        return link is not None

    def drained(self, peer: str) -> None:
        """No write to this lost peer is in flight any more: it may connect again."""
        self._drained.put(peer)
        self._interrupt()

    def set_identity(self, identity: Identity) -> None:
        """What later handshakes compare; connections remain."""
        self._hello = msgspec.structs.replace(self._hello, identity=identity)

    def set_role(self, role: Role) -> None:
        """The role that later handshakes compare; connections remain."""
        self._hello = msgspec.structs.replace(self._hello, role=role)

    def problems(self) -> dict[Address, str]:
        """Addresses without a connection, and why."""
        return {target.address: target.problem for target in self._targets if target.problem}

    def close(self) -> None:
        """Close all connections. Only after the writes of this engine have ended: peers take it for a proof. A second
        call does nothing."""
        self._is_closing = True
        self._interrupt()
        self._thread.join()

    def _interrupt(self) -> None:
        with contextlib.suppress(OSError):  # it is awake already, or closed
            self._waker.send(b"x")

    # -- the thread

    def _run(self) -> None:
        selector = self._selector
        selector.register(self._woken, selectors.EVENT_READ)
        if self._listener is not None:
            selector.register(self._listener, selectors.EVENT_READ)
        last = time.monotonic()
        next_beat = 0.0
        while not self._is_closing:
            for key, events in selector.select(_TICK_S):
                if key.data is not None:
                    self._serve(key.data, events)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._woken.recv(4096)
            now = time.monotonic()
            was_stopped, last = now - last > SILENT_S / 2, now  # then what the peers sent is not read yet
            if now >= next_beat:
                next_beat = now + BEAT_S
                with self._lock:
                    for link in self._peers.values():
                        link.outbox += frame(b"") if not link.outbox else b""
            self._tick(now, was_stopped=was_stopped)
        for each in (*self._links, *self._undrained.values()):
            each.socket.close()
        for other in (self._waker, self._woken, *([self._listener] if self._listener is not None else ())):
            other.close()
        selector.close()

    def _tick(self, now: float, *, was_stopped: bool) -> None:
        while not self._drained.empty():
            link = self._undrained.pop(self._drained.get(), None)
            if link is not None:
                link.socket.close()
        for link in list(self._links):
            if not link.peer and now - link.since > HANDSHAKE_S:
                self._refuse(link, "timeout")
            elif link.peer and not link.is_silent and not was_stopped and now - link.heard > SILENT_S:
                link.is_silent = True
                self._put(Silent(link.peer, link.dialed))
            elif len(link.outbox) > MOST_QUEUED_BYTES:
                self._lose(link, Unreachable(link.peer, link.dialed, "it takes no messages"))
            elif link.outbox or link.handshake.outbox:
                self._serve(link, selectors.EVENT_WRITE)
        for target in self._targets:
            if target.is_resolving or any(link.target is target for link in self._links):
                continue
            if target.resolved:
                self._connect(target)
            elif now >= target.next_try:
                self._dial(target, now)

    def _dial(self, target: _Target, now: float) -> None:
        target.next_try = now + target.backoff_s
        target.backoff_s = min(2 * target.backoff_s, _MOST_BACKOFF_S)
        target.is_resolving = True
        threading.Thread(target=self._resolve, args=(target,), name="quire-resolve", daemon=True).start()

    def _connect(self, target: _Target) -> None:
        family, kind, address = target.resolved.pop(0)
        try:
            made = socket.socket(family, kind)
            made.setblocking(False)
            made.connect_ex(address)
        except OSError as error:
            target.problem = str(error)
            return
        link = self._add(made, target)
        link.handshake.advance()
        self._watch(link)

    def _resolve(self, target: _Target) -> None:
        """On a thread of its own: a name server may take minutes."""
        try:
            found = socket.getaddrinfo(*target.address, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: a host that can be no name
            target.problem = str(error)
        else:
            target.resolved = [(family, kind, address) for family, kind, _, _, address in found]
        target.is_resolving = False
        self._interrupt()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            made, _ = self._listener.accept()
        except BlockingIOError:
            return  # it has gone already
        except OSError:
            time.sleep(0.01)  # for lack of file descriptors: it stays readable
            return
        strangers = [link for link in self._links if not link.peer and not link.dialed]
        if len(strangers) >= MOST_STRANGERS:  # a peer needs milliseconds, and must get in beside any number of others
            self._refuse(min(strangers, key=lambda link: link.since), "too many")
        made.setblocking(False)
        self._watch(self._add(made, None))

    def _add(self, made: socket.socket, target: _Target | None) -> _Link:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        now = time.monotonic()
        admit = self._admit_accepted if target is None else self._admit_dialed
        link = _Link(
            made, target, Handshake(self._hello, self._secret, dials=target is not None, admit=admit), now, now
        )
        self._links.add(link)
        self._selector.register(made, selectors.EVENT_READ, link)
        return link

    def _watch(self, link: _Link) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox or link.handshake.outbox else 0)
        self._selector.modify(link.socket, wanted, link)

    def _serve(self, link: _Link, events: int) -> None:
        if link not in self._links:
            return  # lost earlier in this round
        try:
            if events & selectors.EVENT_READ:
                self._read(link)
            self._write(link)
            self._watch(link)
        except (ConnectionResetError, BrokenPipeError, EOFError):
            self._lose(link, Closed(link.peer, link.dialed))
        except OSError as error:
            self._lose(link, Unreachable(link.peer, link.dialed, str(error)))
        except PeerRefused as error:
            self._refuse(link, error.field, str(error))
        except (Foreign, InvalidInput) as error:
            self._refuse(link, str(error) if isinstance(error, Foreign) else "malformed")

    def _read(self, link: _Link) -> None:
        read = link.socket.recv(_READ_BYTES)
        if not read:
            raise EOFError
        link.heard = time.monotonic()
        if link.is_silent:
            link.is_silent = False
            self._put(Speaks(link.peer, link.dialed))
        inbox = link.handshake.inbox
        inbox += read
        if not link.peer:
            if not link.handshake.advance():
                return
            self._connected(link)
        while (payload := take_frame(inbox, MOST_FRAME_BYTES)) is not None:
            if payload:
                self._put(Arrived(link.peer, decode_answer(payload) if link.dialed else decode_request(payload)))

    def _write(self, link: _Link) -> None:
        if link.handshake.outbox:
            del link.handshake.outbox[: _send(link.socket, link.handshake.outbox)]
        elif link.outbox:
            with self._lock:
                del link.outbox[: _send(link.socket, link.outbox)]

    def _admit_accepted(self, theirs: Hello) -> str:
        """A peer connects again only when it has lost its connection."""
        before = self._peers.get((theirs.peer, False))
        if before is not None:
            self._lose(before, Closed(theirs.peer, False))
        return "not drained" if theirs.peer in self._undrained else ""

    def _admit_dialed(self, theirs: Hello) -> str:
        peers = [link.handshake.theirs for link in self._links if link.dialed]
        is_known = sum(other is not None and other.peer == theirs.peer for other in peers) > 1
        return "another address of a connected peer" if is_known else ""

    def _connected(self, link: _Link) -> None:
        theirs, target = link.handshake.theirs, link.target
        assert theirs is not None
        link.peer = theirs.peer
        if target is not None:
            if target.unproven and target.unproven != link.peer:  # another process listens at its address: it has ended
                self._put(Closed(target.unproven, True))
            target.backoff_s, target.problem, target.unproven = _LEAST_BACKOFF_S, "", ""
            target.resolved.clear()
        with self._lock:
            self._peers[link.peer, link.dialed] = link
        address = format_address(target.address) if target is not None else str(link.socket.getpeername()[0])
        self._put(Connected(link.peer, link.dialed, theirs, address))

    def _refuse(self, link: _Link, reason: str, problem: str = "") -> None:
        """Close a connection that is no peer's, or breaks the protocol."""
        self.refused[reason] += 1
        problem = problem or f"the connection is refused: {reason}."
        if link.target is not None and link.target.problem != problem:
            logger.warning("%s: %s", format_address(link.target.address), problem)
        elif link.target is None and self.refused[reason] == 1:
            logger.warning("A connection was refused (%s); 'refused_connections' counts others like it.", reason)
        with contextlib.suppress(OSError):
            _send(link.socket, link.handshake.outbox)  # last words
        self._lose(link, Unreachable(link.peer, link.dialed, problem))

    def _lose(self, link: _Link, event: Closed | Unreachable) -> None:
        self._links.remove(link)
        self._selector.unregister(link.socket)
        if link.peer:
            with self._lock:
                del self._peers[link.peer, link.dialed]
            if link.target is not None and isinstance(event, Unreachable):
                link.target.unproven = link.peer
            self._put(event)
        if link.target is not None:
            problem = event.reason if isinstance(event, Unreachable) else "the connection was closed"
            if not link.peer and isinstance(event, Closed):
                problem = "it closed the connection in the handshake: it is ending, or has another --transfer-secret"
                if link.target.problem != problem:
                    logger.warning("%s: %s", format_address(link.target.address), problem)
            link.target.problem = problem
        if link.peer and not link.dialed:
            self._undrained[link.peer] = link
        else:
            link.socket.close()

    def _put(self, event: Event) -> None:
        self._events.put(event)
        self._wake()


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family)
    except OSError as error:
        fix = "choose another port with --transfer-listen."
        raise AddressInUse(f"{format_address(address)} cannot be used for peers: {error}.", fix=fix) from error
    listener.setblocking(False)
    return listener


def _send(to: socket.socket, outbox: bytearray) -> int:
    """Bytes that the socket has taken."""
    try:
        return to.send(outbox)
    except BlockingIOError:
        return 0

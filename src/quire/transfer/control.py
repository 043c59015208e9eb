"""Control: connections with the peers of an engine, on a thread of its own.

    dialed     to a prefill engine: requests go out, answers come in
    accepted   from a decode engine: requests come in, answers go out

A peer that closes its connection has ended, or its writes to this engine have: `Closed` proves that it writes no more.
`Unreachable` proves nothing. So an accepted connection that is lost stays open, unread, until the owner says `drained`;
until then the same peer is refused, and connects again later. A dialed one is closed at once: its owner writes nothing.
A stopped process keeps its connections: it is `Silent` until it `Speaks`. A peer that is removed (`Left`) reads the end
of its connection. It ends its writes, then closes it too: `Closed` is the same proof as of a peer that has ended.

Frames are a length and a message; an empty one is a heartbeat. A connection that has not proved the shared secret,
or breaks the protocol, is closed and counted in `refused`, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, get_args

import msgspec

from quire.errors import AddressInUse, InvalidInput, PeerRefused
from quire.transfer.address import Address, format_address
from quire.transfer.handshake import Hello, Identity, Role, frame, shake, take_frame
from quire.transfer.messages import MOST_FRAME_BYTES, Message, Request, decode_answer, decode_request, encode
from quire.transfer.network import READ, WRITE, Connection, Foreign, NetworkLoop, Steps, dial

logger = logging.getLogger(__name__)

_Resolved = tuple[socket.AddressFamily, socket.SocketKind, Any]
"""Family and kind of a socket, and what its `connect` takes."""

BEAT_S: Final = 0.5
SILENT_S: Final = 2.0
MOST_QUEUED_BYTES: Final = 256 << 20

_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 0.1, 2.0
_TICK_S = 0.1
_READ_BYTES = 256 << 10
_REQUESTS = get_args(Request)
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """Something happened to a connection with a peer; `dialed`: by this engine."""

    peer: str
    dialed: bool


@dataclass(frozen=True, slots=True)
class Connected(PeerEvent):
    """The handshake with a peer has succeeded. `address` is what was dialed, or the host that the peer connected
    from."""

    hello: Hello
    address: str


class Closed(PeerEvent):
    """The peer has ended, or closed the connection after its last write: it writes no more."""


@dataclass(frozen=True, slots=True)
class Unreachable(PeerEvent):
    """The connection broke: the peer may still write."""

    reason: str


class Left(PeerEvent):
    """This engine asks the peer no more, and may still be written to: `Closed` or `Unreachable` follows."""


class Silent(PeerEvent):
    """Nothing came from the peer for 2 s: it is stopped, or overloaded."""


class Speaks(PeerEvent):
    """A silent peer is there again."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message: a request of a peer that connected to this engine, or an answer of one that it connected to."""

    peer: str
    message: Message


Event = Connected | Closed | Unreachable | Left | Silent | Speaks | Arrived


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


class _PeerConnection(Connection):
    """A connection with a peer, which has a name after the handshake."""

    def __init__(self, made: socket.socket, target: _Target | None) -> None:
        super().__init__(made, dialed=target is not None)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.target = target
        self.peer = ""
        self.claimed = ""  # the peer, before it is admitted
        self.read_at = time.monotonic()
        self.is_silent = False
        self.outbox = bytearray()  # messages; guarded by the lock


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
        self._hello = hello
        self._secret = secret
        self._wake = wake
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, bool], _PeerConnection] = {}  # key: name and `dialed`, after the handshake
        self._lost: dict[str, _PeerConnection] = {}  # accepted ones, until `drained`
        self._targets = [_Target(address) for address in peers]
        self._former: list[_Target] = []  # removed, with a connection that ends or a peer that may still write
        self._next_beat = self._ticked = 0.0
        listener = _listen(listen) if listen is not None else None
        self.address: Address | None = listener.getsockname()[:2] if listener is not None else None
        self._loop = NetworkLoop[_PeerConnection](
            "quire-control",
            listener,
            accept=lambda made: self._connection(made, None),
            lose=self._lose,
            tick=self._tick,
            tick_s=_TICK_S,
        )
        self._loop.thread.start()

    # -- any thread

    @property
    def refused(self) -> Counter[str]:
        """Connections that were refused, by reason; for a PeerRefused its field."""
        return self._loop.refused

    @property
    def problem(self) -> str:
        """Why there are no connections any more; "" while there may be."""
        return self._loop.problem

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
            if link is None:
                return False
            link.outbox += encoded
            is_full = len(link.outbox) > MOST_QUEUED_BYTES
        return self._loop.call(partial(self._take_off if is_full else self._loop.resume, link))

    def _take_off(self, link: _PeerConnection) -> None:
        """End a connection whose peer takes too few bytes, once."""
        if link in self._loop.connections:
            self._loop.drop(link, OSError("it takes no messages"))

    def drained(self, peer: str) -> None:
        """No write to this lost peer is in flight any more: it may connect again."""

        def close() -> None:
            link = self._lost.pop(peer, None)
            if link is not None:
                link.socket.close()

        self._loop.call(close)

    def set_identity(self, identity: Identity) -> None:
        """What later handshakes compare; connections remain."""
        self._hello = msgspec.structs.replace(self._hello, identity=identity)

    def set_role(self, role: Role) -> None:
        """The role that later handshakes compare; connections remain."""
        self._hello = msgspec.structs.replace(self._hello, role=role)

    def set_peers(self, peers: Sequence[Address]) -> None:
        """Connect to these addresses from now on. Connections to the others end; those that are in both remain."""

        def change() -> None:
            known = {target.address: target for target in (*self._former, *self._targets)}
            self._targets = [known.pop(address, _Target(address)) for address in peers]
            links = {link.target: link for link in self._loop.connections if link.dialed}
            self._former = [target for target in known.values() if target in links or target.unproven]
            for target in self._former:
                if target in links:
                    self._leave(links[target])
            self._seek()

        self._loop.call(change)

    def problems(self) -> dict[Address, str]:
        """Addresses without a connection, and why."""
        return {target.address: target.problem for target in self._targets if target.problem}

    def close(self) -> None:
        """Close all connections. Only after the writes of this engine have ended: peers take it for a proof. A second
        call does nothing."""
        self._loop.close()
        for link in self._lost.values():
            link.socket.close()

    # -- the thread

    def _tick(self, now: float) -> None:
        was_stopped, self._ticked = now - self._ticked > SILENT_S / 2, now  # then what the peers sent is not read yet
        beats = now >= self._next_beat
        if beats:
            self._next_beat = now + BEAT_S
        for link in list(self._peers.values()):
            if beats and not link.outbox:
                with self._lock:
                    link.outbox += frame(b"")
            if not link.is_silent and not was_stopped and now - link.read_at > SILENT_S:
                link.is_silent = True
                self._put(Silent(link.peer, link.dialed))
            elif len(link.outbox) > MOST_QUEUED_BYTES:
                self._loop.drop(link, OSError("it takes no messages"))
            elif link.outbox:
                self._loop.resume(link)
        self._seek()

    def _seek(self) -> None:
        """Connect to the addresses without a connection whose time it is."""
        now = time.monotonic()
        connected = {link.target for link in self._loop.connections}
        for target in self._targets:
            if target.is_resolving or target in connected:
                continue
            if target.resolved:
                self._connect(target)
            elif now >= target.next_try:
                self._dial(target, now)

    def _dial(self, target: _Target, now: float) -> None:
        target.next_try = now + target.backoff_s
        target.backoff_s = min(2 * target.backoff_s, _MOST_BACKOFF_S)
        target.is_resolving = True
        try:
            threading.Thread(target=self._resolve, args=(target,), name="quire-resolve", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads now
            target.problem, target.is_resolving = str(error), False

    def _resolve(self, target: _Target) -> None:
        """On a thread of its own: a name server may take minutes."""
        try:
            found = socket.getaddrinfo(*target.address, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: a host that can be no name
            target.problem = str(error)
        else:
            target.resolved = [(family, kind, address) for family, kind, _, _, address in found]
        target.is_resolving = False
        self._loop.call(self._seek)

    def _connect(self, target: _Target) -> None:
        family, kind, address = target.resolved.pop(0)
        try:
            made = socket.socket(family, kind)
        except OSError as error:
            target.problem = str(error)
            return
        self._loop.add(self._connection(made, target, address))

    def _connection(self, made: socket.socket, target: _Target | None, address: Any = None) -> _PeerConnection:
        link = _PeerConnection(made, target)
        link.steps = self._steps(link, address)
        return link

    def _steps(self, link: _PeerConnection, address: Any) -> Steps:
        try:
            if link.dialed:
                yield from dial(link.socket, address)
            admit = partial(self._admit_dialed, link) if link.dialed else self._admit_accepted
            theirs = yield from shake(link.socket, self._hello, self._secret, dials=link.dialed, admit=admit)
            self._connected(link, theirs)
            inbox = bytearray()
            while True:
                yield READ | (WRITE if link.outbox else 0)
                self._read(link, inbox)
                with self._lock, contextlib.suppress(BlockingIOError):
                    if link.outbox:
                        del link.outbox[: link.socket.send(link.outbox)]
        except PeerRefused as error:
            raise Foreign(error.field, str(error)) from error
        except InvalidInput as error:
            raise Foreign("malformed") from error

    def _read(self, link: _PeerConnection, inbox: bytearray) -> None:
        try:
            read = link.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not read:
            raise EOFError
        link.read_at = time.monotonic()
        if link.is_silent:
            link.is_silent = False
            self._put(Speaks(link.peer, link.dialed))
        inbox += read
        while (payload := take_frame(inbox, MOST_FRAME_BYTES)) is not None:
            if payload:
                self._put(Arrived(link.peer, decode_answer(payload) if link.dialed else decode_request(payload)))

    def _admit_accepted(self, theirs: Hello) -> str:
        """A peer connects again only when it has lost its connection."""
        before = self._peers.get((theirs.peer, False))
        if before is not None:
            self._loop.drop(before, EOFError())
        return "not drained" if theirs.peer in self._lost else ""

    def _admit_dialed(self, link: _PeerConnection, theirs: Hello) -> str:
        link.claimed = theirs.peer
        others = [other for other in self._loop.connections if other.dialed and other is not link]
        is_known = any(other.claimed == theirs.peer for other in others)
        return "another address of a connected peer" if is_known else ""

    def _leave(self, link: _PeerConnection) -> None:
        """Ask a peer no more. Its answers are read until it closes the connection, after its last write."""
        if not link.peer:
            self._loop.drop(link, OSError("it is no peer any more"))
        elif self._peers.get((link.peer, True)) is link:  # else it has left already
            with self._lock:
                del self._peers[link.peer, True]
                link.outbox.clear()  # the end says it all
            link.is_silent = False
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_WR)
            self._put(Left(link.peer, True))

    def _connected(self, link: _PeerConnection, theirs: Hello) -> None:
        target = link.target
        link.proven()
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

    def _lose(self, link: _PeerConnection, error: Exception) -> None:
        """A connection has ended: of a peer, of one that is none, or before that was known."""
        target, is_closed = link.target, isinstance(error, ConnectionResetError | BrokenPipeError | EOFError)
        problem, is_refused = "the connection was closed" if is_closed else str(error), isinstance(error, Foreign)
        if isinstance(error, Foreign):
            problem = error.problem
        elif is_closed and not link.peer:
            problem = (
                "it closed the connection in the handshake: it is ending, or has another --transfer-secret or version"
            )
            is_refused = link.dialed
        if target is not None:
            if is_refused and target.problem != problem:
                logger.warning("%s: %s", format_address(target.address), problem)
            target.problem = problem
            target.unproven = link.peer if link.peer and not is_closed else target.unproven
        elif isinstance(error, Foreign) and self.refused[error.reason] == 1:
            logger.warning("A connection was refused (%s); 'refused_connections' counts others like it.", error.reason)
        if link.peer:
            with self._lock:
                self._peers.pop((link.peer, link.dialed), None)
            self._put(Closed(link.peer, link.dialed) if is_closed else Unreachable(link.peer, link.dialed, problem))
        if link.peer and not link.dialed:
            self._lost[link.peer] = link
        else:
            link.socket.close()

    def _put(self, event: Event) -> None:
        self._events.put(event)
        self._wake()


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        fix = "choose another port with --transfer-listen."
        raise AddressInUse(f"{format_address(address)} cannot be used for peers: {error}.", fix=fix) from error

"""NetworkLoop: connections on a thread of its own. Each has steps, which move its bytes and say what they wait for.

Until an accepted connection has proved the shared secret, 5 seconds and the bytes of a handshake are all that it gets,
and there are few such connections at a time. Others are refused and counted. An unexpected error ends the thread and
all connections: `problem` then says why.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import suppress
from errno import EINPROGRESS
from typing import Any, Final, Generic, TypeVar

from quire.errors import QuireError

logger = logging.getLogger(__name__)

HANDSHAKE_S: Final = 5.0
MOST_UNPROVEN: Final = 64
"""Accepted connections whose handshake has not succeeded. One more ends the oldest."""

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

Steps = Generator[int, None, None]
"""I/O of one connection, which never blocks. It yields READ, WRITE or both: what its socket is waited for."""


class Foreign(Exception):
    """A connection that is no peer's, or breaks the protocol. The `reason` is "foreign", "version", "secret",
    "malformed", "timeout", "too many", "self", the field that differs, or what the acceptor said."""

    def __init__(self, reason: str, problem: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.problem = problem or f"the connection is refused: {reason}."


class LoopEnded(Exception):
    """The loop was closed, or its thread has failed."""


class Connection:
    """A socket and its steps. `gives_up` is when it is refused if it is not proven by then."""

    steps: Steps

    def __init__(self, made: socket.socket, *, dialed: bool) -> None:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = made
        self.dialed = dialed
        self.gives_up = time.monotonic() + HANDSHAKE_S

    @property
    def is_proven(self) -> bool:
        """Whether it waits for no proof of the secret."""
        return self.gives_up == math.inf

    def proven(self) -> None:
        """The other side has proved the secret."""
        self.gives_up = math.inf


C = TypeVar("C", bound=Connection)


class NetworkLoop(Generic[C]):
    """The thread calls the callbacks: `accept` makes the connection of an accepted socket, `lose` gets each that has
    ended, closes its socket now or later, and `tick` is called every `tick_s`. The loop owns `listener`. `refused`
    counts connections by reason."""

    def __init__(
        self,
        name: str,
        listener: socket.socket | None,
        *,
        accept: Callable[[socket.socket], C],
        lose: Callable[[C, Exception], None],
        tick: Callable[[float], None] = lambda now: None,
        tick_s: float = math.inf,
    ) -> None:
        self.connections: set[C] = set()
        self.refused: Counter[str] = Counter()
        self.problem = ""
        """Why the thread has ended; "" if it has not, or was closed."""
        self._listener = listener
        self._accept, self._lose, self._tick, self._tick_s = accept, lose, tick, tick_s
        self._next_tick = 0.0 if tick_s < math.inf else math.inf
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_closing = self._has_ended = False
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for each in (self._waker, self._woken, *([listener] if listener is not None else ())):
            each.setblocking(False)
        self._selector.register(self._woken, READ, self._wake_up)
        if listener is not None:
            self._selector.register(listener, READ, self._accept_one)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- any thread

    def call(self, call: Callable[[], None]) -> bool:
        """Have the thread make a call; False: it has ended, or will."""
        with self._lock:
            if self._has_ended or self._is_closing:
                return False
            self._calls.append(call)
        with suppress(BlockingIOError, OSError):  # the loop was woken often enough, or has just ended
            self._waker.send(b"\0")
        return True

    def close(self) -> None:
        """End all connections and the thread; can be repeated."""
        with self._lock:
            self._is_closing = True
        with suppress(OSError):
            self._waker.send(b"\0")
        if self.thread.ident is not None:
            self.thread.join()

    # -- the thread

    def add(self, connection: C) -> None:
        """Begin the steps of a connection."""
        self.connections.add(connection)
        self._selector.register(connection.socket, READ, connection)
        self.resume(connection)

    def resume(self, connection: C) -> None:
        """Continue the steps of a connection, unless it was lost."""
        if connection not in self.connections:
            return
        try:
            events = next(connection.steps)
        except (OSError, EOFError, Foreign, QuireError) as error:
            self.drop(connection, error)
            return
        if connection in self.connections and self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def drop(self, connection: C, error: Exception) -> None:
        """End a connection."""
        self.connections.remove(connection)
        self._selector.unregister(connection.socket)
        if isinstance(error, Foreign):
            self.refused[error.reason] += 1
        self._lose(connection, error)

    def _run(self) -> None:
        why = LoopEnded("it was closed")
        try:
            while not self._is_closing:
                self._turn()
        except Exception as error:
            logger.exception("The network thread %s has failed.", self.thread.name)
            self.problem = f"{type(error).__name__}: {error}"
            why = LoopEnded(f"its network thread has failed: {self.problem}")
        with self._lock:
            self._has_ended = True
        for call in self._calls:
            with suppress(Exception):  # what it began ends below
                call()
        for connection in list(self.connections):
            self.drop(connection, why)
        for each in (self._waker, self._woken, *([self._listener] if self._listener is not None else ())):
            each.close()
        self._selector.close()

    def _turn(self) -> None:
        until = min((each.gives_up for each in self.connections), default=math.inf)
        until = min(until, self._next_tick)
        for key, _ in self._selector.select(max(0.0, until - time.monotonic()) if until < math.inf else None):
            if isinstance(key.data, Connection):
                self.resume(key.data)  # type: ignore[arg-type]  # all are of `add` or `_accept`
            else:
                key.data()
        while self._calls:
            self._calls.popleft()()
        now = time.monotonic()
        for connection in [each for each in self.connections if each.gives_up < now]:
            self.drop(connection, Foreign("timeout"))
        if now >= self._next_tick:
            self._next_tick = now + self._tick_s
            self._tick(now)

    def _wake_up(self) -> None:
        self._woken.recv(4096)

    def _accept_one(self) -> None:
        assert self._listener is not None
        try:
            made, _ = self._listener.accept()
        except BlockingIOError:
            return  # gone already
        except OSError:
            time.sleep(0.01)  # for lack of file descriptors: it stays readable
            return
        unproven = [each for each in self.connections if not each.dialed and not each.is_proven]
        if len(unproven) >= MOST_UNPROVEN:  # a peer needs milliseconds, and must get in beside any number of others
            self.drop(min(unproven, key=lambda each: each.gives_up), Foreign("too many"))
        self.add(self._accept(made))


# -- steps that connections share


def dial(made: socket.socket, address: Any) -> Steps:
    """Connect a socket. Raises OSError."""
    code = made.connect_ex(address)
    if code in (0, EINPROGRESS):
        yield WRITE
        code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def receive(made: socket.socket, most: int) -> Generator[int, None, bytes]:
    """The next bytes: one or more. Raises EOFError if none come any more."""
    while True:
        with suppress(BlockingIOError):
            read = made.recv(most)
            if not read:
                raise EOFError("closed")
            return read
        yield READ


def receive_exactly(made: socket.socket, count: int) -> Generator[int, None, bytes]:
    """So many bytes."""
    read = b""
    while len(read) < count:
        read += yield from receive(made, count - len(read))
    return read


def send(made: socket.socket, some: bytes) -> Steps:
    """Send a few bytes."""
    while some:
        with suppress(BlockingIOError):
            some = some[made.send(some) :]
            continue
        yield WRITE

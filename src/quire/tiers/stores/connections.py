"""Connections: a pool of connections to one Valkey or Redis server, and pipelines over them.

redis-py connects, encrypts, authenticates and sends. Its parsers return values as new bytes objects, which copies every
page twice more. `ReplyReader` replaces them, and reads values into their target buffers.
"""

from __future__ import annotations

import select
import ssl
from collections.abc import Mapping, Sequence
from io import BufferedReader
from queue import Empty, LifoQueue
from socket import SocketIO, socket
from typing import Any, ClassVar, Literal, TypeAlias

import redis
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from quire.errors import StoreError
from quire.tiers.store import Calls, Counts, RecordViews

Reply: TypeAlias = "bytes | int | list[Reply] | ResponseError | None"
Command: TypeAlias = "tuple[bytes | RecordViews, ...]"

_AHEAD_BYTES = 4096


class Connections:
    """Pipelines to one server, for any thread; each holds a connection, which is closed after any error, so that no
    answer is read as that of another command. `failures` counts by exception, or first word of a refusal."""

    def __init__(self, where: str, arguments: Mapping[str, Any], timeout: float, count: int) -> None:
        """`arguments` are redis-py's; `where` names the server in errors. Raises StoreError if it does not answer."""
        self.where = where
        self.failures = Counts()
        self._timeout = timeout
        self._calls = Calls()
        self._idle: LifoQueue[_Line] = LifoQueue(count)
        for _ in range(count):
            self._idle.put(_Line(arguments, timeout))
        (reply,) = self.call([(b"PING",)])
        if reply != b"PONG":
            self.close()
            raise StoreError(
                f"{self.where} does not answer: {str(reply).rstrip('.')}.",
                fix="start the server, or correct the URL or the password.",
            )

    def call(
        self, commands: Sequence[Command], targets: Sequence[RecordViews] = (), *, counted: bool = True
    ) -> list[Reply]:
        """Send commands together and return a reply to each; a refusal is a ResponseError. With `targets`, a value of a
        target's exact length is read into the target, and its reply is the length."""
        if not commands:
            return []
        replies: list[Reply] = []
        with self._calls as is_open:
            if not is_open:
                return self._lost(len(commands), "Closed", "the store was closed")
            try:
                line = self._idle.get(timeout=self._timeout)
            except Empty:
                return self._lost(len(commands), "Busy", f"all {self._idle.maxsize} connections are in use")
            try:
                line.call(commands, targets, replies)
            except (RedisError, OSError) as error:
                line.connection.disconnect()
                replies += self._lost(len(commands) - len(replies), type(error).__name__, str(error))
            finally:
                self._idle.put(line)
        for reply in replies if counted else ():
            if isinstance(reply, ResponseError) and not isinstance(reply, Lost):
                self.failures.add(str(reply).partition(" ")[0] or "ERR")
        return replies

    def close(self) -> None:
        """Close every connection, after calls in flight. May be called twice."""
        if self._calls.close():
            for line in self._idle.queue:
                line.connection.disconnect()

    def _lost(self, count: int, kind: str, reason: str) -> list[Reply]:
        self.failures.add(kind)
        return [Lost(f"{kind}: {reason}") for _ in range(count)]


class Lost(ResponseError):
    """Stands for a reply that did not arrive. The caller sends nothing more: it would wait as long again."""


class _Arriving(SocketIO):
    """The socket of a connection; while `is_read` is False, reads return nothing and do not wait."""

    def __init__(self, connected: socket, mode: Literal["r"]) -> None:
        super().__init__(connected, mode)
        self.is_read = True
        self._connected = connected

    def readinto(self, buffer: Any) -> int | None:
        return super().readinto(buffer) if self.is_read else None

    def has_more(self, timeout: float) -> bool:
        if isinstance(self._connected, ssl.SSLSocket) and self._connected.pending():
            return True
        poll = select.poll()
        poll.register(self._connected, select.POLLIN)
        return bool(poll.poll(timeout * 1000))


class ReplyReader:
    """The parser of one connection (RESP, version 2), for one thread. With a `target` set, the next reply is the length
    of a value. A value of the target's length is read into the target, and any other is discarded."""

    EXCEPTION_CLASSES: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.target: RecordViews | None = None
        self._arriving: _Arriving | None = None
        self._received: BufferedReader | None = None

    def on_connect(self, connection: Any) -> None:
        """Read from this connection's socket. Called by redis-py."""
        self.on_disconnect()
        self._arriving = _Arriving(connection._sock, "r")
        self._received = BufferedReader(self._arriving, _AHEAD_BYTES)

    def on_disconnect(self) -> None:
        """Drop the socket. Called by redis-py."""
        self.target = self._arriving = self._received = None

    def can_read(self, timeout: float = 0) -> bool:
        """Whether unread bytes have arrived, or the connection has ended."""
        if self._arriving is None or self._received is None:
            return False
        self._arriving.is_read = False
        buffered = self._received.peek()
        self._arriving.is_read = True
        return bool(buffered) or self._arriving.has_more(timeout)

    def read_response(self, disable_decoding: bool = False, timeout: object = None, **_: object) -> Reply:
        """The next reply; a refusal is returned. Raises redis-py's ConnectionError and InvalidResponse, and OSError."""
        assert self._received is not None
        target, self.target = self.target, None
        line = self._received.readline()
        if not line.endswith(b"\r\n"):
            raise Disconnected("the server closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            return self._value(self._received, int(rest), target)
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"*":
            return [self.read_response() for _ in range(int(rest))] if rest != b"-1" else None
        if kind == b"-":
            return ResponseError(rest.decode(errors="replace"))
        raise InvalidResponse(f"not a reply: {line[:40]!r}")

    @staticmethod
    def _value(received: BufferedReader, num_bytes: int, target: RecordViews | None) -> bytes | int | None:
        if num_bytes < 0:
            return None
        value = b""
        if target is not None and target.num_bytes == num_bytes:
            count = sum(map(received.readinto, target.views))
        else:
            value = received.read(num_bytes)
            count = len(value)
        end = received.read(2)
        if count < num_bytes or len(end) < 2:
            raise Disconnected("the server closed the connection")
        if end != b"\r\n":
            raise InvalidResponse(f"a value that does not end where it should: {end!r}")
        return value if target is None else num_bytes


def _packed(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """The bytes of commands, with large values as they are: redis-py joins no buffers."""
    packed: list[bytes | memoryview] = []
    text: list[bytes | memoryview] = []
    for command in commands:
        text.append(b"*%d\r\n" % len(command))
        for word in command:
            value = word if isinstance(word, RecordViews) else RecordViews(word)
            text.append(b"$%d\r\n" % value.num_bytes)
            for view in value.views:
                if view.nbytes > _AHEAD_BYTES:
                    packed += [b"".join(text), view]
                    text = []
                else:
                    text.append(view)
            text.append(b"\r\n")
    return [*packed, b"".join(text)]


class _Line(ReplyReader):
    """One connection and its parser. It connects at its first use, and again after it was lost."""

    def __init__(self, arguments: Mapping[str, Any], timeout: float) -> None:
        super().__init__()
        more = dict(arguments)
        make = more.pop("connection_class", redis.Connection)
        more |= {"protocol": 2, "socket_timeout": timeout, "socket_connect_timeout": timeout}
        self.connection = make(**more, parser_class=lambda socket_read_size: self)

    def call(self, commands: Sequence[Command], targets: Sequence[RecordViews], replies: list[Reply]) -> None:
        """Send and append the replies. Raises RedisError or OSError; replies before that are good."""
        if self.can_read():
            self.connection.disconnect()  # the server closed the connection, or sent data without a command
        self.connection.send_packed_command(_packed(commands))
        for index in range(len(commands)):
            self.target = targets[index] if targets else None
            try:
                replies.append(self.connection.read_response())
            except ResponseError as refusal:
                replies.append(refusal)
                if str(refusal).startswith(("READONLY", "MASTERDOWN", "LOADING")):
                    self.connection.disconnect()  # its name may mean another server by now
                    raise

"""ReplyReader: reads what a Valkey or Redis server answers, and values straight into the buffers they are meant for.

redis-py connects, encrypts, authenticates and sends. Its own parsers return values as new bytes objects, which costs
two more copies of every page; this one takes a parser's place in a connection (RESP, version 2).
"""

from __future__ import annotations

import select
import ssl
from typing import Any, ClassVar, TypeAlias

from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import InvalidResponse, ResponseError

Reply: TypeAlias = "bytes | int | list[Reply] | ResponseError | None"

_AHEAD_BYTES = 4096


class ReplyReader:
    """The parser of one connection. Not for several threads, as the connection is not.

    With a `target` set, the next reply, if it is a value of exactly the target's length, is read into the target, and
    reading it returns the length as a number; a value of any other length is read away and returns its length too.
    """

    EXCEPTION_CLASSES: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.target: memoryview | None = None
        self._bytes = bytearray(_AHEAD_BYTES)  # received and not parsed: [start, end)
        self._ahead = memoryview(self._bytes)
        self._start = self._end = 0
        self._socket: Any = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a socket to read from."""
        return self._socket is not None

    def on_connect(self, connection: Any) -> None:
        """Read from this connection's socket from now on. Called by redis-py."""
        self._socket = connection._sock
        self._start = self._end = 0
        self.target = None

    def on_disconnect(self) -> None:
        """Forget the socket. Called by redis-py."""
        self._socket = None
        self.target = None

    def can_read(self, timeout: float = 0) -> bool:
        """Whether something has arrived, the end of the connection included, that nobody has read."""
        if self._socket is None or self._start < self._end:
            return True
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def read_response(self, disable_decoding: bool = False, timeout: object = None, **_: object) -> Reply:
        """The next reply; errors of single commands are returned, not raised. The arguments are redis-py's.

        Raises redis-py's ConnectionError and InvalidResponse, and what the socket raises.
        """
        target, self.target = self.target, None
        return self._reply(target)

    def _reply(self, target: memoryview | None = None) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._value(int(rest), target)
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"*":
            return [self._reply() for _ in range(int(rest))] if rest != b"-1" else None
        if kind == b"-":
            return ResponseError(rest.decode(errors="replace"))
        raise InvalidResponse(f"not a reply: {line[:40]!r}")

    def _line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\r\n"):
            if self._start == self._end:
                self._start, self._end = 0, self._received(self._socket.recv_into(self._ahead))
            newline = self._bytes.find(b"\n", self._start, self._end)
            stop = self._end if newline < 0 else newline + 1
            line += self._ahead[self._start : stop]
            self._start = stop
        return bytes(line[:-2])

    def _value(self, num_bytes: int, target: memoryview | None) -> bytes | int | None:
        if num_bytes < 0:
            return None
        if target is None:
            value = bytearray(num_bytes)
            self._fill(memoryview(value))
            self._end_of_value()
            return bytes(value)
        if num_bytes == target.nbytes:
            self._fill(target)
        else:
            self._skip(num_bytes)
        self._end_of_value()
        return num_bytes

    def _fill(self, target: memoryview) -> None:
        filled = self._from_ahead(target)
        # One call takes the rest of this value and the start of the next reply; TLS has no such call.
        scatter = not isinstance(self._socket, ssl.SSLSocket)
        while filled < target.nbytes:
            rest = target[filled:]
            if scatter:
                filled += self._received(self._socket.recvmsg_into([rest, self._ahead])[0])
            else:
                filled += self._received(self._socket.recv_into(rest))
        self._start, self._end = (0, filled - target.nbytes) if filled > target.nbytes else (self._start, self._end)

    def _from_ahead(self, target: memoryview) -> int:
        count = min(target.nbytes, self._end - self._start)
        target[:count] = self._ahead[self._start : self._start + count]
        self._start += count
        return count

    def _skip(self, num_bytes: int) -> None:
        away = memoryview(bytearray(min(num_bytes, 1 << 20)))
        while num_bytes:
            piece = away[: min(num_bytes, away.nbytes)]
            self._fill(piece)
            num_bytes -= piece.nbytes

    def _end_of_value(self) -> None:
        mark = bytearray(2)
        self._fill(memoryview(mark))
        if mark != b"\r\n":
            raise InvalidResponse(f"a value that does not end where it should: {bytes(mark)!r}")

    def _received(self, count: int) -> int:
        if not count:
            raise Disconnected("the server closed the connection")
        return count

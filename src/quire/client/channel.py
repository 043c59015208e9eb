"""A channel between two processes: whole messages of bytes, over a pair of sockets without a name.

No thread stands between a message and its reader, and a writer never waits for the reader: what the socket does not
take is kept, and sent by `flush` once the socket can be written to.
"""

from __future__ import annotations

import select
import socket
import struct
import time

_LENGTH = struct.Struct("<Q")  # precedes each message
_READ_BYTES = 1 << 18


class Channel:
    """One end. Only one thread may use it. A message to a process that has ended is dropped."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent = bytearray()
        self._received = bytearray()  # the beginning of a message whose rest has not arrived
        self.is_open = True  # False once the other end is closed and all it sent has been received

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """One end, and the socket of the other, for the process that makes a channel of it."""
        own, other = socket.socketpair()
        return cls(own), other

    def fileno(self) -> int:
        """For event loops."""
        return self._end.fileno()

    @property
    def is_within_message(self) -> bool:
        """Whether the rest of a message is on its way."""
        return bool(self._received)

    def send(self, message: bytes) -> bool:
        """Send a message; whether nothing is left to `flush`."""
        self._unsent += _LENGTH.pack(len(message))
        self._unsent += message
        return self.flush()

    def flush(self) -> bool:
        """Send what the socket takes now; whether nothing is left."""
        while self._unsent:
            try:
                del self._unsent[: self._end.send(self._unsent)]
            except BlockingIOError:
                return False
            except OSError:  # the other end is closed
                self._unsent.clear()
        return True

    def has_news(self) -> bool:
        """Whether `receive` would find bytes, or the end."""
        readable = select.poll()
        readable.register(self._end, select.POLLIN)
        return self.is_open and bool(readable.poll(0))

    def receive(self) -> list[bytes]:
        """The messages that have arrived; without waiting."""
        try:
            found = self._end.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            found = b""
        self.is_open = bool(found)
        self._received += found
        messages, start = [], 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            begin, start_of_next = start + _LENGTH.size, start + _LENGTH.size + length
            if len(self._received) < start_of_next:
                break
            messages.append(bytes(self._received[begin:start_of_next]))
            start = start_of_next
        del self._received[:start]
        return messages

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close this end; what is unsent gets so long. Idempotent."""
        writable, until = select.poll(), time.monotonic() + linger_s
        while not self.flush() and (left_s := until - time.monotonic()) > 0:
            writable.register(self._end, select.POLLOUT)
            writable.poll(left_s * 1000)
        self._end.close()

"""Connections: a bounded number of connections to one Valkey or Redis server, and pipelines over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, LifoQueue
from threading import Lock
from typing import Any, TypeAlias
from urllib.parse import urlencode

import redis
from redis.connection import parse_url
from redis.exceptions import RedisError, ResponseError

from quire.errors import InvalidInput, StoreError
from quire.tiers.stores.failures import Failures
from quire.tiers.stores.options import Options, not_understood
from quire.tiers.stores.resp import Reply, ReplyReader

Command: TypeAlias = "tuple[bytes | memoryview | Reply, ...]"

_SCHEMES = {"valkey": "redis", "valkeys": "rediss", "redis": "redis", "rediss": "rediss", "unix": "unix"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a URL says: where the server is, without its secrets; redis-py's arguments; and options of our own."""

    where: str
    connection: dict[str, Any] = field(repr=False)
    timeout: float
    connections: int
    pending: float

    @classmethod
    def parse(cls, url: str) -> Settings:
        """Understand a URL, or raise InvalidInput."""
        options = Options(url, ("timeout", "connections", "pending", "db", "ssl_*"))
        parts, where = options.parts, options.where
        if parts.scheme not in _SCHEMES:
            raise InvalidInput(f"a Valkey URL begins with valkey://, redis:// or unix://, not {parts.scheme!r}.")
        timeout, connections = options.number("timeout", 2.0), math.ceil(options.number("connections", 8))
        pending = options.number("pending", 30.0)
        theirs = f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path}?{urlencode(options.rest())}"
        try:
            connection = parse_url(theirs)  # type: ignore[no-untyped-call]
        except ValueError:
            raise not_understood(where) from None
        return cls(where=where, connection=connection, timeout=timeout, connections=connections, pending=pending)


class Connections:
    """Pipelines to one server, each over a connection of its own while it lasts. For any number of threads.

    A connection on which anything went wrong is closed, so that no answer is ever taken for another's; the next call
    connects again. `failures` counts by kind: the name of an exception, or the first word of a refusal.
    """

    def __init__(self, settings: Settings) -> None:
        self.where = settings.where
        self.failures = Failures()
        self._settings = settings
        self._closed = False
        self._closing = Lock()
        self._idle: LifoQueue[_Line] = LifoQueue()
        for _ in range(settings.connections):
            self._idle.put(_Line(settings))

    def open(self) -> None:
        """Find the server there and willing, or raise StoreError."""
        (reply,) = self.call([(b"PING",)])
        if reply != b"PONG":
            self.close()
            raise StoreError(
                f"{self.where} does not answer: {str(reply).rstrip('.')}.",
                fix="start the server, or correct the URL or the password.",
            )

    def call(
        self, commands: Sequence[Command], targets: Sequence[memoryview] = (), *, counted: bool = True
    ) -> list[Reply]:
        """Send commands at once and return what the server answers to each, refusals as ResponseErrors, and Lost.

        With `targets`, a value of a target's exact length is read into the target, and the reply is the value's length.
        """
        if not commands:
            return []
        try:
            line = self._idle.get(timeout=self._settings.timeout)
        except Empty:
            return self._lost(len(commands), "Busy", f"all {self._settings.connections} connections are in use")
        replies: list[Reply] = []
        try:
            if self._closed:
                return self._lost(len(commands), "Closed", "the store was closed")
            line.call(commands, targets, replies)
        except (RedisError, OSError) as error:
            line.close()
            replies += self._lost(len(commands) - len(replies), type(error).__name__, str(error))
        finally:
            self._idle.put(line)
        for reply in replies if counted else ():
            if isinstance(reply, ResponseError) and not isinstance(reply, Lost):
                self.failures.note(str(reply).partition(" ")[0] or "ERR")
        return replies

    def close(self) -> None:
        """Close every connection; calls in other threads end first. May be called twice."""
        self._closed = True
        with self._closing:
            lines = [self._idle.get() for _ in range(self._settings.connections)]
            for line in lines:
                line.close()
                self._idle.put(line)

    def _lost(self, count: int, kind: str, reason: str) -> list[Reply]:
        self.failures.note(kind)
        return [Lost(f"{kind}: {reason}") for _ in range(count)]


class Lost(ResponseError):
    """In place of a reply that did not come. Whoever has more to ask stops: it would wait as long again."""


class _Line:
    """One connection, made when first used, made again after it was lost."""

    def __init__(self, settings: Settings) -> None:
        self._reader = ReplyReader()
        arguments = dict(settings.connection)
        make = arguments.pop("connection_class", redis.Connection)
        self._connection = make(
            **arguments,
            parser_class=lambda socket_read_size: self._reader,
            protocol=2,
            socket_timeout=settings.timeout,
            socket_connect_timeout=settings.timeout,
        )

    def call(self, commands: Sequence[Command], targets: Sequence[memoryview], replies: list[Reply]) -> None:
        """Send and append the replies. Raises RedisError or OSError; what was appended by then is good."""
        if self._reader.is_connected and self._reader.can_read():
            self._connection.disconnect()  # the server hung up meanwhile, or said what nobody asked
        self._connection.send_packed_command(self._connection.pack_commands(commands))
        for index in range(len(commands)):
            self._reader.target = targets[index] if targets else None
            try:
                replies.append(self._connection.read_response())
            except ResponseError as refusal:
                replies.append(refusal)
                if str(refusal).startswith(("READONLY", "MASTERDOWN", "LOADING")):
                    self._connection.disconnect()  # another server may have its name by now
                    raise

    def close(self) -> None:
        """Close it; it can be used again."""
        self._connection.disconnect()

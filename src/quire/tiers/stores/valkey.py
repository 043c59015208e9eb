"""ValkeyStore: records in a Valkey or Redis server.

    valkey://user:password@host:6379/0    also redis://; with TLS valkeys:// or rediss://
    unix:///run/valkey.sock?db=0

Options after `?`: `timeout` (seconds per answer, 2), `connections` (at most, 8), `pending` (seconds that a prepared
record waits for its writer, 30), and redis-py's for TLS (`ssl_ca_certs=...`).

    quire/SCOPE/PAGE.PART           a record
    quire.pending/SCOPE/PAGE.PART   the token of the writer that prepared it; it expires
    quire.written/.../TOKEN         a record under way; the script that checks the token renames it

It supports one server, not a cluster: scripts name several keys. The server evicts: set `maxmemory` and
`maxmemory-policy allkeys-lru`. The server evicts the oldest of a random sample, by a clock of seconds, so records of
one batch have no order; `maxmemory-samples 10` is more exact. Without a policy a full server refuses, which is RETRY.
Every error is RETRY and counted in `failures`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlencode

from redis.connection import parse_url

from quire.errors import InvalidInput, StoreError
from quire.tiers.store import Answer, Entry, Record, RecordViews, StoreKey
from quire.tiers.stores.connections import Command, Connections, Lost, Reply
from quire.tiers.stores.registry import Options, not_understood
from quire.tiers.stores.remote import RemoteStore, batches, in_parts, key_of

_SCHEMES = {"valkey": "redis", "valkeys": "rediss", "redis": "redis", "rediss": "rediss", "unix": "unix"}
_RECORD, _PENDING, _WRITTEN = b"quire/", b"quire.pending/", b"quire.written/"
_BATCH_KEYS = 256
_LARGEST = 512 << 20  # bytes of a value, in a server that was not told otherwise
_SENT_BYTES = 8 << 20  # in one pipeline
_ASKED_BYTES = 2 << 20  # bytes in one pipeline: more waits in the server and is evicted from its CPU caches

_EXISTS = b"""
local found = {}
for i = 1, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[i]) == 1 then found[#found + 1] = 1
  elseif redis.call('EXISTS', KEYS[i + 1]) == 1 then found[#found + 1] = 2
  else found[#found + 1] = 0 end
end
return found"""

# A call whose answer was lost leaves its own token. TOUCH counts as a use, EXISTS would not.
_PREPARE = b"""
local found = {}
for i = 1, #KEYS, 2 do
  if redis.call('TOUCH', KEYS[i]) == 1 then found[#found + 1] = 1
  else
    local owner = redis.call('GET', KEYS[i + 1])
    if owner and owner ~= ARGV[1] then found[#found + 1] = 2
    else
      redis.call('SET', KEYS[i + 1], ARGV[1], 'PX', ARGV[2])
      found[#found + 1] = 0
    end
  end
end
return found"""

# Another writer's token prevents the commit; a token that expired or was evicted does not.
_COMMIT = b"""
local found = {}
for i = 1, #KEYS, 3 do
  local record, pending, written = KEYS[i], KEYS[i + 1], KEYS[i + 2]
  local owner = redis.call('GET', pending)
  local there = redis.call('EXISTS', record)
  if there == 0 and (not owner or owner == ARGV[1]) and redis.call('EXISTS', written) == 1 then
    redis.call('RENAME', written, record)
    redis.call('PERSIST', record)
    there = 1
  else
    redis.call('UNLINK', written)
  end
  if owner == ARGV[1] then redis.call('DEL', pending) end
  found[#found + 1] = there
end
return found"""

_DROP = b"""
for i = 1, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then redis.call('DEL', KEYS[i]) end
end
return {}"""


def open(url: str, capacity: int | None = None, *, counts_use: bool = True) -> ValkeyStore:  # noqa: A001
    """Connect to the server of `url`. Raises InvalidInput for settings that do not exist, StoreError if it fails."""
    if capacity is not None:
        raise InvalidInput(
            f"a Valkey server bounds itself, so {capacity} bytes cannot be asked of it.",
            fix="set `maxmemory` and `maxmemory-policy allkeys-lru` in the server, and leave the capacity out.",
        )
    options = Options(url, ("timeout", "connections", "pending", "db", "ssl_*"))
    parts, where = options.parts, options.where
    if parts.scheme not in _SCHEMES:
        raise InvalidInput(f"a Valkey URL begins with valkey://, redis:// or unix://, not {parts.scheme!r}.")
    timeout, count = options.number("timeout", 2.0), math.ceil(options.number("connections", 8))
    pending = options.number("pending", 30.0)
    theirs = f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path}?{urlencode(options.rest())}"
    try:
        arguments = parse_url(theirs)  # type: ignore[no-untyped-call]
    except ValueError:
        raise not_understood(where) from None
    return ValkeyStore(Connections(where, arguments, timeout, count), pending_seconds=pending, counts_use=counts_use)


class ValkeyStore(RemoteStore):
    """The store port on a server that speaks RESP; made by `open`. Owns its connections. `prepare` stores a token that
    other writers respect. `complete` sends the bytes under a temporary name, and a script renames them. If another
    writer has the record by then, the answer is RETRY."""

    def __init__(self, connections: Connections, *, pending_seconds: float = 30.0, counts_use: bool = True) -> None:
        super().__init__(connections.failures)
        self._connections = connections
        self._pending_ms = b"%d" % max(1, int(pending_seconds * 1000))
        self._token = secrets.token_hex(8).encode()
        self._counts_use = counts_use

    @property
    def largest_record(self) -> int:
        """The server's limit of a value, or its default where it tells none."""
        (reply,) = self._connections.call([(b"CONFIG", b"GET", b"proto-max-bulk-len")], counted=False)
        limit = reply[1] if isinstance(reply, list) and len(reply) == 2 else b""
        return int(limit) if isinstance(limit, bytes) and limit.isdigit() else _LARGEST

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        return self._ask(_EXISTS, keys)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        buffers = list(map(RecordViews, records))
        answers = [Answer.RETRY] * len(keys)
        for batch in batches([buffer.num_bytes for buffer in buffers], _BATCH_KEYS, _ASKED_BYTES):
            targets = [buffers[index] for index in batch]
            commands: list[Command] = [(b"GET", _name(_RECORD, keys[index])) for index in batch]
            replies = (self._connections.call if self._counts_use else self._untouching)(commands, targets)
            for index, target, reply in zip(batch, targets, replies, strict=True):
                if reply is None or isinstance(reply, int):
                    answers[index] = Answer.HIT if reply == target.num_bytes else Answer.MISS
            if isinstance(replies[-1], Lost):
                break
        return answers

    def remove(self, keys: Sequence[StoreKey]) -> int:
        replies = self._in_parts(keys, lambda some: (b"UNLINK", *[_name(_RECORD, key) for key in some]))
        return sum(reply for _, reply in replies if isinstance(reply, int))

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        pattern = _RECORD + (b"*" if scope is None else scope.hex().encode() + b"/*")
        seen: set[bytes] = set()
        cursor: Reply = b"0"
        while isinstance(cursor, bytes):
            (reply,) = self._connections.call([(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")])
            if not isinstance(reply, list):
                raise StoreError(f"the records of {self._connections.where} cannot be listed: {reply!s}.")
            cursor, names = reply
            assert isinstance(names, list)
            fresh = [name for name in names if isinstance(name, bytes) and name not in seen]
            seen.update(fresh)
            yield from self._described(fresh)
            if cursor == b"0":
                return

    def close(self) -> None:
        self._drop_announced()
        self._connections.close()

    def _claim(self, keys: list[StoreKey], sizes: list[int]) -> list[Answer]:
        return self._ask(_PREPARE, keys, self._token, self._pending_ms)

    def _unclaim(self, keys: list[StoreKey]) -> None:
        list(self._in_parts(keys, lambda some: _script(_DROP, [_name(_PENDING, key) for key in some], self._token)))

    def _send(self, keys: list[StoreKey], records: list[RecordViews]) -> list[Answer]:
        answers = [Answer.RETRY] * len(keys)
        for batch in batches([record.num_bytes for record in records], _BATCH_KEYS, _SENT_BYTES):
            commands: list[Command] = []
            names: list[bytes] = []
            for index in batch:
                key, written = keys[index], _name(_WRITTEN, keys[index]) + b"/" + self._token
                commands.append((b"SET", written, records[index], b"PX", self._pending_ms))
                names += [_name(_RECORD, key), _name(_PENDING, key), written]
            reply = self._connections.call([*commands, _script(_COMMIT, names, self._token)])[-1]
            if isinstance(reply, Lost):
                break
            if isinstance(reply, list) and len(reply) == len(batch):
                for index, found in zip(batch, reply, strict=True):
                    answers[index] = Answer.HIT if found == 1 else Answer.RETRY
        return answers

    def _in_parts(
        self, keys: Sequence[StoreKey], command: Callable[[Sequence[StoreKey]], Command]
    ) -> Iterator[tuple[Sequence[StoreKey], Reply]]:
        """Batches of keys with the server's reply to a command about them, up to the first lost reply."""
        for some in in_parts(keys, _BATCH_KEYS):
            (reply,) = self._connections.call([command(some)])
            yield some, reply
            if isinstance(reply, Lost):
                return

    def _ask(self, script: bytes, keys: Sequence[StoreKey], *arguments: bytes) -> list[Answer]:
        """The script's number for each key: 0 MISS, 1 HIT, 2 PENDING."""

        def command(some: Sequence[StoreKey]) -> Command:
            names = [_name(prefix, key) for key in some for prefix in (_RECORD, _PENDING)]
            return _script(script, names, *arguments)

        answers: list[Answer] = []
        for some, reply in self._in_parts(keys, command):
            if isinstance(reply, list) and len(reply) == len(some):
                answers += [_ANSWERS[found] if isinstance(found, int) else Answer.RETRY for found in reply]
            else:
                answers += [Answer.RETRY] * len(some)
        return answers + [Answer.RETRY] * (len(keys) - len(answers))

    def _untouching(self, commands: Sequence[Command], targets: Sequence[RecordViews] = ()) -> list[Reply]:
        """Replies to commands that do not count as a use. Servers before 7.2 refuse NO-TOUCH, and count them."""
        nothing = RecordViews(b"")
        wrapped = [(b"CLIENT", b"NO-TOUCH", b"ON"), *commands, (b"CLIENT", b"NO-TOUCH", b"OFF")]
        filled = [nothing, *targets, nothing] if targets else ()
        return self._connections.call(wrapped, filled, counted=False)[1:-1]

    def _described(self, names: list[bytes]) -> Iterator[Entry]:
        commands: list[Command] = []
        for name in names:
            commands += [(b"OBJECT", b"IDLETIME", name), (b"STRLEN", name)]
        replies = self._untouching(commands)
        for name, idle, length in zip(names, replies[::2], replies[1::2], strict=True):
            key = key_of(name.decode(errors="replace").removeprefix("quire/"))
            if key is None:
                continue  # a key of another program
            if not isinstance(length, int):
                raise StoreError(f"the records of {self._connections.where} cannot be read: {length!s}.")
            if length:
                yield Entry(key, length, float(idle) if isinstance(idle, int) else None)


_ANSWERS = (Answer.MISS, Answer.HIT, Answer.PENDING)


def _name(prefix: bytes, key: StoreKey) -> bytes:
    return prefix + str(key).encode()


def _script(script: bytes, names: Sequence[bytes], *arguments: bytes) -> Command:
    return (b"EVAL", script, b"%d" % len(names), *names, *arguments)

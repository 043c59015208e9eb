"""MooncakeStore: records in a Mooncake Store, a memory pool of many machines under one master.

    mooncake://127.0.0.1:50051?segment=512MiB    a master; this process adds 512 MiB to the pool
    mooncake://127.0.0.1:50051                   the same without adding memory

Further options: `host` (this process' address for its peers, 127.0.0.1), `metrics` (the port of the master's HTTP
server, needed to list records), `replicas` (1), `bounce` (memory that records pass through, 64MiB; a record may have
half of it) and `timeout` (seconds for an answer of the master, 2; the first store of a process sets it).

Start the master with `--rpc_address=127.0.0.1 --metrics_host=127.0.0.1`: by default it listens on every address. The
client library also does so, whatever `host` is, and requires no credentials: any peer that reaches its ports can write
to the pool. Protect these ports by a firewall. Digests of records detect bytes that were changed.

Records pass through the store's own memory, registered once: a cancelled transfer may still write to its target, which
must not be a page then.

Behaviour of the pool, and of this store:

    it refuses first and then evicts              asks again for a while, then RETRY
    fewer replicas than asked for                 checks one record per batch: `failures["replicas"]`
    a master that is gone: -900 after seconds     RETRY, and for two seconds RETRY at once, without asking
    a repeated key in a read fills one buffer     asks for each key once
    a record just read is not removed             removes by force
    calls after close end the process             `close` waits for calls under way, and later ones are not made
    it evicts in the order in which leases end    leases the first of a batch last
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from queue import LifoQueue
from typing import Any

from quire.errors import InvalidInput, StoreError
from quire.tiers.store import Answer, Calls, Counts, Entry, Record, RecordViews, StoreKey
from quire.tiers.stores.registry import Options
from quire.tiers.stores.remote import RemoteStore, batches, in_parts, key_of

_PREFIX = "quire/"
_MOST_PIECES = 1024  # after a batch of more than 2048 the transport refuses all batches for a while
_NUM_LANES = 2
_BATCH_BYTES = 4 << 20  # bytes through a lane at once: more is evicted from the CPU caches before it is copied
_ALIGNED = 64
_LOCAL_BYTES = 16 << 20  # the library's own buffer, for calls that are not used here
_REST_SECONDS = 2.0
_WAITS_FOR_ROOM = (0.01, 0.02, 0.05, 0.1, 0.1)
_Move = Callable[[list[StoreKey], list[RecordViews], list[int]], list[Answer]]
"""Moves records through the bounce buffer, at these offsets in it."""
_NO_ROOM, _TOO_SMALL, _NOT_READY, _UNKNOWN, _NO_MASTER, _NO_ANSWER = -200, -600, -703, -704, -900, -901


def open(url: str, capacity: int | None = None, *, counts_use: bool = True) -> MooncakeStore:  # noqa: A001
    """Join the pool of `url`; `capacity` is the bytes added to it, unless the URL says so. Reading counts as a use.

    Raises InvalidInput for invalid settings, StoreError if it fails.
    """
    options = Options(url, ("segment", "host", "metrics", "replicas", "bounce", "timeout"))
    parts = options.parts
    if parts.scheme != "mooncake" or not parts.hostname:
        raise InvalidInput(f"a Mooncake URL looks like mooncake://host:port, not {options.where}.")
    segment = options.size("segment", -1)
    if capacity is not None and segment >= 0:
        raise InvalidInput(
            f"{options.where} gives {segment} bytes to the pool and the capacity is {capacity}.", fix="say one of them."
        )
    timeout, host = options.number("timeout", 2.0), options.text("host", "127.0.0.1")
    master = f"{parts.hostname}:{parts.port or 50051}"
    metrics, replicas = int(options.number("metrics", 0)), math.ceil(options.number("replicas", 1))
    bounce = options.size("bounce", 64 << 20)
    client, replication = _joined(master, host, segment if segment >= 0 else capacity or 0, timeout)
    replication.replica_num = replicas
    return MooncakeStore(
        client,
        replication,
        options.where,
        bounce_bytes=bounce,
        listing=f"http://{parts.hostname}:{metrics}/get_all_keys" if metrics else "",
    )


def _joined(master: str, host: str, segment: int, timeout: float) -> tuple[Any, Any]:
    environment = {  # the library reads all of these
        "MC_TCP_BIND_ADDRESS": host,
        "MC_RPC_TIMEOUT_MS": f"{timeout * 1000:.0f}",
        "MC_RPC_CONNECT_TIMEOUT_MS": f"{min(timeout, 1.0) * 1000:.0f}",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "ERROR",
    }
    os.environ.update({name: value for name, value in environment.items() if name not in os.environ})
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except (ImportError, OSError) as error:
        raise StoreError(
            f"the Mooncake store needs its client library, which cannot be imported: {error}.",
            fix="in the checkout of Quire: pip install '.[mooncake]', and apt-get install libibverbs1.",
        ) from error
    fix = "start mooncake_master, or correct the address."
    try:  # the library would retry for long
        socket.create_connection((master.rpartition(":")[0], int(master.rpartition(":")[2])), timeout).close()
    except OSError as error:
        raise StoreError(f"the Mooncake master at {master} cannot be reached: {error}.", fix=fix) from error
    client = MooncakeDistributedStore()
    code = client.setup(host, "P2PHANDSHAKE", segment, _LOCAL_BYTES, "tcp", "", master)
    if code != 0:
        raise StoreError(f"the Mooncake master at {master} does not take part: code {code}.", fix=fix)
    return client, ReplicateConfig()


class MooncakeStore(RemoteStore):
    """The store port on a Mooncake pool; made by `open`. Owns the client and the registered memory. `failures` counts
    by the library's codes. It never answers PENDING for other processes; the first record of a key stays."""

    def __init__(self, client: Any, replication: Any, where: str, *, bounce_bytes: int, listing: str) -> None:
        super().__init__(Counts())
        self._client = client
        self._replication = replication
        self._where = where
        self._listing = listing
        self._rests_until = 0.0
        self._calls = Calls()
        self._lane_bytes = bounce_bytes // _NUM_LANES // mmap.PAGESIZE * mmap.PAGESIZE
        num_bytes = _NUM_LANES * self._lane_bytes
        self._memory = memoryview(mmap.mmap(-1, num_bytes))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._idle_lanes: LifoQueue[int] = LifoQueue()  # offsets; each lane is for one batch at a time
        for start in range(0, num_bytes, self._lane_bytes):
            self._idle_lanes.put(start)
        if client.register_buffer(self._address, num_bytes) != 0:
            self.close()
            raise StoreError(f"{where} does not register {num_bytes} bytes.", fix="lower `bounce`.")

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """HIT or MISS. `exists` leases records against eviction and so counts as a use. It looks up the last key first,
        so that the lease of the first key ends last."""
        codes = self._ask_in_parts(self._client.batch_is_exist, _names(keys)[::-1])
        return [Answer.HIT if code == 1 else Answer.MISS if code == 0 else Answer.RETRY for code in codes][::-1]

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        return self._by_lanes(self._receive, keys, list(map(RecordViews, records)))

    def remove(self, keys: Sequence[StoreKey]) -> int:
        return self._ask_in_parts(self._client.batch_remove, list(dict.fromkeys(_names(keys))), True).count(0)

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """Visible records. Raises StoreError if the master does not list them, or `metrics` is not set."""
        if not self._listing or not self._calls.are_open:
            raise StoreError(f"{self._where} cannot be listed.", fix="add metrics=PORT, of the master's HTTP server.")
        try:
            with urllib.request.urlopen(self._listing, timeout=10) as page:
                names = page.read().decode().split()
        except (OSError, UnicodeError) as error:
            raise StoreError(f"{self._where} cannot be listed: {error}.") from error
        wanted = _PREFIX + (f"{scope.hex()}/" if scope else "")
        for some in in_parts([name for name in names if name.startswith(wanted)], _MOST_PIECES):
            with self._usable() as usable:
                described = self._client.batch_get_replica_desc(some) if usable else {}
            if not described:
                raise StoreError(f"{self._where} lists records and does not describe them.")
            for name in some:
                copies = [copy for copy in described.get(name, ()) if copy.is_memory_replica()]
                key = key_of(name.removeprefix(_PREFIX))
                if copies and key is not None:
                    yield Entry(key, copies[0].get_memory_descriptor().buffer_descriptor.size)

    def close(self) -> None:
        """Wait for calls in flight, then disconnect. Records in memory of this process are lost."""
        if self._calls.close():
            self._drop_announced()
            self._client.unregister_buffer(self._address)
            self._client.close()

    def _claim(self, keys: list[StoreKey], sizes: list[int]) -> list[Answer]:
        """RETRY for a record too large for `bounce`."""
        fits = [size <= self._lane_bytes for size in sizes]
        return [answer if good else Answer.RETRY for answer, good in zip(self.exists(keys), fits, strict=True)]

    def _send(self, keys: list[StoreKey], records: list[RecordViews]) -> list[Answer]:
        return self._by_lanes(self._put, keys, records)

    def _by_lanes(self, move: _Move, keys: Sequence[StoreKey], records: Sequence[RecordViews]) -> list[Answer]:
        """The answers of `move` for batches that fit in a lane; RETRY for larger records."""
        answers = [Answer.RETRY] * len(keys)
        fitting = [index for index, record in enumerate(records) if record.num_bytes <= self._lane_bytes]
        rooms = [-(-records[index].num_bytes // _ALIGNED) * _ALIGNED for index in fitting]
        for batch in batches(rooms, _MOST_PIECES, min(self._lane_bytes, _BATCH_BYTES)):
            some = [fitting[at] for at in batch]
            lane = self._idle_lanes.get()
            try:
                places = list(accumulate((rooms[at] for at in batch), initial=lane))[:-1]
                moved = move([keys[index] for index in some], [records[index] for index in some], places)
            finally:
                self._idle_lanes.put(lane)
            for index, answer in zip(some, moved, strict=True):
                answers[index] = answer
        return answers

    @contextmanager
    def _usable(self) -> Iterator[bool]:
        """Whether the block may call the client: it is open and the master has not just failed."""
        with self._calls as is_open:
            yield is_open and time.monotonic() >= self._rests_until

    def _ask(self, verb: Callable[..., Sequence[int]], names: Sequence[str], *arguments: object) -> list[int]:
        """The client's code for each name; -900 for all if it may not be called."""
        with self._usable() as usable:
            codes = list(verb(names, *arguments)) if usable and names else []
            failed = [code for code in codes if code < 0 and code not in (_UNKNOWN, _NOT_READY, _TOO_SMALL)]
            self.failures.add(*map(str, failed))
            if _NO_MASTER in failed or _NO_ANSWER in failed:
                self._rests_until = time.monotonic() + _REST_SECONDS
            return codes if len(codes) == len(names) else [_NO_MASTER] * len(names)

    def _ask_in_parts(self, verb: Callable[..., Sequence[int]], names: Sequence[str], *arguments: object) -> list[int]:
        return [code for some in in_parts(names, _MOST_PIECES) for code in self._ask(verb, some, *arguments)]

    def _put(self, keys: list[StoreKey], records: list[RecordViews], places: list[int]) -> list[Answer]:
        for place, record in zip(places, records, strict=True):
            for view in record.views:
                self._memory[place : place + view.nbytes] = view
                place += view.nbytes
        names, codes = _names(keys), [_NO_ROOM] * len(keys)
        for wait in (0.0, *_WAITS_FOR_ROOM):
            time.sleep(wait)
            left = [at for at, code in enumerate(codes) if code == _NO_ROOM]
            again = self._ask(
                self._client.batch_put_from,
                [names[at] for at in left],
                [self._address + places[at] for at in left],
                [records[at].num_bytes for at in left],
                self._replication,
            )
            for at, code in zip(left, again, strict=True):
                codes[at] = code
            if _NO_ROOM not in codes:
                break
        wanted = self._replication.replica_num
        if wanted > 1 and codes[0] == 0:
            with self._usable() as usable:
                if usable and len(self._client.get_replica_desc(names[0])) < wanted:
                    self.failures.add("replicas")
        return [Answer.HIT if code == 0 else Answer.RETRY for code in codes]

    def _receive(self, keys: list[StoreKey], buffers: list[RecordViews], places: list[int]) -> list[Answer]:
        sizes = [buffer.num_bytes for buffer in buffers]
        asked = {key: at for at, key in reversed(list(enumerate(keys))) if sizes[at]}  # each key is requested once
        codes = self._ask(
            self._client.batch_get_into,
            _names(list(asked)),
            [self._address + places[at] for at in asked.values()],
            [sizes[at] for at in asked.values()],
        )
        code_of = dict(zip(asked, codes, strict=True))
        answers = [_answer(code_of.get(key, _TOO_SMALL), size) for key, size in zip(keys, sizes, strict=True)]
        for key, buffer, answer in zip(keys, buffers, answers, strict=True):
            if answer is Answer.HIT:
                place = places[asked[key]]
                buffer.write(0, self._memory[place : place + buffer.num_bytes])
        return answers


def _answer(code: int, num_bytes: int) -> Answer:
    if code == num_bytes:
        return Answer.HIT
    return Answer.MISS if code >= 0 or code in (_UNKNOWN, _TOO_SMALL) else Answer.RETRY


def _names(keys: Sequence[StoreKey]) -> list[str]:
    return [f"{_PREFIX}{key}" for key in keys]

"""MooncakeStore: records in a Mooncake Store, memory of many machines under one master.

    mooncake://127.0.0.1:50051?segment=512MiB    a master, and this process gives 512 MiB to the pool
    mooncake://127.0.0.1:50051                    the same without giving any: others do

Further options: `host` (this process' address for its peers, 127.0.0.1), `metrics` (the port of the master's HTTP
server, needed to list records), `replicas` (1), `bounce` (memory that records pass through, 64MiB; a record may have
half of it) and `timeout` (seconds the master has for an answer, 2; settled by the first store of a process).

Start the master with `--rpc_address=127.0.0.1 --metrics_host=127.0.0.1`: it listens everywhere by default. The client
library opens ports on every address whatever `host` says, and asks for no credentials: whoever reaches them can write
to the pool. Keep them behind a firewall; records carry digests for what gets through.

Records pass through memory of the store's own, registered once. A transfer that was given up may still write where it
was told to, and that must not be a page by then.

What the pool does not tell, and what this store does about it:

    put of a key that is there keeps the old record       as the port wants it
    a full pool evicts after it has refused               asks again for a while, then RETRY
    fewer replicas than asked for                         looks at one record of each batch: `failures["replicas"]`
    a master that is gone: -900 after seconds             RETRY, and for two seconds RETRY at once, without asking
    a new master knows nothing, and that is a MISS        as the port wants it
    a key twice in one read fills one buffer of the two   asks for each key once
    remove of a record that was just read is refused      removed by force
    calls after close end the process                     calls are counted out before
    the master evicts by the time a lease ends            of what is asked for together, the first is leased last
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

from typing_extensions import Buffer

from quire.errors import InvalidInput, StoreError
from quire.tiers.store import Answer, Entry, StoreKey
from quire.tiers.stores.counts import Counts
from quire.tiers.stores.gate import Gate
from quire.tiers.stores.options import Options
from quire.tiers.stores.remote import RemoteStore, batches, bytes_of, in_parts, key_of

_PREFIX = "quire/"
_MOST_PIECES = 1024  # the transport refuses a batch of more than 2048, and for a while everything after it
_BATCH_BYTES = 4 << 20  # what passes through a lane at once: more leaves the caches before it is copied
_ALIGNED = 64
_LOCAL_BYTES = 16 << 20  # the library's own buffer, for verbs that are not used here
_REST_SECONDS = 2.0
_WAITS_FOR_ROOM = (0.01, 0.02, 0.05, 0.1, 0.1)
_NO_ROOM, _TOO_SMALL, _NOT_READY, _UNKNOWN, _NO_MASTER, _NO_ANSWER = -200, -600, -703, -704, -900, -901


def open(url: str, capacity: int | None = None, *, counts_use: bool = True) -> MooncakeStore:  # noqa: A001
    """Join the pool of `url`; `capacity` are bytes given to it, if the URL does not say. Reading counts as use.

    Raises InvalidInput for settings that do not exist, StoreError if it fails.
    """
    options = Options(url, ("segment", "host", "metrics", "replicas", "bounce", "timeout"))
    parts = options.parts
    if parts.scheme != "mooncake" or not parts.hostname:
        raise InvalidInput(f"a Mooncake URL looks like mooncake://host:port, not {options.where}.")
    segment = options.size("segment", -1)
    if capacity is not None and segment >= 0:
        raise InvalidInput(
            f"{options.where} gives {segment} bytes to the pool and the capacity is {capacity}.",
            fix="say one of them.",
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
    """The library's client, and its settings for replicas."""
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)  # read by the library, as are the others
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(int(timeout * 1000)))
    os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", str(int(min(timeout, 1.0) * 1000)))
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except (ImportError, OSError) as error:
        raise StoreError(
            f"the Mooncake store needs its client library, which cannot be imported: {error}.",
            fix="pip install 'quire[mooncake]', and apt-get install libibverbs1.",
        ) from error
    fix = "start mooncake_master, or correct the address."
    try:  # the library would try for long
        socket.create_connection((master.rpartition(":")[0], int(master.rpartition(":")[2])), timeout).close()
    except OSError as error:
        raise StoreError(f"the Mooncake master at {master} cannot be reached: {error}.", fix=fix) from error
    client = MooncakeDistributedStore()
    code = client.setup(host, "P2PHANDSHAKE", segment, _LOCAL_BYTES, "tcp", "", master)
    if code != 0:
        raise StoreError(f"the Mooncake master at {master} does not take part: code {code}.", fix=fix)
    return client, ReplicateConfig()


class MooncakeStore(RemoteStore):
    """The store port on a Mooncake pool. Owns the client and the memory that records pass through; made by `open`.

    `failures` counts by the library's codes. Writers in other processes are not told of each other; where another one
    was faster, its record stays.
    """

    def __init__(self, client: Any, replication: Any, where: str, *, bounce_bytes: int, listing: str) -> None:
        super().__init__(Counts())
        self._client = client
        self._replication = replication
        self._where = where
        self._listing = listing
        self._rests_until = 0.0
        self._gate = Gate()
        self._bounce = Bounce(bounce_bytes, 2)
        if client.register_buffer(self._bounce.address, self._bounce.num_bytes) != 0:
            self.close()
            raise StoreError(f"{where} does not register {self._bounce.num_bytes} bytes.", fix="lower `bounce`.")

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """HIT or MISS; it keeps what is there from being evicted for the master's lease, and counts as use. Asked from
        the end, so that the lease of the first ends last."""
        answers: list[Answer] = []
        names = _names(keys)[::-1]
        for some in in_parts(names, _MOST_PIECES):
            codes = self._ask(len(some), self._client.batch_is_exist, some)
            answers += [Answer.HIT if code == 1 else Answer.MISS if code == 0 else Answer.RETRY for code in codes]
        return answers[::-1]

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Read into the buffers, through memory of this store. A record of another size than its buffer is a MISS."""
        buffers = [bytes_of(record) for record in records]
        answers = [Answer.RETRY] * len(keys)
        for batch in self._bounce.batches([buffer.nbytes for buffer in buffers], _MOST_PIECES, _BATCH_BYTES):
            got = self._receive([keys[index] for index in batch], [buffers[index] for index in batch])
            for index, answer in zip(batch, got, strict=True):
                answers[index] = answer
        return answers

    def remove(self, keys: Sequence[StoreKey]) -> int:
        """Forget records, leased or not; those of a master that does not answer are not counted."""
        removed = 0
        for some in in_parts(keys, _MOST_PIECES):
            names = list(dict.fromkeys(_names(some)))
            codes = self._ask(len(names), self._client.batch_remove, names, True)
            removed += codes.count(0)
        return removed

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """Visible records, as the master lists them. Raises StoreError where it does not, or `metrics` is not set."""
        if not self._listing or not self._gate.is_open:
            raise StoreError(f"{self._where} cannot be listed.", fix="add metrics=PORT, of the master's HTTP server.")
        try:
            with urllib.request.urlopen(self._listing, timeout=10) as page:
                names = page.read().decode().split()
        except (OSError, UnicodeError) as error:
            raise StoreError(f"{self._where} cannot be listed: {error}.") from error
        wanted = _PREFIX + (f"{scope.hex()}/" if scope else "")
        ours = [name for name in names if name.startswith(wanted)]
        for some in in_parts(ours, _MOST_PIECES):
            yield from self._described(some)

    def close(self) -> None:
        """Leave the pool, once calls in other threads have ended. What this process gave to the pool is gone."""
        if self._gate.shut():
            self._drop_announced()
            self._client.unregister_buffer(self._bounce.address)
            self._client.close()

    def _claim(self, keys: list[StoreKey], sizes: list[int]) -> list[Answer]:
        """RETRY for a record that is too long for `bounce`."""
        fits = [size <= self._bounce.lane_bytes for size in sizes]
        return [answer if good else Answer.RETRY for answer, good in zip(self.exists(keys), fits, strict=True)]

    def _send(self, keys: list[StoreKey], records: list[memoryview]) -> list[Answer]:
        answers = [Answer.RETRY] * len(keys)
        for batch in self._bounce.batches([record.nbytes for record in records], _MOST_PIECES, _BATCH_BYTES):
            codes = self._put([keys[index] for index in batch], [records[index] for index in batch])
            for index, code in zip(batch, codes, strict=True):
                answers[index] = Answer.HIT if code == 0 else Answer.RETRY
        return answers

    @contextmanager
    def _usable(self) -> Iterator[bool]:
        """Whether the client may be called in the block: it is open and did not just find the master gone."""
        with self._gate as is_open:
            yield is_open and time.monotonic() >= self._rests_until

    def _ask(self, count: int, verb: Callable[..., Sequence[int]], *arguments: object) -> list[int]:
        """The client's codes, -900 for all where it may not be called."""
        with self._usable() as usable:
            if not usable:
                return [_NO_MASTER] * count
            codes = list(verb(*arguments))
            failed = [code for code in codes if code < 0 and code not in (_UNKNOWN, _NOT_READY, _TOO_SMALL)]
            for code in failed:
                self.failures.add(str(code))
            if _NO_MASTER in failed or _NO_ANSWER in failed:
                self._rests_until = time.monotonic() + _REST_SECONDS
            return codes if len(codes) == count else [_NO_MASTER] * count

    def _put(self, keys: list[StoreKey], records: list[memoryview]) -> list[int]:
        with self._bounce.lane() as lane:
            places = lane.places([record.nbytes for record in records])
            for place, record in zip(places, records, strict=True):
                lane.memory[place : place + record.nbytes] = record
            names, addresses = _names(keys), [lane.address + place for place in places]
            codes = [_NO_ROOM] * len(keys)
            for wait in (0.0, *_WAITS_FOR_ROOM):
                time.sleep(wait)
                left = [at for at, code in enumerate(codes) if code == _NO_ROOM]
                again = self._ask(
                    len(left),
                    self._client.batch_put_from,
                    [names[at] for at in left],
                    [addresses[at] for at in left],
                    [records[at].nbytes for at in left],
                    self._replication,
                )
                for at, code in zip(left, again, strict=True):
                    codes[at] = code
                if _NO_ROOM not in codes:
                    break
        self._count_replicas(names[0], codes[0])
        return codes

    def _count_replicas(self, name: str, code: int) -> None:
        wanted = self._replication.replica_num
        if wanted < 2 or code != 0:
            return
        with self._usable() as usable:
            if usable and len(self._client.get_replica_desc(name)) < wanted:
                self.failures.add("replicas")

    def _receive(self, keys: list[StoreKey], buffers: list[memoryview]) -> list[Answer]:
        sizes = [buffer.nbytes for buffer in buffers]
        first = {key: at for at, key in reversed(list(enumerate(keys)))}  # each key is asked for once
        asked = [at for at in first.values() if sizes[at]]
        if not asked:
            return [Answer.MISS] * len(keys)
        with self._bounce.lane() as lane:
            places = lane.places(sizes)
            codes = self._ask(
                len(asked),
                self._client.batch_get_into,
                _names([keys[at] for at in asked]),
                [lane.address + places[at] for at in asked],
                [sizes[at] for at in asked],
            )
            got = dict.fromkeys(keys, (0, _TOO_SMALL))
            got.update((keys[at], (places[at], code)) for at, code in zip(asked, codes, strict=True))
            for key, buffer in zip(keys, buffers, strict=True):
                place, code = got[key]
                if code == buffer.nbytes:
                    buffer[:] = lane.memory[place : place + code]
        return [_answer(got[key][1], size) for key, size in zip(keys, sizes, strict=True)]

    def _described(self, names: Sequence[str]) -> Iterator[Entry]:
        with self._usable() as usable:
            described = self._client.batch_get_replica_desc(names) if usable else {}
        if not described:
            raise StoreError(f"{self._where} lists records and does not describe them.")
        for name in names:
            copies = [copy for copy in described.get(name, ()) if copy.is_memory_replica()]
            key = key_of(name.removeprefix(_PREFIX))
            if copies and key is not None:
                yield Entry(key, copies[0].get_memory_descriptor().buffer_descriptor.size)


class Lane:
    """A piece of a bounce buffer for one batch at a time."""

    def __init__(self, memory: memoryview, address: int) -> None:
        self.memory = memory
        self.address = address

    def places(self, sizes: Sequence[int]) -> list[int]:
        """Offsets, one behind the other, of records of these sizes. They fit: `Bounce.batches` saw to it."""
        return list(accumulate(map(_room, sizes), initial=0))[:-1]


class Bounce:
    """Memory that records pass through, cut into lanes, each for one thread at a time. It outlives all that are out."""

    def __init__(self, num_bytes: int, num_lanes: int) -> None:
        self.lane_bytes = num_bytes // num_lanes // mmap.PAGESIZE * mmap.PAGESIZE
        self.num_bytes = self.lane_bytes * num_lanes
        self._map = mmap.mmap(-1, self.num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        memory = memoryview(self._map)
        self._idle: LifoQueue[Lane] = LifoQueue()
        for start in range(0, self.num_bytes, self.lane_bytes):
            self._idle.put(Lane(memory[start : start + self.lane_bytes], self.address + start))

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane of one's own for the block; waits for one."""
        lane = self._idle.get()
        try:
            yield lane
        finally:
            self._idle.put(lane)

    def batches(self, sizes: Sequence[int], most: int, most_bytes: int) -> Iterator[list[int]]:
        """Indices of records that pass through one lane together: at most so many, and bytes unless it is one alone.

        Records that fit into no lane are in no batch.
        """
        fitting = [index for index, size in enumerate(sizes) if _room(size) <= self.lane_bytes]
        rooms = [_room(sizes[index]) for index in fitting]
        for batch in batches(rooms, most, min(self.lane_bytes, most_bytes)):
            yield [fitting[at] for at in batch]


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _answer(code: int, num_bytes: int) -> Answer:
    """What the code of a read into so many bytes says."""
    if code == num_bytes:
        return Answer.HIT
    return Answer.MISS if code >= 0 or code in (_UNKNOWN, _TOO_SMALL) else Answer.RETRY


def _names(keys: Sequence[StoreKey]) -> list[str]:
    return [f"{_PREFIX}{key}" for key in keys]

"""Stores over a network against their own clients: bytes per second and latency, on servers of this machine.

    python -m bench.storage.network  redis-server or valkey-server from PATH, Mooncake where importable
    python -m bench.storage.network --toy            the same code in seconds

Each store moves the same records by its three verbs (prepare, put, complete; get) as the plain client does by its own
best ones: redis-py pipelines of 8 MiB that copy what they get into the same buffers, `batch_put_from` and
`batch_get_into` on registered memory. Runs of the two take turns; the table has the median. `measure_valkey` and
`measure_mooncake` are for other programs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from bench.harness import new_parser, save
from rich.console import Console
from rich.table import Table

from quire.testing.contracts.records import make_keys
from quire.tiers.store import Answer, Store, StoreKey

SIZES = (64 << 10, 1 << 20)
PIPELINE_BYTES = 8 << 20
POOL_BYTES = 512 << 20
Row = dict[str, Any]
Verbs = dict[str, Callable[[list[int]], None]]
"""`put` and `get` of records by their numbers; `clear` forgets all that was put."""


class Memory:
    """Records of one size to send, and room for as many to arrive in, page-aligned."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count
        self.keys: list[StoreKey] = make_keys(count)
        self._map = mmap.mmap(-1, 2 * size * count)
        whole = memoryview(self._map)
        np.frombuffer(whole[: size * count], dtype=np.uint8)[:] = np.random.default_rng(0).integers(
            0, 256, size * count, dtype=np.uint8
        )
        self.records = [whole[start : start + size] for start in range(0, size * count, size)]
        self.arrived = [whole[start : start + size] for start in range(size * count, 2 * size * count, size)]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def check(self, numbers: list[int]) -> None:
        """What arrived is what was sent, and it is forgotten."""
        for number in numbers:
            assert self.arrived[number] == self.records[number], f"record {number} came back changed"
            self.arrived[number][:8] = bytes(8)


def by_store(store: Store, memory: Memory) -> Verbs:
    """The verbs of the port."""

    def put(numbers: list[int]) -> None:
        keys = [memory.keys[number] for number in numbers]
        assert set(store.prepare(keys, [memory.size] * len(keys))) == {Answer.MISS}
        store.put(keys, [memory.records[number] for number in numbers])
        assert set(store.complete(keys, [True] * len(keys))) == {Answer.HIT}

    def get(numbers: list[int]) -> None:
        keys = [memory.keys[number] for number in numbers]
        assert set(store.get(keys, [memory.arrived[number] for number in numbers])) == {Answer.HIT}

    return {"put": put, "get": get, "clear": lambda numbers: _count(store.remove([memory.keys[n] for n in numbers]))}


def by_redis(client: Any, memory: Memory) -> Verbs:
    """Pipelines of redis-py, which returns new bytes: they are copied to where they belong, as a cache must."""
    step = max(1, PIPELINE_BYTES // memory.size)
    names = [str(key) for key in memory.keys]

    def put(numbers: list[int]) -> None:
        for start in range(0, len(numbers), step):
            with client.pipeline(transaction=False) as pipeline:
                for number in numbers[start : start + step]:
                    pipeline.set(names[number], memory.records[number])
                pipeline.execute()

    def get(numbers: list[int]) -> None:
        for start in range(0, len(numbers), step):
            batch = numbers[start : start + step]
            with client.pipeline(transaction=False) as pipeline:
                for number in batch:
                    pipeline.get(names[number])
                for number, value in zip(batch, pipeline.execute(), strict=True):
                    memory.arrived[number][:] = value

    return {"put": put, "get": get, "clear": lambda numbers: _count(client.unlink(*[names[n] for n in numbers]))}


def by_mooncake(client: Any, memory: Memory) -> Verbs:
    """The library's batches between registered memory and the pool, without a copy."""
    client.register_buffer(memory.address, 2 * memory.size * memory.count)
    names = [str(key) for key in memory.keys]

    def places(numbers: list[int], first: int) -> tuple[list[str], list[int], list[int]]:
        addresses = [memory.address + (first + number) * memory.size for number in numbers]
        return [names[number] for number in numbers], addresses, [memory.size] * len(numbers)

    def put(numbers: list[int]) -> None:
        assert set(client.batch_put_from(*places(numbers, 0))) == {0}

    def get(numbers: list[int]) -> None:
        assert set(client.batch_get_into(*places(numbers, memory.count))) == {memory.size}

    return {
        "put": put,
        "get": get,
        "clear": lambda numbers: _count(client.batch_remove([names[n] for n in numbers], True)),
    }


def _count(what: object) -> None:
    """An answer that is not looked at."""


def compare(systems: dict[str, Verbs], memory: Memory, repeats: int) -> list[Row]:
    """GB/s of a batch of all records and milliseconds of one, by system and verb: medians of runs that take turns."""
    seconds: dict[tuple[str, str, str], list[float]] = {}
    everything = list(range(memory.count))
    for repeat in range(repeats + 1):
        for name, verbs in sorted(systems.items(), reverse=bool(repeat % 2)):
            for kind, batches in (("batch", [everything]), ("one", [[number] for number in everything[:16]])):
                for verb in ("put", "get"):
                    spent = [_timed(verbs[verb], batch) for batch in batches]
                    if repeat:  # the first connects, allocates and warms up
                        seconds.setdefault((name, verb, kind), []).extend(spent)
                memory.check([number for batch in batches for number in batch])
                verbs["clear"](everything)
    volume = memory.size * memory.count / 1e9
    return [
        {
            "system": name,
            "verb": verb,
            "record_bytes": memory.size,
            "gb_per_s": round(volume / statistics.median(seconds[name, verb, "batch"]), 3),
            "best_gb_per_s": round(volume / min(seconds[name, verb, "batch"]), 3),
            "one_ms": round(1e3 * statistics.median(seconds[name, verb, "one"]), 3),
        }
        for name in systems
        for verb in ("put", "get")
    ]


def _timed(verb: Callable[[list[int]], None], numbers: list[int]) -> float:
    start = time.perf_counter()
    verb(numbers)
    return time.perf_counter() - start


def measure_valkey(volume: int = 64 << 20, repeats: int = 7, sizes: tuple[int, ...] = SIZES) -> list[Row]:
    """ValkeyStore against redis-py on one server, over its socket. Empty where there is no server's program."""
    import redis

    from quire.tiers.stores import valkey

    program = shutil.which("valkey-server") or shutil.which("redis-server")
    rows: list[Row] = []
    if program is None:
        return rows
    with tempfile.TemporaryDirectory(prefix="quire-") as folder, ExitStack() as stack:
        path = f"{folder}/valkey.sock"
        stack.enter_context(
            _process([program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder], lambda: _up(path))
        )
        client = stack.enter_context(redis.Redis(unix_socket_path=path))
        store = valkey.open(f"unix://{path}")
        stack.callback(store.close)
        for size in sizes:
            memory = Memory(size, max(16, volume // size))
            rows += compare(
                {"ValkeyStore": by_store(store, memory), "redis-py": by_redis(client, memory)}, memory, repeats
            )
    return rows


def measure_mooncake(volume: int = 64 << 20, repeats: int = 7, sizes: tuple[int, ...] = SIZES) -> list[Row]:
    """MooncakeStore against its library, on a pool whose memory is another process'. Empty where it is not installed.

    QUIRE_MOONCAKE_SITE names a directory that the library was installed to.
    """
    site = os.environ.get("QUIRE_MOONCAKE_SITE", "")
    if site:
        sys.path.append(site)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.store import MooncakeDistributedStore
    except (ImportError, OSError):
        return []

    from quire.tiers.stores import mooncake

    rows: list[Row] = []
    port, metrics = _free_port(), _free_port()
    program = str(Path(sys.modules["mooncake.store"].__file__ or "").with_name("mooncake_master"))
    listening = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}"]
    with tempfile.TemporaryDirectory(prefix="quire-") as folder, ExitStack() as stack:
        stack.enter_context(_process([program, *listening, "--metrics_host=127.0.0.1"], lambda: _answers(port)))
        ready = Path(folder) / "ready"
        arguments = [site, str(port), str(POOL_BYTES), str(ready)]
        stack.enter_context(_process([sys.executable, "-c", NODE, *arguments], ready.exists))
        client = MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{port}") == 0
        stack.callback(client.close)
        store = mooncake.open(f"mooncake://127.0.0.1:{port}")
        stack.callback(store.close)
        for size in sizes:
            memory = Memory(size, max(16, volume // size))
            systems = {"MooncakeStore": by_store(store, memory), "mooncake": by_mooncake(client, memory)}
            rows += compare(systems, memory, repeats)
            client.unregister_buffer(memory.address)
    return rows


NODE = """
import sys, time
sys.path.append(sys.argv[1])
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[3]), 1 << 20, "tcp", "", "127.0.0.1:" + sys.argv[2]) == 0
open(sys.argv[4], "w").close()
time.sleep(3600)
"""


@contextmanager
def _process(command: list[str], ready: Callable[[], bool]) -> Iterator[None]:
    """A process for the block, from when it is ready."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 30
        while not ready():
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def _up(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        return line.connect_ex(path) == 0


def _answers(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def print_table(rows: list[Row], console: Console) -> None:
    """One line for each system, verb and size."""
    table = Table("system", "verb", "record", "GB/s", "best GB/s", "one record, ms")
    for row in rows:
        numbers = (row["gb_per_s"], row["best_gb_per_s"], row["one_ms"])
        table.add_row(
            row["system"], row["verb"], f"{row['record_bytes'] >> 10} KiB", *[str(number) for number in numbers]
        )
    console.print(table)


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__, toy="few bytes, once")
    options = parser.parse_args()
    volume, repeats = (2 << 20, 1) if options.toy else (64 << 20, 7)
    rows = [*measure_valkey(volume, repeats), *measure_mooncake(volume, repeats)]
    print_table(rows, Console())
    save(options.json, rows)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())

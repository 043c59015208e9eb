"""What connectors cost: bytes per second and CPU seconds of both processes, beside the same copy without them.

    python -m bench.transfer.connectors                       all that is installed, 64 MiB batches of scattered pages
    python -m bench.transfer.connectors --toy                 the same code in seconds
    python -m bench.transfer.connectors --read RESULT.json --readme docs/benchmarks.md  the table of what --json wrote

Each way of copying has two processes, a writer and a receiver, with the same pages in other orders. Ways take turns in
each round. Afterwards the receiver compares every page. Raw ways are the shortest programs that use the same means:
`process_vm_writev` by ctypes, one NIXL transfer of all pages, `sendmsg` and `recvmsg_into` on one connection.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from bench.harness import machine, new_parser, save

CONNECTORS = {"tcp": "sockets", "nixl": "raw nixl", "mooncake": ""}
"""Each with the raw way that it is compared with, besides process_vm_writev."""
SINGLE_COPY = "process_vm_writev"
WAYS = (SINGLE_COPY, "raw nixl", "sockets", *CONNECTORS)
PIECES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
GOAL = 0.9
GOAL_FROM = 256 << 10
_MARKS = ("<!-- connectors -->", "<!-- end of connectors -->")
_MOST_IOVECS = 1024


def spans(piece: int, batch: int, memory: int, seed: int) -> np.ndarray[Any, Any]:
    """Scattered pages of a batch, int64 [n, 2]: offset and length."""
    pages = np.random.default_rng(seed).permutation(memory // piece)[: batch // piece].astype(np.int64)
    return np.stack([pages * piece, np.full(len(pages), piece)], axis=1)


# -- one process


class Side:
    """A writer or receiver. Subclasses are the ways to copy."""

    def __init__(self, name: str, memory: int) -> None:
        self.name = name
        self.memory = np.frombuffer(mmap.mmap(-1, memory, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        self.memory[:] = 0

    @property
    def base(self) -> int:
        """Where the memory is."""
        return int(self.memory.ctypes.data)

    def fill(self) -> None:
        """Make this the writer: each word has its own value."""
        self.memory.view(np.uint64)[:] = words(np.arange(len(self.memory) // 8))

    def address(self) -> Any:
        """For the writer."""
        return {"pid": os.getpid(), "base": self.base}

    def connect(self, address: Any) -> None:
        """To the receiver."""
        self.peer = address

    def open(self, targets: np.ndarray[Any, Any]) -> Any:
        """Expect a write to these pages."""

    def write(self, pages: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], target: Any) -> None:
        """Copy pages to targets; returns when they have arrived."""
        raise NotImplementedError

    def idle(self) -> None:
        """Called every millisecond while nothing is asked."""

    def close(self) -> None:
        """End it."""


def _can_be_imported(module: str) -> bool:
    """Also False for a library that is installed and lacks one of the system."""
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def words(indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values of words, by index in the writer's memory."""
    return indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)


class SingleCopy(Side):
    """The system call that copies to another process."""

    def write(self, pages: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], target: Any) -> None:
        call = ctypes.CDLL(None, use_errno=True).process_vm_writev
        call.restype = ctypes.c_ssize_t
        here, there = pages.astype(np.uint64), targets.astype(np.uint64)
        here[:, 0] += np.uint64(self.base)
        there[:, 0] += np.uint64(self.peer["base"])
        for start in range(0, len(here), _MOST_IOVECS):
            count = min(_MOST_IOVECS, len(here) - start)
            views = [ctypes.c_void_p(int(each[start:].ctypes.data)) for each in (here, there)]
            size = ctypes.c_ulong(count)
            done = call(self.peer["pid"], views[0], size, views[1], size, ctypes.c_ulong(0))
            if done != pages[start : start + count, 1].sum():
                raise OSError(ctypes.get_errno(), f"process_vm_writev wrote {done} bytes")


class Sockets(Side):
    """One connection, without any protocol."""

    def address(self) -> Any:
        self.listener = socket.create_server(("127.0.0.1", 0))
        return self.listener.getsockname()

    def connect(self, address: Any) -> None:
        self.sock = socket.create_connection(tuple(address))

    def open(self, targets: np.ndarray[Any, Any]) -> Any:
        threading.Thread(target=self._receive, args=(targets,), daemon=True).start()

    def _receive(self, targets: np.ndarray[Any, Any]) -> None:
        if not hasattr(self, "sock"):
            self.sock, _ = self.listener.accept()
        self._move(targets, lambda views: self.sock.recvmsg_into(views)[0])
        self.sock.sendall(b"1")

    def write(self, pages: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], target: Any) -> None:
        self._move(pages, self.sock.sendmsg)
        self.sock.recv(1)

    def _move(self, pages: np.ndarray[Any, Any], move: Any) -> None:
        memory = self.memory.data
        step = max(1, min(_MOST_IOVECS, (4 << 20) // int(pages[0, 1])))
        for start in range(0, len(pages), step):
            views = [memory[offset : offset + length] for offset, length in pages[start : start + step].tolist()]
            while views:
                count = move(views)
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]


class RawNixl(Side):
    """One transfer of all pages."""

    def __init__(self, name: str, memory: int) -> None:
        super().__init__(name, memory)
        os.environ |= {"NIXL_LOG_LEVEL": "FATAL", "UCX_NET_DEVICES": "lo"}
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
        self.registered = self.agent.register_memory(np.array([[self.base, memory, 0]], np.uint64), "DRAM")

    def address(self) -> Any:
        return super().address() | {"metadata": self.agent.get_agent_metadata().hex()}

    def connect(self, address: Any) -> None:
        super().connect(address)
        self.remote = self.agent.add_remote_agent(bytes.fromhex(address["metadata"]))

    def write(self, pages: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], target: Any) -> None:
        lists = []
        for each, base in ((pages, self.base), (targets, self.peer["base"])):
            rows = np.zeros((len(each), 3), np.uint64)
            rows[:, 0], rows[:, 1] = each[:, 0] + base, each[:, 1]
            lists.append(self.agent.get_xfer_descs(rows, "DRAM"))
        handle = self.agent.initialize_xfer("WRITE", *lists, self.remote)
        state = self.agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.0002)
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError(state)
        self.agent.release_xfer_handle(handle)

    def idle(self) -> None:
        self.agent.get_new_notifs()

    def close(self) -> None:
        self.agent.deregister_memory(self.registered)
        del self.agent


class Connected(Side):
    """A connector."""

    def __init__(self, kind: str, name: str, memory: int) -> None:
        super().__init__(name, memory)
        from quire.transfer.connectors.registry import open_connector

        self.connector = open_connector(kind, self.memory, name=name, secret=b"benchmark", unauthenticated=True)
        self.tag = 0

    def address(self) -> Any:
        return self.name, self.connector.address().hex()

    def connect(self, address: Any) -> None:
        self.peer = address[0]
        self.connector.connect(self.peer, bytes.fromhex(address[1]))

    def open(self, targets: np.ndarray[Any, Any]) -> Any:
        self.connector.shut(self.tag)
        self.tag += 1
        return self.connector.open(self.tag, targets)

    def write(self, pages: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], target: Any) -> None:
        from quire.transfer.connector import Progress

        self.tag += 1
        write = self.connector.write(self.peer, self.tag, pages, target)
        while write.poll() is Progress.PENDING:
            time.sleep(0.001)
        if write.poll() is not Progress.LANDED:
            raise OSError(write.error)

    def close(self) -> None:
        self.connector.close()


def make_side(way: str, name: str, memory: int) -> Side:
    """The side of a way."""
    if way in CONNECTORS:
        return Connected(way, name, memory)
    return {SINGLE_COPY: SingleCopy, "sockets": Sockets, "raw nixl": RawNixl}[way](name, memory)


def serve(way: str, name: str, batch: int, memory: int) -> None:
    """Answer the questions on stdin, one a line."""
    side = make_side(way, name, memory)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    opened = idle_from = 0.0
    questions = os.fdopen(0, "rb", buffering=0)
    while True:
        while not select.select([questions], [], [], 0.001 if type(side).idle is not Side.idle else None)[0]:
            side.idle()
        line = bytearray()
        while not line.endswith(b"\n"):
            more = questions.readline()
            if not more:
                side.close()
                return
            line += more
        question = json.loads(line)
        verb, answer = question["verb"], dict[str, Any]()
        if "piece" in question:
            source = spans(question["piece"], batch, memory, 2 * question["seed"])
            targets = spans(question["piece"], batch, memory, 2 * question["seed"] + 1)
        if verb == "start":
            if question["writes"]:
                side.fill()
            answer = {"address": side.address()}
        elif verb == "connect":
            side.connect(question["address"])
        elif verb == "open":
            side.memory[:] = 0
            began = time.process_time()
            target = side.open(targets)
            answer = {"target": target.hex() if isinstance(target, bytes) else ""}
            opened = time.process_time() - began
            idle_from = time.process_time()
        elif verb == "write":
            target = bytes.fromhex(question["target"])
            cpu, wall = time.process_time(), time.monotonic()
            side.write(source, targets, target)
            answer = {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}
        elif verb == "cpu":
            answer = {"cpu": opened + time.process_time() - idle_from}
        elif verb == "check":
            found = side.memory.view(np.uint64)
            inside = np.arange(question["piece"] // 8)
            answer = {"stray": int(np.count_nonzero(found)) - len(inside) * len(source)}
            answer["wrong"] = sum(
                not np.array_equal(found[there // 8 + inside], words(here // 8 + inside))
                for here, there in zip(source[:, 0].tolist(), targets[:, 0].tolist(), strict=True)
            )
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# -- the measurement


class Process:
    """A side in its process."""

    def __init__(self, way: str, name: str, options: argparse.Namespace) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", way, name, str(options.batch), str(options.memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
        )

    def ask(self, verb: str, **question: Any) -> Any:
        """The answer to a question."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"verb": verb, **question}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} has ended; --verbose shows why")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way and size of piece."""
    pairs: dict[str, tuple[Process, Process]] = {}
    samples: dict[tuple[str, int], list[dict[str, float]]] = {}
    try:
        for way in options.ways:
            writer, receiver = pairs[way] = Process(way, "writer", options), Process(way, "receiver", options)
            address = receiver.ask("start", writes=False)["address"]
            writer.ask("start", writes=True)
            writer.ask("connect", address=address)
        for turn in range(options.rounds + 1):
            for piece in options.pieces:
                for way in options.ways[turn % len(options.ways) :] + options.ways[: turn % len(options.ways)]:
                    writer, receiver = pairs[way]
                    about = {"piece": piece, "seed": turn}
                    target = receiver.ask("open", **about)["target"]
                    sent = writer.ask("write", target=target, **about)
                    received = receiver.ask("cpu")["cpu"]
                    got = receiver.ask("check", **about)
                    if got["wrong"] or got["stray"]:
                        raise SystemExit(
                            f"{way} at {piece}: {got['wrong']} pages are wrong, {got['stray']} words stray"
                        )
                    if turn:  # the first turn connects
                        samples.setdefault((way, piece), []).append(
                            {"wall": sent["wall"], "writer": sent["cpu"], "receiver": received}
                        )
            print(f"round {turn} of {options.rounds}", flush=True)
    finally:
        for pair in pairs.values():
            for process in pair:
                process.close()
    return [row_of(way, piece, options.batch, samples) for way, piece in samples]


def row_of(way: str, piece: int, batch: int, samples: dict[tuple[str, int], list[dict[str, float]]]) -> dict[str, Any]:
    """Medians and best of one way, and its ratios to raw ways in the same rounds: above 1 is better than raw."""
    gigabytes = batch / 1e9
    mine = samples[way, piece]
    row: dict[str, Any] = {
        "way": way,
        "piece": piece,
        "rounds": len(mine),
        "gb_per_s": statistics.median(gigabytes / each["wall"] for each in mine),
        "gb_per_s_best": max(gigabytes / each["wall"] for each in mine),
        **{
            f"{side}_cpu_s_per_gb": statistics.median(each[side] / gigabytes for each in mine)
            for side in ("writer", "receiver")
        },
        "cpu_s_per_gb_best": min((each["writer"] + each["receiver"]) / gigabytes for each in mine),
        "against": {},
    }
    for raw in {CONNECTORS.get(way, ""), SINGLE_COPY} - {"", way}:
        if (raw, piece) in samples:
            pairs = list(zip(mine, samples[raw, piece], strict=True))
            row["against"][raw] = {
                "speed": statistics.median(theirs["wall"] / own["wall"] for own, theirs in pairs),
                "cpu": statistics.median(
                    (theirs["writer"] + theirs["receiver"]) / (own["writer"] + own["receiver"]) for own, theirs in pairs
                ),
            }
    return row


def table(result: dict[str, Any]) -> str:
    """All rows as a table in Markdown."""
    lines = [
        "| pages | way | GB/s (best) | CPU s per GB, writer + receiver | ÷ raw: GB/s, CPU | ÷ process_vm_writev |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(result["connectors"], key=lambda row: (row["piece"], WAYS.index(row["way"]))):
        piece = f"{row['piece'] >> 20} MiB" if row["piece"] >= 1 << 20 else f"{row['piece'] >> 10} KiB"
        ratios = [
            f"{found['speed']:.2f}, {found['cpu']:.2f}" if (found := row["against"].get(raw)) else ""
            for raw in (CONNECTORS.get(row["way"], ""), SINGLE_COPY)
        ]
        name = f"`{row['way']}`" if row["way"] in CONNECTORS else row["way"]
        lines.append(
            f"| {piece} | {name} | {row['gb_per_s']:.2f} ({row['gb_per_s_best']:.2f}) | "
            f"{row['writer_cpu_s_per_gb']:.2f} + {row['receiver_cpu_s_per_gb']:.2f} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def missed(result: dict[str, Any]) -> list[str]:
    """Goals that are missed: 0.9 of the raw way, from 256 KiB up."""
    return [
        f"{row['way']} at {row['piece'] >> 10} KiB has {ratio:.2f} of the {what} of {raw}"
        for row in result["connectors"]
        for raw, found in row["against"].items()
        if raw == CONNECTORS.get(row["way"]) and row["piece"] >= GOAL_FROM
        for what, ratio in found.items()
        if ratio < GOAL
    ]


def main() -> int:
    """Measure, print, write."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return 0
    parser = new_parser("Measure what connectors cost.", toy="tiny sizes")
    parser.add_argument("--ways", help=f"comma-separated, of {', '.join(WAYS)}; default all that are installed")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (%(default)s)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: read what --json wrote")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="write the table into this file, between its marks")
    parser.add_argument("--verbose", action="store_true", help="show what libraries print")
    options = parser.parse_args()
    options.pieces, options.batch, options.memory = PIECES, 64 << 20, 128 << 20
    if options.toy:
        options.pieces, options.batch, options.memory, options.rounds = (16 << 10, 256 << 10), 2 << 20, 4 << 20, 2
    libraries = {"raw nixl": "nixl_cu12._api", "nixl": "nixl_cu12._api", "mooncake": "mooncake.engine"}
    absent = {way for way, module in libraries.items() if not _can_be_imported(module)}
    options.ways = options.ways.split(",") if options.ways else [way for way in WAYS if way not in absent]
    if options.read:
        result = json.loads(options.read.read_text())
    else:
        result = {
            **machine(),
            "batch": options.batch,
            "absent": sorted(absent),
            "connectors": measure(options),
        }
    print(table(result))
    for line in missed(result):
        print(f"missed: {line}")
    save(options.json, result)
    if options.readme:
        text = options.readme.read_text()
        before, _, rest = text.partition(_MARKS[0])
        options.readme.write_text(f"{before}{_MARKS[0]}\n{table(result)}\n{_MARKS[1]}{rest.partition(_MARKS[1])[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

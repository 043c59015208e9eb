"""ConnectorContract: tests that every connector must pass, with a peer in another process.

The test of a connector subclasses it and says how to make one. Peers make theirs in other processes, which are forked:

    class TestTcp(ConnectorContract):
        @staticmethod
        def make(memory, name): return TcpConnector(memory, name=name, secret=b"shared")

Class attributes say what the connector can prove.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import ConnectorError, InvalidInput
from quire.transfer.connector import Connector, Memory, Progress, Spans, Write, pack_target
from tests.programs import ForkedContext

MIB = 1 << 20
MEMORY_BYTES = 64 * MIB
Make = Callable[[Memory, str], Connector]
PENDING, LANDED, FAILED = Progress.PENDING, Progress.LANDED, Progress.FAILED

_tags = count(1)
_names = count(1)


class Side:
    """A connector with its memory, which other processes can map. Verbs take and return what can be sent to another
    process; a write is a number."""

    def __init__(self, make: Make, name: str, path: str) -> None:
        self.name = name
        with open(path, "r+b") as file:
            self.memory: Memory = np.frombuffer(mmap.mmap(file.fileno(), MEMORY_BYTES), dtype=np.uint8)
        self.connector = make(self.memory, name)
        self.address, self.connect = self.connector.address, self.connector.connect
        self.open, self.shut = self.connector.open, self.connector.shut
        self.disconnect, self.close = self.connector.disconnect, self.connector.close
        self._writes: list[Write] = []

    def write(self, peer: str, tag: int, spans: Spans, target: bytes) -> int:
        """Begin one."""
        self._writes.append(self.connector.write(peer, tag, spans, target))
        return len(self._writes) - 1

    def poll(self, write: int) -> tuple[Progress, str]:
        """Its state and error."""
        return self._writes[write].poll(), self._writes[write].error


def serve_side(make: Make, name: str, path: str, pipe: Connection) -> None:
    """The main program of a peer: answers calls of a `Side`."""
    side = Side(make, name, path)
    pipe.send("ready")
    while True:
        verb, arguments = pipe.recv()
        try:
            pipe.send(getattr(side, verb)(*arguments))
        except Exception as error:
            pipe.send(error)


class Peer:
    """A `Side` in another process, or in this one. Calls of a stopped process wait."""

    def __init__(self, make: Make, *, separate: bool) -> None:
        self.name = f"peer-{next(_names)}"
        self._file = os.memfd_create(self.name)
        os.ftruncate(self._file, MEMORY_BYTES)
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.memory: Memory = np.frombuffer(mmap.mmap(self._file, MEMORY_BYTES), dtype=np.uint8)
        self.side: Side | None = None
        if separate:
            self._pipe, theirs = Pipe()
            self.process = ForkedContext().Process(target=serve_side, args=(make, self.name, path, theirs))
            self.process.start()
            theirs.close()
            assert self._pipe.recv() == "ready"
        else:
            self.side = Side(make, self.name, path)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            if self.side is not None:
                return getattr(self.side, verb)(*arguments)
            self._pipe.send((verb, arguments))
            answer = self._pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; returns when it has had its effect."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number is signal.SIGSTOP:
            while not self.is_stopped():
                time.sleep(0.0002)

    def is_stopped(self) -> bool:
        """Whether SIGSTOP has had its effect on the process, and SIGCONT has not."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def end(self) -> None:
        """Close it; kills a process."""
        if self.side is not None:
            self.side.close()
        else:
            self.process.kill()
            self.process.join()
            self._pipe.close()
        os.close(self._file)


def activity(process: int | None, seconds: float = 0.7) -> tuple[float, set[Path]]:
    """Wake-ups per second of a process's threads, and the threads that were never seen asleep. A slow machine adds
    none to either."""
    before, began = switches(process), time.monotonic()
    restless = set(before)
    for _ in range(10):
        time.sleep(seconds / 10)
        restless = {thread for thread in restless if (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R"}
    elapsed, after = time.monotonic() - began, switches(process)
    return sum(after[thread] - before[thread] for thread in before) / elapsed, restless


def switches(process: int | None) -> dict[Path, int]:
    """How often each thread of a process gave up its core, or lost it, since it began."""
    return {
        thread: sum(
            int(line.split()[1]) for line in (thread / "status").read_text().splitlines() if "ctxt_switches" in line
        )
        for thread in Path(f"/proc/{process}/task").iterdir()
    }


def needs(attribute: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test that applies only to classes where an attribute is true."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.__dict__["needs"] = attribute
        return test

    return mark


def wait(side: Peer, write: int, seconds: float = 60.0) -> tuple[Progress, str]:
    """How a write ends; PENDING if it does not in time."""
    gives_up = time.monotonic() + seconds
    while True:
        progress, error = side.poll(write)
        if progress is not PENDING or time.monotonic() > gives_up:
            return progress, error
        time.sleep(0.0005)


def spread(random: np.random.Generator, lengths: np.ndarray, num_bytes: int = MEMORY_BYTES, start: int = 0) -> Spans:
    """Spans of these lengths in random order from `start` on, half of them adjacent to the one before."""
    order = random.permutation(len(lengths))
    gaps = random.integers(1, 65, len(lengths)) * random.integers(0, 2, len(lengths))
    ends = (lengths[order] + gaps).cumsum() + start
    assert ends[-1] <= num_bytes
    offsets = np.empty(len(lengths), np.int64)
    offsets[order] = ends - lengths[order]
    return np.stack([offsets, lengths], axis=1)


def whole(start: int, num_bytes: int, piece: int = 65_536) -> Spans:
    """Spans of one size from `start` on, every other one, so that none is adjacent to the next."""
    offsets = np.arange(start, start + num_bytes, 2 * piece, dtype=np.int64)
    return np.stack([offsets, np.full(len(offsets), piece)], axis=1)


def moved(spans: Spans, offset: int, length: int = 0) -> Spans:
    """The spans with so much added."""
    shifted: Spans = spans + np.array([offset, length])
    return shifted


def expected(writer: Peer, spans: Spans, receiver: Memory, targets: Spans) -> Memory:
    """The receiver's memory after a write."""
    after = receiver.copy()
    for (here, length), (there, _) in zip(spans.tolist(), targets.tolist(), strict=True):
        after[there : there + length] = writer.memory[here : here + length]
    return after


class ConnectorContract:
    """Subclasses implement `make`, and set the attributes. Tests of what the connector cannot do are omitted."""

    separate = True  # peers are other processes
    checks_tags = True  # the receiver refuses tags that are unknown or shut, so that `shut` is a proof
    leaves_nothing = True  # `close` ends all threads and closes all sockets
    most_wakes_per_s = 150
    """Times a second that its threads may wake up in sum while nothing is asked of it."""

    @staticmethod
    def make(memory: Memory, name: str) -> Connector:
        """A connector; called in this process and, with its class found by name, in others."""
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in dir(cls):
            attribute = getattr(getattr(cls, name), "needs", None)
            if attribute is not None and not getattr(cls, attribute):
                setattr(cls, name, None)

    # -- what tests use

    @pytest.fixture(scope="class")
    @classmethod
    def peers(cls) -> Iterator[tuple[Peer, Peer]]:
        """One in this process and another one, connected both ways, for tests that leave them as they are."""
        here, there = Peer(cls.make, separate=False), Peer(cls.make, separate=cls.separate)
        join(here, there)
        yield here, there
        here.end()
        there.end()

    @pytest.fixture
    def new(self) -> Iterator[Callable[..., Peer]]:
        """Makes peers that end with the test, in this process or `separate`, connected with those before."""
        made: list[Peer] = []

        def make(*, separate: bool) -> Peer:
            peer = Peer(self.make, separate=separate and self.separate)
            for other in made:
                if other.side is not None or other.process.is_alive():
                    join(other, peer)
            made.append(peer)
            return peer

        yield make
        for peer in made[::-1]:
            peer.end()

    # -- bytes

    @pytest.mark.parametrize("inward", [False, True])
    def test_scattered_spans(self, peers: tuple[Peer, Peer], inward: bool) -> None:
        """5,000 spans of 1 byte to 4 MiB in other places and order arrive, and no byte beside them changes."""
        writer, receiver = peers[:: -1 if inward else 1]
        random = np.random.default_rng(inward)
        lengths = (2 ** random.uniform(0, 15, 5_000)).astype(np.int64)
        lengths[random.choice(5_000, 3, replace=False)] = 4 * MIB
        lengths[:3] = 1, 4 * MIB, 4 * MIB - 1
        self.check_write(writer, receiver, spread(random, lengths), spread(random, lengths), random)

    def test_adjacent_spans(self, peers: tuple[Peer, Peer]) -> None:
        """Spans that are one run on both sides, longer than the longest run."""
        lengths = np.full(1_000, 16_384)
        spans = np.stack([np.arange(1_000) * 16_384 + 7, lengths], axis=1)
        self.check_write(*peers, spans, moved(spans, MIB), np.random.default_rng(2))

    def check_write(
        self, writer: Peer, receiver: Peer, spans: Spans, targets: Spans, random: np.random.Generator
    ) -> None:
        """Write, and compare all of the receiver's memory."""
        writer.memory[:] = random.integers(0, 256, MEMORY_BYTES, np.uint8)
        receiver.memory[:] = random.integers(0, 256, MEMORY_BYTES, np.uint8)
        after = expected(writer, spans, receiver.memory, targets)
        tag = next(_tags)
        target = receiver.open(tag, targets)
        assert wait(writer, writer.write(receiver.name, tag, spans, target)) == (LANDED, "")
        assert np.array_equal(receiver.memory, after)
        receiver.shut(tag)

    def test_several_tags_from_several_threads(self, peers: tuple[Peer, Peer]) -> None:
        """Threads of the writer open, write and shut at once, each in its part of the memory."""
        here, there = peers
        random = np.random.default_rng(3)
        here.memory[:] = random.integers(0, 256, MEMORY_BYTES, np.uint8)
        before = there.memory.copy()
        part = MEMORY_BYTES // 4
        lock = threading.Lock()  # for the pipe to the peer

        def work(number: int) -> None:
            own = np.random.default_rng(number)
            for _ in range(6):
                lengths = own.integers(1, 30_000, 200)
                spans = spread(own, lengths, (number + 1) * part, number * part)
                targets = spread(own, lengths, (number + 1) * part, number * part)
                tag = next(_tags)
                with lock:
                    target = there.open(tag, targets)
                assert wait(here, here.write(there.name, tag, spans, target)) == (LANDED, "")
                room = slice(number * part, (number + 1) * part)
                after = expected(here, spans, before, targets)[room]
                assert np.array_equal(there.memory[room], after)
                before[room] = after
                with lock:
                    there.shut(tag)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))

    # -- refusals

    def test_what_is_refused_changes_nothing(self, peers: tuple[Peer, Peer]) -> None:
        """Targets of other tags, lengths or places, and unknown peers; local mistakes are errors."""
        here, there = peers
        before = there.memory.copy()
        spans, targets = whole(0, MIB), whole(4 * MIB, MIB)
        tag, other = next(_tags), next(_tags)
        target = there.open(tag, targets)
        other_target = there.open(other, targets)
        shorter = moved(spans, 0, -1)
        outside = np.concatenate((targets[:-1], [[MEMORY_BYTES - 65_535, 65_536]]))
        wrong: list[tuple[str, int, Spans, bytes]] = [
            ("unknown", tag, spans, target),
            (there.name, tag, spans, other_target),
            (there.name, tag, shorter, target),
            (there.name, tag, spans[:-1], target),
            (there.name, tag, spans, b""),
            (there.name, tag, spans, target[:-1]),
            (there.name, tag, spans, bytes(len(target))),
        ]
        if self.checks_tags:
            unknown = next(_tags)
            wrong.append((there.name, unknown, spans, pack_target(unknown, targets)))
            wrong.append((there.name, tag, spans[:-1], pack_target(tag, targets[:-1])))
        else:
            wrong.append((there.name, tag, spans, pack_target(tag, outside)))
        for each in wrong:
            progress, error = wait(here, here.write(*each))
            assert progress is FAILED and error, each[:2]
        assert np.array_equal(there.memory, before)
        for bad in (moved(spans, -1), outside, moved(spans, 0, -65_536), spans[:0], spans[0], moved(spans, 0, 1 << 62)):
            with pytest.raises(InvalidInput):
                here.write(there.name, tag, bad, target)
            with pytest.raises(InvalidInput):
                here.open(next(_tags), bad)
        assert wait(here, here.write(there.name, tag, spans, target))[0] is LANDED
        for each_tag in (tag, other):
            assert there.shut(each_tag) is self.checks_tags

    def test_foreign_addresses(self, peers: tuple[Peer, Peer]) -> None:
        """An address that is malformed, or of another peer."""
        here, there = peers
        no_text = there.address().replace(there.name.encode(), b"\xff" * len(there.name))
        for address in (b"", b"\x00" * 40, no_text, there.address()):
            with pytest.raises(ConnectorError):
                here.connect("another", address)

    @needs("checks_tags")
    def test_a_shut_tag(self, peers: tuple[Peer, Peer]) -> None:
        """Nothing is written under it, and other tags go on."""
        here, there = peers
        before = there.memory.copy()
        tag, spans = next(_tags), whole(0, MIB)
        target = there.open(tag, spans)
        assert there.shut(tag) and there.shut(tag)
        assert wait(here, here.write(there.name, tag, spans, target))[0] is FAILED
        assert np.array_equal(there.memory, before)
        self.test_adjacent_spans(peers)

    # -- stopped and dead peers

    @needs("separate")
    def test_shut_while_the_writer_is_stopped(self, new: Callable[..., Peer]) -> None:
        """In the middle of a write. Where `shut` says so, nothing lands when the writer continues; else nothing lands
        after the writer says that the write has ended."""
        here, there = new(separate=False), new(separate=True)
        there.memory[:] = 7
        spans = whole(0, MEMORY_BYTES)
        for _ in range(10):
            here.memory[:] = 0
            tag = next(_tags)
            target = here.open(tag, spans)
            write = there.write(here.name, tag, spans, target)
            while not here.memory[0]:
                pass
            there.signal(signal.SIGSTOP)
            stopped_midway = not here.memory[spans[-1, 0]]
            is_proof = here.shut(tag)
            assert is_proof is self.checks_tags
            before = here.memory.copy()
            there.signal(signal.SIGCONT)
            progress, _ = wait(there, write)
            if is_proof:
                assert np.array_equal(here.memory, before)
                assert progress is (FAILED if stopped_midway else progress)
            else:
                assert progress is LANDED
                assert (here.memory[whole(0, MEMORY_BYTES)[:, 0]] == 7).all()
            assert not here.memory[65_536:131_072].any()
            if stopped_midway:
                return
        pytest.fail("the writer could not be stopped in the middle of a write")

    @needs("separate")
    def test_a_stopped_receiver(self, new: Callable[..., Peer]) -> None:
        """No verb waits for it, and the write lands when it continues, if it had not before."""
        here, there = new(separate=False), new(separate=True)
        here.memory[:] = 9
        spans = whole(0, MEMORY_BYTES)
        tags = [next(_tags) for _ in range(3)]
        targets = [there.open(tag, spans) for tag in tags]
        there.signal(signal.SIGSTOP)
        writes = [here.write(there.name, tag, spans, target) for tag, target in zip(tags, targets, strict=True)]
        for _ in range(300):
            states = [here.poll(write)[0] for write in writes]
            assert FAILED not in states
            time.sleep(0.001)
        assert there.is_stopped(), "until all verbs have returned"
        there.signal(signal.SIGCONT)
        assert [wait(here, write)[0] for write in writes] == [LANDED] * 3
        assert (there.memory[spans[:, 0]] == 9).all() and not there.memory[65_536:131_072].any()

    @needs("separate")
    def test_a_receiver_that_dies(self, new: Callable[..., Peer]) -> None:
        """In the middle of a write, which fails. Another process, under a new name, is a new peer."""
        here = new(separate=False)
        here.memory[:] = 5
        spans = whole(0, MEMORY_BYTES)
        for _ in range(10):
            there = new(separate=True)
            tag = next(_tags)
            target = there.open(tag, spans)
            write = here.write(there.name, tag, spans, target)
            while not there.memory[0]:
                pass
            there.signal(signal.SIGKILL)
            progress, error = wait(here, write)
            if progress is FAILED:
                break
        assert progress is FAILED and error
        progress, error = wait(here, here.write(there.name, tag, spans, target))
        assert progress is FAILED and error
        here.disconnect(there.name)
        self.check_write(here, new(separate=True), spans, spans, np.random.default_rng(4))

    @needs("separate")
    def test_a_writer_that_dies(self, new: Callable[..., Peer]) -> None:
        """Nothing lands after its death and `shut`; others go on."""
        here, there = new(separate=False), new(separate=True)
        there.memory[:] = 7
        tag, spans = next(_tags), whole(0, MEMORY_BYTES)
        target = here.open(tag, spans)
        there.write(here.name, tag, spans, target)
        while not here.memory[0]:
            pass
        there.signal(signal.SIGKILL)
        there.process.join()
        here.shut(tag)
        before = here.memory.copy()
        again = new(separate=True)
        assert np.array_equal(here.memory, before)
        self.check_write(here, again, spans, spans, np.random.default_rng(5))
        self.check_write(again, here, spans, spans, np.random.default_rng(6))

    # -- endings

    @needs("separate")
    def test_idle_costs_nothing(self, peers: tuple[Peer, Peer]) -> None:
        """Threads of a peer sleep, and few timers wake them, with an open tag and without."""
        _, there = peers
        tag = next(_tags)
        there.open(tag, whole(0, MIB))
        for _ in range(2):
            wakes_per_s, restless = activity(there.process.pid)
            assert wakes_per_s <= self.most_wakes_per_s
            assert not restless, "threads that never sleep"
            there.shut(tag)

    def test_disconnected_and_closed(self, new: Callable[..., Peer]) -> None:
        """Later writes fail, verbs can be repeated, and the other side goes on."""
        here, there = new(separate=False), new(separate=True)
        tag, spans = next(_tags), whole(0, MIB)
        target = there.open(tag, spans)
        assert wait(here, here.write(there.name, tag, spans, target))[0] is LANDED
        address = there.address()
        for _ in range(2):
            here.disconnect(there.name)
        assert wait(here, here.write(there.name, tag, spans, target))[0] is FAILED
        here.connect(there.name, address)
        assert wait(here, here.write(there.name, tag, spans, target))[0] is LANDED
        for disconnects in (True, False, True):  # as at once after a write that took too long
            if disconnects:
                here.disconnect(there.name)
            here.connect(there.name, address)
            assert wait(here, here.write(there.name, tag, spans, target))[0] is LANDED
        for _ in range(2):
            here.close()
        assert wait(here, here.write(there.name, tag, spans, target))[0] is FAILED

    @needs("leaves_nothing")
    def test_close_leaves_nothing(self) -> None:
        """No thread, and no open file but the test's memory, not even while a peer is there that was connected.
        Threads and files of other tests may end meanwhile."""
        there = Peer(self.make, separate=False)

        def found() -> set[str]:
            names = {f"thread {number}" for number in os.listdir("/proc/self/task")}
            for path in Path("/proc/self/fd").iterdir():
                with suppress(FileNotFoundError):  # closed since it was listed
                    names.add(f"file {path.name}: {path.readlink()}")
            return {name for name in names if "memfd" not in name and "/proc/" not in name}

        before = found()
        for _ in range(2):
            here = Peer(self.make, separate=False)
            join(here, there)
            tag, spans = next(_tags), whole(0, MIB)
            target = here.open(tag, spans)
            assert wait(there, there.write(here.name, tag, spans, target))[0] is LANDED
            there.disconnect(here.name)
            here.end()
        gives_up = time.monotonic() + 30
        while (left := found() - before) and time.monotonic() < gives_up:
            time.sleep(0.01)
        assert not left
        there.end()


def join(one: Peer, other: Peer) -> None:
    """Connect both ways."""
    one.connect(other.name, other.address())
    other.connect(one.name, one.address())

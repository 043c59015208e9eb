"""Engines' identities and controls for tests, and a process with a control that tests kill and stop."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import msgspec

from quire.transfer.address import Address
from quire.transfer.control import Control, Event
from quire.transfer.handshake import Hello, Identity, Role, shake

T = TypeVar("T")
SECRET = b"a secret of tests"
IDENTITY = Identity("tiny@main", 0, 16, "bfloat16", 1, {"full": "f" * 64, "window": "e" * 64}, "d" * 64)
LONG_S = 30.0


def hello(name: str, role: Role, epoch: int = 1, **changes: Any) -> Hello:
    """By default of the same model; `changes` are of its identity."""
    return Hello(name, epoch, role, msgspec.structs.replace(IDENTITY, **changes), "tcp", b"address")


class Side:
    """One side of a handshake. `inbox` has bytes of the other side that are not sent to it yet, and `outbox` what it
    has said."""

    def __init__(self, mine: Hello, *, dials: bool, secret: bytes = SECRET, refusal: str = "") -> None:
        self.inbox, self.outbox = bytearray(), bytearray()
        self.theirs: Hello | None = None
        self._made, self._end = socket.socketpair()
        self._made.setblocking(False)
        self._end.setblocking(False)

        def admit(theirs: Hello) -> str:
            self.theirs = theirs
            return refusal

        self._steps = shake(self._made, mine, secret, dials=dials, admit=admit)

    def __del__(self) -> None:
        self._made.close()
        self._end.close()

    def advance(self) -> bool:
        """Have it read `inbox`; returns whether the handshake has succeeded. Raises as `shake`."""
        if self.inbox:
            assert self._end.send(self.inbox) == len(self.inbox)
            self.inbox.clear()
        try:
            next(self._steps)
        except StopIteration as stop:
            return stop.value is not None
        finally:
            with contextlib.suppress(BlockingIOError):
                self.outbox += self._end.recv(1 << 20)
        return False


class Watched:
    """A control, and all events that it ever had."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.seen: list[Event] = []
        self._read = 0

    def wait(self, kind: type[T], seconds: float = LONG_S) -> T:
        """The next event of a kind; those before it are passed."""
        until = time.monotonic() + seconds
        while True:
            self.seen += self.control.events()
            while self._read < len(self.seen):
                event = self.seen[self._read]
                self._read += 1
                if isinstance(event, kind):
                    return event
            assert time.monotonic() < until, f"no {kind.__name__} in {seconds} s, but {self.seen}"
            time.sleep(0.005)

    def none(self, *kinds: type) -> None:
        """None of these has happened."""
        self.seen += self.control.events()
        assert not [event for event in self.seen[self._read :] if isinstance(event, kinds)], self.seen


@contextlib.contextmanager
def control(mine: Hello, secret: bytes = SECRET, **settings: Any) -> Iterator[Watched]:
    made = Watched(Control(mine, secret, **settings))
    try:
        yield made
    finally:
        made.control.close()


def until(check: Callable[[], bool], seconds: float = LONG_S) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def _serve(mine: Hello, address: Address, reports: Connection) -> None:
    made = Control(mine, SECRET, listen=address)
    reports.send(made.address)
    with contextlib.suppress(EOFError):
        reports.recv()
    made.close()


@contextlib.contextmanager
def process(mine: Hello, address: Address = ("127.0.0.1", 0)) -> Iterator[tuple[BaseProcess, Address, Connection]]:
    """A process with a control, where it listens, and a pipe: when that is closed, it closes its control and ends."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    made = spawn.Process(target=_serve, args=(mine, address, theirs), daemon=True)
    made.start()
    theirs.close()
    try:
        assert ours.poll(LONG_S), "the process did not start"
        yield made, ours.recv(), ours
    finally:
        made.kill()
        made.join()
        ours.close()

"""An `EngineCore` in a process of its own, so that HTTP and tokenising never stall a step.

    parent                                 child
    EngineProcess.start  --spawn-->        build the core      --Ready | Died-->
    send(Ask | Abort | ...) --Channel-->   between two steps   --Outputs | Reply | Beat ...-->

The child blocks in `poll` while it has no work, and ends when its parent does. One bad request, or one that cannot be
read, is refused alone. An exception of the step loop itself, or a broken invariant anywhere, ends the engine (`Died`).
Heartbeats have a progress mark, so that the parent can distinguish an engine without work from one that makes no
progress.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from types import GenericAlias
from typing import Any, NamedTuple, Protocol, get_args, get_origin, get_type_hints

import msgspec

from quire.cache.session import SessionList
from quire.client.channel import Channel
from quire.engine.config import EngineConfig
from quire.engine.messages import (
    COMMAND_DECODER,
    ENCODER,
    EXIT_DEFECT,
    Abort,
    Ask,
    Beat,
    Command,
    Died,
    EngineRequest,
    Later,
    MemoryReport,
    Outputs,
    Ready,
    Reply,
    Report,
    ResizeRequest,
    RetainRequest,
    Shutdown,
    StepOutputs,
    Touched,
    WireError,
)
from quire.engine.outline import Outline
from quire.engine.watchdog import Watchdog
from quire.errors import EngineDead, InvalidInput, QuireError
from quire.garbage import kept_imports
from quire.loop.tenants import TenantState
from quire.observe.explain import Explanation
from quire.offload.deletion import Flushed
from quire.offload.retention import Granted, RetainedList
from quire.spec.ending import Ending
from quire.spec.events import Namespace

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""Longest time between two heartbeats of an engine between steps."""

STEP_STUCK_AFTER_S = 30.0
"""Time in one step after which the log has where it is."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"

_EMPTY_STEPS_BEFORE_REST = 64
_REST_MS = 2
_REST_OF_COMMAND_MS = 5
_LINGER_S = 2.0


class Verbs(Protocol):
    """The methods of a core that the parent may call. Those with an `owner` answer for what is that one's; None: for
    all."""

    def add(self, request: EngineRequest) -> Any: ...  # Later[bool] | None
    def tell_ending(self, request_id: str, ending: Ending) -> bool: ...
    def counters(self) -> dict[str, Any]: ...
    def explain(self, request_id: str, owner: str | None) -> dict[str, Explanation]: ...
    def retain(self, request: RetainRequest) -> Granted: ...
    def release(self, retention_id: str, owner: str | None) -> bool: ...
    def retained(self) -> RetainedList: ...
    def sessions(self, namespace: Namespace | None, owner: str | None) -> SessionList: ...
    def close_session(self, namespace: Namespace, session_id: str, owner: str | None) -> bool: ...
    def flush(self, namespace: Namespace | None) -> Later[Flushed]: ...
    def set_weights_epoch(self, epoch: int) -> Flushed: ...
    def resize(self, request: ResizeRequest) -> Later[MemoryReport]: ...
    def release_memory(self, wait_s: float) -> Later[MemoryReport]: ...
    def resume_memory(self, wait_s: float) -> Later[MemoryReport]: ...
    def memory(self) -> MemoryReport: ...
    def tenants(self) -> list[TenantState]: ...
    def set_tenant(self, name: str, terms: dict[str, Any]) -> list[TenantState]: ...
    def set_role(self, role: str) -> str: ...
    def set_prefill_peers(self, addresses: list[str]) -> list[str]: ...
    def audit_cache(self) -> Later[dict[str, Any]]: ...
    def history(self) -> dict[str, Any]: ...
    def outline(self) -> Outline: ...
    def plan_if(self, changes: dict[str, int]) -> dict[str, Any]: ...


class Core(Verbs, Protocol):
    """The interface of what the process runs: `EngineCore`, or a stand-in of a test. Any thread may call `wake`, which
    the process sets, when `is_due` may have become true."""

    wake: Callable[[], None]

    def ready(self) -> Ready: ...
    def abort(self, request_id: str, *, stopped: bool = False) -> None: ...
    def step(self) -> StepOutputs: ...
    def has_work(self) -> bool: ...
    def is_due(self) -> bool: ...
    def close(self) -> None: ...


class Verb(NamedTuple):
    """How the arguments of a method are decoded in the engine's process, and its answer in the owner's."""

    arguments: msgspec.msgpack.Decoder[tuple[Any, ...]]
    answer: msgspec.msgpack.Decoder[Any]

    @classmethod
    def of(cls, method: Callable[..., Any]) -> Verb:
        """From the types of a method of `Verbs`."""
        hints = get_type_hints(method)
        answer = hints.pop("return")
        if get_origin(answer) is Later:
            (answer,) = get_args(answer)
        return cls(msgspec.msgpack.Decoder(GenericAlias(tuple, tuple(hints.values()))), msgspec.msgpack.Decoder(answer))


VERBS = {name: Verb.of(method) for name, method in vars(Verbs).items() if name[0] != "_"}

Progress = Callable[[int, int], None]
"""Touched bytes of host memory, and the total."""

BuildCore = Callable[[EngineConfig, Progress], Core]


def build_engine_core(config: EngineConfig, progress: Progress) -> Core:
    """The real core; imported here so that only the child loads torch, which takes longer than a refusal."""
    with kept_imports():
        from quire.engine.lean_imports import with_short_spins, without_compiler

        with_short_spins()
        from quire.engine.tier_storage import open_tiers

    storage = open_tiers(config)
    with kept_imports():
        without_compiler(config.device)
        from quire.engine.core import EngineCore

    return EngineCore(config, storage=storage, progress=progress)


class EngineProcess:
    """The parent's end. Not thread-safe; an event loop may wait for `channel`: to read reports, to flush."""

    def __init__(self, config: EngineConfig, *, build: BuildCore = build_engine_core) -> None:
        self._stop_s = config.stop_seconds
        self.channel, other = Channel.pair()
        self.process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(config, other, build, logging.getLogger().level), name="quire-engine", daemon=True
        )
        with other, _signals_blocked():
            self.process.start()
        # Runs at interpreter exit too, before multiprocessing would wait for a child that ignores SIGTERM.
        self._finalizer = weakref.finalize(self, _clean_up, self.process)

    def send(self, command: Command) -> bool:
        """Hand a command to the child; never blocks. Returns whether nothing is left for `channel.flush`."""
        return self.channel.send(ENCODER.encode(command))

    def death(self) -> EngineDead:
        """The error that says how the child ended."""
        code = self.process.exitcode or 0
        names = {each.value: each.name for each in signal.Signals}
        how = f"was killed by signal {-code} ({names.get(-code, 'unknown')})" if code < 0 else f"ended with code {code}"
        fix = "restart the server; its log has the cause."
        if code == -signal.SIGKILL:
            fix = "restart the server; if it was not killed by hand, memory ran out: lower the KV memory."
        return EngineDead(f"the engine process {how}; no request can progress.", fix=fix)

    def stop(self, *, deadline_s: float | None = None) -> None:
        """Ask the child to end, and kill it at the deadline: by default when transfers to storage should have ended
        (`EngineConfig.stop_seconds`). Blocks; idempotent."""
        if self.process.is_alive():
            self.send(Shutdown())
            seconds = self._stop_s if deadline_s is None else deadline_s
            self.process.join(seconds)
            if self.process.is_alive() and deadline_s is None:
                logger.warning("the engine did not end within %g s and is killed", seconds)
        self._finalizer()
        self.channel.close()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start a child that ignores Ctrl-C from its first moment on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _clean_up(process: BaseProcess) -> None:
    if process.is_alive():
        process.kill()
        process.join(5.0)


def run_engine(config: EngineConfig, end: socket.socket, build: BuildCore, log_level: int) -> None:
    """Main function of the child, which logs as its parent does."""
    logging.basicConfig(level=log_level, format=LOG_FORMAT)
    _live_and_die_with_parent()
    link = _ChildEnd(Channel(end))
    exit_code, is_ready = 0, False
    try:
        core = build(config, lambda done, total: link.report(Touched(done, total)))
        gc.collect()
        gc.freeze()  # a collection of what was loaded takes the time of many steps
        link.report(core.ready())
        is_ready = True
        core.wake = link.wake
        watchdog = Watchdog("the engine loop", STEP_STUCK_AFTER_S)
        StepLoop(core, link, tick=watchdog.tick).run()
    except Exception as error:
        link.report(Died(error=WireError.of(error)))
        exit_code = error.exit_code if isinstance(error, QuireError) and not is_ready else EXIT_DEFECT
    link.close()
    sys.stderr.flush()
    os._exit(exit_code)  # taking the interpreter and torch down would take seconds, and nothing has to be saved


def _live_and_die_with_parent() -> None:
    """Leave Ctrl-C and SIGTERM to the parent, which drains first, and end at once when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, name="quire-parent-watch", daemon=True).start()


class _ChildEnd:
    """The child's end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._awake, self._waker = socket.socketpair()
        for end in (self._awake, self._waker):
            end.setblocking(False)
        self._ready = select.poll()
        self._ready.register(self._awake, select.POLLIN)
        self._ready.register(channel, select.POLLIN)

    def wake(self) -> None:
        """End the wait for commands. Any thread may call it."""
        with contextlib.suppress(OSError):  # full: it ends anyway; closed: the engine ends
            self._waker.send(b"w")

    def close(self) -> None:
        """Close all sockets; reports that were made are sent."""
        self._waker.close()
        self._channel.close(linger_s=_LINGER_S)

    def report(self, report: Report) -> None:
        """Send it; what the socket does not take now is sent by `commands`."""
        if not self._channel.send(ENCODER.encode(report)):
            self._ready.modify(self._channel, select.POLLIN | select.POLLOUT)

    def commands(self, timeout_ms: int) -> list[Command]:
        """All commands that have arrived, after waiting for the first one for at most `timeout_ms`."""
        arrived: list[Command] = []
        while ready := dict(self._ready.poll(timeout_ms)):
            if self._awake.fileno() in ready:
                self._awake.recv(4096)
            if ready.get(self._channel.fileno(), 0) & select.POLLOUT and self._channel.flush():
                self._ready.modify(self._channel, select.POLLIN)
            for message in self._channel.receive():
                try:
                    arrived.append(COMMAND_DECODER.decode(message))
                except Exception:
                    logger.exception("a command could not be read and is ignored")
            if not self._channel.is_open:  # the parent has ended: so does this process (`_live_and_die_with_parent`)
                self._ready.unregister(self._channel)
                break
            timeout_ms = _REST_OF_COMMAND_MS if self._channel.is_within_message else 0
        return arrived


class StepLoop:
    """Commands, one step, reports; then again. `link` needs `commands(timeout_ms)` and `report(report)`. Each time it
    begins with a `tick`."""

    def __init__(self, core: Core, link: _ChildEnd, *, tick: Callable[[], None] = lambda: None) -> None:
        self._tick = tick
        self._core = core
        self._link = link
        self._running = True
        self._later: dict[int, Later[Any]] = {}  # answers that are not known yet, by the number of their question
        self._num_empty_steps = 0
        self._num_outputs = 0
        self._beat_at_s = 0.0
        self._was_idle = True

    def run(self) -> None:
        """Until a `Shutdown` command. An exception of the core's step passes through here."""
        while self._running:
            self._tick()
            for command in self._link.commands(self._patience_ms()):
                self._obey(command)
            if self._core.has_work() or self._core.is_due():
                self._step()
            self._answer_later()
            self._beat()
        self._core.close()
        self._answer_later(ends=True)

    def _patience_ms(self) -> int:
        """How long to wait for commands: without limit if idle, not at all while steps have results."""
        if not self._core.has_work():
            return _REST_MS if self._core.is_due() else int(BEAT_S * 1000)
        return _REST_MS if self._num_empty_steps >= _EMPTY_STEPS_BEFORE_REST else 0

    def _step(self) -> None:
        outputs = self._core.step()
        self._num_outputs += len(outputs)
        self._num_empty_steps = 0 if len(outputs) else self._num_empty_steps + 1
        if len(outputs):
            self._link.report(Outputs(outputs))

    def _beat(self) -> None:
        """Send a heartbeat: every `BEAT_S`, and at once when the last work is done."""
        now, has_work = time.monotonic(), self._core.has_work()
        became_idle = not has_work and not self._was_idle
        if now - self._beat_at_s < BEAT_S and not became_idle:
            return
        self._beat_at_s, self._was_idle = now, not has_work
        counters = self._core.counters()
        progress = self._num_outputs + int(counters.get("steps", 0))
        self._link.report(Beat(has_work=has_work, progress=progress, counters=counters))

    def _obey(self, command: Command) -> None:
        match command:
            case Ask(number):
                self._answer(number, partial(self._call, command))
            case Abort(request_ids, stopped):
                for request_id in request_ids:
                    self._core.abort(request_id, stopped=stopped)
            case Shutdown():
                self._running = False

    def _call(self, ask: Ask) -> Any:
        try:
            arguments = VERBS[ask.verb].arguments.decode(ask.arguments)
        except AssertionError:
            raise
        except Exception as error:
            if isinstance(error.__cause__, QuireError):  # raised by a constructor
                raise error.__cause__ from None
            raise InvalidInput(f"the engine cannot read the request: {error}.") from None
        return getattr(self._core, ask.verb)(*arguments)

    def _answer_later(self, *, ends: bool = False) -> None:
        """Send answers that have become known, and overdue ones as they are; all of them if the engine ends."""
        for number, later in list(self._later.items()):
            self._answer(number, partial(_poll, later, waits=not ends and time.monotonic() < later.until_s))

    def _answer(self, number: int, found: Callable[[], Any]) -> None:
        """Report what `found` returns, or its error; one question that meets a defect must not end the others."""
        self._later.pop(number, None)
        try:
            value = found()
            reply = None if isinstance(value, Later) else Reply(number, msgspec.Raw(ENCODER.encode(value)))
        except AssertionError:  # a broken invariant ends the engine: later answers could be wrong
            raise
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.exception("question %d could not be answered", number)
            reply = Reply(number, error=WireError.of(error))
        if reply is None:
            self._later[number] = value
        else:
            self._link.report(reply)


def _poll(later: Later[Any], *, waits: bool) -> Any:
    """The answer, or the object itself while there is none."""
    found = later.poll(waits)
    return later if found is None else found

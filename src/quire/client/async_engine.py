"""The engine for an event loop: requests in, streams of deltas out, while the steps run in a process of their own.

States: running -> draining (no new requests; `shutdown` waits for the open ones) -> closed. At any moment the engine
process may die: every open stream then raises `EngineDead`, and `health` reports it. Another process takes its place,
within limits; until it is ready, requests are refused with the time after which to send them again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, overload

import msgspec
import numpy as np

from quire.client.changes import Changes
from quire.client.health import EngineHealth, is_released, stuck
from quire.client.output import SequenceDelta
from quire.client.process import VERBS, BuildCore, Core, EngineProcess, Progress, build_engine_core
from quire.client.request_assembler import RequestAssembler
from quire.client.request_stream import RequestStream
from quire.client.tokenising import ServingTokenizer, Tokenising
from quire.counters import Metric
from quire.engine.config import EngineConfig
from quire.engine.messages import (
    REPORT_DECODER,
    Abort,
    Ask,
    Beat,
    Command,
    Died,
    Later,
    Outputs,
    Ready,
    Reply,
    Report,
    RetainRequest,
    TokenOutput,
    Touched,
    encoded,
    not_utf8,
    prompt_bytes,
)
from quire.errors import EngineDead, InvalidInput, QuireError
from quire.offload.retention import Granted
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.ids import Ids

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
logger = logging.getLogger(__name__)

STALL_AFTER_S = 120.0
"""Default time without progress, with pending work, after which the engine counts as stuck."""

ANSWER_TIMEOUT_S = 10.0

RESTART_WINDOW_S = 600.0
"""Time in which an engine may be started again `max_restarts` times."""

SILENT_AFTER_S = 30.0
"""Time without a heartbeat of an engine without work, after which it counts as stuck. A step may take longer."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LEAST_RETRY_S = 1.0
_LOOK_S = 0.1  # between two looks at whether a process has ended
_LINGER_S = 5.0  # in which it has to

Prompt = str | Sequence[int] | Ids


def _in_daemon_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Its result. The process ends without waiting for the thread, which may fetch from the hub."""
    found: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    found.set_running_or_notify_cancel()
    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(found)


async def _made(start: Callable[[], EngineProcess]) -> EngineProcess:
    """A process that a thread starts. If nothing waits for it any more, it ends."""
    making = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        process = await making
        await asyncio.to_thread(process.stop, deadline_s=0)
        raise


class AsyncEngine:
    """An engine in a process of its own, for the event loop that started it by `await AsyncEngine.start(config)`.

    `facts` are statistics that never change; `last_statistics` are all, with the counters of the last heartbeat, at
    most a moment old unless a long step runs.
    """

    def __init__(
        self,
        process: EngineProcess,
        tokenizer: ServingTokenizer | None,
        *,
        start_again: Callable[[], EngineProcess],
        max_restarts: int,
        stall_after_s: float,
        on_progress: Progress | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tokenising: Tokenising | None = None  # that tokenizer's, once the engine is ready
        self.context_length, self.eos_token_ids = 0, list[int]()
        self.facts, self.metrics = dict[str, Any](), list[Metric]()
        self.last_statistics: dict[str, Any] = {}
        self.num_restarts = 0
        self.on_beat: Callable[[], None] = lambda: None  # is called after each heartbeat
        self._process = process
        self._start_again = start_again
        self._max_restarts = max_restarts
        self._restarted_s: list[float] = []  # when it was started again, within the window
        self._restarting: asyncio.Task[None] | None = None
        self._began_s = time.monotonic()
        self._start_s = 0.0  # how long the last start took
        self._back_at_s = 0.0  # while another one starts: when it should be ready
        self._heard_s = self._began_s  # when the engine last reported anything
        self._stall_after_s = stall_after_s
        self._on_progress = on_progress
        self._streams: dict[str, RequestStream] = {}  # key: engine id of a sequence
        self._questions: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._changes = Changes()
        self._counter = itertools.count(1)
        self._progress_s = time.monotonic()  # when the engine last got anywhere
        self._progress = -1  # its mark of that
        self._has_work = False  # says its last heartbeat
        self._death: QuireError | None = None
        self._lost: QuireError | None = None  # how the process that was started last has ended
        self._draining = False
        self._has_ended = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None]
        self._attach(process)

    def _attach(self, process: EngineProcess) -> None:
        """Listen to a process that starts."""
        self._process, self._has_ended, self._lost = process, False, None
        self._ready = self._loop.create_future()
        self._began_s = self._heard_s = time.monotonic()
        self._progress, self._has_work = -1, False
        self._loop.add_reader(process.channel, self._receive)
        self._loop.add_reader(process.process.sentinel, self._on_exit)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        tokenizer: ServingTokenizer | None = None,
        build: BuildCore = build_engine_core,
        stall_after_s: float = STALL_AFTER_S,
        on_progress: Progress | None = None,
        max_restarts: int = 0,
    ) -> AsyncEngine:
        """Start the engine process and wait until it can serve. Raises the error that the engine raised at its start.
        One that dies later is started again, at most `max_restarts` times in `RESTART_WINDOW_S`.

        By default the configuration's tokenizer is used, loaded here while the process loads the weights. If both fail,
        the engine's error is raised: a model that cannot run often has no tokenizer either. `on_progress` is called
        while host memory is touched.
        """
        start_process = partial(EngineProcess, config, build=build)
        process = await _made(start_process)
        engine = cls(
            process,
            tokenizer,
            start_again=start_process,
            max_restarts=max_restarts,
            stall_after_s=stall_after_s,
            on_progress=on_progress,
        )
        loads = tokenizer is None and not config.skip_tokenizer_init
        loading = _in_daemon_thread(config.load_tokenizer) if loads else None
        try:
            await engine._ready
            if loading is not None:
                engine.tokenizer = await loading
            if engine.tokenizer is not None:
                engine.tokenising = Tokenising(engine.tokenizer, most_tokens=engine.context_length)
            engine._on_progress = None
        except BaseException:
            await engine._start_no_other()
            if loading is not None:
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
            await engine._end(deadline_s=0.5)
            raise
        return engine

    async def generate(
        self, prompt: Prompt, params: SamplingParams, **options: Any
    ) -> AsyncGenerator[SequenceDelta, None]:
        """The deltas of one request, with the options of `submit`. Closing or cancelling the generator aborts it."""
        stream = await self.submit(prompt, params, **options)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.close()

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        adapter: str = "",
        salt: str = "",
        priority: int = 0,
        explain: bool = False,
        session_id: str = "",
        last_turn: bool = False,
        owner: str = "",
        echo: bool = False,
        begun: Sequence[TokenOutput] = (),
    ) -> RequestStream:
        """Hand a request to the engine; returns once it is accepted. Raises the engine's refusal. With `echo` the text
        begins with the prompt. If another engine has `begun` the request and said this of it, it is continued."""
        if params.stop and self.tokenizer is None:
            raise InvalidInput("stop strings need a tokenizer.", fix="use stop_token_ids.")
        token_ids = await self.token_ids(prompt)
        self._check_alive()
        if self._draining:
            closing = EngineDead("the server is shutting down.", fix="send the request to another one.")
            closing.was_received = False
            raise closing
        assembler = RequestAssembler(
            request_id=request_id or f"request-{next(self._counter)}",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            decoder=self.tokenizer,
            echo=echo,
            session_id=session_id,
        )
        stream = RequestStream(assembler, on_close=self._close, begun=begun)
        terms = {"adapter": adapter, "salt": salt, "priority": priority, "explain": explain, "last_turn": last_turn}
        requests = assembler.engine_requests(owner=owner, **terms)
        if any(request.request_id in self._streams for request in requests):
            raise InvalidInput(f"request id '{assembler.request_id}' is in use.", fix="choose another, or none.")
        asked = [encoded((request,)) for request in requests]  # refused before it is registered
        if not self._streams:
            self._progress_s = time.monotonic()
        if requests:
            self._idle.clear()
        self._streams |= dict.fromkeys((request.request_id for request in requests), stream)
        try:
            await asyncio.gather(*[self._send(Core.add.__name__, arguments) for arguments in asked])
        except BaseException:
            stream.close()
            raise
        return stream

    if TYPE_CHECKING:

        @overload
        async def ask(self, verb: Callable[[Core, *Ts], Later[T]], *arguments: *Ts, timeout_s: float = ...) -> T: ...
        @overload
        async def ask(self, verb: Callable[[Core, *Ts], T], *arguments: *Ts, timeout_s: float = ...) -> T: ...

    async def ask(self, verb: Callable[..., Any], *arguments: object, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Call a method of the engine's core, and return its result. Raises what that raises, and `EngineDead` if the
        engine has ended or does not answer in time."""
        answer = await self._in_time(self._send(verb.__name__, encoded(arguments)), timeout_s)
        self._changes.done(verb.__name__, arguments)
        return VERBS[verb.__name__].answer.decode(answer)

    async def _in_time(self, answer: asyncio.Future[msgspec.Raw], timeout_s: float) -> msgspec.Raw:
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise EngineDead(
                f"the engine did not answer within {timeout_s:g} s.",
                fix="a step takes that long; try again, or lower --max-num-batched-tokens.",
            ) from None

    def _send(self, verb: str, arguments: msgspec.Raw) -> asyncio.Future[msgspec.Raw]:
        """Send a question; returns its answer."""
        self._check_alive()
        return self._question(verb, arguments)

    def _again(self, verb: str, arguments: tuple[Any, ...]) -> Awaitable[msgspec.Raw]:
        return self._in_time(self._question(verb, encoded(arguments)), ANSWER_TIMEOUT_S)

    def _question(self, verb: str, arguments: msgspec.Raw) -> asyncio.Future[msgspec.Raw]:
        number = next(self._counter)
        answer = self._questions[number] = self._loop.create_future()
        answer.add_done_callback(lambda _: self._questions.pop(number, None))
        self._command(Ask(number, verb, arguments))
        return answer

    def _command(self, command: Command) -> None:
        if not self._process.send(command):
            self._loop.add_writer(self._process.channel, self._flush)

    def _flush(self) -> None:
        if self._process.channel.flush():
            self._loop.remove_writer(self._process.channel)

    async def statistics(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The engine's counters now."""
        self.last_statistics = self.facts | await self.ask(Core.counters, timeout_s=timeout_s)
        return self.last_statistics

    async def retain(self, prompt: Prompt, *, ttl_seconds: float, **options: Any) -> Granted:
        """Retain the cached part of a prompt for so long; the answer says how much that is and why not more (`ask`).
        `options` are further fields of `RetainRequest`."""
        tokens = prompt_bytes(await self.token_ids(prompt))
        return await self.ask(Core.retain, RetainRequest(prompt=tokens, ttl_seconds=ttl_seconds, **options))

    @property
    def is_draining(self) -> bool:
        """Whether it ends, and takes no new requests."""
        return self._draining

    def health(self) -> EngineHealth:
        """Whether a request made now could be answered."""
        if self._death is not None:
            return EngineHealth(healthy=False, reason=str(self._death), detail=getattr(self._death, "detail", ""))
        if self._draining:
            return EngineHealth(healthy=False, reason="the server is shutting down.")
        if not self._process.process.is_alive():  # its last reports are read before its requests end
            death = self._process.death()
            restarts = self._may_restart()
            return EngineHealth(
                healthy=False, reason=f"{death.message} It is started again." if restarts else str(death)
            )
        if violation := self.last_statistics.get("violation"):
            reason = "an invariant of the cache is broken; requests that run end, and no other is admitted."
            return EngineHealth(healthy=False, reason=reason, detail=violation)
        silent_s = time.monotonic() - self._heard_s
        if not self._streams and not self._has_work and silent_s > min(SILENT_AFTER_S, self._stall_after_s):
            return EngineHealth(
                healthy=False, reason=f"the engine has no work, and was not heard of for {silent_s:.0f} s."
            )
        waited_s = time.monotonic() - self._progress_s
        if self._streams and waited_s > self._stall_after_s:
            work = "has work but makes no progress" if self._has_work else "does not answer"
            limit = f"{len(self._streams)} sequences are open; the limit is {self._stall_after_s:g} s"
            reason = f"the engine {work} for {waited_s:.0f} s ({limit})."
            return EngineHealth(healthy=False, reason=reason, detail=self.last_statistics.get("waiting_reason", ""))
        return EngineHealth(healthy=True, stuck=tuple(stuck(self.last_statistics)))

    async def shutdown(self, *, drain_s: float = 0.0) -> None:
        """Refuse new requests, let the open ones finish for at most `drain_s`, abort the rest, end the process."""
        await self._start_no_other()
        if self._death is None and drain_s > 0:
            try:
                await asyncio.wait_for(self._idle.wait(), drain_s)
            except TimeoutError:
                logger.warning("%d sequences did not finish in time and are aborted", len(self._streams))
        closed = EngineDead("the server is shutting down; the request was aborted.", fix="send it again later.")
        self._fail_all(closed)
        await self._end(deadline_s=None if self._ready.done() else 0.5)
        if self.tokenising is not None:
            self.tokenising.close()
        self._death = self._death or closed

    async def _start_no_other(self) -> None:
        """Take no more requests, and let no other process take the place of one that dies."""
        self._draining = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)

    async def _end(self, *, deadline_s: float | None = None) -> None:
        """Stop the process, and listen to it no longer."""
        if not self._has_ended:
            self._has_ended = True
            self._loop.remove_reader(self._process.process.sentinel)
            self._loop.remove_reader(self._process.channel)
            self._loop.remove_writer(self._process.channel)
        await asyncio.to_thread(self._process.stop, deadline_s=deadline_s)  # again: a cancelled one may not have begun

    # Reports of the engine process.

    def _receive(self) -> None:
        channel = self._process.channel
        self._heard_s = time.monotonic()
        try:
            for message in channel.receive():
                self._on_report(REPORT_DECODER.decode(message))
            if not channel.is_open:
                self._loop.remove_reader(channel)
                self._loop.call_later(_LOOK_S, self._await_end, self._process, self._heard_s + _LINGER_S)
        except Exception as error:  # every open request must get this error, whatever it is
            logger.exception("reading the engine's reports failed")
            self._die(EngineDead(f"the engine's reports cannot be read: {error}", fix="restart the server."))

    def _on_report(self, report: Report) -> None:
        match report:
            case Outputs(outputs):
                self._progress_s = time.monotonic()
                for output in outputs:
                    self._deliver(output)
            case Beat():
                self._on_beat(report)
            case Reply(number, value, error):
                answer = self._questions.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(value) if error is None else answer.set_exception(error.rebuild())
            case Touched(done, total):
                if self._on_progress is not None:
                    self._on_progress(done, total)
            case Ready():
                self.context_length, self.eos_token_ids = report.context_length, report.eos_token_ids
                self.facts, self.metrics = report.facts, report.metrics
                self.last_statistics = self.facts | report.counters
                self._progress_s = time.monotonic()
                self._start_s = self._progress_s - self._began_s
                if not self._ready.done():  # cancelled if the start is
                    self._ready.set_result(None)
            case Died(error) if not self._ready.done():
                logger.debug("engine start-up failed:\n%s", error.details)
                self._ready.set_exception(error.rebuild())
            case Died(error):
                logger.error("the engine stopped:\n%s", error.details)
                cause = error.rebuild()
                death = EngineDead("the engine stopped after an error of its own.", fix="restart the server.")
                death.detail = cause.message
                self._die(death)

    def _deliver(self, output: TokenOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # aborted in the meantime
        try:
            delta = stream.push(output)
        except Exception as error:  # a tokenizer that cannot decode one request's tokens must not end the others
            logger.exception("the output of %s could not be put together", output.request_id)
            stream.fail(QuireError(f"the output could not be put together: {type(error).__name__}: {error}"))
            stream.close()
            return
        if delta.finish_reason is not None:
            self._remove(output.request_id)
        if delta.must_abort:
            self._command(Abort([output.request_id], stopped=True))

    def _on_beat(self, beat: Beat) -> None:
        self.last_statistics = self.facts | beat.counters
        if beat.progress != self._progress or not self._streams or is_released(beat.counters):
            self._progress_s = time.monotonic()
        self._progress, self._has_work = beat.progress, beat.has_work
        self.on_beat()

    def _on_exit(self) -> None:
        """The process is gone, or about to be."""
        self._loop.remove_reader(self._process.process.sentinel)
        self._loop.call_later(_LOOK_S, self._await_end, self._process, time.monotonic() + _LINGER_S)

    def _await_end(self, process: EngineProcess, until_s: float) -> None:
        """What waits for a process gets the error that it left, or how it ended. One that has not ended by then is
        killed."""
        if process is not self._process or self._has_ended:  # another has its place, or nothing waits for it
            return
        while process.channel.has_news():  # its last reports
            self._receive()
        if process.process.exitcode is not None:
            self._die(process.death())
            return
        if time.monotonic() > until_s:
            logger.error("the engine process has closed its channel, and is killed as it does not end")
            process.process.kill()
        self._loop.call_later(_LOOK_S, self._await_end, process, until_s)

    def _die(self, error: QuireError) -> None:
        self._lost = error
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self._death is not None:  # a process that had just started
            self._fail_all(error)
        else:
            self._death = error
            if not self._draining and self._may_restart():
                self._death = self._starts_again(error)
                self._restarting = self._loop.create_task(self._restart(error))
            logger.error("%s", self._death)
            self._fail_all(self._death)

    def _may_restart(self) -> bool:
        """Whether the limit allows one more."""
        since_s = time.monotonic() - RESTART_WINDOW_S
        self._restarted_s = [each for each in self._restarted_s if each > since_s]
        return len(self._restarted_s) < self._max_restarts

    def _starts_again(self, error: QuireError) -> EngineDead:
        """The error of requests until the next engine is ready."""
        self._back_at_s = time.monotonic() + _FIRST_PAUSE_S + self._start_s
        death = EngineDead(f"{error.message} It is started again.", fix="send the request again.")
        death.retry_after_s, death.detail = self._retry_after_s(), getattr(error, "detail", "")
        return death

    def _retry_after_s(self) -> float:
        """Seconds until the engine that starts should be ready, by the time that the last start took."""
        return max(_LEAST_RETRY_S, self._back_at_s - time.monotonic())

    async def _restart(self, error: QuireError) -> None:
        """Start processes, until one is ready or the limit is reached."""
        for attempt in itertools.count():
            await self._end(deadline_s=0.5)
            if not self._may_restart():
                self._death = EngineDead(
                    f"{error.message} It was started again {len(self._restarted_s)} times within "
                    f"{RESTART_WINDOW_S:.0f} s.",
                    fix="restart the server; its log has the cause.",
                )
                logger.error("%s", self._death)
                return
            self._restarted_s.append(time.monotonic())
            pause_s = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
            self._back_at_s = time.monotonic() + pause_s + self._start_s
            await asyncio.sleep(pause_s)
            try:
                self._attach(await _made(self._start_again))
                await self._ready
                await self._changes.make_again(self._again)
                if self._lost is not None:
                    raise self._lost
            except (QuireError, OSError) as failed:  # OSError: no file, process or memory is left for it
                logger.error("the engine did not start again: %s", failed)
                error = failed if isinstance(failed, QuireError) else EngineDead(f"no engine can be started: {failed}.")
                continue
            self._death, self._restarting = None, None
            self.num_restarts += 1
            logger.warning("the engine is ready again, after %.1f s", self._start_s)
            return

    def _fail_all(self, error: QuireError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)
        if self._death is None and self._streams:
            self._command(Abort(list(self._streams)))
        self._streams.clear()
        self._idle.set()
        for answer in list(self._questions.values()):
            if not answer.done():
                answer.set_exception(error)

    # Requests.

    def _close(self, request: RequestAssembler) -> None:
        open_ids = [name for name in request.unfinished_ids() if name in self._streams]
        for request_id in open_ids:
            self._remove(request_id)
        if self._death is None and open_ids:
            self._command(Abort(open_ids))

    def _remove(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def _check_alive(self) -> None:
        if self._death is not None:
            error = EngineDead(self._death.message, fix=self._death.fix)
            error.was_received = False
            if getattr(self._death, "retry_after_s", None) is not None:
                error.retry_after_s = self._retry_after_s()
            raise error

    async def token_ids(self, prompt: Prompt) -> Ids:
        """The token ids int32 of a prompt. Raises InvalidInput for one that has none, and what `Tokenising.encode`
        does."""
        if isinstance(prompt, str):
            if self.tokenising is None:
                raise InvalidInput(
                    "this engine has no tokenizer, so a prompt cannot be text.", fix="send token ids as the prompt."
                )
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise not_utf8("prompt", error) from None
            return await self.tokenising.encode(prompt)
        try:
            return np.asarray(prompt, dtype=np.int32)
        except (OverflowError, ValueError, TypeError):
            raise InvalidInput("prompt token ids must be integers of at most 2147483647.") from None

"""One HTTP request on its way through the engine, and its answer: whole, or as events while tokens come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from quire.client.async_engine import AsyncEngine, Prompt
from quire.client.output import CompletionOutput, SequenceAssembler, SequenceDelta
from quire.client.process import Core
from quire.client.request_stream import RequestStream
from quire.client.tokenising import Rendered, Tokenising
from quire.errors import InvalidInput, QuireError, TooSlow, UnknownModel
from quire.observe.explain import Cause
from quire.observe.metrics import ServerMetrics
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.answer_reader import AnswerReader
from quire.serve.answers import PromptDetails, Usage
from quire.serve.conversation import Conversation, Terms
from quire.serve.errors import OPENAI, BadField, defect
from quire.serve.journal import NO_JOURNAL, NoJournal, PromptTokens, journal_of
from quire.serve.keys import Client, not_allowed
from quire.serve.live import Live
from quire.serve.places import PromptPlaces
from quire.serve.protocol import MAX_CHOICES, ModelBody, RequestBody
from quire.serve.session_header import session_named
from quire.serve.shares import OpenSequences, Shares
from quire.serve.sse import DONE, EventStream, json_answer, while_connected
from quire.serve.texts import PromptTexts
from quire.serve.tracing import Tracing
from quire.spec.ending import Ending
from quire.spec.ids import Ids

if TYPE_CHECKING:
    from opentelemetry.context import Context

T = TypeVar("T")

logger = logging.getLogger(__name__)

ROOM = "X-Quire-Max-Tokens"
"""Header of an answer whose limit is more than the context has room for: so many tokens are possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes share."""

    engine: AsyncEngine
    metrics: ServerMetrics
    model_name: str
    started_at: int
    shares: Shares
    live: Live
    texts: PromptTexts
    tracing: Tracing | None = None
    request_timeout_s: float | None = None
    retains_marked: bool = False
    tenants: frozenset[str] = frozenset()
    after: set[asyncio.Task[object]] = field(default_factory=set)
    """Work that follows answers."""

    @property
    def tokenising(self) -> Tokenising:
        """The server's tokenizer. Raises InvalidInput if there is none."""
        if self.engine.tokenising is None:
            raise InvalidInput("this server has no tokenizer.", fix="send token ids to /v1/completions.")
        return self.engine.tokenising

    def deadline(self, timeout_s: float | None = None) -> float | None:
        """When, by the event loop's clock, a request that came now must be answered."""
        limits = [each for each in (timeout_s, self.request_timeout_s) if each is not None]
        return asyncio.get_running_loop().time() + min(limits) if limits else None

    def terms(self, request: Request, body: RequestBody) -> Terms:
        """How a body is served, with the session that the request's header names."""
        terms = body.terms(self.deadline(body.timeout_s))
        session_id, is_last = session_named(request.headers, terms.session_id)
        return replace(terms, session_id=session_id, last_turn=terms.last_turn or is_last)

    def begin(self, work: Coroutine[Any, Any, object], failure: str) -> None:
        """Work that follows an answer, which does not wait for it. That it failed is logged."""

        def done(task: asyncio.Task[object]) -> None:
            self.after.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("%s: %s", failure, error)

        task = asyncio.get_running_loop().create_task(work)
        self.after.add(task)
        task.add_done_callback(done)

    def check(self, body: ModelBody) -> None:
        """Refuse a model that is not served, and what `body` refuses."""
        self.check_model(body.model)
        body.check()

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; the default is the served one."""
        if name is not None and name != self.model_name:
            raise UnknownModel(
                f"the model '{name[:60]}' does not exist here.",
                fix=f"use '{self.model_name}', the one this server has.",
            )


@contextlib.asynccontextmanager
async def by(deadline: float | None) -> AsyncIterator[None]:
    """Raises TooSlow at that time."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise _too_slow() from None


def _too_slow() -> TooSlow:
    return TooSlow(
        "the request was not answered by its deadline, and was ended.",
        fix="send it again, with a longer timeout_s or fewer tokens.",
    )


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A conversation on its way to an answer."""

    conversation: Conversation
    terms: Terms
    prompt: Rendered

    @classmethod
    async def of(cls, service: Service, request: Request, body: ModelBody, conversation: Conversation) -> ChatTurn:
        """Render the prompt, until the client leaves, or the deadline. Raises what `Conversation.rendered` does, and
        InvalidInput without a tokenizer."""
        terms = service.terms(request, body)
        tokenising, salt = service.tokenising, request.state.client.salt(terms.cache_salt)
        async with by(terms.deadline):
            prompt = await while_connected(request.receive, conversation.rendered(tokenising, salt))
        places = cache(PromptPlaces(body, prompt, tokenising.tokenizer).at)  # several choices begin at one token
        return cls(conversation, replace(terms, places=places), prompt)

    async def reader(self, service: Service, request: Request, params: SamplingParams) -> Callable[[], AnswerReader]:
        """`Conversation.reader`; in a thread where it makes a grammar, which takes long for large schemas."""
        make = partial(self.conversation.reader, service.tokenising, self.prompt, params)
        if not self.conversation.has_grammar(params):
            return make()
        async with by(self.terms.deadline):
            return await while_connected(request.receive, service.tokenising.aside(make))


def room_if_less(service: Service, prompt: Rendered, params: SamplingParams, wanted: int | None) -> int | None:
    """Limit the answer to the tokens that a client wants, and to the context: the room if that is less. Without room
    for one, the engine refuses the prompt as too long."""
    room = service.engine.context_length - len(prompt.token_ids)
    is_less = wanted is not None and room < wanted
    params.max_tokens = max(1, room) if is_less else wanted
    return room if is_less else None


class AnswerForm(ABC):
    """How a dialect writes an answer: whole, or as events. One form is made for each answer."""

    kind: str
    """The beginning of the answer's id."""

    places: Callable[[int], Sequence[str]] = staticmethod(lambda token: ())
    """The items of the client's conversation at a token of its prompt."""

    def reader_of(self, index: int) -> AnswerReader | None:
        """What has read the text of a choice to its end, if that is read."""
        return None

    @abstractmethod
    def whole(self, generation: Generation, outputs: Sequence[CompletionOutput]) -> Any:
        """The body of a whole answer, from its sequences in the order of the choices."""

    @abstractmethod
    def events(self, generation: Generation, index: int, delta: SequenceDelta) -> bytes:
        """The events for what has arrived of a choice; none for what shows nothing."""

    def end(self, generation: Generation) -> bytes:
        """The last events."""
        return DONE

    def failure(self, generation: Generation, error: QuireError) -> bytes:
        """The last events of an answer that fails while it is sent."""
        return OPENAI.last_events(OPENAI.body(error, ""))

    def notes(self, part: CompletionOutput) -> dict[str, Any]:
        """What the last part of a sequence says beside its content: why no more of its prompt was cached and where that
        ends, if the request asked for it, and what its session holds."""
        if part.finish_reason is None:
            return {}
        found: dict[str, Any] = {}
        if part.explanation is not None:
            told = part.explanation.for_client()
            found["explanation"] = told.to_dict()
            last = told.reasons[-1]
            if last.cause is Cause.NEW and (places := self.places(last.start)):
                found["explanation"]["first_new"] = {"token": last.start, "in": places}
        if part.session is not None:
            found["session"] = asdict(part.session)
        return found


async def answer(
    service: Service,
    request: Request,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    terms: Terms,
    form: AnswerForm,
    *,
    stream: bool | None,
    room: int | None = None,
) -> Response:
    """Generate the answer to a checked body, until the client leaves, or the deadline. A `room` is told in a header."""
    if request.state.asks_tokens:
        ids = await service.engine.token_ids(prompts[0])
        return PromptTokens(ids.tobytes(), request.state.client.salt(terms.cache_salt)).answer()
    journal = journal_of(request, stream=stream)
    submit = Generation.submit(service, request, prompts, params, terms, kind=form.kind, journal=journal)
    generation = await while_connected(request.receive, submit)
    form.places = terms.places
    headers = {} if room is None else {ROOM: str(room)}
    if stream:
        headers |= journal.headers
        is_scored = params.prompt_logprobs is not None
        events = _events(generation, form, journal, is_scored=is_scored, explains=terms.explain)
        return EventStream(events, on_close=generation.close, headers=headers)
    try:
        await while_connected(request.receive, generation.finish())

        def whole() -> Response:
            return json_answer(form.whole(generation, generation.outputs()), headers)

        is_scored = params.logprobs is not None or params.prompt_logprobs is not None
        response = await _made(whole, aside=is_scored or terms.explain)
        generation.tell_endings(form)
        return response
    finally:
        generation.close()


async def _made(make: Callable[[], T], *, aside: bool) -> T:
    """What a function makes; in a thread where that takes long."""
    return await asyncio.to_thread(make) if aside else make()


async def _events(
    generation: Generation, form: AnswerForm, journal: NoJournal, *, is_scored: bool, explains: bool = False
) -> AsyncGenerator[bytes, None]:
    """With `is_scored`, the prompt has log-probabilities, which take long. So do places in it, which the last events
    have where it `explains`."""

    def shown(found: Sequence[tuple[int, SequenceDelta]]) -> bytes:
        return b"".join([form.events(generation, i, delta) for i, delta in found if _says_something(delta)])

    try:
        if before := generation.before():
            await asyncio.to_thread(shown, before)
        yield journal.first(generation)
        async for found in generation.deltas():
            is_last = any(delta.finish_reason is not None for _, delta in found)
            events = await _made(partial(shown, found), aside=is_scored or (explains and is_last))
            yield events + journal.after(found)
        generation.tell_endings(form)
        yield await _made(partial(form.end, generation), aside=explains) + journal.last()
    except Exception as caught:
        error = caught if isinstance(caught, QuireError) else defect(caught)
        yield journal.lost(error, generation) or form.failure(generation, error) + journal.last()
    finally:
        generation.close()


class Generation:
    """The engine's side of one HTTP request. Choice `i` is sequence `i % n` of prompt `i // n`.

    Made by `submit`; its owner calls `close`, which aborts what still runs.
    """

    def __init__(
        self,
        service: Service,
        request_id: str,
        streams: Sequence[RequestStream],
        terms: Terms,
        *,
        client_id: str,
        started_s: float,
        turn: OpenSequences,
        created: int,
        parent: Context | None,
    ) -> None:
        """`parent` is that of its spans."""
        self._turn = turn
        loop = asyncio.get_running_loop()
        self._expiry = None if terms.deadline is None else loop.call_at(terms.deadline, self._expire)
        self.request_id = request_id
        self.terms = terms
        self.model = service.model_name
        self.created = created
        self._service = service
        self._client_id = client_id
        self._streams = streams
        self._requests = [stream.request for stream in streams]
        self._started_s = started_s  # a time of `time.perf_counter`
        self._first_token_s: float | None = None  # since the start, as the next ones
        self._last_token_s: dict[int, float] = {}  # key: choice
        self._is_closed = False
        self._parent = parent

    @classmethod
    async def submit(
        cls,
        service: Service,
        request: Request,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        terms: Terms,
        *,
        kind: str,
        journal: NoJournal = NO_JOURNAL,
    ) -> Generation:
        """Hand all prompts to the engine when it is the client's turn, or none: the first refusal takes back the others
        and is raised. So is what the client may not ask for."""
        client: Client = request.state.client
        if client.name and not client.is_admin and terms.priority > 0:
            raise not_allowed("a priority below 0")
        if len(prompts) * params.n > MAX_CHOICES:
            raise BadField(
                f"{len(prompts)} prompts with n={params.n} are {len(prompts) * params.n} sequences; "
                f"one request may ask for {MAX_CHOICES}.",
                param="n",
                fix="send several requests.",
            )
        if terms.session_id and len(prompts) * params.n > 1:
            raise BadField(
                f"a session follows one sequence, and this request has {len(prompts) * params.n}.",
                param="session_id",
                fix="send them one by one.",
            )
        started_s = time.perf_counter()
        request_id = journal.request_id or f"{kind}{uuid.uuid4().hex}"
        streams: dict[int, RequestStream] = {}

        async def submit_one(i: int, prompt: Prompt) -> None:
            streams[i] = await service.engine.submit(
                prompt,
                journal.params(params, i),
                request_id=f"{request_id}-{i}",
                salt=client.salt(terms.cache_salt),
                priority=terms.priority,
                explain=terms.explain,
                session_id=terms.session_id,
                last_turn=terms.last_turn,
                echo=terms.echo,
                owner=client.owner,
                begun=journal.begun(i),
            )

        turn: OpenSequences | None = None
        try:
            async with by(terms.deadline):
                turn = await service.shares.enter(client.name, len(prompts) * params.n)
                async with asyncio.TaskGroup() as group:
                    for i, prompt in enumerate(prompts):
                        group.create_task(submit_one(i, prompt))
        except BaseException as error:
            for stream in streams.values():
                stream.close()
            if turn is not None:
                turn.close()
            raise (error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error) from None
        in_order = [streams[i] for i in range(len(prompts))]
        for i, stream in enumerate(in_order):
            service.texts.keep(f"{request_id}-{i}", stream.request.prompt_token_ids)
        return cls(
            service,
            request_id,
            in_order,
            terms,
            client_id=request.state.request_id,
            started_s=started_s,
            turn=turn,
            created=journal.created or int(time.time()),
            parent=None if service.tracing is None else service.tracing.parent(request.headers),
        )

    @property
    def engine(self) -> AsyncEngine:
        """The engine that it runs on."""
        return self._service.engine

    @property
    def prompts(self) -> list[Ids]:
        """The tokens of each prompt."""
        return [request.prompt_token_ids for request in self._requests]

    def before(self) -> list[tuple[int, SequenceDelta]]:
        """What the servers before this one have shown, as (choice, delta)."""
        return [
            (prompt * stream.request.params.n + delta.index, delta)
            for prompt, stream in enumerate(self._streams)
            for delta in stream.before
        ]

    async def deltas(self) -> AsyncGenerator[list[tuple[int, SequenceDelta]], None]:
        """What has arrived since the last, as (choice, delta) in the order of arrival, of all prompts together."""
        if len(self._streams) == 1:
            while found := await self._streams[0].take():
                yield [self._timed(0, delta) for delta in found]
            return
        queue: asyncio.Queue[tuple[int, list[SequenceDelta]] | QuireError] = asyncio.Queue()
        pumps = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(self._streams)]
        try:
            num_open = len(pumps)
            while num_open:
                item = await queue.get()
                if isinstance(item, QuireError):
                    raise item
                prompt, found = item
                num_open -= not found
                yield [self._timed(prompt, delta) for delta in found]
        finally:
            for pump in pumps:
                pump.cancel()

    async def finish(self) -> None:
        """Wait for the end."""
        async for _ in self.deltas():
            pass

    def outputs(self) -> list[CompletionOutput]:
        """The sequences in the order of the choices."""
        return [sequence.completion() for sequence in self._sequences()]

    def usage(self) -> Usage:
        """Tokens read, generated, and served from the cache, so far. Rejected drafts are not among the completion
        tokens."""
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in self._requests)
        num_output_tokens = sum(len(each.token_ids) for each in self._sequences())
        cached, host, storage, peer = map(sum, zip(*(request.use for request in self._requests), strict=True))
        details: PromptDetails = {"cached_tokens": cached}
        if self.engine.last_statistics.get("tiers"):
            tiers = {"device": cached - host - storage - peer, "host": host, "storage": storage}
            if self.engine.last_statistics.get("transfer"):
                tiers["peer"] = peer
            details["cached_tokens_by_tier"] = tiers
        found: Usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": details,
        }
        if self.engine.last_statistics.get("speculation"):
            drafted, accepted = map(sum, zip(*(each.drafts for each in self._sequences()), strict=True))
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return found

    def tell_endings(self, form: AnswerForm) -> None:
        """Tell the engine which outputs have called tools and which have not, where a reader looked for calls."""
        ids = [request_id for request in self._requests for request_id in request.sequences]
        for index, (request_id, each) in enumerate(zip(ids, self._sequences(), strict=True)):
            reader = form.reader_of(index)
            if reader is not None and not reader.is_plain and each.finish_reason == "stop":
                ending = Ending.TOOL if reader.num_calls else Ending.ANSWER
                telling = self.engine.ask(Core.tell_ending, request_id, ending)
                self._service.begin(telling, "the engine was not told how an output ended")

    def close(self) -> None:
        """Abort what still runs, and record what became of the request. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        for stream in self._streams:
            stream.close()
        self._turn.close()
        seconds, usage = time.perf_counter() - self._started_s, self.usage()
        metrics = self._service.metrics.counters
        reasons = Counter(each.finish_reason or "abort" for each in self._sequences())
        metrics.finished.update(reasons)
        metrics.prompt_tokens.observe(usage["prompt_tokens"])
        metrics.generation_tokens.observe(usage["completion_tokens"])
        if not {"abort", "error"} & set(reasons):
            metrics.request_s.observe(seconds)
        ends = ", ".join(reason if count == 1 else f"{count} {reason}" for reason, count in sorted(reasons.items()))
        told = {"id": self.request_id, "client_id": self._client_id, "usage": usage, "seconds": seconds, "ends": ends}
        self._service.live.ended(told | {"first_token_s": self._first_token_s})
        if self._service.tracing is not None:
            parts = [(each.times, each.use, self._last_token_s.get(i)) for i, each in enumerate(self._sequences())]
            self._service.tracing.ended(self._parent, told, self._started_s, parts)
        logger.info(
            "%s [%s]: %d prompt tokens, %d cached, %d output tokens%s, first after %s, %.3f s, %s",
            self.request_id,
            self._client_id,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            _said_of_drafts(usage),
            "-" if self._first_token_s is None else f"{self._first_token_s:.3f} s",
            seconds,
            ends,
        )

    def _expire(self) -> None:
        for stream in self._streams:
            stream.fail(_too_slow())

    def _sequences(self) -> list[SequenceAssembler]:
        return [sequence for request in self._requests for sequence in request.sequences.values()]

    def _timed(self, prompt: int, delta: SequenceDelta) -> tuple[int, SequenceDelta]:
        choice = prompt * self._requests[prompt].params.n + delta.index
        if delta.token_ids:
            now = time.perf_counter() - self._started_s
            if self._first_token_s is None:
                self._first_token_s = now
                self._service.metrics.counters.first_token_s.observe(now)
            if choice in self._last_token_s:
                self._service.metrics.counters.inter_token_s.observe(now - self._last_token_s[choice])
            self._last_token_s[choice] = now
        return choice, delta


def _says_something(delta: SequenceDelta) -> bool:
    """False for the engine's word that a request has begun, which has an explanation: its prompt is not computed."""
    return bool(delta.token_ids or delta.text or delta.finish_reason)


def _said_of_drafts(usage: Usage) -> str:
    """For the log; nothing without speculation."""
    found = usage.get("completion_tokens_details")
    if found is None:
        return ""
    accepted = found["accepted_prediction_tokens"]
    return f", {accepted} of {accepted + found['rejected_prediction_tokens']} drafts accepted"


async def _pump(
    prompt: int, stream: RequestStream, queue: asyncio.Queue[tuple[int, list[SequenceDelta]] | QuireError]
) -> None:
    """Put what arrives into the queue, and nothing at the end."""
    try:
        while found := await stream.take():
            queue.put_nowait((prompt, found))
        queue.put_nowait((prompt, []))
    except QuireError as error:
        queue.put_nowait(error)

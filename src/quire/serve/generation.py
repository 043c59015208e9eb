"""One HTTP request on its way through the engine, and its answer: whole, or as events while tokens come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import JSONResponse, Response

from quire.client.async_engine import AsyncEngine, Prompt
from quire.client.output import CompletionOutput, SequenceAssembler, SequenceDelta
from quire.client.request_stream import RequestStream
from quire.errors import QuireError, TooSlow, UnknownModel
from quire.observe.metrics import ServerMetrics
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.answers import ChoiceFields, PromptDetails, Usage
from quire.serve.errors import BadField, error_body
from quire.serve.keys import Client, not_allowed
from quire.serve.protocol import MAX_CHOICES, GenerationBody
from quire.serve.shares import OpenSequences, Shares
from quire.serve.sse import DONE, EventStream, EventTemplate, event, while_connected

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes share."""

    engine: AsyncEngine
    metrics: ServerMetrics
    model_name: str
    started_at: int
    shares: Shares
    request_timeout_s: float | None = None

    def deadline(self, body: GenerationBody) -> float | None:
        """When, by the event loop's clock, a request that came now must be answered."""
        limits = [each for each in (body.timeout_s, self.request_timeout_s) if each is not None]
        return asyncio.get_running_loop().time() + min(limits) if limits else None

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


class ChoiceForm(Protocol):
    """The differences of the two generation routes: names, and the form of a choice."""

    kind: str
    answer_object: str
    chunk_object: str
    opening: dict[str, Any] | None

    def content(self, part: CompletionOutput, *, whole: bool) -> Mapping[str, object]: ...
    def logprobs(self, index: int, part: CompletionOutput) -> dict[str, Any] | None: ...


async def answer(
    service: Service,
    request: Request,
    body: GenerationBody,
    params: SamplingParams,
    prompts: Sequence[Prompt],
    choices: ChoiceForm,
    *,
    deadline: float | None,
) -> Response:
    """Generate the answer to a checked body, until the client leaves, or the deadline by the event loop's clock."""
    client: Client = request.state.client
    if client.name and not client.is_admin and (body.priority or 0) > 0:
        raise not_allowed("a priority above 0")
    submit = Generation.submit(
        service,
        prompts,
        params,
        body,
        kind=choices.kind,
        client_id=request.state.request_id,
        client=client,
        deadline=deadline,
    )
    generation = await while_connected(request.receive, submit)
    if body.stream:
        return EventStream(_events(service, body, generation, choices), on_close=generation.close)
    try:
        outputs = await while_connected(request.receive, generation.finish())
        found = [_choice(body, choices, index, part, whole=True) for index, part in enumerate(outputs)]
        head = _head(service, generation, choices.answer_object)
        return JSONResponse(head | {"choices": found, "usage": generation.usage()})
    finally:
        generation.close()


async def _events(
    service: Service, body: GenerationBody, generation: Generation, choices: ChoiceForm
) -> AsyncGenerator[bytes, None]:
    head = _head(service, generation, choices.chunk_object)
    if body.include_usage:
        head["usage"] = None
    chunks = _Chunks(head, body, choices, usage=generation.usage if body.continuous_usage else None)
    try:
        for index in range(body.n or 1) if choices.opening is not None else ():
            first = {"index": index, "delta": choices.opening, "logprobs": None, "finish_reason": None}
            yield event(chunks.chunk(first))
        async for found in generation.deltas():
            yield b"".join([chunks.of(index, delta) for index, delta in found])
        if body.include_usage:
            yield event(head | {"choices": [], "usage": generation.usage()})
    except QuireError as error:
        yield event(error_body(error))
    finally:
        generation.close()
    yield DONE


class _Chunks:
    """The events of deltas, none for a delta that shows nothing. Most add text and nothing else.

    With `usage`, all have what it returns.
    """

    def __init__(
        self, head: dict[str, Any], body: GenerationBody, choices: ChoiceForm, *, usage: Callable[[], Usage] | None
    ) -> None:
        self._head = head
        self._body = body
        self._choices = choices
        self._usage = usage
        self._templates: dict[int, EventTemplate] = {}  # key: choice

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The body of an event."""
        return self._head | {"choices": [choice]} | ({"usage": self._usage()} if self._usage is not None else {})

    def of(self, index: int, delta: SequenceDelta) -> bytes:
        """The event of one delta of a choice."""
        shows_more = delta.logprobs or delta.finish_reason or (self._body.return_token_ids and delta.token_ids)
        if not delta.text and not shows_more:
            return b""
        if shows_more or self._usage is not None:
            return event(self.chunk(_choice(self._body, self._choices, index, delta, whole=False)))
        if index not in self._templates:
            hole = uuid.uuid4().hex
            example = SequenceDelta(index=delta.index, text=hole, token_ids=[])
            choice = _choice(self._body, self._choices, index, example, whole=False)
            self._templates[index] = EventTemplate(self.chunk(choice), hole)
        return self._templates[index].event(delta.text)


def _head(service: Service, generation: Generation, kind: str) -> dict[str, Any]:
    return {"id": generation.request_id, "object": kind, "created": generation.created, "model": service.model_name}


def _choice(
    body: GenerationBody, choices: ChoiceForm, index: int, part: CompletionOutput, *, whole: bool
) -> dict[str, Any]:
    choice: ChoiceFields = {
        "index": index,
        "logprobs": choices.logprobs(index, part),
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }
    if part.finish_reason is not None and body.explain and part.explanation is not None:
        choice["explanation"] = part.explanation.for_client().to_dict()
    if part.finish_reason is not None and part.session is not None:
        choice["session"] = asdict(part.session)
    if body.return_token_ids:
        choice["token_ids"] = part.token_ids
    return {"index": index, **choices.content(part, whole=whole), **choice}


class Generation:
    """The engine's side of one HTTP request. Choice `i` is sequence `i % n` of prompt `i // n`.

    Made by `submit`; its owner calls `close`, which aborts what still runs.
    """

    def __init__(
        self,
        service: Service,
        request_id: str,
        streams: Sequence[RequestStream],
        *,
        client_id: str,
        started_s: float,
        turn: OpenSequences,
        deadline: float | None,
    ) -> None:
        self._turn = turn
        loop = asyncio.get_running_loop()
        self._expiry = None if deadline is None else loop.call_at(deadline, self._expire)
        self.request_id = request_id
        self.created = int(time.time())
        self._service = service
        self._client_id = client_id
        self._streams = streams
        self._requests = [stream.request for stream in streams]
        self._started_s = started_s  # a time of `time.perf_counter`
        self._first_token_s: float | None = None  # since the start, as the next ones
        self._last_token_s: dict[int, float] = {}  # key: choice
        self._is_closed = False

    @classmethod
    async def submit(
        cls,
        service: Service,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        body: GenerationBody,
        *,
        kind: str,
        client_id: str,
        client: Client,
        deadline: float | None,
    ) -> Generation:
        """Hand all prompts to the engine when it is the client's turn, or none: the first refusal takes back the others
        and is raised."""
        if len(prompts) * params.n > MAX_CHOICES:
            raise BadField(
                f"{len(prompts)} prompts with n={params.n} are {len(prompts) * params.n} sequences; "
                f"one request may ask for {MAX_CHOICES}.",
                param="n",
                fix="send several requests.",
            )
        if body.session_id and len(prompts) * params.n > 1:
            raise BadField(
                f"a session follows one sequence, and this request has {len(prompts) * params.n}.",
                param="session_id",
                fix="send them one by one.",
            )
        started_s = time.perf_counter()
        request_id = f"{kind}-{uuid.uuid4().hex}"
        streams: dict[int, RequestStream] = {}

        async def submit_one(i: int, prompt: Prompt) -> None:
            streams[i] = await service.engine.submit(
                prompt,
                params,
                request_id=f"{request_id}-{i}",
                salt=client.salt(body.cache_salt or ""),
                priority=body.priority or 0,
                explain=bool(body.explain),
                session_id=body.session_id or "",
                owner=client.owner,
            )

        turn: OpenSequences | None = None
        try:
            async with by(deadline):
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
        return cls(
            service, request_id, in_order, client_id=client_id, started_s=started_s, turn=turn, deadline=deadline
        )

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

    async def finish(self) -> list[CompletionOutput]:
        """Wait for the end; the sequences in the order of the choices."""
        async for _ in self.deltas():
            pass
        return [output for request in self._requests for output in request.output().outputs]

    def usage(self) -> Usage:
        """Tokens read, generated, and served from the cache, so far. Rejected drafts are not among the completion
        tokens."""
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in self._requests)
        num_output_tokens = sum(len(each.token_ids) for each in self._sequences())
        cached, host, storage, peer = map(sum, zip(*(request.use for request in self._requests), strict=True))
        details: PromptDetails = {"cached_tokens": cached}
        if self._service.engine.last_statistics.get("tiers"):
            tiers = {"device": cached - host - storage - peer, "host": host, "storage": storage}
            if self._service.engine.last_statistics.get("transfer"):
                tiers["peer"] = peer
            details["cached_tokens_by_tier"] = tiers
        found: Usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": details,
        }
        if self._service.engine.last_statistics.get("speculation"):
            drafted, accepted = map(sum, zip(*(each.drafts for each in self._sequences()), strict=True))
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return found

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
            ", ".join(reason if count == 1 else f"{count} {reason}" for reason, count in sorted(reasons.items())),
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

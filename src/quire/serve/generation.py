"""One HTTP request on its way through the engine: its prompts, their streams, its usage and its latencies."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.async_engine import AsyncEngine, Prompt
from quire.engine.output import RequestOutput, SequenceDelta
from quire.engine.request_stream import RequestStream
from quire.errors import QuireError, UnknownModel
from quire.observe.metrics import ServerMetrics
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.errors import BadField
from quire.serve.protocol import MAX_CHOICES, GenerationBody

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes share."""

    engine: AsyncEngine
    metrics: ServerMetrics
    model_name: str
    started_at: int

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not the one served; none given means the one served."""
        if name is not None and name != self.model_name:
            raise UnknownModel(
                f"the model '{name}' does not exist here.", fix=f"use '{self.model_name}', the one this server has."
            )


class Generation:
    """The engine's side of one HTTP request. Choice `i` is sequence `i % n` of prompt `i // n`.

    Made by `submit`; its owner calls `close`, which aborts what still runs.
    """

    def __init__(
        self, service: Service, params: SamplingParams, num_prompts: int, *, kind: str, client_id: str
    ) -> None:
        self.request_id = f"{kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._client_id = client_id
        self._service = service
        self._params = params
        self._streams: list[RequestStream | None] = [None] * num_prompts
        self._started_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._last_token_s: dict[int, float] = {}  # by choice
        self._finish_reasons: dict[int, str] = {}  # by choice
        self._ended_s: float | None = None
        self._num_output_tokens = 0
        self._cached: dict[int, tuple[int, int, int]] = {}  # by prompt: tokens, of these from the host, from storage
        self._has_tiers = bool(service.engine.start_statistics.get("tiers"))

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
    ) -> Generation:
        """Hand all prompts to the engine, or none: the first refusal takes back the others and is raised."""
        if len(prompts) * params.n > MAX_CHOICES:
            raise BadField(
                f"{len(prompts)} prompts with n={params.n} are {len(prompts) * params.n} sequences; "
                f"one request may ask for {MAX_CHOICES}.",
                param="n",
                fix="send several requests.",
            )
        generation = cls(service, params, len(prompts), kind=kind, client_id=client_id)

        async def submit_one(i: int) -> None:
            generation._streams[i] = await service.engine.submit(
                prompts[i],
                params,
                request_id=f"{generation.request_id}-{i}",
                salt=body.cache_salt or "",
                priority=body.priority or 0,
                explain=bool(body.explain),
            )

        try:
            async with asyncio.TaskGroup() as group:
                for i in range(len(prompts)):
                    group.create_task(submit_one(i))
        except BaseExceptionGroup as failures:
            generation.close()
            raise failures.exceptions[0] from None
        except BaseException:
            generation.close()
            raise
        return generation

    async def deltas(self) -> AsyncGenerator[tuple[int, SequenceDelta], None]:
        """(choice, delta) as they come, of all prompts together."""
        streams = self._open_streams()
        if len(streams) == 1:
            async for delta in streams[0]:
                yield self._note(0, delta)
            return
        queue: asyncio.Queue[tuple[int, SequenceDelta] | QuireError | None] = asyncio.Queue()
        pumps = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
        try:
            num_open = len(streams)
            while num_open:
                item = await queue.get()
                if isinstance(item, QuireError):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield self._note(*item)
        finally:
            for pump in pumps:
                pump.cancel()

    async def finish(self) -> list[RequestOutput]:
        """Wait for the end; the outputs, prompt by prompt."""
        async for _ in self.deltas():
            pass
        return [stream.output() for stream in self._open_streams()]

    def usage(self) -> dict[str, Any]:
        """Tokens read, generated, and served from the cache, so far; with tiers also from which of them."""
        num_prompt_tokens = sum(stream.num_prompt_tokens for stream in self._open_streams())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": self._cached_tokens(),
        }

    def _cached_tokens(self) -> dict[str, Any]:
        cached, host, storage = (sum(counts) for counts in zip((0, 0, 0), *self._cached.values(), strict=True))
        if not self._has_tiers:
            return {"cached_tokens": cached}
        by_tier = {"device": cached - host - storage, "host": host, "storage": storage}
        return {"cached_tokens": cached, "cached_tokens_by_tier": by_tier}

    def close(self) -> None:
        """Abort what still runs, and take down what became of the request. Idempotent."""
        for stream in self._streams:
            if stream is not None:
                stream.close()
        if self._ended_s is None and all(self._streams):
            self._ended_s = time.perf_counter() - self._started_s
            self._take_down(self._ended_s)

    def _take_down(self, seconds: float) -> None:
        usage, metrics = self.usage(), self._service.metrics
        choices = range(len(self._streams) * self._params.n)
        reasons = Counter(self._finish_reasons.get(choice, "abort") for choice in choices)
        metrics.finished.update(reasons)
        metrics.prompt_tokens.observe(usage["prompt_tokens"])
        metrics.generation_tokens.observe(usage["completion_tokens"])
        if not {"abort", "error"} & set(reasons):
            metrics.request_s.observe(seconds)
        logger.info(
            "%s [%s]: %d prompt tokens, %d cached, %d output tokens, first after %s, %.3f s, %s",
            self.request_id,
            self._client_id,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            "-" if self._first_token_s is None else f"{self._first_token_s:.3f} s",
            seconds,
            ", ".join(reason if count == 1 else f"{count} {reason}" for reason, count in sorted(reasons.items())),
        )

    def _open_streams(self) -> list[RequestStream]:
        return [stream for stream in self._streams if stream is not None]

    def _note(self, prompt: int, delta: SequenceDelta) -> tuple[int, SequenceDelta]:
        choice = prompt * self._params.n + delta.index
        if delta.token_ids:
            self._time(choice, time.perf_counter() - self._started_s)
        if delta.finish_reason is not None:
            self._finish_reasons[choice] = delta.finish_reason
        self._num_output_tokens += len(delta.token_ids)
        found = (delta.num_cached_tokens, delta.num_host_tokens, delta.num_storage_tokens)
        self._cached[prompt] = min(self._cached.get(prompt, found), found, key=lambda cached: cached[0])
        return choice, delta

    def _time(self, choice: int, now: float) -> None:
        """A token of a choice came, so many seconds after the request."""
        if self._first_token_s is None:
            self._first_token_s = now
            self._service.metrics.first_token_s.observe(now)
        if choice in self._last_token_s:
            self._service.metrics.inter_token_s.observe(now - self._last_token_s[choice])
        self._last_token_s[choice] = now


async def _pump(
    prompt: int, stream: RequestStream, queue: asyncio.Queue[tuple[int, SequenceDelta] | QuireError | None]
) -> None:
    try:
        async for delta in stream:
            queue.put_nowait((prompt, delta))
        queue.put_nowait(None)
    except QuireError as error:
        queue.put_nowait(error)

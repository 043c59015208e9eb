"""Chooser: which servers a router prefers for a request.

`Chooser` knows the beginnings of prompts alone. `EventChooser` knows what each server has cached, from the events that
it publishes, and how much it has to compute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import numpy as np
from starlette.requests import Request

from quire.observe.kv_batch import AllBlocksCleared, BlockStored, KvBatch, KvEvent
from quire.routing.page_index import EventOrder, PageIndex
from quire.routing.relay import passed_on
from quire.routing.upstream import Preference, Upstream, preference_of
from quire.serve.journal import GENERATING, TOKENS, PromptTokens
from quire.serve.session_header import SESSION
from quire.spec.events import Namespace

logger = logging.getLogger(__name__)

MOST_ENGINES = 256
"""Engines whose events are read. Others count as empty."""

_LOOK_S = 0.5
_ANSWER_S = 2.0  # for what an engine has published before, and for the tokens of a prompt
_PIECE = 16  # events that are applied at once
_BATCHES = msgspec.msgpack.Decoder(KvBatch)
_TOKENS = msgspec.msgpack.Decoder(PromptTokens)


class Chooser:
    """Requests with the same beginning go to the same server, as long as that has no more than its share."""

    async def choice(self, request: Request, body: bytes, upstreams: Sequence[Upstream]) -> Preference:
        """For a request with this body."""
        return preference_of(body, request.headers.get(SESSION, ""))

    async def watch(self, upstreams: Callable[[], Sequence[Upstream]]) -> None:
        """Learn of servers, which come and go, until cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheapest(Preference):
    """The server with the fewest tokens to compute: what it `lacks` of a prompt of `num_tokens`, by the addresses of
    its events, and those that wait there."""

    num_tokens: int
    lacks: Mapping[tuple[str, str], int]

    def order(self, upstreams: Iterable[Upstream]) -> list[Upstream]:
        by_beginning = super(Cheapest, self).order(upstreams)
        return sorted(by_beginning, key=lambda each: (self.cost(each) + each.num_waiting, each.in_flight))

    def cost(self, upstream: Upstream) -> float:
        return self.num_tokens if upstream.events is None else self.lacks.get(upstream.events, self.num_tokens)

    def why(self, upstream: Upstream, upstreams: Iterable[Upstream]) -> dict[str, Any]:
        waiting = int(upstream.num_waiting)
        return {"why": "tokens", "prompt_tokens": self.num_tokens, "lacks": self.cost(upstream), "waiting": waiting}


class EventChooser(Chooser):
    """A request goes where the fewest tokens are to be computed before its first one: those of its prompt that are not
    cached there, and those that wait there. Turns of sessions, and what has no prompt, go by their beginning."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        import zmq.asyncio

        self._client = client
        self._zmq: Any = zmq
        self._context: Any = zmq.asyncio.Context()
        self._index: PageIndex | None = None  # made for the page size of the first event
        self._places: dict[tuple[str, str], int] = {}  # key: the addresses of an engine's events

    async def choice(self, request: Request, body: bytes, upstreams: Sequence[Upstream]) -> Preference:
        found = preference_of(body, request.headers.get(SESSION, ""))
        first = next(iter(found.order(upstreams)), None)
        asks = request.method == "POST" and request.scope["path"] in GENERATING and not found.stays
        if first is None or not first.secret or self._index is None or not asks:
            return found
        try:
            asked = passed_on(first, request, body, asks=TOKENS)
            answer = await self._client.request(**asked, timeout=_ANSWER_S)
            if TOKENS not in answer.headers:
                return found
            prompt = _TOKENS.decode(answer.content)
        except (httpx.TransportError, msgspec.DecodeError):
            return found
        tokens = np.frombuffer(prompt.tokens, dtype=np.int32)
        held = self._index.held(tokens, Namespace(salt=prompt.salt))
        lacks = {events: len(tokens) - held[place][1] for events, place in self._places.items()}
        return Cheapest(found.key, num_tokens=len(tokens), lacks=lacks)

    async def watch(self, upstreams: Callable[[], Sequence[Upstream]]) -> None:
        following: dict[tuple[str, str], asyncio.Task[None]] = {}
        try:
            while True:
                known = {each.events for each in upstreams() if each.events is not None}
                ended = {events for events, task in following.items() if task.done()}  # with an error: begin again
                for gone in (following.keys() - known) | ended:
                    task = following.pop(gone)
                    if not task.cancel():
                        logger.warning("events of %s cannot be read: %s", gone[0], task.exception())
                    await self._apply(self._places.pop(gone), [AllBlocksCleared()])
                for new in known - following.keys():
                    free = next((each for each in range(MOST_ENGINES) if each not in self._places.values()), None)
                    if free is not None:
                        self._places[new] = free
                        following[new] = asyncio.create_task(self._follow(free, *new))
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in following.values():
                task.cancel()
            await asyncio.gather(*following.values(), return_exceptions=True)
            self._context.destroy(linger=0)

    async def _follow(self, place: int, address: str, replay: str) -> None:
        """Apply the events of one engine. What was published before, or is missed, is asked for."""
        order, known = EventOrder(), 1
        with self._context.socket(self._zmq.SUB) as events:
            events.set_hwm(0)
            events.subscribe(b"")
            events.connect(address)
            while True:
                if (start := order.asks(known)) is not None:
                    await self._apply(place, order.told_again(await self._ask(replay, start)))
                known = 0
                _, number, batch = await events.recv_multipart()
                await self._apply(place, order.receive(int.from_bytes(number, "big"), _BATCHES.decode(batch).events))

    async def _ask(self, replay: str, start: int) -> list[tuple[int, Sequence[KvEvent]]]:
        """The batches from a number on that the engine keeps; those that come in time."""
        found: list[tuple[int, Sequence[KvEvent]]] = []
        with self._context.socket(self._zmq.DEALER) as asking, suppress(TimeoutError):
            asking.connect(replay)
            await asking.send_multipart((b"", start.to_bytes(8, "big")))
            async with asyncio.timeout(_ANSWER_S):
                while True:
                    *_, number, batch = await asking.recv_multipart()
                    at = int.from_bytes(number, "big", signed=True)
                    if at < 0:
                        break
                    found.append((at, _BATCHES.decode(batch).events))
                    await asyncio.sleep(0)  # what has arrived is not waited for
        return found

    async def _apply(self, place: int, events: Sequence[KvEvent]) -> None:
        """What an engine has published. A million pages take seconds, in which requests go on."""
        if self._index is None:
            size = next((each.block_size for each in events if isinstance(each, BlockStored)), None)
            if size is None:
                return
            self._index = PageIndex(MOST_ENGINES, size)
        for at in range(0, len(events), _PIECE):
            self._index.apply(place, events[at : at + _PIECE])
            await asyncio.sleep(0)

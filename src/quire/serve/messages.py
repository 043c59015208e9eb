"""`POST /v1/messages` and `/v1/messages/count_tokens`, and the form of their answers: blocks, as Anthropic has them."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.client.output import CompletionOutput, SequenceDelta
from quire.client.tokenising import Rendered, Tokenising
from quire.errors import QuireError
from quire.serve.answer_reader import AnswerBlocks, AnswerReader, CallBegun, Content, Event, Piece, Reasoning
from quire.serve.answers import MessageAnswer, MessageError, MessageUsage, TokenCount, failures, generated
from quire.serve.errors import ANTHROPIC, BadField
from quire.serve.generation import AnswerForm, ChatTurn, Generation, Service, answer, room_if_less
from quire.serve.keys import Client
from quire.serve.messages_protocol import CountBody, MessagesBody
from quire.serve.sse import EventTemplate, event

SIGNATURE = "quire"
"""Signature of each block of thinking: clients send back no block without one. It signs nothing."""


def messages_router(service: Service) -> APIRouter:
    """The routes, for `service`. Without a tokenizer they refuse every request and say so."""
    router = APIRouter(responses=failures(MessageError))

    @router.post("/v1/messages", response_model=None, responses=generated(MessageAnswer))
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answers messages, as Anthropic's."""
        service.check(body)
        params, turn = body.params(), await ChatTurn.of(service, request, body, body.conversation())
        _check_thinking(body, service.tokenising, turn.prompt)
        reader = await turn.reader(service, request, params)
        room = room_if_less(service, turn.prompt, params, body.max_tokens)
        limit = "max_tokens" if room is None else "model_context_window_exceeded"
        form = MessageForm(body, reader(), at_limit=limit, request_id=request.state.request_id)
        if service.retains_marked and (seconds := body.kept_s()):
            form.at_end = partial(_begin_retention, service, request.state.client, turn, seconds)
        ids = [turn.prompt.token_ids]
        return await answer(service, request, ids, params, turn.terms, form, stream=body.stream, room=room)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody, request: Request) -> TokenCount:
        """The tokens of the prompt that these messages, system prompt and tools make."""
        service.check(body)
        return {"input_tokens": len((await ChatTurn.of(service, request, body, body.conversation())).prompt.token_ids)}

    return router


def _begin_retention(service: Service, client: Client, turn: ChatTurn, seconds: float) -> None:
    """Retain a whole prompt beside what follows: its marks say how long, and which part is not worth a rendering."""
    retaining = service.engine.retain(
        turn.prompt.token_ids, ttl_seconds=seconds, salt=client.salt(turn.terms.cache_salt), owner=client.owner
    )
    service.begin(retaining, "a prompt with cache_control is not retained")


def _check_thinking(body: MessagesBody, tokenising: Tokenising, prompt: Rendered) -> None:
    reasons = tokenising.tokenizer.response_parser(prompt.text, ()) is not None
    if body.thinking is not None and body.thinking.type == "enabled" and not reasons:
        raise BadField("the model does not reason before it answers.", param="thinking", fix="leave thinking out.")


class MessageForm(AnswerForm):
    """The form of the answer to `body`, whose text `reader` reads. An answer that is full stops for the reason
    `at_limit`."""

    kind = "msg_"

    def __init__(self, body: MessagesBody, reader: AnswerReader, *, at_limit: str, request_id: str) -> None:
        self._at_limit = at_limit
        self._request_id = request_id
        self._reader = reader
        shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._blocks = MessageBlocks(shows_thinking=shows_thinking)
        self._template: EventTemplate | None = None  # for deltas that add text and nothing else
        self._last: SequenceDelta | None = None
        self.at_end: Callable[[], None] = lambda: None

    def reader_of(self, index: int) -> AnswerReader:
        return self._reader

    def whole(self, generation: Generation, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        [part] = outputs
        events = [event for piece in self._reader.whole(part.text) for event in self._blocks.add(piece)]
        message = _message(generation) | {"content": content_of([*events, *self._blocks.end()])}
        return message | self._end(part) | {"usage": _usage(generation)}

    def end(self, generation: Generation) -> bytes:
        """Why it stopped, with the usage."""
        assert self._last is not None, "a sequence ends before its stream does"
        ended = self._end(self._last)
        delta = {name: ended.pop(name) for name in ("stop_reason", "stop_sequence")}
        stop = {"type": "message_delta", "delta": delta, "usage": _usage(generation)} | ended
        return _sent([*self._blocks.end(), stop, {"type": "message_stop"}])

    def failure(self, generation: Generation, error: QuireError) -> bytes:
        return ANTHROPIC.last_events(ANTHROPIC.body(error, self._request_id))

    def events(self, generation: Generation, index: int, delta: SequenceDelta) -> bytes:
        """The events of new text; `message_start` leaves with the first token."""
        is_first, self._last = self._last is None, delta
        if self._template is not None and delta.finish_reason is None:
            return self._template.event(delta.text) if delta.text else b""
        begun: list[dict[str, Any]] = []
        if is_first:
            head = _message(generation) | {"stop_reason": None, "stop_sequence": None, "usage": _usage(generation)}
            begun.append({"type": "message_start", "message": head})
        pieces = self._reader.read(delta.text, is_last=delta.finish_reason is not None)
        found = [event for piece in pieces for event in self._blocks.add(piece)]
        if self._reader.is_plain and found:
            self._template = self._blocks.template()
        return _sent([*begun, *found])

    def _end(self, part: CompletionOutput) -> dict[str, Any]:
        self.at_end()
        stopped = part.stop_reason if isinstance(part.stop_reason, str) else None
        return {"stop_reason": self._reason(part), "stop_sequence": stopped, **self.notes(part)}

    def _reason(self, part: CompletionOutput) -> str:
        if part.finish_reason == "length":
            return self._at_limit
        if isinstance(part.stop_reason, str):
            return "stop_sequence"
        return "tool_use" if self._reader.num_calls else "end_turn"


class MessageBlocks(AnswerBlocks):
    """The blocks of an answer, as events."""

    def __init__(self, *, shows_thinking: bool = True) -> None:
        super().__init__()
        self._shows_thinking = shows_thinking

    def template(self) -> EventTemplate:
        """Events with more text in the open block."""
        hole = uuid.uuid4().hex
        return EventTemplate(self._delta("text", hole), hole, name=b"content_block_delta")

    def _begun(self, kind: type[Piece], name: str) -> list[Event]:
        block: Event = {"type": "text", "text": ""}
        if kind is Reasoning:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind is CallBegun:
            block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": {}}
        return [{"type": "content_block_start", "index": self.num_begun - 1, "content_block": block}]

    def _grown(self, text: str, logprobs: Sequence[Event] = ()) -> list[Event]:
        if self._open is Reasoning:
            return [self._delta("thinking", text)] if self._shows_thinking else []
        return [self._delta("text", text) if self._open is Content else self._delta("input_json", text, "partial_json")]

    def _ended(self, status: str) -> list[Event]:
        signed = [self._delta("signature", SIGNATURE)] if self._open is Reasoning else []
        return [*signed, {"type": "content_block_stop", "index": self.num_begun - 1}]

    def _delta(self, kind: str, text: str, name: str = "") -> Event:
        delta = {"type": f"{kind}_delta", name or kind: text}
        return {"type": "content_block_delta", "index": self.num_begun - 1, "delta": delta}


def content_of(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a whole answer: what clients make of a stream of these events."""
    found: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for each in events:
        if each["type"] == "content_block_start":
            found.append(dict(each["content_block"]))
        if each["type"] == "content_block_delta":
            for name, text in each["delta"].items():
                if name == "partial_json":
                    inputs[each["index"]] = inputs.get(each["index"], "") + text
                elif name != "type":
                    found[each["index"]][name] += text
    for index, text in inputs.items():
        found[index]["input"] = _sendable(text)
    return found


def _sendable(text: str) -> Any:
    """The value of JSON as a model writes it. What no JSON has is null, and half a surrogate pair a question mark."""
    found = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))


def _finite(text: str) -> float | None:
    return found if math.isfinite(found := float(text)) else None


def _message(generation: Generation) -> dict[str, Any]:
    return {
        "id": generation.request_id,
        "type": "message",
        "role": "assistant",
        "model": generation.model,
        "content": [],
    }


def _usage(generation: Generation) -> MessageUsage:
    found = generation.usage()
    cached = found["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": found["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": found["completion_tokens"],
    }


def _sent(events: Sequence[dict[str, Any]]) -> bytes:
    return b"".join([event(each, name=each["type"].encode()) for each in events])

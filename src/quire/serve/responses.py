"""`POST /v1/responses`, and the form of its answers: items, and the events in which they grow.

created, in_progress                      with the first token
output_item.added                         each item: a message, reasoning, or a call
  content_part.added                      of messages and reasoning
  output_text.delta*, output_text.done    or reasoning_text.*, or function_call_arguments.*
  content_part.done
output_item.done
completed, incomplete or failed           with the whole answer
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from quire.client.output import CompletionOutput, SequenceDelta
from quire.errors import QuireError, UnknownRequest
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.answer_reader import AnswerBlocks, AnswerReader, CallBegun, Content, Event, Piece, Reasoning
from quire.serve.answers import InputTokens, ResponseAnswer, ResponseUsage, generated
from quire.serve.choices import token_logprobs
from quire.serve.conversation import Conversation, Tool, ToolChoice
from quire.serve.errors import BadField, openai_error
from quire.serve.generation import AnswerForm, ChatTurn, Generation, Service, answer, room_if_less
from quire.serve.responses_protocol import ENCRYPTED, LOGPROBS, REPEATED, ResponsesBody, encrypted
from quire.serve.sse import event


def responses_router(service: Service) -> APIRouter:
    """The routes, for `service`. Without a tokenizer they refuse every request and say so."""
    router = APIRouter()

    @router.post("/v1/responses", response_model=None, responses=generated(ResponseAnswer))
    async def respond(body: ResponsesBody, request: Request) -> Response:
        """Answers a conversation in items, as OpenAI's newer route. It stores no answer."""
        service.check(body)
        params, turn = body.params(), await ChatTurn.of(service, request, body, body.conversation())
        reader = (await turn.reader(service, request, params))()
        if params.logprobs is not None and not reader.is_plain:
            raise BadField(f"{LOGPROBS} is for answers without tools and reasoning.", param="include")
        room = room_if_less(service, turn.prompt, params, body.max_output_tokens)
        token_bytes, ids = service.tokenising.tokenizer.token_bytes, [turn.prompt.token_ids]
        form = ResponseForm(body, params, turn.conversation, reader, token_bytes)
        return await answer(service, request, ids, params, turn.terms, form, stream=body.stream, room=room)

    @router.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesBody, request: Request) -> InputTokens:
        """The tokens of the prompt that such a conversation makes."""
        service.check(body)
        prompt = (await ChatTurn.of(service, request, body, body.conversation())).prompt
        return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}

    @router.api_route("/v1/responses/{response_id:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored(response_id: str) -> Response:
        """Nothing is stored."""
        if response_id == "input_tokens":
            raise HTTPException(405, headers={"Allow": "POST"})
        raise UnknownRequest(
            f"there is no answer '{response_id[:80]}': this server stores none.", fix="send the whole conversation."
        )

    return router


class ResponseForm(AnswerForm):
    """The form of the answer to `body`, whose prompt is that of `conversation`, and whose text `reader` reads."""

    kind = "resp_"

    def __init__(
        self,
        body: ResponsesBody,
        params: SamplingParams,
        conversation: Conversation,
        reader: AnswerReader,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._repeated = _repeated(body, params, conversation)
        self._num_top = None if params.logprobs is None else body.top_logprobs or 0
        self._reader, self._token_bytes = reader, token_bytes
        self._items = Items(keeps_reasoning=body.includes(ENCRYPTED))
        self._last: CompletionOutput | None = None
        self._num_events = 0

    def reader_of(self, index: int) -> AnswerReader:
        return self._reader

    def whole(self, generation: Generation, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        [part] = outputs
        self._begin(generation)
        self._read(part, self._reader.whole(part.text))
        return self._end(generation)[1]

    def events(self, generation: Generation, index: int, delta: SequenceDelta) -> bytes:
        """The events of what is new. The first leave with the first token."""
        pieces = self._reader.read(delta.text, is_last=delta.finish_reason is not None)
        return self._sent([*self._begin(generation), *self._read(delta, pieces)])

    def end(self, generation: Generation) -> bytes:
        """The end of the items, and the answer."""
        events, found = self._end(generation)
        return self._sent([*events, {"type": f"response.{found['status']}", "response": found}])

    def failure(self, generation: Generation, error: QuireError) -> bytes:
        """The error, in the answer as far as it came."""
        begun = self._begin(generation)
        self._items.last("incomplete")
        told = openai_error(error)["error"]
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"  # clients know no others
        found = self._answer(generation, "failed")
        found["error"] = {"code": code, "message": f"{told['code']}: {told['message']}"}
        return self._sent([*begun, {"type": "response.failed", "response": found}])

    def _begin(self, generation: Generation) -> list[Event]:
        """The events before the first item's; once."""
        if self._items.key:
            return []
        self._items.key = generation.request_id.removeprefix(self.kind)
        found = self._answer(generation, "in_progress")
        return [{"type": f"response.{name}", "response": found} for name in ("created", "in_progress")]

    def _read(self, part: CompletionOutput, pieces: list[Piece]) -> list[Event]:
        self._last = part
        logprobs = token_logprobs(part, self._num_top, self._token_bytes) if self._num_top is not None else []
        if logprobs and not pieces:
            pieces = [Content("")]
        return [event for piece in pieces for event in self._items.add(piece, logprobs)]

    def _end(self, generation: Generation) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The last events of the items, and the answer."""
        assert self._last is not None, "a sequence ends before its answer does"
        status = "completed" if self._last.finish_reason == "stop" else "incomplete"
        events = self._items.last(status)
        found = self._answer(generation, status) | {"usage": self._usage(generation), **self.notes(self._last)}
        if status == "completed":
            found["completed_at"] = int(time.time())
        elif self._last.finish_reason == "length":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        return events, found

    def _answer(self, generation: Generation, status: str) -> dict[str, Any]:
        return {
            "id": generation.request_id,
            "object": "response",
            "created_at": generation.created,
            "completed_at": None,
            "status": status,
            "model": generation.model,
            "output": list(self._items.items),
            "error": None,
            "incomplete_details": None,
            "usage": None,
        } | self._repeated

    def _usage(self, generation: Generation) -> ResponseUsage:
        found = generation.usage()
        cached = found["prompt_tokens_details"]["cached_tokens"]
        share = self._items.share_of_reasoning()
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": round(share * found["completion_tokens"])},
            "total_tokens": found["total_tokens"],
        }

    def _sent(self, events: Iterable[dict[str, Any]]) -> bytes:
        sent = []
        for each in events:
            sent.append(event(each | {"sequence_number": self._num_events}, name=each["type"].encode()))
            self._num_events += 1
        return b"".join(sent)


_PARTS: dict[str, dict[str, Any]] = {
    "message": {"type": "output_text", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text"},
}
"""The parts of items that have any, without their text."""

_TYPES: dict[type[Piece], tuple[str, str, dict[str, Any]]] = {
    Content: ("message", "msg", {"role": "assistant"}),
    Reasoning: ("reasoning", "rs", {"summary": []}),
    CallBegun: ("function_call", "fc", {}),
}
"""The types of items, how their ids begin, and fields that they have from the beginning."""


class Items(AnswerBlocks):
    """The items of an answer, and the events in which they grow.

    `key` makes their ids. With `keeps_reasoning`, reasoning is also in a form that clients send back.
    """

    def __init__(self, key: str = "", *, keeps_reasoning: bool = False) -> None:
        super().__init__()
        self.key = key
        self.items: list[dict[str, Any]] = []
        self._keeps_reasoning = keeps_reasoning
        self._texts: list[str] = []  # texts of the open item
        self._logprobs: list[dict[str, Any]] = []
        self._num_characters = {"message": 0, "reasoning": 0, "function_call": 0}

    def last(self, status: str) -> list[Event]:
        """The end. An answer that says nothing has a message without text."""
        return [*([] if self.items else self._in(Content)), *self.end(status)]

    def share_of_reasoning(self) -> float:
        """The part of all characters that are reasoning. Tokens are not counted by item."""
        return self._num_characters["reasoning"] / max(1, sum(self._num_characters.values()))

    @property
    def _place(self) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if self._open is CallBegun else place | {"content_index": 0}

    def _begun(self, kind: type[Piece], name: str) -> list[Event]:
        type_, prefix, more = _TYPES[kind]
        index = len(self.items)
        item: dict[str, Any] = {"type": type_, "id": f"{prefix}_{self.key}{index}", "status": "in_progress"}
        if kind is CallBegun:
            item |= {"call_id": f"call_{self.key}{index}", "name": name, "arguments": ""}
        else:
            item |= {"content": [], **more}
        self.items.append(item)
        self._texts, self._logprobs = [], []
        begun: list[Event] = [{"type": "response.output_item.added", "output_index": index, "item": dict(item)}]
        if kind is not CallBegun:
            part = _PARTS[type_] | {"text": ""}
            begun.append({"type": "response.content_part.added", **self._place, "part": part})
        return begun

    def _grown(self, text: str, logprobs: Sequence[Event] = ()) -> list[Event]:
        kind = self.items[-1]["type"]
        self._texts.append(text)
        self._num_characters[kind] += len(text)
        name = _PARTS[kind]["type"] if kind in _PARTS else "function_call_arguments"
        found = {"type": f"response.{name}.delta", **self._place, "delta": text}
        if kind == "message":
            self._logprobs += logprobs
            found["logprobs"] = list(logprobs)
        return [found]

    def _ended(self, status: str) -> list[Event]:
        item, text = self.items[-1], "".join(self._texts)
        kind = item["type"]
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            said = {"name": item["name"], "arguments": text}
            ended = [{"type": "response.function_call_arguments.done", **self._place, **said}]
        else:
            part = _PARTS[kind] | {"text": text} | ({"logprobs": self._logprobs} if kind == "message" else {})
            item["content"] = [part]
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            ended = [
                {"type": f"response.{part['type']}.done", **self._place, **said},
                {"type": "response.content_part.done", **self._place, "part": part},
            ]
        if kind == "reasoning" and self._keeps_reasoning:
            item["encrypted_content"] = encrypted(text)
        return [*ended, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]


def _repeated(body: ResponsesBody, params: SamplingParams, conversation: Conversation) -> dict[str, msgspec.Raw]:
    """What an answer has of its request, encoded once. Raises BadField for what JSON cannot have."""
    given = body.model_extra or {}
    effort = body.reasoning.effort if body.reasoning else None
    repeated = {
        "background": False,
        "conversation": None,
        "instructions": body.instructions,
        "max_output_tokens": params.max_tokens,
        "metadata": {},
        "parallel_tool_calls": conversation.is_parallel,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {
            "format": body.format.model_dump(by_alias=True, exclude_none=True),
            "verbosity": (body.text and body.text.verbosity) or "medium",
        },
        "tool_choice": _chosen(conversation.choice),
        "tools": [_tool(tool) for tool in conversation.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    } | {name: given[name] for name in REPEATED if given.get(name) is not None}
    return {name: _encoded(name, value) for name, value in repeated.items()}


def _encoded(name: str, value: object) -> msgspec.Raw:
    try:
        return msgspec.Raw(json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode())
    except (ValueError, RecursionError):
        raise BadField(
            f"{name} has a number or a text that JSON cannot have, and the answer repeats it.",
            param=name,
            fix="send finite numbers, and text without lone surrogates.",
        ) from None


def _chosen(choice: ToolChoice) -> str | dict[str, Any]:
    return {"type": "function", "name": choice.name} if choice.name else choice.mode


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": tool.strict,
    }

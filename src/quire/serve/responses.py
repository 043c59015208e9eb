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

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from quire.client.output import CompletionOutput, SequenceDelta
from quire.errors import QuireError, UnknownRequest
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.answer_reader import AnswerReader, CallArguments, CallBegun, Content, Piece, Reasoning
from quire.serve.answers import InputTokens, ResponseAnswer, ResponseUsage, generated
from quire.serve.choices import token_logprobs
from quire.serve.conversation import Conversation, Tool, ToolChoice
from quire.serve.error_forms import openai_error
from quire.serve.errors import BadField
from quire.serve.generation import ROOM, Generation, Service, answer, notes, reader_of, rendered, room_if_less
from quire.serve.responses_protocol import ENCRYPTED, LOGPROBS, REPEATED, ResponsesBody, encrypted
from quire.serve.sse import event


def responses_router(service: Service) -> APIRouter:
    """The routes, for `service`. Without a tokenizer they refuse every request and say so."""
    router = APIRouter()

    @router.post("/v1/responses", response_model=None, responses=generated(ResponseAnswer))
    async def respond(body: ResponsesBody, request: Request) -> Response:
        """Answers a conversation in items, as OpenAI's newer route. It stores no answer."""
        service.check_model(body.model)
        body.check()
        params, conversation, terms = body.params(), body.conversation(), body.terms(service.deadline(body.timeout_s))
        prompt = await rendered(service, request, conversation, terms)
        reader = await reader_of(service, request, conversation, prompt, params, terms)
        if reader is not None and params.logprobs is not None:
            raise BadField(f"{LOGPROBS} is for answers without tools and reasoning.", param="include")
        room = room_if_less(service, prompt, params, body.max_output_tokens)
        form = ResponseForm(body, params, conversation, reader)
        found = await answer(service, request, [prompt.token_ids], params, terms, form, stream=bool(body.stream))
        if room is not None:
            found.headers[ROOM] = str(room)
        return found

    @router.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesBody, request: Request) -> InputTokens:
        """The tokens of the prompt that such a conversation makes."""
        service.check_model(body.model)
        body.check()
        terms = body.terms(service.deadline(body.timeout_s))
        prompt = await rendered(service, request, body.conversation(), terms)
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


class ResponseForm:
    """The form of the answer to `body`, whose prompt is that of `conversation`. `reader` makes a reader for its text;
    None where all text is content."""

    kind = "resp_"

    def __init__(
        self,
        body: ResponsesBody,
        params: SamplingParams,
        conversation: Conversation,
        reader: Callable[[], AnswerReader] | None,
    ) -> None:
        self._repeated = _repeated(body, params, conversation)
        self._num_top = None if params.logprobs is None else body.top_logprobs or 0
        self._reader = AnswerReader() if reader is None else reader()
        self._keeps_reasoning = body.includes(ENCRYPTED)
        self._items: Items | None = None  # from the first token on
        self._last: CompletionOutput | None = None
        self._num_events = 0

    def whole(self, generation: Generation, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        """The answer."""
        [part] = outputs
        self._read(generation, part, self._reader.whole(part.text))
        return self._end(generation)[1]

    def events(self, generation: Generation, found: Sequence[tuple[int, SequenceDelta]]) -> bytes:
        """The events of what is new. The first leave with the first token."""
        return b"".join([self._sent(self._events(generation, delta)) for _, delta in found])

    def end(self, generation: Generation) -> bytes:
        """The end of the items, and the answer."""
        events, found = self._end(generation)
        return self._sent([*events, {"type": f"response.{found['status']}", "response": found}])

    def failure(self, generation: Generation, error: QuireError) -> bytes:
        """The error, in the answer as far as it came."""
        begun = self._begin(generation) if self._items is None else []
        assert self._items is not None
        self._items.end("incomplete")
        told = openai_error(error)["error"]
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"  # clients know no others
        found = self._answer(generation, "failed")
        found["error"] = {"code": code, "message": f"{told['code']}: {told['message']}"}
        return self._sent([*begun, {"type": "response.failed", "response": found}])

    def _events(self, generation: Generation, delta: SequenceDelta) -> list[dict[str, Any]]:
        begun = self._begin(generation) if self._items is None else []
        pieces = self._reader.read(delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.end()
        return begun + self._read(generation, delta, pieces)

    def _begin(self, generation: Generation) -> list[dict[str, Any]]:
        self._items = Items(generation.request_id.removeprefix(self.kind), keeps_reasoning=self._keeps_reasoning)
        found = self._answer(generation, "in_progress")
        return [{"type": f"response.{name}", "response": found} for name in ("created", "in_progress")]

    def _read(self, generation: Generation, part: CompletionOutput, pieces: list[Piece]) -> list[dict[str, Any]]:
        if self._items is None:
            self._begin(generation)
        assert self._items is not None
        self._last = part
        logprobs = token_logprobs(part, self._num_top) if self._num_top is not None else []
        if logprobs and not pieces:
            pieces = [Content("")]
        return [event for piece in pieces for event in self._items.add(piece, logprobs)]

    def _end(self, generation: Generation) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The last events of the items, and the answer."""
        assert self._items is not None and self._last is not None, "a sequence ends before its answer does"
        status = "completed" if self._last.finish_reason == "stop" else "incomplete"
        events = self._items.end(status)
        found = self._answer(generation, status) | {"usage": self._usage(generation), **notes(self._last)}
        if status == "completed":
            found["completed_at"] = int(time.time())
        elif self._last.finish_reason == "length":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        return events, found

    def _answer(self, generation: Generation, status: str) -> dict[str, Any]:
        assert self._items is not None
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
        assert self._items is not None
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

_BEGINNINGS: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class Items:
    """The items of an answer, and the events in which they grow. A piece continues the open item, or ends it and begins
    another. White space between two items is in neither.

    `key` makes their ids. With `keeps_reasoning`, reasoning is also in a form that clients send back.
    """

    def __init__(self, key: str, *, keeps_reasoning: bool = False) -> None:
        self.items: list[dict[str, Any]] = []
        self._key = key
        self._keeps_reasoning = keeps_reasoning
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []  # texts of the open item
        self._logprobs: list[dict[str, Any]] = []
        self._num_characters = {"message": 0, "reasoning": 0, "function_call": 0}

    def add(self, piece: Piece, logprobs: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """The events of a piece, whose tokens have these log-probabilities."""
        match piece:
            case Content(text):
                if self.items and not self._is_open("message"):
                    text = text.lstrip()
                return [*self._in("message"), self._delta(text, logprobs)] if text or logprobs else []
            case Reasoning(text):
                return [*self._in("reasoning"), self._delta(text)]
            case CallBegun(_, name):
                ended = self.end("completed") if self._open else []
                return [*ended, *self._in("function_call", name)]
            case CallArguments(_, text):
                return [self._delta(text)]

    def end(self, status: str) -> list[dict[str, Any]]:
        """The events after which no item is open. An answer that says nothing has a message without text."""
        begun = [] if self.items else self._in("message")
        if self._open is None:
            return begun
        item, text, place = self._open, "".join(self._texts), self._place()
        kind = item["type"]
        self._open = None
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            ended = [
                {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": text}
            ]
        else:
            part = _PARTS[kind] | {"text": text} | ({"logprobs": self._logprobs} if kind == "message" else {})
            item["content"] = [part]
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            ended = [
                {"type": f"response.{part['type']}.done", **place, "content_index": 0, **said},
                {"type": "response.content_part.done", **place, "content_index": 0, "part": part},
            ]
        if kind == "reasoning" and self._keeps_reasoning:
            item["encrypted_content"] = encrypted(text)
        done = {"type": "response.output_item.done", "output_index": place["output_index"], "item": item}
        return [*begun, *ended, done]

    def share_of_reasoning(self) -> float:
        """The part of all characters that are reasoning. Tokens are not counted by item."""
        return self._num_characters["reasoning"] / max(1, sum(self._num_characters.values()))

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _in(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """The events after which an item of this type is open."""
        if self._is_open(kind):
            return []
        ended = self.end("completed") if self._open else []
        index = len(self.items)
        item: dict[str, Any] = {"type": kind, "id": f"{_PREFIXES[kind]}_{self._key}{index}", "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": f"call_{self._key}{index}", "name": name, "arguments": ""}
        else:
            item["content"] = []
            item |= _BEGINNINGS[kind]
        self.items.append(item)
        self._open, self._texts, self._logprobs = item, [], []
        begun: list[dict[str, Any]] = [
            {"type": "response.output_item.added", "output_index": index, "item": dict(item)}
        ]
        if kind in _PARTS:
            part = _PARTS[kind] | {"text": ""}
            begun.append({"type": "response.content_part.added", **self._place(), "content_index": 0, "part": part})
        return [*ended, *begun]

    def _delta(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        assert self._open is not None
        kind = self._open["type"]
        self._texts.append(text)
        self._num_characters[kind] += len(text)
        if kind == "function_call":
            return {"type": "response.function_call_arguments.delta", **self._place(), "delta": text}
        found = {"type": f"response.{_PARTS[kind]['type']}.delta", **self._place(), "content_index": 0, "delta": text}
        if kind == "message":
            self._logprobs += logprobs
            found["logprobs"] = list(logprobs)
        return found


def _repeated(body: ResponsesBody, params: SamplingParams, conversation: Conversation) -> dict[str, Any]:
    """What an answer has of its request."""
    given = body.model_extra or {}
    effort = body.reasoning.effort if body.reasoning else None
    return {
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

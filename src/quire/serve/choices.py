"""`POST /v1/completions` and `/v1/chat/completions`, and the form of their answers: choices, whole or in chunks."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.client.async_engine import Prompt
from quire.client.output import CompletionOutput, Logprob, SequenceDelta
from quire.serve.answer_reader import AnswerReader, CallArguments, CallBegun, Content, Piece, ReadAnswer, Reasoning
from quire.serve.answers import ChatAnswer, ChoiceFields, CompletionAnswer, generated
from quire.serve.generation import AnswerForm, ChatTurn, Generation, Service, answer, by
from quire.serve.protocol import ChatBody, CompletionBody, GenerationBody
from quire.serve.sse import DONE, EventTemplate, event, while_connected


def completions_router(service: Service) -> APIRouter:
    """The routes, for `service`. Without a tokenizer that of chats refuses every request and says so."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, responses=generated(CompletionAnswer))
    async def complete(body: CompletionBody, request: Request) -> Response:
        service.check(body)
        form, terms = TextChoices(body), service.terms(request, body)
        prompts: list[Prompt] = list(body.prompts())
        if body.truncate_prompt_tokens is not None:
            async with by(terms.deadline):
                prompts = await while_connected(request.receive, _ends(service, prompts, body.truncate_prompt_tokens))
        return await answer(service, request, prompts, body.params(), terms, form, stream=body.stream)

    @router.post("/v1/chat/completions", response_model=None, responses=generated(ChatAnswer))
    async def chat(body: ChatBody, request: Request) -> Response:
        service.check(body)
        params, turn = body.params(), await ChatTurn.of(service, request, body, body.conversation())
        prompt = turn.prompt.token_ids
        if body.truncate_prompt_tokens is not None:
            prompt = prompt[-body.truncate_prompt_tokens :]
        reader = await turn.reader(service, request, params)
        form = MessageChoices(body, reader, service.tokenising.tokenizer.token_bytes)
        return await answer(service, request, [prompt], params, turn.terms, form, stream=body.stream)

    return router


async def _ends(service: Service, prompts: Sequence[Prompt], num_tokens: int) -> list[Prompt]:
    """The last tokens of each prompt."""
    return [(await service.engine.token_ids(prompt))[-num_tokens:] for prompt in prompts]


class ChoiceForm(AnswerForm):
    """The form of an answer to `body` that has choices. The two routes differ in names, and in the fields of a choice.
    All begin with 0 at choice `index`."""

    answer_object: str
    chunk_object: str

    def __init__(self, body: GenerationBody) -> None:
        self._body = body
        self._templates: dict[int, EventTemplate] = {}  # key: choice; of deltas that add text and nothing else

    @abstractmethod
    def content(self, index: int, part: CompletionOutput) -> Mapping[str, object]:
        """The content of a choice; also a `finish_reason` that is not the engine's."""

    @abstractmethod
    def chunks(self, index: int, delta: SequenceDelta, *, at_least: int) -> Sequence[Mapping[str, object]]:
        """The new content, in so many chunks or more; the last has also a `finish_reason` that is not the engine's."""

    @abstractmethod
    def plain(self, index: int, text: str) -> Mapping[str, object] | None:
        """The chunk of a delta that adds this text and nothing else; None if that depends on the text."""

    @abstractmethod
    def logprobs(self, index: int, part: CompletionOutput) -> dict[str, Any] | None:
        """Log-probabilities of the positions that follow those given before."""

    def whole(self, generation: Generation, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        """All choices, with the usage."""
        found = [self._choice(index, part, self.content(index, part)) for index, part in enumerate(outputs)]
        return _head(generation, self.answer_object) | {"choices": found, "usage": generation.usage()}

    def end(self, generation: Generation) -> bytes:
        """The usage, if it was asked for."""
        usage = {"choices": [], "usage": generation.usage()}
        return (event(self._head(generation) | usage) if self._body.include_usage else b"") + DONE

    def _head(self, generation: Generation) -> dict[str, Any]:
        head = _head(generation, self.chunk_object)
        if self._body.include_usage:
            head["usage"] = generation.usage() if self._body.continuous_usage else None
        return head

    def events(self, generation: Generation, index: int, delta: SequenceDelta) -> bytes:
        """A chunk, or more; none for a delta that shows nothing."""
        shows_more = delta.logprobs or delta.finish_reason or (self._body.return_token_ids and delta.token_ids)
        if not (shows_more or delta.text or delta.token_ids):
            return b""
        if not shows_more and index in self._templates:
            return self._templates[index].event(delta.text) if delta.text else b""
        chunks = self.chunks(index, delta, at_least=int(bool(shows_more)))
        if not chunks:
            return b""
        head, idle = self._head(generation), SequenceDelta(index=delta.index, text="", token_ids=[])
        if not (shows_more or self._body.continuous_usage):
            self._add_template(head, index, idle)
        *before, last = chunks
        part = delta if shows_more else idle
        choices = [*(self._choice(index, idle, each) for each in before), self._choice(index, part, last)]
        return b"".join([event(head | {"choices": [choice]}) for choice in choices])

    def _add_template(self, head: dict[str, Any], index: int, idle: SequenceDelta) -> None:
        hole = uuid.uuid4().hex
        fields = self.plain(index, hole)
        if fields is not None:
            self._templates[index] = EventTemplate(head | {"choices": [self._choice(index, idle, fields)]}, hole)

    def _choice(self, index: int, part: CompletionOutput, fields: Mapping[str, object]) -> dict[str, Any]:
        choice: ChoiceFields = {
            "index": index,
            "logprobs": self.logprobs(index, part),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
        return {**choice, **self.notes(part), **fields}


def _head(generation: Generation, kind: str) -> dict[str, Any]:
    return {"id": generation.request_id, "object": kind, "created": generation.created, "model": generation.model}


class TextChoices(ChoiceForm):
    """Choices with a text, and OpenAI's old shape of logprobs: parallel lists, with each token's place in the text.
    Those of an echo begin with the prompt's, as the text does."""

    kind = "cmpl-"
    answer_object = chunk_object = "text_completion"

    def __init__(self, body: CompletionBody) -> None:
        super().__init__(body)
        self._num_top = body.logprobs
        self._echoes = bool(body.echo)
        self._scores = body.prompt_logprobs is not None

    def content(self, index: int, part: CompletionOutput) -> dict[str, object]:
        return {"text": part.text} | (_prompt_logprobs(part) if self._scores else {})

    def chunks(self, index: int, delta: SequenceDelta, *, at_least: int) -> list[dict[str, object]]:
        return [{"text": delta.text}] if delta.text or at_least else []

    def plain(self, index: int, text: str) -> dict[str, object]:
        return {"text": text}

    def logprobs(self, index: int, part: CompletionOutput) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        tokens, offsets = list[str](), list[int]()
        positions: list[tuple[int, dict[int, Logprob] | None]] = []
        if self._echoes and part.prompt is not None and part.prompt.logprobs is not None:
            tokens, offsets = part.prompt.tokens[:], part.prompt.offsets[:]
            positions += zip(part.prompt.token_ids, part.prompt.logprobs, strict=True)
        for token_id, position in zip(part.token_ids, part.logprobs or (), strict=True):
            positions.append((token_id, position))
            tokens.append(position[token_id].decoded_token)
        offsets += part.text_offsets or ()
        if not positions:
            return None
        top = [None if position is None else _by_text(position, drawn, self._num_top) for drawn, position in positions]
        return {
            "tokens": tokens,
            "token_logprobs": [None if position is None else position[drawn].logprob for drawn, position in positions],
            "top_logprobs": top if self._num_top else None,
            "text_offset": offsets,
        }


def most_likely(position: dict[int, Logprob], drawn: int, num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` most likely tokens of a position and their log-probabilities, best first; also the one that is
    there, if any are asked for."""
    top = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
    return top if not top or drawn in dict(top) else [*top, (drawn, position[drawn])]


def _by_text(position: dict[int, Logprob], drawn: int, num_top: int) -> dict[str, float]:
    """The most likely tokens' log-probabilities by text, best first.

    Of tokens with the same text (halves of characters have none of their own) the one drawn has it, else the best; the
    others are called "token_id:<id>".
    """
    top = most_likely(position, drawn, num_top)
    owners = {logprob.decoded_token: token_id for token_id, logprob in reversed(top)}
    owners[position[drawn].decoded_token] = drawn
    return {
        lp.decoded_token if owners[lp.decoded_token] == token_id else f"token_id:{token_id}": lp.logprob
        for token_id, lp in top
    }


def _prompt_logprobs(part: CompletionOutput) -> dict[str, Any]:
    """The log-probabilities of a prompt as vLLM has them: of each position an object by token id."""
    if part.prompt is None or part.prompt.logprobs is None:
        return {}
    return {"prompt_logprobs": part.prompt.logprobs}


class MessageChoices(ChoiceForm):
    """Choices with a message, in chunks a delta, and OpenAI's newer shape of logprobs: an object for each token.

    `reader` makes a reader for the text of each choice, `token_bytes` are a token's. The chunk with the role leaves
    with the first token.
    """

    kind = "chatcmpl-"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, reader: Callable[[], AnswerReader], token_bytes: Callable[[int], bytes]) -> None:
        super().__init__(body)
        self._token_bytes = token_bytes
        self._num_top = body.top_logprobs or 0
        self._reader = reader
        self._readers: dict[int, AnswerReader] = {}  # key: choice, from its first chunk on

    def reader_of(self, index: int) -> AnswerReader | None:
        return self._readers.get(index)

    def whole(self, generation: Generation, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        """Also log-probabilities of the prompt, if they were asked for."""
        return super().whole(generation, outputs) | _prompt_logprobs(outputs[0])

    def content(self, index: int, part: CompletionOutput) -> dict[str, object]:
        reader = self._readers[index] = self._reader()
        found = ReadAnswer.of(reader.whole(part.text))
        message: dict[str, object] = {"role": "assistant", "content": found.content, "refusal": None}
        if found.reasoning:
            message |= _reasoning(found.reasoning)
        if found.calls:
            message["content"] = found.content or None
            message["tool_calls"] = [_called(call.name, call.arguments) for call in found.calls]
        return {"message": message} | _finish(part, reader)

    def chunks(self, index: int, delta: SequenceDelta, *, at_least: int) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._reader()
            found.append({"delta": {"role": "assistant", "content": ""}})
        pieces = reader.read(delta.text, is_last=delta.finish_reason is not None)
        found += [{"delta": _delta(piece)} for piece in pieces]
        if at_least and (not pieces or reader.num_calls):  # clients look for the end of calls in a chunk of its own
            found.append({"delta": {}})
        if delta.finish_reason is not None:
            found[-1] |= _finish(delta, reader)
        return found

    def plain(self, index: int, text: str) -> dict[str, object] | None:
        """The new text, where no reader looks into it."""
        return {"delta": {"content": text}} if self._readers[index].is_plain else None

    def logprobs(self, index: int, part: CompletionOutput) -> dict[str, Any] | None:
        """One object for each token."""
        if not part.logprobs:
            return None
        return {"content": token_logprobs(part, self._num_top, self._token_bytes), "refusal": None}


def _delta(piece: Piece) -> dict[str, object]:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallBegun(number, name):
            return {"tool_calls": [{"index": number} | _called(name, "")]}
        case CallArguments(number, text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def _reasoning(text: str) -> dict[str, object]:
    """Under both names that clients read: that of DeepSeek, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _called(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _finish(part: CompletionOutput, reader: AnswerReader) -> dict[str, object]:
    """A sequence that ends by itself after calls of tools ends for them."""
    return {"finish_reason": "tool_calls"} if part.finish_reason == "stop" and reader.num_calls else {}


def token_logprobs(part: CompletionOutput, num_top: int, token_bytes: Callable[[int], bytes]) -> list[dict[str, Any]]:
    """An object for each token, in OpenAI's newer shape. The bytes of all are those of the text."""

    def shown(token_id: int, logprob: Logprob) -> dict[str, Any]:
        own = list(token_bytes(token_id))
        return {"token": logprob.decoded_token, "logprob": logprob.logprob, "bytes": own}

    return [
        shown(token_id, position[token_id])
        | {"top_logprobs": [shown(*each) for each in most_likely(position, token_id, num_top)]}
        for position, token_id in zip(part.logprobs or (), part.token_ids, strict=True)
    ]

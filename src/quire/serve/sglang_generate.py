"""`POST /generate`: a continuation as SGLang's clients and its benchmark ask for it.

Each event of a stream has the whole text so far, as SGLang's without `--stream-output`. An event has at least a 256th
more tokens than the one before, so all together grow with the answer, not with its square. The last has all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from quire.client.async_engine import Prompt
from quire.client.output import CompletionOutput, SequenceDelta
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.answers import generated
from quire.serve.closed_object import ClosedObject
from quire.serve.errors import BadField
from quire.serve.generation import AnswerForm, Generation, Service, answer
from quire.serve.protocol import (
    MOST_IDS,
    MOST_STOPS,
    NOTHING,
    Int32,
    RequestBody,
    StopText,
    Text,
    TokenId,
    field,
)
from quire.serve.sse import event

NEW_TOKENS = 128
"""Tokens that SGLang generates if a request does not say how many."""

_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class GenerateSampling(ClosedObject):
    """How tokens are drawn, by SGLang's names."""

    ignored: ClassVar[frozenset[str]] = frozenset({"spaces_between_special_tokens"})
    neutral: ClassVar[tuple[object, ...]] = NOTHING

    max_new_tokens: Int32 = field("Most tokens to generate.", NEW_TOKENS)
    min_new_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    def params(self, logprobs: int | None) -> SamplingParams:
        """As the engine takes them."""
        given = {name: getattr(self, name) for name in type(self).model_fields}
        named = {_NAMES.get(name, name): value for name, value in given.items() if value is not None}
        return SamplingParams(**named, logprobs=logprobs)


class GenerateBody(RequestBody):
    """The body of `/generate`: one prompt, as text or token ids."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **dict.fromkeys(("audio_data", "image_data", "input_embeds", "lora_path", "session_params"), NOTHING),
        **dict.fromkeys(("return_hidden_states", "return_routed_experts", "top_logprobs_num"), (*NOTHING, 0)),
        "logprob_start_len": (None, -1),
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"rid", "return_text_in_logprobs", "log_metrics"})

    text: Text | None = field("The prompt, or its token ids as `input_ids`.")
    input_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    sampling_params: GenerateSampling = field("How tokens are drawn.", GenerateSampling())
    stream: bool | None = field("Answer in events, as tokens come.")
    return_logprob: bool | None = field("Give the log-probability of each token in `meta_info`.")

    def prompt(self) -> Prompt:
        """The prompt. Raises BadField unless it is given in exactly one form."""
        given: list[Prompt] = [each for each in (self.text, self.input_ids) if each is not None]
        if len(given) != 1:
            raise BadField("one of text and input_ids is required.", param="text")
        return given[0]


class GenerateForm(AnswerForm):
    """The form of the answer: one object, in a stream once for each event."""

    kind = "gen-"

    def __init__(self) -> None:
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[list[Any]] = []
        self._num_sent = 0

    def whole(self, generation: Generation, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
        """The text and the tokens, with what they took."""
        return self._with(generation, outputs[0])

    def events(self, generation: Generation, index: int, delta: SequenceDelta) -> bytes:
        answer, num = self._with(generation, delta), len(self._ids)
        if delta.finish_reason is None and num - self._num_sent < num // 256:
            return b""
        self._num_sent = num
        return event(answer)

    def _with(self, generation: Generation, part: CompletionOutput) -> dict[str, Any]:
        self._text += part.text
        self._ids += part.token_ids
        for position, token_id in zip(part.logprobs or (), part.token_ids, strict=False):
            self._logprobs.append([position[token_id].logprob, token_id, position[token_id].decoded_token])
        usage = generation.usage()
        about: dict[str, Any] = {
            "id": generation.request_id,
            "finish_reason": _ended(part, len(self._ids)),
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
        if self._logprobs and part.finish_reason is not None:  # once: in each event they would grow with the square
            about["output_token_logprobs"] = self._logprobs
        return {"text": self._text, "output_ids": self._ids, "meta_info": about, **self.notes(part)}


def _ended(part: CompletionOutput, num_tokens: int) -> dict[str, Any] | None:
    if part.finish_reason == "length":
        return {"type": "length", "length": num_tokens}
    return None if part.finish_reason is None else {"type": part.finish_reason, "matched": part.stop_reason}


def generate_router(service: Service) -> APIRouter:
    """The route, for `service`."""
    router = APIRouter()

    @router.post("/generate", response_model=None, responses=generated(dict[str, Any]))
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Continues one prompt, as SGLang's."""
        body.check()
        params = body.sampling_params.params(0 if body.return_logprob else None)
        terms = service.terms(request, body)
        return await answer(service, request, [body.prompt()], params, terms, GenerateForm(), stream=body.stream)

    return router

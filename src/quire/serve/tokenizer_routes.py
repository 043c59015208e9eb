"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as vLLM has them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from quire.client.tokenising import Tokenising
from quire.serve.answers import Detokenized, TokenizerInfo, Tokens
from quire.serve.closed_object import ClosedObject
from quire.serve.conversation import Conversation
from quire.serve.errors import BadField
from quire.serve.generation import Service
from quire.serve.protocol import Messages, TemplateVariables, Text, TokenId, Tools, field
from quire.serve.sse import while_connected
from quire.spec.ids import Ids


class TokenizeBody(ClosedObject):
    """A text or a conversation."""

    model: Text | None = field("The model that is served; no other.")
    prompt: Text | None = None
    messages: Messages | None = field("A conversation, for the model's chat template.")
    tools: Tools | None = field("Tools of the conversation.")
    chat_template_kwargs: TemplateVariables | None = field("Variables of the model's chat template.")
    add_generation_prompt: Literal[True] | None = field("The conversation ends where an answer begins; always so here.")
    add_special_tokens: bool | None = field(
        "Add the tokens that the tokenizer adds to a text; default true. A chat template has its own."
    )
    return_token_strs: bool | None = field("Give the names of the tokens in the vocabulary.")

    async def tokens(self, tokenising: Tokenising) -> Ids:
        """Token ids int32. Raises BadField unless it is given in one form."""
        if (self.prompt is None) == (self.messages is None):
            raise BadField("one of prompt, messages is required, and not both.", param="prompt")
        if self.prompt is not None:
            if self.tools:
                raise BadField("tools need messages: a text has none.", param="tools")
            return await tokenising.encode(self.prompt, add_special_tokens=self.add_special_tokens is not False)
        conversation = Conversation(
            messages=[message.turn() for message in self.messages or ()],
            tools=[each.tool() for each in self.tools or ()],
            variables=self.chat_template_kwargs or {},
        )
        return (await conversation.rendered(tokenising)).token_ids


class DetokenizeBody(ClosedObject):
    """Token ids."""

    model: Text | None = field("The model that is served; no other.")
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def tokenizer_router(service: Service) -> APIRouter:
    """The routes of the model's tokenizer, for `service`. Without one they refuse every request and say so."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Tokens:
        """The token ids of a text or a conversation."""
        service.check_model(body.model)
        tokenising = service.tokenising
        ids = (await while_connected(request.receive, body.tokens(tokenising))).tolist()
        names = partial(tokenising.tokenizer.names, ids)
        return {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": service.engine.context_length,
            "token_strs": await tokenising.aside(names) if body.return_token_strs else None,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Detokenized:
        """The text of token ids, with its special tokens."""
        service.check_model(body.model)
        tokenizer = service.tokenising.tokenizer
        size, most = tokenizer.description()["vocab_size"], max(body.tokens, default=0)
        if most >= size:
            raise BadField(
                f"token id {most} is outside the tokenizer's vocabulary of {size:,}.",
                param="tokens",
                fix="check the tokenizer.",
            )
        decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return {"prompt": await while_connected(request.receive, service.tokenising.aside(decode))}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        """Special tokens and chat template."""
        found = service.tokenising.tokenizer.description()
        return {**found, "model_max_length": service.engine.context_length}  # type: ignore[typeddict-item]

    return router

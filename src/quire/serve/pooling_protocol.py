"""The bodies of `/v1/embeddings`, `/v1/score` and `/v1/rerank`, with the fields of OpenAI, vLLM and Cohere."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field, WrapValidator

from quire.serve.closed_object import ClosedObject
from quire.serve.errors import BadField
from quire.serve.protocol import (
    IGNORED,
    MAX_CHOICES,
    NOTHING,
    ModelBody,
    PromptForms,
    Text,
    checked_prompts,
    each_prompt,
    field,
)
from quire.spec.pooling import Pair

MOST_INPUTS = 2048
"""Texts to embed in one request, as OpenAI has it."""

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]


class PoolingBody(ModelBody):
    """What the bodies of models that give embeddings or scores share."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "add_special_tokens": (None, True),
        "embed_dtype": (None, "float32"),
        "endianness": (None, "native", "little"),
        "input_type": NOTHING,
        "max_tokens_per_doc": NOTHING,
        "messages": NOTHING,
        "mm_processor_kwargs": NOTHING,
        "truncate_prompt_tokens": NOTHING,
        "truncation_side": NOTHING,
    }
    ignored: ClassVar[frozenset[str]] = IGNORED

    def check(self) -> None:
        """See `RequestBody`. What is of generated text is refused, too."""
        super().check()
        for name in ("session_id", "last_turn", "explain"):
            if getattr(self, name):
                raise BadField(f"{name} is for requests that generate text.", param=name, fix=f"leave {name} out.")


class EmbeddingBody(PoolingBody):
    """The body of `/v1/embeddings`."""

    input: Annotated[PromptForms, WrapValidator(partial(checked_prompts, MOST_INPUTS))] = field(
        "Text or token ids, of one input or several.", ...
    )
    encoding_format: Literal["float", "base64"] | None = field(
        "Embeddings as numbers, the default, or as the base64 of little-endian float32."
    )
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = field(
        "Numbers of each embedding; only for models that were trained to be cut."
    )

    def prompts(self) -> list[str | list[int]]:
        """The inputs, one for each request of the engine."""
        return each_prompt("input", self.input)


class ScoreBody(PoolingBody):
    """The body of `/v1/score`: one text with several, or as many with as many."""

    text_1: Text | Texts = field("The first text of each pair.", ...)
    text_2: Text | Texts = field("The second one.", ...)
    use_activation: bool | None = field("Scores from 0 to 1, if the model gives these; default true.")

    def pairs(self) -> list[Pair]:
        """The pairs. Raises BadField if the texts do not pair."""
        first, second = ([each] if isinstance(each, str) else each for each in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise BadField(
                f"text_1 has {len(first)} texts, and text_2 has {len(second)}.",
                param="text_2",
                fix="give one text_1, or as many as text_2.",
            )
        return list(zip(first, second, strict=True))


class Document(ClosedObject):
    """A text to rank."""

    text: Text


class RerankBody(PoolingBody):
    """The body of `/v1/rerank`."""

    query: Text = field("What is looked for.", ...)
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MAX_CHOICES)] = field(
        "The texts to rank.", ...
    )
    top_n: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = field("So many results; 0, the default: all.")
    return_documents: bool | None = field("Results have the text; default true.")
    use_activation: bool | None = field("Scores from 0 to 1, if the model gives these; default true.")

    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

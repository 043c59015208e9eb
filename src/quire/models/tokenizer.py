"""Tokenizer: text to token ids and back, and conversations to token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as BackendTokenizer
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from quire.errors import InvalidInput, ModelLoadError
from quire.models.answer_parser import AnswerParser
from quire.models.call_grammar import Calling
from quire.models.response_template import ResponseTemplate, find
from quire.models.source import ModelSource, quiet, reading
from quire.plan.source import check_tokenizer
from quire.spec.ids import Ids

_MARK = "\ufffd"

_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")

_SHOWN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_ALPHABET = {chr(byte): byte for byte in _SHOWN} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}
"""The bytes that characters stand for in the names of byte-level vocabularies, such as GPT-2's."""

_MOST_JOINED = 4
"""Characters of which a normal form makes one."""

_KINDS = ("bos_token", "eos_token", "pad_token", "unk_token")

_ENCODING = ("encode", "_encode_plus", "__call__")  # methods in which a tokenizer may do more than the library


class Tokenizer:
    """A Hugging Face tokenizer behind the few methods that Quire uses."""

    def __init__(self, tokenizer: Any, *, name: str, response_template: str = "auto") -> None:
        """`response_template` is chosen as by `quire.models.response_template.find`."""
        self.name = name
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1  # ids may have holes
        self._tokenizer = tokenizer
        self._response_template = _response_template(tokenizer, response_template)
        self._token_bytes: dict[int, bytes] = {}
        self._token_texts: dict[bool | str, TokenTexts | None] = {}  # key: `skip_special_tokens`

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token, if the tokenizer names one."""
        found = self._tokenizer.eos_token_id
        return () if found is None else (int(found),)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return bool(self._tokenizer.chat_template)

    @cached_property
    def longest_token(self) -> int:
        """Characters of a text that one token stands for, at most. What normalises a text may join some of them."""
        longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        is_plain = backend is not None and backend.normalizer is None
        return longest if is_plain else _MOST_JOINED * longest

    def portable(self) -> str | None:
        """JSON of the tokenizers library, with which a text has the token ids that `encode` gives; None for a tokenizer
        that does more than the library."""
        own = type(self._tokenizer)
        is_plain = isinstance(self._tokenizer, PreTrainedTokenizerFast) and all(
            getattr(own, name) is getattr(PreTrainedTokenizerFast, name) for name in _ENCODING
        )
        if not is_plain or getattr(self._tokenizer, "split_special_tokens", False):
            return None
        backend = BackendTokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        return str(backend.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids:
        """Token ids int32 of `text`. Raises InvalidInput if it has no UTF-8."""
        ids = self._tokenizer.encode(_utf8(text), add_special_tokens=add_special_tokens)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | Ids, *, skip_special_tokens: bool | str = True) -> str:
        """Text of `token_ids`; ids outside the vocabulary (a padded output layer has them) decode to nothing. Special
        tokens are left out as `SamplingParams` says."""
        known = [token for token in map(int, token_ids) if 0 <= token < self.vocab_size]
        if skip_special_tokens == "unmarked":
            known = [token for token in known if token not in self._unmarked]
        skips = skip_special_tokens is True
        return str(self._tokenizer.decode(known, skip_special_tokens=skips, clean_up_tokenization_spaces=False))

    @cached_property
    def _unmarked(self) -> frozenset[int]:
        """Special tokens that the response template does not look for."""
        template = self._response_template
        marks = "" if template is None else template.marks
        tokens: Mapping[int, Any] = self._tokenizer.added_tokens_decoder
        return frozenset(token_id for token_id, each in tokens.items() if each.special and each.content not in marks)

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens' names in the vocabulary; "" of ids outside of it."""
        return [name or "" for name in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def description(self) -> dict[str, Any]:
        """The tokenizer's class, the size of its vocabulary, its special tokens by their kind, and its chat
        template."""
        template = self._tokenizer.chat_template
        return {
            "tokenizer_class": type(self._tokenizer).__name__,
            "vocab_size": self.vocab_size,
            **{kind: getattr(self._tokenizer, kind) for kind in _KINDS},
            "chat_template": template if isinstance(template, str) else None,
        }

    def token_texts(self, *, skip_special_tokens: bool | str) -> Mapping[int, str | None] | None:
        """What each token adds to a text that is not empty and ends with a whole character; None at tokens of which
        that depends on their neighbours, and None for a tokenizer where it may always depend on them."""
        if skip_special_tokens not in self._token_texts:
            own = type(self._tokenizer)
            is_plain = (
                isinstance(self._tokenizer, PreTrainedTokenizerFast)
                and own.decode is PreTrainedTokenizerFast.decode
                and own._decode is PreTrainedTokenizerFast._decode
                and _joins_tokens(self._tokenizer.backend_tokenizer.decoder)
            )
            decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
            before = self.encode("a", add_special_tokens=False)[-1:].tolist() if is_plain else []
            self._token_texts[skip_special_tokens] = TokenTexts(decode, before) if decode(before).isalpha() else None
        return self._token_texts[skip_special_tokens]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text that is not empty; it may be a part of a character."""
        if token_id not in self._token_bytes:
            self._token_bytes[token_id] = self._bytes_of(token_id)
        return self._token_bytes[token_id]

    def _bytes_of(self, token_id: int) -> bytes:
        texts = self.token_texts(skip_special_tokens=False)
        text = None if texts is None else texts[token_id]
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
        [name] = self.names([token_id])
        if _MARK not in text or not name:
            return text.encode()
        if found := _BYTE_NAME.fullmatch(name):
            return bytes.fromhex(found[1])
        return bytes(map(_ALPHABET.__getitem__, name)) if _ALPHABET.keys() >= set(name) else text.encode()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> Ids:
        """Token ids of a conversation; `variables` are passed to the template."""
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def response_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Callable[[bool], AnswerParser] | None:
        """Makes parsers of answers to this prompt, which offered these tools; it is called with `streams`. None where
        each answer is text: for a family without a response template, and without tools for one that does not
        reason."""
        template = self._response_template
        if template is None or not (tools or template.reasons):
            return None
        return lambda streams: template.parser(prompt, tools, streams=streams)

    def call_grammar(self, prompt: str, tools: Sequence[Mapping[str, Any]], **choice: Any) -> str | None:
        """The grammar, in Lark's syntax, of answers to this prompt that call these tools; `choice` is as in `Calling`.
        None where it is not known how a call is written."""
        if self._response_template is None:
            return None
        calling = Calling(functions=[tool["function"] for tool in tools], **choice)
        tokens = self._tokenizer.added_tokens_decoder
        added = {token.content: token_id for token_id, token in tokens.items()}
        special = {token.content for token in tokens.values() if token.special}
        return self._response_template.grammar(prompt, calling, added, special)

    def check_tools(self) -> None:
        """Raise InvalidInput where tools would change nothing: their calls could not be read, or the chat template
        shows none of them."""
        if self._response_template is None or not self._response_template.has_calls:
            raise InvalidInput(
                f"'{self.name}' has no response template, so calls of tools could not be found in its answers.",
                fix="serve a model that has one, such as quire-bundled-agent, or choose one by --response-template.",
            )
        self.check_shows_tools()

    def check_shows_tools(self) -> None:
        """Raise InvalidInput where the chat template shows no tools."""
        if not self._shows_tools:
            raise InvalidInput(
                f"the chat template of '{self.name}' shows no tools to the model.",
                fix="give one that does, by --chat-template.",
            )

    @cached_property
    def _shows_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": "a", "description": "b", "parameters": {"type": "object"}}}
        messages = [{"role": "user", "content": "c"}]
        try:
            return self.chat_text(messages) != self.chat_text(messages, tools=[tool])
        except InvalidInput:
            return True  # the request's own messages decide

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, which has all special tokens. Raises InvalidInput if the template refuses
        it, or if it has no UTF-8."""
        if not self.has_chat_template:
            raise InvalidInput(
                f"tokenizer '{self.name}' has no chat template.",
                fix="use plain completions, or add 'chat_template' to tokenizer_config.json.",
            )
        template = self._response_template
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    list(messages) if template is None else template.turns(messages),
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **variables,
                )
            )
        except Exception as error:  # templates raise exceptions of their authors' choice
            raise InvalidInput(
                f"the chat template of '{self.name}' refuses these messages: {error}.",
                fix="check roles, their order and the content of each message.",
            ) from error
        return _utf8(text)


def _utf8(text: str) -> str:
    """`text`. Raises InvalidInput if it has lone surrogates, of which there is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!r} after {text[max(0, error.start - 20) : error.start]!r}"
        raise InvalidInput(f"the prompt must be text without lone surrogates; it has {found}.") from None
    return text


def _response_template(tokenizer: Any, chosen: str) -> ResponseTemplate | None:
    templates = tokenizer.chat_template
    text = json.dumps(templates, ensure_ascii=False) if isinstance(templates, dict) else templates or ""
    return find(chosen, own=getattr(tokenizer, "response_template", None), chat_template=text)


class TokenTexts(dict[int, str | None]):
    """The text of single tokens as they are met, at most one entry for each token of the vocabulary."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        super().__init__()
        self._decode = decode
        self._before = before  # a token with a text of its own: at the start of a text, some decoders drop a space
        self._text_before = decode(before)

    def __missing__(self, token_id: int) -> str | None:
        text = self._decode([*self._before, token_id])
        is_whole = text.startswith(self._text_before) and _MARK not in text
        found = self[token_id] = text[len(self._text_before) :] if is_whole else None
        return found


def _joins_tokens(decoder: Any) -> bool:
    """Whether a decoder of the tokenizers library changes each token, or each byte of it, by itself and joins them. A
    space at the start of a text may be dropped."""
    if decoder is None:
        return False
    found = json.loads(decoder.__getstate__())
    for step in found["decoders"] if found["type"] == "Sequence" else [found]:
        match step:
            case {"type": "ByteLevel" | "ByteFallback" | "Fuse" | "Metaspace"}:
                pass
            case {"type": "Strip", "stop": 0}:
                pass
            case {"type": "Replace", "pattern": {"String": str(text)}} if len(text) == 1:
                pass
            case _:
                return False
    return True


def load_tokenizer(
    path_or_id: str, *, revision: str | None = None, chat_template: str | None = None, response_template: str = "auto"
) -> Tokenizer:
    """The tokenizer in a folder or on the hub, with the chat template in the file `chat_template` if given.

    Raises ModelLoadError if none can be read.
    """
    source = ModelSource.find(path_or_id, revision)
    if source.local:
        check_tokenizer(Path(source.name))
    with quiet(), reading(source, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            source.name, revision=source.revision, local_files_only=source.local, trust_remote_code=False
        )
    if not len(tokenizer):
        raise ModelLoadError(
            f"'{path_or_id}' has no tokenizer.", fix="add tokenizer.json, or run with token ids and no tokenizer."
        )
    # Prompts that are too long are refused, with a message of Quire's own.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return Tokenizer(tokenizer, name=path_or_id, response_template=response_template)

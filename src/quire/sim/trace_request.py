"""TraceRequest and Trace: requests as they arrived, with the tokens that the model will produce.

A trace holds drafts of requests, which say what their tokens are made of. Tokens are built when a request is read.

Published traces say which parts of prompts are equal, not their text, and a generated workload needs no more. So a
synthetic text is a name and a length: each token is a fixed function of the name and its position. Texts of one name
begin with the same tokens.

Token i of a sequence has the hash `h[i] = h[i - 1] + m(t[i], i)` modulo 2^64, with `h[-1]` made from the namespace and
a mixing `m` that is one-to-one. For all tokens at once it is a running sum, some nanoseconds per token. After a token
in which two sequences differ, they have equal hashes with a chance of about 2^-64 per slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar

from quire.errors import InvalidInput
from quire.prefix.hashing import namespace_seed
from quire.spec.events import Namespace
from quire.spec.ids import Ids

Hashes = npt.NDArray[np.uint64]

ODD_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2^64 by the golden ratio. Its multiples are far from each other."""
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def prefix_hashes(namespace: Namespace, tokens: Ids) -> Hashes:
    """The hash of each token of a sequence, uint64 `[num_tokens]`."""
    found: Hashes = np.arange(len(tokens), dtype=np.uint64)
    found += tokens.astype(np.uint64) << _HALF
    np.cumsum(_mixed(found), out=found)
    found += np.uint64(int.from_bytes(namespace_seed(namespace)[:8], "little"))
    return found


def page_digests(hashes: Hashes) -> Hashes:
    """The digest of each page, uint64 `[pages]`, from the hashes or the tokens of its slots, `[pages, slots]`. It is a
    sum in which every slot has an odd weight of its own, so that one wrong slot always changes it."""
    found: Hashes = hashes @ _weights(hashes.shape[1])
    return found


@cache
def _weights(slots: int) -> Hashes:
    return _mixed(np.arange(1, slots + 1, dtype=np.uint64)) | np.uint64(1)


def _mixed(numbers: Hashes) -> Hashes:
    """A one-to-one mixing of 64-bit numbers, in place."""
    numbers += np.uint64(1)
    numbers *= ODD_STEP
    return mix_bits(numbers)


def mix_bits(numbers: Hashes) -> Hashes:
    """A one-to-one mixing of the bits of each number, in place. 0 stays 0."""
    for _ in range(2):
        numbers ^= numbers >> _HALF
        numbers *= _MIX
    return numbers


VOCABULARY = 128_000
"""Token ids of synthetic texts are below this. Texts of two names agree in one position in 128,000."""

Tokenize = Callable[[str], Ids]
"""Text to token ids, int32."""

Tokens = TypeVar("Tokens", bound=Sized, default=Ids)


@dataclass(frozen=True, slots=True)
class TraceRequest(Generic[Tokens]):
    """One request. The arrays belong to the reader of the trace."""

    request_id: str
    prompt: Tokens
    """int32 `[num_tokens]`, at least one."""
    output: Tokens
    """int32: the output of the model."""
    arrival: float = 0.0
    """Seconds from the trace's start. For a follow-up it is an estimate, which orders the trace: a replay uses `after`
    and `think`."""
    session: str = ""
    namespace: Namespace = Namespace()  # noqa: RUF009 - a frozen value
    after: str = ""
    """`request_id` of the turn before, if this is a follow-up: it arrives `think` seconds after that one finished."""
    think: float = 0.0
    priority: int = 0
    abort_after: int | None = None
    """The client leaves after this many output tokens; 0: while it waits, so the request never runs."""
    acceptance: float | None = None
    """The chance of a draft to be accepted, if those before it are."""
    calls_tool: bool | None = None
    """Whether the output calls a tool, whose result the next turn of the session brings; None: unknown."""

    def __post_init__(self) -> None:
        if not len(self.prompt):
            fix = "remove it, or use another tokenizer if it has text."
            raise InvalidInput(f"request '{self.request_id}' of the trace has no prompt tokens.", fix=fix)


class Text(NamedTuple):
    """The first `length` tokens of the endless synthetic text of this name. Its words and numbers are the name."""

    name: tuple[int | str, ...]
    length: int


class TextBlocks(NamedTuple):
    """The first `length` tokens of synthetic texts of `size` tokens each, whose names are `name` and an id."""

    name: str
    ids: list[int]
    size: int
    length: int


Content: TypeAlias = tuple[Text, ...] | TextBlocks | list[int] | str
"""What tokens are made of: synthetic texts one after the other, token ids, or a text for a tokenizer."""

Draft: TypeAlias = TraceRequest[Content]
"""A request before its tokens are built. `arrival` is in seconds on any clock."""


class Planned(NamedTuple):
    """A request that a trace can build again and again."""

    arrival: float
    """Seconds on any clock; the trace starts when its first request arrives."""
    build: Callable[[float], TraceRequest]
    """The request, given its arrival in seconds from the trace's start."""
    lengths: tuple[int, int] | None = None
    """Prompt and output tokens, if they are known without building."""

    @classmethod
    def of(cls, draft: Draft, tokenize: Tokenize) -> Planned:
        """The request of a draft, which it keeps."""
        prompt, output = _length(draft.prompt, tokenize), _length(draft.output, tokenize)
        lengths = (prompt, output) if prompt is not None and output is not None else None
        return cls(draft.arrival, partial(built, draft, tokenize), lengths)


class Trace:
    """Requests in order of arrival, a follow-up after the turn before it. Each iteration gives the same requests, whose
    token arrays are built on demand.

    `name` is short; `source` says in one line where the trace came from.
    """

    def __init__(self, name: str, source: str, planned: Iterable[Planned], *, limit: int | None = None) -> None:
        self.name = name
        self.source = source
        self._planned = sorted(planned, key=lambda request: request.arrival)[:limit]
        self._start = self._planned[0].arrival if self._planned else 0.0

    def __len__(self) -> int:
        return len(self._planned)

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, built one at a time."""
        return map(self._built, self._planned)

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(prompt for prompt, _ in self.lengths)

    @cached_property
    def output_tokens(self) -> int:
        """Tokens of all outputs, whether or not the client stays to see them."""
        return sum(output for _, output in self.lengths)

    @cached_property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Prompt and output tokens of each request."""
        return tuple(planned.lengths or _array_lengths(self._built(planned)) for planned in self._planned)

    def _built(self, planned: Planned) -> TraceRequest:
        return planned.build(round(planned.arrival - self._start, 6))


def built(draft: Draft, tokenize: Tokenize, arrival: float) -> TraceRequest:
    """The request of a draft, with its tokens."""
    fields: dict[str, Any] = {"prompt": _tokens(draft.prompt, tokenize), "output": _tokens(draft.output, tokenize)}
    return cast("TraceRequest", replace(draft, arrival=arrival, **fields))


def utf8_bytes(text: str) -> Ids:
    """A token for each byte of `text`: needs no vocabulary, and equal prefixes of text are equal prefixes of tokens."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


@lru_cache(maxsize=1 << 16)
def text_seed(name: tuple[int | str, ...]) -> int:
    """A 64-bit number, the same in every process. Different names give different seeds."""
    return int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest(), "little")


def tokens_of(texts: Sequence[Text]) -> Ids:
    """The tokens of several texts, one after the other, int32. About 15 ns a token."""
    seeds = np.array([text_seed(text.name) for text in texts], dtype=np.uint64)
    lengths = np.array([text.length for text in texts], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    # Token i of a text is drawn from its seed + i * step: it differs from a plain count by one number per text.
    state = np.repeat(seeds - starts.astype(np.uint64) * ODD_STEP, lengths)
    state += _steps(1 << len(state).bit_length())[: len(state)]
    mix_bits(state)
    state >>= _HALF
    state *= np.uint64(VOCABULARY)
    state >>= _HALF
    return state.astype(np.int32)


@lru_cache(maxsize=32)
def _steps(length: int) -> Hashes:
    return np.arange(length, dtype=np.uint64) * ODD_STEP


def _tokens(content: Content, tokenize: Tokenize) -> Ids:
    match content:
        case str():
            return tokenize(content)
        case list():
            return np.array(content, dtype=np.int32)
        case TextBlocks(name, ids, size, length):
            return tokens_of([Text((name, each), size) for each in ids])[:length]
    return tokens_of(content)


def _length(content: Content, tokenize: Tokenize) -> int | None:
    """In tokens; None if only the tokenizer can tell."""
    match content:
        case str():
            return len(content.encode()) if tokenize is utf8_bytes else None
        case list():
            return len(content)
        case TextBlocks():
            return content.length
    return sum(text.length for text in content)


def _array_lengths(request: TraceRequest) -> tuple[int, int]:
    return len(request.prompt), len(request.output)

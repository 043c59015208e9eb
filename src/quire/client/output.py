"""What a caller gets: the text and tokens of a request, assembled from the engine's `TokenOutput`s.

    TokenOutput --TextStream--> characters that can no longer change --StopStrings--> characters safe to show --> delta

A delta never ends inside a character (a token may be half of one) nor inside a possible stop string: both are held back
until the next token, or the end. The same classes serve the in-process `LLM` and the server, so that both cut text at
the same place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np

from quire.cache.request_kv import CacheUse
from quire.cache.session import SessionGrant
from quire.client.stop_strings import StopAutomaton, StopStrings
from quire.engine.messages import DraftUse, SequenceTimes, TokenLogprobs, TokenOutput
from quire.observe.explain import Explanation
from quire.scheduler.request import Begun
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.ids import Ids
from quire.spec.pooling import Vectors

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER_TAIL = 3  # bytes of an unfinished UTF-8 character; some tokenizers return one mark for each of them
_WINDOW_TOKENS = 16  # tokens decoded again with every new one, at most twice this
_MOST_KEPT = 11  # tokens that stay when older ones are dropped


class Decoder(Protocol):
    """The only method of a tokenizer that text assembly needs. Where there are `token_texts` and `token_bytes` of
    `models.tokenizer.Tokenizer`, the first makes it faster, and the second knows the parts of a character."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool | str = True) -> str: ...


class Logprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log-probability of one token at one position; `rank` 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence. `logprobs[i]` maps token ids to their log-probability at generated position `i`, whose
    text begins at `text_offsets[i]` of the whole text.

    `finish_reason` is "stop", "length", "abort" or "error"; `stop_reason` is the stop string or stop token that ended
    it, None for the model's own end-of-sequence token. `explanation` says why no more of its prompt was cached, if the
    request asked for it. With speculation, `num_draft_tokens` were computed, and `num_accepted_tokens` of them are
    among its tokens; where a stop string ended it, as of the last step that accepted any. The last one of a turn says
    what its `session` holds. An echoed `prompt` is the beginning of the text, and of nothing else. What was
    `pooled`, float32 `[size]`, stands in place of tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    text_offsets: list[int] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    explanation: Explanation | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    session: SessionGrant | None = None
    prompt: ShownPrompt | None = None
    pooled: Vectors | None = None


@dataclass(slots=True, kw_only=True)
class SequenceDelta(CompletionOutput):
    """What one engine step added to a sequence. The deltas of a sequence joined are its final output.

    `must_abort`: the text ended on a stop string, which the engine cannot see; its sequence still runs. `error` and
    `status`, the HTTP status, are those of a sequence that finished with "error". `source` is what the engine said.
    """

    must_abort: bool = False
    error: str = ""
    status: int = 500
    source: TokenOutput | None = None


class TextStream:
    """Tokens in, text out, as early as it is final.

    A token that always has the same text costs a look into a table, where the text before it is final. Any other is
    decoded with a short window of the last tokens, because decoders depend on neighbours (a leading space belongs to
    the word, a character spans tokens).
    """

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool | str) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        find = getattr(decoder, "token_texts", None)
        self._texts: Mapping[int, str | None] | None = find(skip_special_tokens=skip_special_tokens) if find else None
        self._is_final = False  # some text was returned, and none is held back
        self._since: deque[int] = deque(maxlen=_WINDOW_TOKENS)  # the last tokens after the window, whose text is final
        self._window: list[int] = []
        self._shown = ""  # what was returned of the window's text

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became final."""
        if self._is_final and self._texts is not None:
            found = self._texts[token_id]
            if found is not None:
                self._since.append(token_id)
                return found
        if self._since:
            self._extend()
        self._window.append(token_id)
        text = self._decode(self._window)
        end = _final_length(text)
        if end < len(text) and not text.startswith(self._shown):
            end = 0  # within a character, some decoders show bytes of the characters before it as marks, too
        delta = self._show(text, end)
        self._is_final = len(self._shown) == len(text) > 0
        if len(self._window) > _WINDOW_TOKENS:
            self._trim(text)
        return delta

    def flush(self) -> str:
        """The end: returns the text that was held back."""
        if self._is_final:
            return ""
        text = self._decode(self._window)
        return self._show(text, len(text))

    def _extend(self) -> None:
        """Add the tokens to the window that came without it; enough of them take its place."""
        self._window = [*(self._window if len(self._since) < _WINDOW_TOKENS else ()), *self._since]
        self._shown = self._decode(self._window)
        self._since.clear()

    def _show(self, text: str, end: int) -> str:
        delta = text[len(self._shown) : end]
        if end > len(self._shown):
            self._shown = text[:end]
        return delta

    def _trim(self, text: str) -> None:
        """Keep the window's newer half, from the beginning of a character, if the text at its end stays the same."""
        num_hidden = len(text) - len(self._shown)
        is_forced = len(self._window) >= 2 * _WINDOW_TOKENS
        if not is_forced and not text.startswith(self._shown):
            return
        for size in range(_MOST_KEPT - _LONGEST_CHARACTER_TAIL, _MOST_KEPT + 1):
            tail = self._decode(self._window[-size:])
            clean = tail and text.endswith(tail) and not tail.startswith(_REPLACEMENT) and num_hidden <= len(tail)
            if clean or (is_forced and size == _MOST_KEPT):
                self._window = self._window[-size:]
                self._shown = tail[: max(0, len(tail) - num_hidden)]
                return

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip)


class ShownPrompt:
    """A prompt that is a part of the answers of a request: echoed, or `scored` by one of its sequences. Each field is
    made when it is read: those of each token of a long prompt take seconds, so a server makes them in a thread."""

    def __init__(
        self, params: SamplingParams, decoder: Decoder | None, *, prompt: str | None, token_ids: Ids, echo: bool
    ) -> None:
        self.token_ids: list[int] = token_ids.tolist()
        self.scored: list[TokenLogprobs] = []
        self._params, self._decoder = params, decoder
        self._prompt, self._echo = prompt, echo

    @cached_property
    def text(self) -> str:
        """The text of an echo, without what the tokenizer has added."""
        if not self._echo or self._decoder is None:
            return ""
        if self._prompt is not None:
            return self._prompt
        return self._decoder.decode(self.token_ids, skip_special_tokens=self._params.skip_special_tokens)

    @cached_property
    def tokens(self) -> list[str]:
        """The text of each token by itself."""
        return [text_of(self._decoder, token_id) for token_id in self.token_ids]

    @cached_property
    def offsets(self) -> list[int]:
        """Where the text of each token begins in `text`."""
        if self._decoder is None:
            return [0] * len(self.token_ids)
        skip = self._params.skip_special_tokens
        if self._prompt is not None:
            skip = self._decoder.decode(self.token_ids, skip_special_tokens=False) != self.text
        stream, offsets, at = TextStream(self._decoder, skip_special_tokens=skip), list[int](), 0
        for token_id in self.token_ids:
            offsets.append(min(at, len(self.text)))
            at += len(stream.push(token_id))
        return offsets

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Entry `i` maps token ids to their log-probability at position `i`, and is None where nothing precedes; None
        if they were not asked for."""
        if self._params.prompt_logprobs is None:
            return None
        rest = zip(self.token_ids[1:], self.scored, strict=False)
        return [None, *(position_of(self._decoder, token_id, found) for token_id, found in rest)]


def bytes_of(decoder: Decoder | None, token_id: int) -> bytes:
    """What a token adds to a text."""
    if decoder is None:
        return b""
    find: Callable[[int], bytes] | None = getattr(decoder, "token_bytes", None)
    return find(token_id) if find else decoder.decode([token_id], skip_special_tokens=False).encode()


def text_of(decoder: Decoder | None, token_id: int) -> str:
    """What a token adds to a text, with marks for parts of a character."""
    return bytes_of(decoder, token_id).decode(errors="replace")


def position_of(decoder: Decoder | None, token_id: int, found: TokenLogprobs) -> dict[int, Logprob]:
    """The log-probabilities at one position: first of the token drawn, then of the most likely ones."""
    top = zip(found.top_ids, found.top_logprobs, range(1, len(found.top_ids) + 1), strict=True)
    position: dict[int, Logprob] = {}
    for each, logprob, rank in ((token_id, found.logprob, found.rank), *top):
        if each not in position:
            position[each] = Logprob(logprob=logprob, rank=rank, decoded_token=text_of(decoder, each))
    return position


def _final_length(text: str) -> int:
    """Length of `text` without the marks at its end that may be the start of an unfinished character."""
    end = len(text)
    while end > 0 and len(text) - end < _LONGEST_CHARACTER_TAIL and text[end - 1] == _REPLACEMENT:
        end -= 1
    return end


class SequenceAssembler:
    """Builds one sequence from its `TokenOutput`s. Without a decoder the text stays empty."""

    def __init__(
        self,
        params: SamplingParams,
        decoder: Decoder | None,
        *,
        index: int = 0,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.text_offsets: list[int] | None = None if params.logprobs is None else []
        self.use = CacheUse()
        self.drafts = DraftUse()
        self.times: SequenceTimes | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error = ""  # why, if `finish_reason` is "error"
        self.explanation: Explanation | None = None
        self.session: SessionGrant | None = None
        self.is_turn = False  # a session's text that ends on a stop string waits for the last output
        self._params = params
        self._decoder = decoder
        self._stream = decoder and TextStream(decoder, skip_special_tokens=params.skip_special_tokens)
        self._stop = StopStrings(StopAutomaton.of(params.stop), include=params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self._num_characters = 0  # characters with those that are held back

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended; later outputs of the engine are ignored."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._pieces)

    def push(self, output: TokenOutput) -> SequenceDelta:
        """Add one step's tokens; returns what they add to the output."""
        first_token, first_piece, ended = len(self.token_ids), len(self._pieces), self.finished
        self.session, self.times = output.session or self.session, output.times or self.times
        if not ended:
            self.use, self.drafts = output.use or self.use, output.drafts or self.drafts
            self.explanation = output.explanation or self.explanation
            for i, token_id in enumerate(output.token_ids):
                if self.logprobs is not None and output.logprobs is not None:
                    self.logprobs.append(position_of(self._decoder, token_id, output.logprobs[i]))
                is_last = output.finish_reason == "stop" and i == len(output.token_ids) - 1
                is_stop = is_last and token_id == output.stop_token
                ended = self.push_token(token_id, shown=not is_stop or self._params.include_stop_str_in_output)
                if ended:
                    drafted, accepted = self.drafts
                    self.drafts = DraftUse(drafted, max(0, accepted - (len(output.token_ids) - i - 1)))
                    break
            if output.finish_reason is not None and not ended:
                self._finish(output)
        waits = self.is_turn and output.finish_reason is None
        return SequenceDelta(
            index=self.index,
            text="".join(self._pieces[first_piece:]),
            token_ids=self.token_ids[first_token:],
            logprobs=None if self.logprobs is None else self.logprobs[first_token:],
            text_offsets=None if self.text_offsets is None else self.text_offsets[first_token:],
            finish_reason=None if waits else self.finish_reason,
            stop_reason=None if waits else self.stop_reason,
            must_abort=ended and output.finish_reason is None,
            error=self.error,
            status=output.status,
            explanation=self.explanation,
            session=self.session,
            source=output,
        )

    def push_token(self, token_id: int, *, shown: bool = True) -> bool:
        """Add one token; whether the text ends with it, on a stop string, which the engine cannot see."""
        if self.finished:
            return False
        self.token_ids.append(token_id)
        if self.text_offsets is not None:
            self.text_offsets.append(self._num_characters)
        if self._stream and shown:
            self._show(self._stream.push(token_id))
        return self.finish_reason is not None

    def begun(self) -> Begun | None:
        """What an engine needs that is to continue it; None for a sequence without tokens."""
        outputs = np.array(self.token_ids, dtype=np.int32).tobytes()
        return Begun(outputs=outputs, use=self.use, **self.drafts._asdict()) if outputs else None

    def completion(self) -> CompletionOutput:
        """The sequence as it is now."""
        total = None
        if self.logprobs is not None:
            drawn = zip(self.logprobs, self.token_ids, strict=True)
            total = sum((found[token_id].logprob for found, token_id in drawn), start=0.0)
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            logprobs=self.logprobs,
            text_offsets=self.text_offsets,
            cumulative_logprob=total,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            explanation=self.explanation,
            session=self.session,
            **self.drafts._asdict(),
        )

    def _show(self, text: str) -> None:
        """Pass final text through the stop strings; ends the sequence when one is complete."""
        self._num_characters += len(text)
        if len(self.token_ids) >= self._params.min_tokens:
            text, stop = self._stop.push(text)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
        self._pieces.append(text)

    def _finish(self, output: TokenOutput) -> None:
        """End as the engine says, unless the held-back text completes a stop string."""
        if self._stream:
            self._show(self._stream.flush())
        if not self.finished:
            self.finish_reason, self.error = output.finish_reason, output.error
            if output.stop_token is not None and output.stop_token in self._params.stop_token_ids:
                self.stop_reason = output.stop_token
            self._pieces.append(self._stop.flush())

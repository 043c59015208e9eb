"""What a caller gets: the text and tokens of a request, put together from the engine's `TokenOutput`s.

    TokenOutput --TextStream--> characters that can no longer change --StopStrings--> characters safe to show --> delta

A delta never ends inside a character (a token may hold half of one) nor inside what may yet turn out to be a stop
string: both are held back until the next token, or the end, decides. The same classes serve the in-process `LLM` and
the server, so that both cut text at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.engine.messages import EngineRequest, TokenLogprobs, TokenOutput
from quire.observe.explain import Explanation
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.ids import Ids

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER_TAIL = 3  # bytes of an unfinished UTF-8 character; some tokenizers show one mark for each of them
_WINDOW_TOKENS = 16  # tokens decoded again with every new one, at most twice this


class Decoder(Protocol):
    """The one thing text assembly asks of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of one token at one position; `rank` 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence. `logprobs[i]` maps token ids to their log-probability at generated position `i`.

    `finish_reason` is "stop", "length", "abort" or "error"; `stop_reason` is the stop string or stop token that ended
    it, None when that was the model's own end-of-sequence token. `explanation` says why no more of its prompt was
    cached, where that was asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    explanation: Explanation | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One prompt with its `n` sequences. `num_cached_tokens` are the prompt tokens that came from the cache: of these,
    `num_host_tokens` from host memory, `num_storage_tokens` from storage, and the others were on the device."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_storage_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDelta:
    """What one engine step added to sequence `index`. The deltas of a sequence joined are its final output.

    `must_abort`: the text ended on a stop string, which the engine cannot see; its sequence still runs.
    """

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[dict[int, Logprob]] | None = None
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_storage_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    must_abort: bool = False
    error: str = ""
    status: int = 500
    explanation: Explanation | None = None


class TextStream:
    """Tokens in, text out, as early as it is final.

    Only a short window of the last tokens is decoded for each new one; it starts some tokens back because decoders
    look at neighbours (a leading space belongs to the word, a character spans tokens).
    """

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that were returned

    def push(self, token_id: int) -> str:
        """Add a token; the text that became final."""
        self._window.append(token_id)
        text = self._decode(self._window)
        delta = self._show(text, _final_length(text))
        if len(self._window) > _WINDOW_TOKENS:
            self._trim(text)
        return delta

    def flush(self) -> str:
        """The end: whatever was held back, as it stands."""
        text = self._decode(self._window)
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        delta = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return delta

    def _trim(self, text: str) -> None:
        """Drop the window's older half where that leaves the text at its end as it is."""
        tail_tokens = self._window[-_WINDOW_TOKENS // 2 :]
        tail = self._decode(tail_tokens)
        num_hidden = len(text) - self._num_shown
        clean = tail and text.endswith(tail) and not tail.startswith(_REPLACEMENT) and num_hidden <= len(tail)
        if clean or len(self._window) >= 2 * _WINDOW_TOKENS:
            self._window = tail_tokens
            self._num_shown = max(0, len(tail) - num_hidden)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip)


def _final_length(text: str) -> int:
    """Length of `text` without the marks at its end that may be the start of an unfinished character."""
    end = len(text)
    while end > 0 and len(text) - end < _LONGEST_CHARACTER_TAIL and text[end - 1] == _REPLACEMENT:
        end -= 1
    return end


class StopStrings:
    """Looks for the stop string that is complete first (of two that end together, the longer).

    The answer depends on the text alone, not on how it was cut into tokens.
    """

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""  # a suffix of the text so far that is the beginning of some stop string

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that ended it, if one did."""
        if not self._stop:
            return text, None
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, at, stop = min(found)
            self._held = ""
            return text[: end if self._include else at], stop
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """What was held back: the text ended before it could become a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0


class SequenceAssembler:
    """Builds one sequence from its `TokenOutput`s. With no decoder the text stays empty."""

    def __init__(self, params: SamplingParams, decoder: Decoder | None, *, index: int = 0) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.num_cached_tokens = 0
        self.num_host_tokens = 0
        self.num_storage_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error = ""  # why, when `finish_reason` is "error"
        self.explanation: Explanation | None = None
        self._params = params
        self._decoder = decoder
        self._stream = decoder and TextStream(decoder, skip_special_tokens=params.skip_special_tokens)
        self._stop = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._pieces: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended; later outputs of the engine are ignored."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._pieces)

    def push(self, output: TokenOutput) -> SequenceDelta:
        """Add one step's tokens; what they add to the output."""
        if self.finished:
            return SequenceDelta(index=self.index, finish_reason=self.finish_reason, stop_reason=self.stop_reason)
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
            self.num_host_tokens, self.num_storage_tokens = output.num_host_tokens, output.num_storage_tokens
        self.explanation = output.explanation or self.explanation
        first_token = len(self.token_ids)
        pieces: list[str] = []
        for i, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            if self.logprobs is not None and output.logprobs is not None:
                self._add_logprobs(token_id, output.logprobs[i])
            ends = output.finish_reason == "stop" and i == len(output.token_ids) - 1 and token_id == output.stop_token
            if self._stream and (not ends or self._params.include_stop_str_in_output):
                pieces.append(self._show(self._stream.push(token_id)))
                if self._has_ended():
                    break
        must_abort = self._has_ended() and output.finish_reason is None
        if output.finish_reason is not None and not self._has_ended():
            pieces.append(self._finish(output))
        text = "".join(pieces)
        self._pieces.append(text)
        return SequenceDelta(
            index=self.index,
            text=text,
            token_ids=self.token_ids[first_token:],
            logprobs=None if self.logprobs is None else self.logprobs[first_token:],
            num_cached_tokens=self.num_cached_tokens,
            num_host_tokens=self.num_host_tokens,
            num_storage_tokens=self.num_storage_tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            must_abort=must_abort,
            error=self.error,
            status=output.status,
            explanation=self.explanation,
        )

    def push_token(self, token_id: int) -> bool:
        """Add one token of which the engine has nothing else to say; whether the text ends with it, on a stop string,
        which the engine cannot see."""
        if self.finished:
            return False
        self.token_ids.append(token_id)
        if self._stream:
            self._pieces.append(self._show(self._stream.push(token_id)))
        return self.finished

    def completion(self) -> CompletionOutput:
        """The sequence as it stands."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            logprobs=self.logprobs,
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            explanation=self.explanation,
        )

    def _has_ended(self) -> bool:
        return self.finish_reason is not None

    def _show(self, text: str) -> str:
        """Pass final text through the stop strings; ends the sequence when one is complete."""
        if len(self.token_ids) < self._params.min_tokens:
            return text
        shown, stop = self._stop.push(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        return shown

    def _finish(self, output: TokenOutput) -> str:
        """End as the engine says, unless the text that was held back completes a stop string."""
        rest = self._show(self._stream.flush()) if self._stream else ""
        if self._has_ended():
            return rest
        self.finish_reason, self.error = output.finish_reason, output.error
        if output.stop_token is not None and output.stop_token in self._params.stop_token_ids:
            self.stop_reason = output.stop_token
        return rest + self._stop.flush()

    def _add_logprobs(self, token_id: int, logprobs: TokenLogprobs) -> None:
        assert self.logprobs is not None
        assert self.cumulative_logprob is not None
        position = {token_id: self._logprob(token_id, logprobs.logprob, logprobs.rank)}
        for rank, (top_id, logprob) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), start=1):
            if top_id not in position:
                position[top_id] = self._logprob(top_id, logprob, rank)
        self.logprobs.append(position)
        self.cumulative_logprob += logprobs.logprob

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = self._decoder.decode([token_id], skip_special_tokens=False) if self._decoder else ""
        return Logprob(logprob=logprob, rank=rank, decoded_token=text)


@dataclass(slots=True, kw_only=True)
class RequestAssembler:
    """One prompt and the assemblers of its `n` sequences, which the engine runs as `n` requests of their own."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Ids
    params: SamplingParams
    decoder: Decoder | None
    sequences: list[SequenceAssembler] = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = [SequenceAssembler(self.params, self.decoder, index=i) for i in range(self.params.n)]

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.finished for sequence in self.sequences)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens the request found in the cache: of the sequence that found least, as the rest find its own."""
        return self._first.num_cached_tokens

    @property
    def _first(self) -> SequenceAssembler:
        return min(self.sequences, key=lambda sequence: sequence.num_cached_tokens)

    def engine_requests(
        self, *, adapter: str = "", salt: str = "", priority: int = 0, explain: bool = False
    ) -> list[EngineRequest]:
        """The requests to give to the engine, one for each sequence, in the order of their index."""
        prompt = self.prompt_token_ids.tobytes()
        return [
            EngineRequest(
                request_id=sequence_id(self.request_id, index),
                prompt=prompt,
                params=self.params,
                index=index,
                adapter=adapter,
                salt=salt,
                priority=priority,
                explain=explain,
            )
            for index in range(self.params.n)
        ]

    def by_id(self) -> list[tuple[str, SequenceAssembler]]:
        """The sequences with the engine's id of each."""
        return [(sequence_id(self.request_id, sequence.index), sequence) for sequence in self.sequences]

    def unfinished_ids(self) -> list[str]:
        """Engine ids of the sequences that still run."""
        return [sequence_id(self.request_id, s.index) for s in self.sequences if not s.finished]

    def push(self, output: TokenOutput) -> SequenceDelta:
        """Add one step's tokens of one of this request's sequences."""
        request_id, _, index = output.request_id.rpartition("-")
        assert request_id == self.request_id, f"output of '{output.request_id}' given to '{self.request_id}'"
        return self.sequences[int(index)].push(output)

    def output(self) -> RequestOutput:
        """The request as it stands."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids.tolist(),
            outputs=[sequence.completion() for sequence in self.sequences],
            num_cached_tokens=self.num_cached_tokens,
            num_host_tokens=self._first.num_host_tokens,
            num_storage_tokens=self._first.num_storage_tokens,
            finished=self.finished,
        )


def sequence_id(request_id: str, index: int) -> str:
    """The engine's id of sequence `index` of a request."""
    return f"{request_id}-{index}"

"""PromptedSequence: a sequence whose answer has its prompt too: echoed, or with log-probabilities of its tokens."""

from __future__ import annotations

from functools import cached_property

from msgspec.structs import replace

from quire.client.output import (
    CompletionOutput,
    Decoder,
    Logprob,
    SequenceAssembler,
    SequenceDelta,
    ShownPrompt,
    TextStream,
)
from quire.engine.messages import TokenLogprobs, TokenOutput
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.ids import Ids


class PromptedSequence(SequenceAssembler):
    """Its first delta has the prompt. Of a sequence without tokens (`max_tokens` 0), the engine's first one ends it and
    is dropped."""

    def __init__(
        self,
        params: SamplingParams,
        decoder: Decoder | None,
        *,
        index: int,
        prompt: str | None,
        token_ids: Ids,
        echo: bool,
        scored: list[TokenLogprobs],
    ) -> None:
        """`scored` gets the log-probabilities of the prompt, and is shared by its sequences: one has them computed."""
        super().__init__(params, decoder, index=index)
        self._prompt, self._prompt_ids, self._echo = prompt, token_ids.tolist(), echo
        self._scored = scored
        self._is_shown = False
        self._texts: dict[int, str] = {}

    def push(self, output: TokenOutput) -> SequenceDelta:
        """Add one step's tokens, or log-probabilities of the prompt."""
        if output.prompt_logprobs is not None:
            self._scored += output.prompt_logprobs.positions()
        if self._params.max_tokens == 0 and output.token_ids:
            output = replace(output, token_ids=[], logprobs=None, finish_reason="length", stop_token=None)
        delta = super().push(output)
        if not self._is_shown and self._is_scored and (delta.token_ids or delta.finish_reason is not None):
            self._is_shown = True
            self._show_prompt(delta)
        return delta

    def completion(self) -> CompletionOutput:
        """The sequence as it is now, behind its prompt."""
        found = super().completion()
        self._show_prompt(found)
        return found

    @property
    def _is_scored(self) -> bool:
        return self._params.prompt_logprobs is None or len(self._scored) >= len(self._prompt_ids) - 1

    def _show_prompt(self, part: CompletionOutput) -> None:
        part.prompt = self._shown
        part.text = part.prompt.text + part.text

    @cached_property
    def _shown(self) -> ShownPrompt:
        """The prompt; made when all of it was computed."""
        if not self._echo or self._decoder is None:
            return ShownPrompt(token_ids=self._prompt_ids, score=self._scores)
        text, skip = self._prompt, self._params.skip_special_tokens
        if text is None:
            text = self._decoder.decode(self._prompt_ids, skip_special_tokens=skip)
        else:  # without what the tokenizer has added
            skip = self._decoder.decode(self._prompt_ids, skip_special_tokens=False) != text
        stream, offsets, at = TextStream(self._decoder, skip_special_tokens=skip), [], 0
        for token_id in self._prompt_ids:
            offsets.append(min(at, len(text)))
            at += len(stream.push(token_id))
        tokens = [self._text_of(token_id) for token_id in self._prompt_ids]
        return ShownPrompt(token_ids=self._prompt_ids, score=self._scores, text=text, tokens=tokens, offsets=offsets)

    def _scores(self) -> list[dict[int, Logprob] | None] | None:
        if self._params.prompt_logprobs is None:
            return None
        return [None, *map(self._position, self._prompt_ids[1:], self._scored)]

    def _text_of(self, token_id: int) -> str:
        """A prompt has many tokens, and many of them twice."""
        if token_id not in self._texts:
            self._texts[token_id] = super()._text_of(token_id)
        return self._texts[token_id]

"""PromptedSequence: a sequence whose answer has its prompt too: echoed, or with log-probabilities of its tokens."""

from __future__ import annotations

from msgspec.structs import replace

from quire.client.output import CompletionOutput, Decoder, SequenceAssembler, SequenceDelta, ShownPrompt
from quire.engine.messages import TokenOutput
from quire.scheduler.sampling_params import SamplingParams


class PromptedSequence(SequenceAssembler):
    """Its first delta has the prompt. Of a sequence without tokens (`max_tokens` 0), the engine's first one ends it and
    is dropped."""

    def __init__(self, params: SamplingParams, decoder: Decoder | None, *, index: int, prompt: ShownPrompt) -> None:
        """`prompt` is shared by the sequences of a request: one has its log-probabilities computed."""
        super().__init__(params, decoder, index=index)
        self._prompt = prompt
        self._is_shown = False

    def push(self, output: TokenOutput) -> SequenceDelta:
        """Add one step's tokens, or log-probabilities of the prompt."""
        if output.prompt_logprobs is not None:
            self._prompt.scored += output.prompt_logprobs.positions()
        if self._params.max_tokens == 0 and output.token_ids:
            output = replace(output, token_ids=[], logprobs=None, finish_reason="length", stop_token=None)
        delta = super().push(output)
        self._move(delta)
        if not self._is_shown and self._is_scored and (delta.token_ids or delta.finish_reason is not None):
            self._is_shown = True
            self._show_prompt(delta)
        return delta

    def completion(self) -> CompletionOutput:
        """The sequence as it is now, behind its prompt."""
        found = super().completion()
        self._move(found)
        self._show_prompt(found)
        return found

    @property
    def _is_scored(self) -> bool:
        return self._params.prompt_logprobs is None or len(self._prompt.scored) >= len(self._prompt.token_ids) - 1

    def _move(self, part: CompletionOutput) -> None:
        """Its offsets are those behind the prompt."""
        if part.text_offsets:
            part.text_offsets = [len(self._prompt.text) + offset for offset in part.text_offsets]

    def _show_prompt(self, part: CompletionOutput) -> None:
        part.prompt = self._prompt
        part.text = self._prompt.text + part.text

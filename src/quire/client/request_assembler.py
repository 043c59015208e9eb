"""RequestAssembler: one prompt and its sequences, from what the engine says of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from quire.cache.request_kv import CacheUse
from quire.cache.session import SessionGrant
from quire.client.output import CompletionOutput, Decoder, Logprob, SequenceAssembler, SequenceDelta, ShownPrompt
from quire.client.pooled import PooledSequence
from quire.client.prompted import PromptedSequence
from quire.engine.messages import EngineRequest, TokenOutput
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.ids import Ids


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One prompt with its `n` sequences. `num_cached_tokens` are the prompt tokens from the cache: of these,
    `num_host_tokens` from host memory, `num_storage_tokens` from storage, `num_peer_tokens` from another engine, and
    the others were on the device. `prompt_logprobs` are `ShownPrompt.logprobs`, if they were asked for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_storage_tokens: int = 0
    num_peer_tokens: int = 0
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def session(self) -> SessionGrant | None:
        """What the session of this turn holds; None without one."""
        return self.outputs[0].session


@dataclass(slots=True, kw_only=True)
class RequestAssembler:
    """One prompt and its `n` sequences by the engine's id of each: the engine runs them as requests of their own. With
    `echo`, the text of each begins with the prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Ids
    params: SamplingParams
    decoder: Decoder | None
    echo: bool = False
    session_id: str = ""
    sequences: dict[str, SequenceAssembler] = field(init=False)

    def __post_init__(self) -> None:
        make: Callable[..., SequenceAssembler] = SequenceAssembler
        if self.echo or self.params.prompt_logprobs is not None:
            ids, echo = self.prompt_token_ids, self.echo
            shown = ShownPrompt(self.params, self.decoder, prompt=self.prompt, token_ids=ids, echo=echo)
            make = partial(PromptedSequence, prompt=shown)
        if self.params.pooled:
            make = PooledSequence
        assemblers = [make(self.params, self.decoder, index=i) for i in range(self.params.n)]
        self.sequences = {f"{self.request_id}-{each.index}": each for each in assemblers}
        for each in assemblers:
            each.is_turn = bool(self.session_id)

    @property
    def use(self) -> CacheUse:
        """The cached tokens of the sequence with the fewest, because the others reuse what it computes."""
        return min((each.use for each in self.sequences.values()), key=lambda use: use.num_cached_tokens)

    def engine_requests(self, **options: Any) -> list[EngineRequest]:
        """The requests to give to the engine, one for each sequence that has not ended. `options` are further fields of
        them. The first alone has the log-probabilities of the prompt computed. A sequence that has tokens, drawn by
        another engine, is continued."""
        prompt, others = self.prompt_token_ids.tobytes(), self.params
        if others.prompt_logprobs is not None:
            others = replace(others, prompt_logprobs=None, max_tokens=others.max_tokens or 1)
        return [
            EngineRequest(
                request_id=name,
                prompt=prompt,
                params=others if each.index or each.token_ids else self.params,
                index=each.index,
                session_id=self.session_id,
                begun=each.begun(),
                **options,
            )
            for name, each in self.sequences.items()
            if not each.finished
        ]

    def unfinished_ids(self) -> list[str]:
        """Engine ids of the sequences that still run."""
        return [name for name, each in self.sequences.items() if not each.finished]

    def push(self, output: TokenOutput) -> SequenceDelta:
        """Add one step's tokens of one of this request's sequences."""
        return self.sequences[output.request_id].push(output)

    def output(self) -> RequestOutput:
        """The request as it is now."""
        outputs = [each.completion() for each in self.sequences.values()]
        shown = outputs[0].prompt
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids.tolist(),
            outputs=outputs,
            finished=not self.unfinished_ids(),
            prompt_logprobs=shown.logprobs if shown is not None else None,
            **self.use._asdict(),
        )

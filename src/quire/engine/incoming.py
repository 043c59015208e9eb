"""Requests as the scheduler runs them, from the messages of callers: what can never run is refused here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.cache.session import LONGEST_SESSION_ID
from quire.engine.config import EngineConfig
from quire.engine.messages import EngineRequest
from quire.errors import InvalidInput
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams, eos_or_stop
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.pages import ALL_TOKENS


def request_of(
    message: EngineRequest, config: EngineConfig, largest: int, vocabulary: int, eos_token_ids: Sequence[int]
) -> Request:
    """The request of a message, by default of up to `largest` tokens, prompt and output together. Raises InvalidInput
    for tokens and fields that this engine cannot compute with."""
    tokens, begun = message.tokens(), message.begun
    for drawn in (tokens, begun.tokens() if begun is not None else tokens[:0]):
        _check_ids(drawn, vocabulary)
    for name, ids in (("logit_bias", message.params.logit_bias), ("stop_token_ids", message.params.stop_token_ids)):
        if wrong := [token for token in ids if not 0 <= token < vocabulary]:
            raise InvalidInput(f"{name} names token {wrong[0]}, outside the vocabulary of {vocabulary:,}.")
    refuse_adapter(message.adapter)
    if message.explain and not config.explain:
        raise InvalidInput("explain was asked for, and this engine does not.", fix="start it with explain on.")
    if message.session_id:
        _check_turn(message.session_id, message.params)
    params = message.params
    limit = params.max_tokens
    max_tokens = max(1, largest - len(tokens) if limit is None else limit)
    if begun is not None and len(begun.tokens()) >= max_tokens:
        raise InvalidInput(f"a sequence of {max_tokens} tokens was to be continued after {len(begun.tokens())}.")
    return Request(
        message.request_id,
        tokens,
        message.params,
        max_tokens=max_tokens,
        stop_ids=eos_or_stop(message.params, eos_token_ids),
        index=message.index,
        namespace=Namespace(message.adapter, message.salt),
        priority=message.priority,
        explain=message.explain,
        is_for_peer=message.is_for_peer,
        session_id=message.session_id,
        last_turn=message.last_turn,
        owner=message.owner,
        most_cached=ALL_TOKENS if params.prompt_logprobs is None else 0,
        begun=begun,
    )


def _check_ids(ids: Ids, vocabulary: int) -> None:
    if np.maximum.reduce(ids.view(np.uint32), initial=0) >= vocabulary:  # negative ones are the largest
        bad = int(ids.min() if ids.min() < 0 else ids.max())
        raise InvalidInput(f"token id {bad} is outside the vocabulary of {vocabulary:,}.", fix="check the tokenizer.")


def _check_turn(session_id: str, params: SamplingParams) -> None:
    """Raises InvalidInput for a turn that no session can have."""
    if params.n > 1:
        raise InvalidInput(f"a session follows one sequence, and n is {params.n}.", fix="send n requests.")
    if params.prompt_logprobs is not None:
        raise InvalidInput(
            "prompt_logprobs were asked for in a session, whose turns compute only what is new.",
            fix="leave session_id out.",
        )
    if params.pooled:
        raise InvalidInput("a session has turns of text, and this is none.", fix="leave session_id out.")
    if len(session_id) > LONGEST_SESSION_ID:
        raise InvalidInput(f"session_id has {len(session_id):,} characters, and {LONGEST_SESSION_ID} at most.")


def refuse_adapter(name: str) -> None:
    """Raises InvalidInput if an adapter is named."""
    if name:
        raise InvalidInput(f"adapter '{name}' was asked for, and this version loads no adapters.")

"""Greedy tokens of turns equal `transformers` generation, and a turn computes exactly its new tokens.

Held are a partly filled page of 16 tokens, windows and states. Then the row of the session ends between two turns,
and the tokens are the same.
"""

from __future__ import annotations

import numpy as np
import pytest

from quire.cache.session import SessionGrant, Start
from quire.client.llm import LLM
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.errors import InvalidInput
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.events import Namespace
from tests.engine.running import core_for, generated
from tests.engine.test_hybrid_tokens import build
from tests.tiny_models import VOCAB_SIZE, build_tiny

NEW_TOKENS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
KINDS = ("gemma3_text", "mamba2", "qwen3_next")


def turn(core: EngineCore, prompt: list[int], name: str) -> tuple[list[int], SessionGrant, int]:
    """The tokens of a turn, what its session holds, and the prompt tokens that were computed."""
    data = np.array(prompt, dtype=np.int32).tobytes()
    core.add(EngineRequest(request_id=name, prompt=data, params=GREEDY, session_id="s"))
    tokens: list[int] = []
    grant, cached = None, 0
    while core.has_work():
        for output in core.step():
            tokens += output.token_ids
            grant, cached = output.session or grant, output.use.num_cached_tokens if output.use else cached
    core.audit()
    assert grant is not None
    return tokens, grant, len(prompt) - cached


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "qwen3_next" else pytest.mark.slow) for n in KINDS])
def test_turns_equal_generation_and_compute_their_new_tokens(name: str) -> None:
    reference, model = build(name), LoadedModel(build(name), name=name)
    bounds = {"max_model_len": 256, "max_running_requests": 4, "max_num_batched_tokens": 32}
    core = core_for(model, page_size=16, overlap=True, **bounds)
    rng = np.random.default_rng(3)
    history, held = rng.integers(1, VOCAB_SIZE, 21).tolist(), 0
    for at in range(4):
        before = core.statistics()["hit_tokens"]
        tokens, grant, computed = turn(core, history, f"t{at}")
        assert tokens == generated(reference, history, NEW_TOKENS)
        assert computed == len(history) - held and core.statistics()["hit_tokens"] - before == held
        assert grant.resumed_tokens == held and grant.start is (Start.CONTINUED if at else Start.NEW)
        held = grant.held_tokens
        assert held == len(history) + NEW_TOKENS - 1
        history = [*history, *tokens, *rng.integers(1, VOCAB_SIZE, 6).tolist()]
    assert core.statistics()["session_partial_tokens"] > 0
    assert core.cache.sessions.give_way()
    core.cache.evict(core.plan.num_pages)
    tokens, grant, computed = turn(core, history, "evicted")
    assert tokens == generated(reference, history, NEW_TOKENS)
    assert grant.start is Start.LOST and computed == len(history)
    history = [*history, *tokens, 9]
    tokens, grant, computed = turn(core, history, "warm")
    assert tokens == generated(reference, history, NEW_TOKENS) and computed == 2
    assert core.close_session(Namespace(), "s") and not core.sessions(None).sessions
    core.audit()
    assert all(frames["private"] == 0 for frames in core.statistics()["frames"].values())


def test_counters_are_those_after_sessions_have_expired() -> None:
    """The frames of a session that expires while its engine has nothing to do are not counted without it."""
    core = core_for(LoadedModel(build_tiny("llama_gqa"), name="llama_gqa"), page_size=16, max_model_len=256)
    turn(core, list(range(1, 22)), "t")
    held = core.statistics()
    assert held["sessions"] == held["sessions_held"] == held["frames"]["full"]["private"] == 1
    [session] = core.cache.sessions._by_key.values()
    session.expires_at = core.cache.sessions._next_expiry = 0.0
    left = core.statistics()
    assert left["sessions"] == left["sessions_held"] == left["frames"]["full"]["private"] == 0


def test_an_unknown_key_of_a_prompt_is_named() -> None:
    with LLM(kv_memory="16MiB", show_plan=False) as llm:
        with pytest.raises(InvalidInput, match="a prompt has no 'sesion_id'"):
            llm.generate([{"prompt_token_ids": [5], "sesion_id": "s1"}])
        with pytest.raises(InvalidInput, match="session_id is a text that is not empty"):
            llm.generate([{"prompt_token_ids": [5], "session_id": ""}])
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        [turn_one] = llm.generate([{"prompt_token_ids": list(range(5, 30)), "session_id": "s1"}], params)
        assert turn_one.session is not None and turn_one.session.held_tokens == 27
        more = [*range(5, 30), *turn_one.outputs[0].token_ids, 7]
        [turn_two] = llm.generate([{"prompt_token_ids": more, "session_id": "s1"}], params)
        assert turn_two.num_cached_tokens == 27 and turn_two.session is not None
        assert llm.sessions().sessions[0].saved_tokens == 27 and llm.sessions(salt="other").sessions == ()
        assert llm.close_session("s1") and not llm.close_session("s1")

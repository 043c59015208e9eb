"""Sequences that another engine has begun: the same tokens, from every place, cold and warm, with drafts and grammars,
in pools so small that requests are preempted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from quire.cache.request_kv import CacheUse
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, prompt_bytes
from quire.errors import InvalidInput
from quire.scheduler.request import Begun
from quire.scheduler.sampling_params import SamplingParams
from tests.engine import grammars
from tests.engine.drafted import CHAIN
from tests.engine.running import STEPS, add, core_for, run, shared_prompts, tight_core
from tests.engine.test_prompt_logprobs import model_of
from tests.tiny_models import VOCAB_SIZE

PROMPTS = shared_prompts(3, shared=20, tails=(1, 14, 3, 7, 30, 2), vocabulary=VOCAB_SIZE)
PENALTIES = {"presence_penalty": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=23, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=17, ignore_eos=True, **PENALTIES),
    SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, **PENALTIES),
    SamplingParams(seed=4, temperature=1.7, max_tokens=20, min_tokens=20, top_k=20),
    SamplingParams(seed=5, top_p=0.8, max_tokens=22, ignore_eos=True, logit_bias={3: 4.0}),
]
USE = CacheUse(num_cached_tokens=7)


def begun(tokens: Sequence[int], num: int) -> Begun | None:
    """What another engine says that has drawn so many of these tokens."""
    return Begun(outputs=prompt_bytes(tokens[:num]), use=USE, num_draft_tokens=5) if num else None


def continued(
    core: EngineCore,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    whole: Sequence[list[int]],
    nums: Sequence[int],
) -> list[list[int]]:
    """All tokens of these requests, of which the first were drawn elsewhere. They run at once."""
    found = {f"c-{i}": list(tokens[:num]) for i, (tokens, num) in enumerate(zip(whole, nums, strict=True))}
    for i, (prompt, each, tokens, num) in enumerate(zip(prompts, params, whole, nums, strict=True)):
        message = EngineRequest(request_id=f"c-{i}", prompt=prompt_bytes(prompt), params=each, begun=begun(tokens, num))
        add(core, message)
    for _ in range(STEPS):
        for output in core.step():
            found[output.request_id] += output.token_ids
            if nums[int(output.request_id[2:])] and output.use is not None:
                assert output.use == USE, "the cached tokens are those of the first engine"
                assert output.drafts is not None and output.drafts.num_draft_tokens >= 5
        if not core.has_work():
            core.audit()
            return list(found.values())
    raise AssertionError("it never ends")


def check_continued(make: Callable[[], EngineCore], *, seed: int = 0, turns: int = 3) -> EngineCore:
    """One engine draws all; others go on from random places, the first time with an empty cache."""
    first = make()
    whole = run(first, PROMPTS, PARAMS)
    first.close()
    rng, core = Random(seed), make()
    for _ in range(turns):
        nums = [rng.randrange(len(tokens)) for tokens in whole]
        assert continued(core, PROMPTS, PARAMS, whole, nums) == whole
    core.close()
    return core


def check_tiny() -> None:
    """With full attention."""
    check_continued(lambda: core_for(model_of("llama_gqa"), page_size=4))


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_oss", "qwen3_next", "falcon_h1"])
def test_the_same_tokens(name: str) -> None:
    check_continued(lambda: core_for(model_of(name), page_size=4))


def test_in_a_pool_that_is_too_small_for_all() -> None:
    core = check_continued(lambda: tight_core(model_of("llama_gqa"), num_tokens=120, page_size=4))
    assert core.statistics()["preemptions"] > 0


def test_with_drafts() -> None:
    check_continued(lambda: core_for(model_of("llama_gqa"), page_size=4, speculative_config=CHAIN, max_model_len=256))


def test_with_grammars() -> None:
    rng, whole, core = Random(1), grammars.expected(), grammars.bundled_core()
    nums = [rng.randrange(len(tokens)) for tokens in whole]
    assert continued(core, grammars.prompts(), grammars.params(), whole, nums) == whole
    core.close()


def test_as_a_turn_of_a_session() -> None:
    """Its session begins here."""
    [whole] = run(core_for(model_of("llama_gqa"), page_size=4), PROMPTS[:1], PARAMS[:1])
    core = core_for(model_of("llama_gqa"), page_size=4)
    prompt = prompt_bytes(PROMPTS[0])
    message = EngineRequest(request_id="s", prompt=prompt, params=PARAMS[0], session_id="s", begun=begun(whole, 9))
    core.add(message)
    found = [output for _ in range(len(whole)) if core.has_work() for output in core.step()]
    assert whole[:9] + [token for output in found for token in output.token_ids] == whole
    assert found[-1].session is not None and found[-1].session.held_tokens > len(PROMPTS[0])
    after = EngineRequest(request_id="t", prompt=prompt_bytes(PROMPTS[0] + whole), params=PARAMS[0], session_id="s")
    core.add(after)
    while core.has_work():
        found += core.step()
    assert found[-1].session is not None and found[-1].session.resumed_tokens > len(PROMPTS[0])
    core.audit()


def test_what_cannot_be_continued_is_refused() -> None:
    core = core_for(model_of("llama_gqa"), page_size=4)
    for tokens, why in (([VOCAB_SIZE], "outside the vocabulary"), ([1] * 20, "was to be continued after 20")):
        with pytest.raises(InvalidInput, match=why):
            core.add(
                EngineRequest(
                    request_id="r",
                    prompt=prompt_bytes(np.arange(1, 9)),
                    params=PARAMS[0],
                    begun=Begun(outputs=prompt_bytes(tokens)),
                )
            )
    assert not core.has_work()
    core.close()

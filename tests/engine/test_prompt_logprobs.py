"""Log-probabilities of prompts equal transformers' own, whatever is cached, chunked, preempted, drafted or shared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, TokenLogprobs, TokenOutput
from quire.errors import InvalidInput
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from tests.covering import covering
from tests.engine.drafted import CHAIN
from tests.engine.running import STEPS, core_for, run, shared_prompts, tiered_core, tight_core
from tests.engine.test_hybrid_tokens import build
from tests.tiny_models import VOCAB_SIZE, build_tiny

PROMPTS = shared_prompts(5, shared=37, tails=(3, 20, 11, 1), vocabulary=VOCAB_SIZE)
DIFFERENCE = {"float32": 2e-4, "bfloat16": 0.15}
"""The largest difference of a log-probability that rounding may cause, by dtype."""
NEW_TOKENS = 4


def asking(k: int = 2, **more: Any) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "prompt_logprobs": k} | more
    return SamplingParams(**given)


PLAIN = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@cache
def model_of(name: str, dtype: str = "float32", *, pack: bool = True) -> LoadedModel:
    hybrids = ("gemma2", "gpt_oss", "qwen3_next", "falcon_h1", "mistral_all_slide")
    made = build(name) if name in hybrids else build_tiny(name)
    return LoadedModel(made.to(getattr(torch, dtype)), name=name, pack=pack)


@cache
def expected(name: str, dtype: str, prompt: tuple[int, ...]) -> Tensor:
    """By transformers' own forward pass: row i is of the token behind position i."""
    model = model_of(name, dtype, pack=False)
    return torch.log_softmax(model.plain_logits(torch.tensor(prompt)), dim=-1)


def outputs_of(
    core: EngineCore, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], name: str = "r", **more: Any
) -> dict[str, list[TokenOutput]]:
    """All outputs of these requests, which run at once. Audits the cache after each step."""
    found: dict[str, list[TokenOutput]] = {}
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        tokens = np.array(prompt, dtype=np.int32).tobytes()
        core.add(EngineRequest(request_id=f"{name}-{i}", prompt=tokens, params=each, **more))
        found[f"{name}-{i}"] = []
    for step in count():
        if not core.has_work():
            return found
        assert step < STEPS
        for output in core.step():
            found[output.request_id].append(output)
        core.audit()
    raise AssertionError


def positions_of(outputs: Sequence[TokenOutput]) -> list[TokenLogprobs]:
    """What was reported of the prompt, all of it before the first token."""
    first = next(at for at, each in enumerate(outputs) if each.token_ids)
    assert all(each.prompt_logprobs is None for each in outputs[first:])
    return [one for each in outputs if each.prompt_logprobs is not None for one in each.prompt_logprobs.positions()]


def check(
    name: str, prompt: Sequence[int], outputs: Sequence[TokenOutput], *, k: int = 2, dtype: str = "float32"
) -> None:
    """Each position once, in order, with the values of transformers."""
    found, wanted, most = positions_of(outputs), expected(name, dtype, tuple(prompt)), DIFFERENCE[dtype]
    assert len(found) == len(prompt) - 1
    for at, position in enumerate(found):
        own = wanted[at]
        assert abs(position.logprob - float(own[prompt[at + 1]])) < most, at
        assert len(position.top_ids) == len(position.top_logprobs) == k
        assert all(abs(a - b) < most for a, b in zip(position.top_logprobs, own.topk(k).values.tolist(), strict=True))
        assert position.top_logprobs == sorted(position.top_logprobs, reverse=True)
        if prompt[at + 1] in position.top_ids:  # the same float, which clients compare
            assert position.top_logprobs[position.top_ids.index(prompt[at + 1])] == position.logprob


def tokens_of(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token for each in outputs for token in each.token_ids]


def check_small() -> None:
    """In few seconds."""
    test_put_back_in_the_middle_of_a_prompt()
    test_with_tiers()
    core = core_for(model_of("cohere"), page_size=16, max_num_batched_tokens=23, max_model_len=256)
    [outputs] = outputs_of(core, PROMPTS[:1], [asking()]).values()
    check("cohere", PROMPTS[0], outputs)


@covering(
    name=["llama_gqa", "gemma2", "gpt_oss", "qwen3_next", "cohere", "gpt2"],
    page_size=[1, 16],
    chunk=[23, 2048],
    overlap=[False, True],
)
def test_cold_and_warm(name: str, page_size: int, chunk: int, overlap: bool) -> None:
    """What is cached has no logits and is computed again; afterwards it is shared as before, and no page is double."""
    bounds = {"max_model_len": 256, "max_running_requests": 8}
    core = core_for(model_of(name), page_size=page_size, max_num_batched_tokens=chunk, overlap=overlap, **bounds)
    plain = run(core, PROMPTS, PLAIN, "plain")
    cached = core.statistics()["cached_pages"]
    for turn in ("warm", "again"):
        found = outputs_of(core, PROMPTS, [asking()] * len(PROMPTS), turn)
        for at, (prompt, outputs) in enumerate(zip(PROMPTS, found.values(), strict=True)):
            check(name, prompt, outputs)
            assert tokens_of(outputs) == plain[at]
    assert core.statistics()["cached_pages"] == cached
    hits = core.statistics()["hit_tokens"]
    assert run(core, PROMPTS, PLAIN, "after") == plain
    assert core.statistics()["hit_tokens"] > hits


@pytest.mark.parametrize("dtype", sorted(DIFFERENCE))
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_values_by_dtype(dtype: str, pack: bool) -> None:
    """By fused layers and by transformers' own code, cold, warm, and after an eviction."""
    core = core_for(model_of("llama_gqa", dtype, pack=pack), pages=6, page_size=16)
    for prompt in PROMPTS[1], PROMPTS[1], list(range(1, 80)), PROMPTS[1]:
        [outputs] = outputs_of(core, [prompt], [asking(5)]).values()
        check("llama_gqa", prompt, outputs, k=5, dtype=dtype)
    assert core.statistics()["evicted_pages"] > 0


def test_a_mixed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests that ask for other counts, or for none; logits of a few rows at a time."""
    monkeypatch.setattr("quire.engine.prompt_logprobs.reported_at_once", lambda vocabulary: 7)
    core = core_for(model_of("llama_gqa"), page_size=4, max_num_batched_tokens=50)
    params = [asking(0), PLAIN, asking(3, logprobs=1), asking(1, max_tokens=1)]
    found = outputs_of(core, PROMPTS, params)
    for at, k in ((0, 0), (2, 3), (3, 1)):
        check("llama_gqa", PROMPTS[at], found[f"r-{at}"], k=k)
    assert all(each.prompt_logprobs is None for each in found["r-1"])


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_repeats_no_position(overlap: bool) -> None:
    """A request that gives its pages back goes on where it was, and no position comes twice."""
    prompts = shared_prompts(3, shared=1, tails=(60, 60, 60), vocabulary=VOCAB_SIZE)
    params = [asking(max_tokens=40), asking(max_tokens=40), asking(max_tokens=40)]
    core = tight_core(model_of("llama_gqa"), num_tokens=160, page_size=4, max_num_batched_tokens=9, overlap=overlap)
    found = outputs_of(core, prompts, params)
    for prompt, outputs in zip(prompts, found.values(), strict=True):
        check("llama_gqa", prompt, outputs)
    assert core.statistics()["preemptions"] > 0


def test_put_back_in_the_middle_of_a_prompt() -> None:
    """Positions that have been reported are not computed again, but for their page."""
    core = core_for(model_of("llama_gqa"), page_size=4, max_num_batched_tokens=10, overlap=False)
    [prompt] = shared_prompts(3, shared=1, tails=(60,), vocabulary=VOCAB_SIZE)
    core.add(EngineRequest(request_id="r", prompt=np.array(prompt, dtype=np.int32).tobytes(), params=asking()))
    outputs: list[TokenOutput] = []
    for step in count():
        if not core.has_work():
            break
        outputs += core.step()
        if step == 2:
            [request] = core.scheduler.requests
            assert request.most_cached == 30
            core.scheduler._preempt(request)
            assert core.cache.match(request.tokens, most_tokens=request.most_cached).num_tokens == 28
    check("llama_gqa", prompt, outputs)


def test_a_leader_is_not_waited_for() -> None:
    """Requests that ask begin together, and do not wait for pages that have no logits; others wait and share."""
    core = core_for(model_of("llama_gqa"), page_size=4, max_num_batched_tokens=256)
    found = outputs_of(core, [PROMPTS[1]] * 3, [asking(), asking(), PLAIN])
    check("llama_gqa", PROMPTS[1], found["r-0"])
    check("llama_gqa", PROMPTS[1], found["r-1"])
    assert core.statistics()["hit_tokens"] == (len(PROMPTS[1]) - 1) // 4 * 4
    assert len({tuple(tokens_of(each)) for each in found.values()}) == 1


def test_beside_drafts() -> None:
    core = core_for(
        model_of("llama_gqa"),
        page_size=4,
        speculative_config=CHAIN,
    )
    prompts = [[7, 8, 9, 10] * 8, [3, 4] * 20]
    plain = run(core_for(model_of("llama_gqa"), page_size=4), prompts, PLAIN)
    found = outputs_of(core, prompts, [asking(), asking()])
    for at, (prompt, outputs) in enumerate(zip(prompts, found.values(), strict=True)):
        check("llama_gqa", prompt, outputs)
        assert tokens_of(outputs) == plain[at]


def test_with_tiers() -> None:
    """Pages on the host have no logits either: they are not loaded, and stay."""
    core = tiered_core(model_of("llama_gqa"), num_tokens=96, page_size=4)
    try:
        for prompt in (PROMPTS[1], list(range(1, 80)), PROMPTS[1]):
            [outputs] = outputs_of(core, [prompt], [asking()]).values()
            check("llama_gqa", prompt, outputs)
        run(core, [PROMPTS[1]], PLAIN, "after")
        assert core.statistics()["hit_tokens"] == (len(PROMPTS[1]) - 1) // 4 * 4
    finally:
        core.close()


def test_why_nothing_was_cached() -> None:
    core = core_for(model_of("llama_gqa"), page_size=4, explain=True)
    run(core, [PROMPTS[1]], PLAIN)
    outputs_of(core, [PROMPTS[1]], [asking()], "asks")
    [explanation] = core.explain("asks-0").values()
    assert explanation.tokens_by_cause()["logprobs"] == 56
    assert sum(explanation.tokens_by_cause().values()) == len(PROMPTS[1])


def test_one_token_has_no_positions() -> None:
    core = core_for(model_of("llama_gqa"))
    [outputs] = outputs_of(core, [[5]], [asking()]).values()
    assert positions_of(outputs) == []
    assert len(tokens_of(outputs)) == NEW_TOKENS


def test_an_abort_leaves_nothing() -> None:
    """A request that leaves in the middle of its prompt, with a step in flight."""
    core = core_for(model_of("llama_gqa"), page_size=4, max_num_batched_tokens=10, overlap=True)
    core.add(EngineRequest(request_id="r", prompt=np.array(PROMPTS[1], dtype=np.int32).tobytes(), params=asking()))
    core.step()
    core.step()
    core.abort("r")
    last = [output for _ in range(4) for output in core.step()]
    assert [each.finish_reason for each in last if each.finish_reason] == ["abort"]
    [outputs] = outputs_of(core, [PROMPTS[1]], [asking()], "next").values()
    check("llama_gqa", PROMPTS[1], outputs)


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="prompt_logprobs must be an integer of at least 0 and at most 20"):
        asking(21)
    with pytest.raises(InvalidInput, match="max_tokens must be an integer of at least 1"):
        SamplingParams(max_tokens=0)
    core = core_for(model_of("llama_gqa"))
    with pytest.raises(InvalidInput, match="prompt_logprobs were asked for in a session"):
        outputs_of(core, [[1, 2]], [asking()], session_id="s")

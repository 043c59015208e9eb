"""Checks of an engine with drafts, of tiny models: draws, reserves, trees, states. Tests and mutants run them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from quire.cache.running import Lengths, Rows
from quire.counters import plain
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, prompt_bytes
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.pages import pages_for
from quire.speculative.governor import Governor
from quire.speculative.speculator import Speculator
from tests.engine.running import core_for, generated, run
from tests.engine.scripted import drafts_with, follow_script
from tests.engine.test_hybrid_tokens import build
from tests.tiny_models import build_tiny

CHAIN = {
    "method": "ngram",
    "shared_history": True,
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
TREE = {**CHAIN, "num_speculative_tokens": 4, "topk": 3, "num_draft_tokens": 12}
BOUNDS = {"max_model_len": 256, "max_running_requests": 8}
REPEATING = [[5, 6, 7, 8] * 6, [9, 3, 9, 3, 9, 3, 4], [1, 2, 3] * 5]
STATES = "falcon_h1"


class Varying(Governor):
    """Another number of drafts in each step."""

    turns = 0

    def rests(self, num_requests: int) -> bool:
        return not num_requests

    def pays(self, rows: Rows, serials: Lengths, counts: Lengths) -> bool:
        return len(rows) == len(serials) == len(counts)

    def limits(self, rows: Rows, serials: Lengths) -> Lengths:
        self.turns += 1
        return np.full(len(rows), self.turns % (self._most + 1), dtype=np.int64)


def greedy(num_tokens: int, **more: Any) -> SamplingParams:
    """Of exactly so many tokens, if no stop token is given."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **more)


PENALTIES = greedy(40, repetition_penalty=1.3, frequency_penalty=0.4)


@cache
def llama() -> LoadedModel:
    """The tiny model of keys and values."""
    return LoadedModel(build_tiny("llama_gqa"), name="llama_gqa")


@cache
def states() -> tuple[LoadedModel, list[list[int]]]:
    """A tiny model with states, and its tokens."""
    reference = build(STATES)
    return LoadedModel(build(STATES), name=STATES), [generated(reference, prompt, 24) for prompt in REPEATING]


def core_with(model: LoadedModel, speculation: dict[str, Any], page_size: int = 4, **settings: Any) -> EngineCore:
    """An engine that drafts so."""
    return core_for(model, page_size=page_size, speculative_config=speculation, **{**BOUNDS, **settings})


@cache
def _plain(page_size: int) -> EngineCore:
    return core_for(llama(), page_size=page_size, **BOUNDS)


def tokens_without(prompts: list[list[int]], params: SamplingParams, page_size: int = 4) -> list[list[int]]:
    """What the engine draws without speculation."""
    found = run(_plain(page_size), prompts, params)
    _plain(page_size).flush(None)
    return found


def check_at_rest(core: EngineCore) -> None:
    """No request holds a page or a frame, and no draft is left."""
    core.audit()
    assert all(frames["private"] == 0 for frames in core.statistics()["frames"].values())
    assert core.cache.pages.num_free_pages + core.cache.tree.num_evictable == core.plan.num_pages
    drafts = core.scheduler._rows.drafts
    assert not drafts.num_drafted and not drafts.counts.any()


def check_tokens(script: str, params: SamplingParams, speculation: dict[str, Any] = CHAIN) -> None:
    """Cold and warm, the tokens are those without drafts, whatever the script proposes."""
    expected = tokens_without(REPEATING, params)
    core = core_with(llama(), speculation)
    speculator = follow_script(core, REPEATING, expected, script)
    for turn in ("cold", "warm"):
        assert run(core, REPEATING, params, turn) == expected
    check_at_rest(core)
    found = plain(speculator.counted())
    assert found["draft_tokens"], "nothing was drafted, so this shows little"
    assert (found["accepted_tokens"] > 0) == (script != "none")


def check_stop_inside() -> None:
    """A stop token that is an accepted draft ends the request there."""
    [free] = tokens_without(REPEATING[:1], greedy(24))
    place = next(at for at in range(7, 24) if free[at] not in free[:at] and at % 6 not in (0, 5))
    stop = greedy(24, stop_token_ids=[free[place]])
    core = core_with(llama(), CHAIN)
    follow_script(core, REPEATING[:1], [free], "all right")
    assert run(core, REPEATING[:1], stop) == [free[: place + 1]]
    check_at_rest(core)


def check_min_tokens() -> None:
    """A stop token is not drawn before so many tokens, also behind drafts."""
    [free] = tokens_without(REPEATING[:1], greedy(24))
    place = next(at for at in range(7, 20) if free[at] not in free[:at])
    least = greedy(24, stop_token_ids=[free[place]], min_tokens=22)
    [expected] = tokens_without(REPEATING[:1], least)
    assert free[place] not in expected[:21] and expected != free
    core = core_with(llama(), CHAIN)
    follow_script(core, REPEATING[:1], [free], "all right")  # the stop token among them
    assert run(core, REPEATING[:1], least) == [expected]
    follow_script(core, REPEATING[:1], [expected], "all right")
    assert run(core, REPEATING[:1], least) == [expected]


def check_log_probabilities(speculation: dict[str, Any]) -> None:
    """Each token has its own, as without drafts."""
    params = greedy(24, logprobs=3)

    def outputs(core: EngineCore) -> tuple[list[int], list[Any]]:
        core.add(EngineRequest(request_id="a", prompt=prompt_bytes(REPEATING[0]), params=params))
        every = [output for _ in range(60) if core.has_work() for output in core.step()]
        return [t for o in every for t in o.token_ids], [each for o in every for each in o.logprobs or ()]

    plain, before = outputs(core_for(llama(), page_size=4, **BOUNDS))
    core = core_with(llama(), speculation)
    follow_script(core, REPEATING[:1], [plain], "wrong in the third")
    tokens, said = outputs(core)
    assert tokens == plain
    assert [(each.rank, each.top_ids) for each in said] == [(each.rank, each.top_ids) for each in before]
    assert np.allclose([each.logprob for each in said], [each.logprob for each in before], atol=1e-4)


def check_states() -> None:
    """The state after the last accepted draft is the request's, whatever is rejected."""
    model, expected = states()
    for script in ("alternating", "wrong in the third"):
        core = core_with(model, CHAIN)
        speculator = follow_script(core, REPEATING, expected, script)
        for turn in ("cold", "warm"):
            assert run(core, REPEATING, greedy(24), turn) == expected
        check_at_rest(core)
        found = plain(speculator.counted())
        assert found["draft_tokens"] > found["accepted_tokens"] > 0


def check_a_full_batch_of_states(num_requests: int = 3) -> None:
    """As many requests as the plan admits run at once, each with a state for each of its drafts."""
    model, _ = states()
    bounds = {"max_running_requests": num_requests, "max_mamba_cache_size": num_requests}
    core = core_with(model, CHAIN, enable_prefix_caching=False, **bounds)
    prompts = [[7 + at, 3, 5, 8] for at in range(num_requests)]
    for at, prompt in enumerate(prompts):
        core.add(EngineRequest(request_id=str(at), prompt=prompt_bytes(prompt), params=greedy(40)))
    most = steps = 0
    while core.has_work():
        core.step()
        most, steps = max(most, core.scheduler.num_running), steps + 1
        assert steps < 200, "they never end"
    assert core.plan.max_requests == most == num_requests, f"{most} requests ran at once"
    assert core.statistics()["preemptions"] == 0
    check_at_rest(core)


def check_reserves(page_size: int) -> None:
    """A step verifies as many tokens as the helpers say, rows are as wide as they say, and a request as long as the
    plan admits runs alone to its end in a pool of just that size. What it has allocated only grows."""
    length, reserve = 64, 2 * 6
    pages = pages_for(length - 1 + reserve, page_size)
    core = core_for(llama(), pages=pages, page_size=page_size, speculative_config=CHAIN, max_running_requests=2)
    assert core.plan.num_pages == pages and core.plan.largest_request == pages * page_size + 1 - reserve
    extra = 4 + 6 if page_size == 1 else max(4 + 6, reserve + page_size - 1)
    assert core.plan.pages_per_row == pages_for(core.plan.context + extra, page_size) == core.cache.rows.pages.shape[1]
    prompt = REPEATING[0]
    most = greedy(core.plan.largest_request - len(prompt))
    expected = tokens_without([prompt], most, page_size)
    long = [(prompt * 9)[: core.plan.largest_request - 1]]
    assert run(core, long, greedy(1), "no room for drafts") == tokens_without(long, greedy(1), page_size)
    core.flush(None)
    speculator = follow_script(core, [prompt], expected, "all right")
    speculator._governor = Varying(core.plan.max_requests, 5)
    core.add(EngineRequest(request_id="a", prompt=prompt_bytes(prompt), params=most))
    tokens: list[int] = []
    longest = allocated = 0
    while core.has_work():
        for output in core.step():
            tokens += output.token_ids
            longest = max(longest, len(output.token_ids))
        before, allocated = allocated, int(core.cache.rows.num_allocated.max())
        assert allocated >= before or not core.has_work(), "what is allocated has shrunk"
        core.audit()
    assert tokens == expected[0] and longest == 6
    check_at_rest(core)
    assert speculator.counted().accepted_tokens == speculator.counted().draft_tokens > 0


def check_the_context_end(page_size: int, speculation: dict[str, Any]) -> None:
    """A request runs to the last token of the context with drafts, beside a neighbour in the next row."""
    prompts = [REPEATING[0], REPEATING[1]]
    context = 64
    params = [greedy(context - len(prompt)) for prompt in prompts]
    expected = [tokens_without([p], each, page_size)[0] for p, each in zip(prompts, params, strict=True)]
    core = core_with(llama(), speculation, page_size, max_model_len=context, max_running_requests=2)
    assert core.plan.largest_request == context
    for script in ("all right", "wrong in the third", "none"):
        follow_script(core, prompts, expected, script)
        assert run(core, prompts, params, script) == expected
    check_at_rest(core)


def check_flush() -> None:
    """What an earlier request had is proposed to the next, and not after a flush."""
    prompt = [[9, 3, 1, 4, 7, 2]]
    expected = tokens_without(prompt, greedy(24))
    core = core_with(llama(), {**CHAIN, "prompt_lookup_min": 3})
    assert core.speculator is not None
    drafts_with(core, core.speculator.drafter, core.plan.tokens_per_step - 1)
    counts = [0]
    for flushes in (False, False, True):
        if flushes:
            core.flush(None)
        assert run(core, prompt, greedy(24), f"after {len(counts)}") == expected
        counts.append(core.speculator.counted().accepted_tokens)
    cold, warm, flushed = np.diff(counts).tolist()
    assert warm > cold == flushed


def drafts_freely(core: EngineCore) -> Speculator:
    """From now on the engine drafts as much as there is room for, whatever it costs."""
    assert core.speculator is not None and core.plan.speculation is not None
    return drafts_with(core, core.speculator.drafter, core.plan.speculation.num_steps)


def hit_tokens_of_follow_ups(core: EngineCore, turns: int = 4) -> int:
    """Conversations whose prompts are all that was said before and a few tokens more: what of them was cached."""
    talks = [list(prompt) for prompt in REPEATING]
    for turn in range(turns):
        for talk, more in zip(talks, run(core, talks, greedy(13), f"turn{turn}"), strict=True):
            talk += [*more, 11 + turn, 12, 13]
    return int(core.statistics()["hit_tokens"])

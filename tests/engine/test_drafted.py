"""Drafts at the edges: reserves, the end of the context, stop tokens and texts, states, tiers, follow-up turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.counters import plain
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, prompt_bytes
from tests.changes import DRAFTS, TIERS, slow_unless_changed
from tests.covering import covering
from tests.engine.drafted import (
    CHAIN,
    TREE,
    check_a_full_batch_of_states,
    check_at_rest,
    check_flush,
    check_log_probabilities,
    check_min_tokens,
    check_reserves,
    check_states,
    check_stop_inside,
    check_the_context_end,
    core_with,
    drafts_freely,
    hit_tokens_of_follow_ups,
    llama,
)
from tests.engine.running import core_for
from tests.engine.scripted import follow_script
from tests.engine.tiered import LONGEST, OTHERS, PROMPTS, case_of, closed, small


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_reserves_are_those_of_the_plan(page_size: int) -> None:
    check_reserves(page_size)


@slow_unless_changed(*DRAFTS)
@covering(page_size=[1, 4, 16], speculation=[CHAIN, TREE])
def test_to_the_end_of_the_context(page_size: int, speculation: dict[str, object]) -> None:
    check_the_context_end(page_size, speculation)


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_log_probabilities(speculation: dict[str, object]) -> None:
    check_log_probabilities(speculation)


def test_a_stop_token_inside_a_draft() -> None:
    check_stop_inside()


def test_min_tokens() -> None:
    check_min_tokens()


def test_states_follow_the_accepted_drafts() -> None:
    check_states()


def test_a_full_batch_of_states() -> None:
    check_a_full_batch_of_states()


def test_a_flush_deletes_the_history() -> None:
    check_flush()


@slow_unless_changed(*DRAFTS)
@covering(page_size=[1, 4, 16, 64], speculation=[TREE, CHAIN])
def test_follow_up_turns_hit_as_much(page_size: int, speculation: dict[str, object]) -> None:
    """Pages that end with an accepted draft are cached as others are, and no page is kept back or held for drafts."""
    undrafted = core_for(llama(), page_size=page_size, max_model_len=256, max_running_requests=8)
    expected = hit_tokens_of_follow_ups(undrafted)
    core = core_with(llama(), speculation, page_size)
    speculator = drafts_freely(core)
    assert hit_tokens_of_follow_ups(core) == expected
    assert expected > 0 or page_size == 64
    found = plain(speculator.counted())
    assert found["draft_tokens"] > found["accepted_tokens"] > 0
    assert core.statistics()["cached_pages"] == undrafted.statistics()["cached_pages"]
    check_at_rest(core)


@slow_unless_changed(*DRAFTS, *TIERS)
@pytest.mark.usefixtures("threads_end")
@pytest.mark.parametrize(("name", "storage"), [("llama_gqa", True), ("gemma3_text", False), ("falcon_h1", True)])
def test_with_tiers(name: str, storage: bool, tmp_path: Path) -> None:
    """Pages written by drafts leave the device, and come back from the host or, after a restart, the store."""
    case = case_of(name)
    settings = {"speculative_config": CHAIN, "max_mamba_cache_size": 9 if name == "falcon_h1" else None}
    if storage:
        settings["storage"] = str(tmp_path / "kv")
    rejected = accepted = 0
    for _ in range(1 + storage):
        core = small(case.model, num_tokens=LONGEST + 28, host=8.0, **settings)
        speculator = follow_script(core, PROMPTS + OTHERS, case.expected + case.others, "wrong in the third")
        for turn in range(2):
            case.check(core, turn)
        found = closed(core)
        drafts = plain(speculator.counted())
        accepted, rejected = drafts["accepted_tokens"], drafts["draft_tokens"] - drafts["accepted_tokens"]
        assert found["loaded_bytes"] > 0 and accepted > 0 and rejected > 0
        assert found["failed_moves"] == 0 and not found["defects"]
    if storage:
        assert found["fetched_bytes"] > 0 and core.statistics()["hit_tokens"] > 0


TEXTS = ["Tell me about Mr. Darcy.", "Tell me about Elizabeth. Tell me about Elizabeth. Tell me about Elizabeth."]
ASKED = {
    "greedy": SamplingParams(temperature=0, max_tokens=48),
    "stop": SamplingParams(temperature=0, max_tokens=48, stop=["a", "r"], min_tokens=9),
    "seeded": SamplingParams(temperature=0.7, max_tokens=40, seed=5, n=3),
    "penalties": SamplingParams(temperature=0.4, max_tokens=40, seed=6, n=2, frequency_penalty=0.3, stop=["the"]),
}


@slow_unless_changed(*DRAFTS)
def test_texts_are_the_same() -> None:
    """Of the bundled model: stop strings inside a draft, several sequences of a prompt, seeds, penalties."""
    undrafted = LLM(dtype="float32", kv_memory="8MiB", max_model_len=512)
    llm = LLM(dtype="float32", kv_memory="8MiB", max_model_len=512, speculative_config=CHAIN)
    speculator = drafts_freely(llm.engine)
    for name, params in ASKED.items():
        wanted = [o for each in undrafted.generate(TEXTS, params) for o in each.outputs]
        found = [o for each in llm.generate(TEXTS, params) for o in each.outputs]
        for one, other in zip(wanted, found, strict=True):
            assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason), (
                name
            )
    counts = plain(speculator.counted())
    assert counts["draft_tokens"] > counts["accepted_tokens"] > 0
    assert any(o.finish_reason == "stop" for each in llm.generate(TEXTS, ASKED["stop"]) for o in each.outputs)
    check_at_rest(llm.engine)


@pytest.mark.slow
def test_tokens_that_differ_in_bfloat16() -> None:
    """A report: rounding depends on how many rows a step computes at once, so close calls may go the other way."""
    import numpy as np

    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True, logprobs=2)
    random = np.random.default_rng(3)
    prompts = [random.integers(10, 2000, 12).tolist() * 3 for _ in range(16)]

    def outputs(core: EngineCore) -> list[tuple[list[int], list[float]]]:
        found: dict[str, tuple[list[int], list[float]]] = {}
        for at, prompt in enumerate(prompts):
            core.add(EngineRequest(request_id=str(at), prompt=prompt_bytes(prompt), params=params))
            found[str(at)] = [], []
        while core.has_work():
            for output in core.step():
                tokens, margins = found[output.request_id]
                tokens += output.token_ids
                margins += [each.top_logprobs[0] - each.top_logprobs[1] for each in output.logprobs or ()]
        return list(found.values())

    for dtype in ("bfloat16", "float32"):
        undrafted = EngineCore(engine_config(dtype=dtype, kv_memory=2**24))
        core = EngineCore(engine_config(dtype=dtype, kv_memory=2**24, speculative_config=CHAIN))
        speculator = drafts_freely(core)
        told = []
        for at, (one, other) in enumerate(zip(outputs(undrafted), outputs(core), strict=True)):
            if one[0] != other[0]:
                place = next(i for i, (a, b) in enumerate(zip(one[0], other[0], strict=True)) if a != b)
                told.append((at, place, round(one[1][place], 4)))
        counts = plain(speculator.counted())
        median = float(np.median([margin for _, margins in outputs(undrafted) for margin in margins]))
        print(
            f"{dtype}: {len(told)} of {len(prompts)} requests differ; median margin {median:.3f}; (request, token, "
            f"top-2 margin): {told}; accepted {counts['accepted_tokens']} of {counts['draft_tokens']}"
        )
        assert counts["accepted_tokens"] > 0
        assert dtype == "bfloat16" or not told

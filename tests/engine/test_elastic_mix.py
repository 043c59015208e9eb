"""Memory that swings beside everything else: lower tiers, drafts, latents in host memory, pages from other engines.

What transformers generates is what each request gets, and none is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, ResizeRequest
from quire.models.hf import LoadedModel
from quire.plan.plan import size_within
from quire.testing.choices import Choices
from tests.changes import CORE, DEVICE, HISPARSE, TIERS, TRANSFER, slow_unless_changed
from tests.engine.apart import COMMON, address_of, prefill_engine, ready_peers, turn, wait_for
from tests.engine.tiered import GREEDY, LONGEST, OTHERS, PROMPTS, at_rest, case_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
WATCHED = (*CORE, *DEVICE, *HISPARSE, *TIERS, *TRANSFER, "src/quire/loop/", "tests/engine/test_elastic")
TIMES = [10, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
MOST = 4 * 2**20

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("gemma3_text", {"speculative_config": NGRAM, "storage": ""}),
    "state": ("qwen3_next", {"storage": ""}),
    "window in an arena": ("gemma3_text", {"arena": True, "speculative_config": NGRAM, "storage": ""}),
    "state in an arena": ("qwen3_next", {"arena": True, "storage": ""}),
    "hisparse": ("deepseek_v32", {"hisparse": {"device_buffer_size": 16}, "speculative_config": NGRAM}),
}
"""A tiny model, and what is on beside host memory; all its storage is in a folder of the test."""


def elastic(model: LoadedModel, **settings: Any) -> EngineCore:
    return EngineCore(
        engine_config(
            **{
                "model": model.name,
                "kv_memory": MOST,
                "kv_memory_least": 128 * 2**10,
                "host_memory": 2 * MOST,
                "load": "always",
                "page_size": 4,
                "max_num_batched_tokens": 17,
                "max_running_requests": 3,
                "max_model_len": 256,
                "target_itl_ms": "off",
                "canary": "all",
                **settings,
            }
        ),
        model=model,
    )


def holds(core: EngineCore, num_bytes: int) -> bool:
    """Whether so many bytes have room for the longest request, and little more."""
    return size_within(core.capacity, num_bytes).largest_request >= LONGEST + 24


def swing(core: EngineCore, others: Sequence[EngineCore], expected: list[list[list[int]]], times: int) -> None:
    """Serve prompts that push each other off the device, while the size swings at random, so many times and back."""
    choices, done = Choices.seeded(11), 0
    tight = next(size for size in range(core.memory().device.least, MOST, 2048) if holds(core, size))
    for number in range(40 * times):
        tokens: dict[str, list[int]] = {}
        for some, prompts in enumerate((PROMPTS, OTHERS)):
            for at, prompt in enumerate(prompts):
                ids = np.array(prompt, dtype=np.int32).tobytes()
                core.add(EngineRequest(request_id=f"{number}-{some}-{at}", prompt=ids, params=GREEDY))
                tokens[f"{number}-{some}-{at}"] = []
        while core.has_work():
            for name, found in turn(core, *others).items():
                if name in tokens:
                    tokens[name] += found
            if choices.chance(20):
                size = choices.one_of((tight, (tight + MOST) // 2, MOST))
                core.resize(ResizeRequest(device_bytes=size, preempt=choices.chance(30)))
                done += 1
            if choices.chance(2):
                assert core.release_memory(0.0).poll(False) is not None
                core.resume_memory(0.0)
        assert list(tokens.values()) == [each for some in expected for each in some]
        core.audit()
        if done >= 2 * times:
            return
    raise AssertionError(f"only {done} sizes")


@slow_unless_changed(*WATCHED)
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", CASES)
def test_the_size_swings_beside_tiers_and_drafts(name: str, times: int, tmp_path: Path) -> None:
    model_name, settings = CASES[name]
    case = case_of(model_name)
    if "storage" in settings:
        settings = {**settings, "storage": str(tmp_path), "storage_size": 64 << 20, "prefetch": "wait_complete"}
    core = elastic(case.model, **settings)
    swing(core, (), [case.expected, case.others], times)
    statistics = core.statistics()
    assert statistics["moved_frames"] > 0 and not statistics["canary"]["found_pages"]
    tiers = at_rest(core)
    assert tiers["host_hit_tokens"] + tiers["storage_hit_tokens"] > 0 and not tiers["failed_moves"]
    core.close()


@pytest.fixture
def prefill() -> Iterator[EngineCore]:
    core = prefill_engine(case_of("llama_gqa").model, num_tokens=4 * LONGEST, page_size=4, max_model_len=256)
    yield core
    core.close()


@slow_unless_changed(*WATCHED)
@pytest.mark.parametrize("times", TIMES)
def test_the_size_swings_while_pages_arrive_from_another_engine(prefill: EngineCore, times: int) -> None:
    case = case_of("llama_gqa")
    core = elastic(case.model, **COMMON, role="decode", prefill_peers=address_of(prefill), speculative_config=NGRAM)
    wait_for(lambda: len(ready_peers(core)) == 1, core, prefill)
    swing(core, (prefill,), [case.expected, case.others], times)
    assert core.statistics()["moved_frames"] > 0
    assert core.statistics()["tiers"]["peer_hit_tokens"] > 0
    core.close()

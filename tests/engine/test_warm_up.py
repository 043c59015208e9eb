"""Warm-up: serving compiles nothing after the start of an engine, on a device in Python."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from quire.engine.core import EngineCore
from quire.engine.device.warm_up import warm_ups
from quire.engine.messages import EngineRequest
from quire.scheduler.sampling_params import SamplingParams
from tests.changes import DEVICE, slow_unless_changed
from tests.emulated_attention import emulated_kernels
from tests.engine.running import core_for
from tests.engine.test_fake_cuda import on_cpu, on_device, ours, watched
from tests.engine.test_graphs import SETTINGS
from tests.fake_cuda import FakeCuda
from tests.tiny_models import VOCAB_SIZE

LONG = 400
"""Tokens of a prompt: some programs read its keys, and not one."""
GIVEN = {**SETTINGS, "max_model_len": 512, "max_num_batched_tokens": 128, "cuda_graph_max_bs": 2}


def turns(core: EngineCore) -> list[list[int]]:
    """The tokens of prompts of many lengths: alone and together, cold and from cached pages, in chunks."""
    rng = np.random.default_rng(1)
    long = rng.integers(1, VOCAB_SIZE, LONG)
    waves = [[long[:1], long[:3]], [long[:20]], [long, long[:90], long[7:30]], [long[:399], long[:350], long[:6]]]
    found: list[list[int]] = []
    for number, prompts in enumerate(waves):
        tokens: dict[str, list[int]] = {}
        for at, prompt in enumerate(prompts):
            request = EngineRequest(
                request_id=f"{number} {at}",
                prompt=prompt.astype(np.int32).tobytes(),
                params=SamplingParams(temperature=0, max_tokens=3 + at, ignore_eos=True),
            )
            core.add(request)
            tokens[request.request_id] = []
        while core.has_work():
            for output in core.step():
                assert not output.error, output.error
                tokens[output.request_id].extend(output.token_ids)
        found += tokens.values()
    core.audit()
    return found


def check_compilations(name: str, **settings: Any) -> None:
    expected = turns(core_for(on_cpu(name), device="cpu", **GIVEN))
    cuda = FakeCuda()
    with cuda.installed(), watched(cuda), emulated_kernels() as compiled:
        core = core_for(on_device(name), device="cuda", **GIVEN, **settings)
        at_start = len(compiled)
        assert turns(core) == expected
        assert {"attend_tasks", "merge_parts", "write_tiles"} == set(compiled)
        assert compiled[at_start:] == []
        assert ours(cuda) == []


@slow_unless_changed(*DEVICE)
@pytest.mark.parametrize(
    "name",
    [
        "llama_gqa",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "gpt_oss", "llama4_text", "deepseek_v2")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v32", "minimax_m3", "bamba")),
    ],
)
def test_serving_compiles_nothing_after_the_start(name: str) -> None:
    check_compilations(name)


@slow_unless_changed(*DEVICE)
def test_a_start_without_warm_up_leaves_it_to_the_first_prompts(caplog: pytest.LogCaptureFixture) -> None:
    cuda, given = FakeCuda(), {**GIVEN, "disable_cuda_graph": True}
    caplog.set_level(logging.INFO, "quire.engine.device.warm_up")
    with cuda.installed(), emulated_kernels() as compiled:
        core = core_for(on_device("llama_gqa"), device="cuda", skip_warmup=True, **given)
        assert compiled == [] and caplog.messages == []
        core_for(on_device("llama_gqa"), device="cuda", **given)
        assert len(compiled) > 10 and caplog.messages[-1].startswith("warmed up 5 kinds of steps")
        compiled.clear()
        turns(core)
        assert len(compiled) > 10


def test_steps_are_within_what_an_engine_takes() -> None:
    for longest, rows in ((1, 1), (2, 5), (40, 8), (100_000, 2048)):
        found = warm_ups(longest, rows, trees=True)
        for pads in found:
            assert all(1 <= new <= context <= longest for new, context in zip(pads.news, pads.contexts, strict=True))
        assert found[-1].branches and not any(pads.branches for pads in warm_ups(longest, rows, trees=False))
    branching = found[-1]
    assert branching.parents.tolist() == [-1, 0, 0, -1, 3, 3]

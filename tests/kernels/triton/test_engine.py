"""Engines whose attention and writes are Triton kernels, by the interpreter: the tokens are those of torch."""

from __future__ import annotations

import pytest

from quire.models.hf import load_model
from quire.scheduler.sampling_params import SamplingParams
from tests.changes import DEVICE, KERNELS, slow_unless_changed
from tests.engine.running import core_for, run, shared_prompts
from tests.tiny_hybrids import HYBRIDS
from tests.tiny_latents import LATENTS
from tests.tiny_models import VOCAB_SIZE, save_tiny

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def check(name: str, path, page_size=4, **settings) -> None:
    kind = {**HYBRIDS, **LATENTS}.get(name)
    model = load_model(str(save_tiny(name, path) if kind is None else save_tiny("llama_gqa", path, **kind)))
    prompts = shared_prompts(7, shared=37, tails=(3, 20), vocabulary=VOCAB_SIZE)
    found = {}
    for word in ("triton", "torch"):
        core = core_for(model, page_size=page_size, attention_backend=word, max_num_batched_tokens=32, **settings)
        found[word] = run(core, prompts, GREEDY)
        attention = core.statistics()["attention"]
        core.close()
        if word == "triton":
            assert set(attention["fallbacks"]) <= {"expanded latents"}
            assert attention["calls"]["triton"] > attention["calls"].get("torch", 0)
            assert attention["backend"].startswith("Triton kernels")
    assert found["triton"] == found["torch"]


@slow_unless_changed(*KERNELS, *DEVICE)
@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("fp8_e4m3", marks=pytest.mark.slow)])
def test_tokens_are_those_of_torch(kv_dtype, tmp_path):
    check("llama", tmp_path, kv_dtype=kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "llama4_text", "deepseek_v3", "deepseek_v32", "minimax_m3"])
def test_tokens_of_other_kinds(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.slow
def test_tokens_of_compressed_windows(tmp_path):
    check("deepseek_v4", tmp_path, page_size=128)

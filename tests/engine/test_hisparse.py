"""Latents in host memory: the same tokens as with all latents on the device."""

from __future__ import annotations

import numpy as np
import pytest

from quire.models.hf import LoadedModel, load_model
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.hosted import TOP_K, hosted_core
from tests.engine.running import core_for, run
from tests.tiny_latents import save_latent
from tests.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB_SIZE - 1, length).tolist() for length in lengths]


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_latent(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize(("page_size", "buffer_size"), [(1, TOP_K), (16, 16), (64, 30)])
def test_tokens_are_those_of_latents_on_the_device(model: LoadedModel, page_size: int, buffer_size: int) -> None:
    """Contexts below, at and above what is selected and the buffer, up to 8 times the buffer; cold, then cached."""
    lengths = {TOP_K + d for d in (-2, 0, 2)} | {buffer_size + d for d in (-2, -1, 0, 1, 2)} | {8 * buffer_size}
    prompts = prompts_of(*sorted(lengths))
    settings = {"page_size": page_size, "max_num_batched_tokens": 50, "max_running_requests": 8}
    resident = core_for(model, **settings)
    core = hosted_core(model, buffer_size, **settings)
    for name, params in (("cold", GREEDY), ("warm", GREEDY), ("seeded", SEEDED)):
        assert run(core, prompts, params, name) == run(resident, prompts, params, name)
    found = core.statistics()
    assert found["hit_tokens"] == resident.statistics()["hit_tokens"] > 0
    hisparse = found["hisparse"]
    assert min(hisparse[name] for name in ("hit_tokens", "swapped_tokens", "swapped_bytes", "backed_up_tokens")) > 0
    assert found["kv_bytes"] < resident.statistics()["kv_bytes"]
    core.close()

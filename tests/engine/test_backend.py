"""What computed attention and the layers of an engine: counted by call, and said at the start."""

from __future__ import annotations

from typing import Any

import pytest

from quire.client.llm import LLM
from quire.kernels.native.library import native, use_native
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.running import core_for, run
from tests.engine.test_hybrid_tokens import build
from tests.tiny_hybrids import build_hybrid
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = [[(7 * n + seed) % (VOCAB_SIZE - 1) for n in range(count)] for seed, count in ((1, 300), (2, 5))]


def calls_of(model: LoadedModel, **settings: Any) -> tuple[dict[str, int], ...]:
    """Calls by backend and fallbacks by reason, of a long and a short prompt."""
    core = core_for(model, **settings)
    run(core, PROMPTS, GREEDY)
    found = core.statistics()["attention"]
    return found["calls"], found["fallbacks"]


def test_every_call_of_a_plain_model_is_native() -> None:
    """Also those of windows."""
    calls, fallbacks = calls_of(LoadedModel(build("gemma2"), name="gemma2"))
    assert set(calls) == {"native"} and calls["native"] > 0 and not fallbacks


def test_what_was_chosen_is_no_fallback() -> None:
    calls, fallbacks = calls_of(LoadedModel(build("gemma2"), name="gemma2"), attention_backend="torch")
    assert set(calls) == {"torch"} and not fallbacks


@pytest.mark.parametrize(
    ("name", "reason"), [("deepseek_v3", "expanded latents"), ("deepseek_v4", "rows that read the same entries")]
)
def test_what_the_kernel_cannot_compute_is_counted_by_reason(name: str, reason: str) -> None:
    """Chunks of prompts fall back; steps of one token for each request are all native."""
    compressed = name == "deepseek_v4"
    model = LoadedModel(build_hybrid(name, index_n_heads=8) if compressed else build(name), name=name)
    core = core_for(model, page_size=None if compressed else 16)
    run(core, PROMPTS, SamplingParams(temperature=0, max_tokens=1))
    prompts = core.statistics()["attention"]
    assert set(prompts["fallbacks"]) == {reason}
    assert prompts["calls"]["torch"] == prompts["fallbacks"][reason]
    run(core, [prompt[:3] for prompt in PROMPTS], GREEDY)
    decodes = core.statistics()["attention"]
    assert decodes["fallbacks"] == prompts["fallbacks"]
    assert decodes["calls"]["native"] > prompts["calls"].get("native", 0)


@pytest.mark.parametrize("enabled", [True, False])
def test_what_runs_between_products_is_said(enabled: bool) -> None:
    use_native(enabled)
    try:
        model = LoadedModel(build("mistral_all_slide"), name="mistral")
    finally:
        use_native(True)
    found = model.forward_statistics()
    assert found["fused_layers"] == found["layers"] == model.num_layers and found["fused_decoder"] == 1
    assert found["fused_backend"] == ("native" if enabled else "torch")
    assert found["packed_linears"] == 7 * model.num_layers + 1
    plain = LoadedModel(build("mistral_all_slide"), name="mistral", pack=False).forward_statistics()
    assert plain == {**found, **dict.fromkeys(found, 0), "layers": found["layers"], "fused_backend": ""}


@pytest.mark.parametrize("chosen", ["auto", "torch"])
def test_an_engine_for_scripts_says_what_computes_attention(chosen: Any, capsys: pytest.CaptureFixture[str]) -> None:
    LLM(kv_memory="4MiB", attention_backend=chosen).close()
    lines = capsys.readouterr().err.splitlines()
    said = {"auto": "native kernel, compiled for this CPU", "torch": "torch's operators; torch was chosen."}
    assert lines[-1] == f"Attention: {said[chosen]}" and lines[0].startswith("KV pools")
    LLM(kv_memory="4MiB", attention_backend=chosen, show_plan=False).close()
    assert not capsys.readouterr().err

"""An engine whose cache is encoded: the same tokens cold, warm, in other chunks and starved; and never shared pages."""

from __future__ import annotations

import pytest

from quire.engine.config import engine_config
from quire.errors import InvalidInput
from quire.models.hf import LoadedModel, load_model
from quire.observe.events import EventLog
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.events import PagesStored
from quire.spec.pages import pages_for
from tests.changes import CORE, MODELS, in_turns, slow_unless_changed
from tests.engine.running import core_for, run, shared_prompts, tight_core
from tests.tiny_hybrids import build_hybrid
from tests.tiny_latents import SPARSE, build_latent
from tests.tiny_models import VOCAB_SIZE, build_tiny, save_tiny

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
PROMPTS = shared_prompts(7, shared=37, tails=(3, 20, 11, 1, 29), vocabulary=VOCAB_SIZE)
LONGEST = max(map(len, PROMPTS)) + NEW_TOKENS
FORMATS = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "fp4_e2m1", "nvfp4")
GRID = ((1, 23, False), (16, 50, True), (64, 2048, False))
"""Page size, tokens of a step, overlap."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Plain attention with heads of 32, which every block fits."""
    return load_model(str(save_tiny("llama_gqa", tmp_path_factory.mktemp("plain"), head_dim=32)))


def check_any_chunks(model: LoadedModel, name: str) -> list[list[int]]:
    """The tokens of the prompts, the same cold, warm, and for every page size and step."""
    found = []
    for page_size, chunk, overlap in GRID:
        core = core_for(model, page_size=page_size, max_num_batched_tokens=chunk, overlap=overlap, kv_dtype=name)
        found.append(run(core, PROMPTS, GREEDY, "cold"))
        cold = core.statistics()["hit_tokens"]
        found.append(run(core, PROMPTS, GREEDY, "warm"))
        hits = core.statistics()["hit_tokens"] - cold
        assert hits == sum((len(prompt) - 1) // page_size * page_size for prompt in PROMPTS) > 0
    assert all(tokens == found[0] for tokens in found)
    return found[0]


@pytest.mark.parametrize("name", in_turns(FORMATS, 3, *MODELS))
def test_cold_warm_and_in_other_chunks(model: LoadedModel, name: str) -> None:
    check_any_chunks(model, name)


@slow_unless_changed(*MODELS, *CORE)
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("gpt_oss", "mxfp8"),  # windows in a pool of their own, and sinks
        ("qwen3_next", "nvfp4"),  # recurrent states, which are never encoded
        ("deepseek_v3", "fp4_e2m1"),  # latents
        ("deepseek_v32", "fp8_e4m3"),  # rows of sparse latents, and an indexer's keys
    ],
)
def test_other_kinds_of_layers(architecture: str, name: str) -> None:
    build = build_latent if architecture in SPARSE else build_hybrid
    model = LoadedModel(build(architecture), name=architecture)
    plain = run(core_for(model), PROMPTS, GREEDY)
    assert check_any_chunks(model, name) != plain  # these weights are wide, so that any rounding shows


@slow_unless_changed(*MODELS, *CORE)
@pytest.mark.parametrize("architecture", ["llama_gqa", "gpt_oss"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_starved(architecture: str, name: str) -> None:
    """Frames are evicted and used again: no scale of the request before is left in them."""
    model = LoadedModel(build_tiny(architecture, head_dim=32), name=architecture)
    settings = {"page_size": 4, "max_num_batched_tokens": 17, "kv_dtype": name}
    ample = run(core_for(model, **settings), PROMPTS, GREEDY)
    tokens = (pages_for(LONGEST - 1, 4) + 8) * 4
    core = tight_core(model, num_tokens=tokens, window_tokens=28, max_running_requests=3, **settings)
    for turn in range(2):
        assert run(core, PROMPTS, GREEDY, f"turn{turn}") == ample
    statistics = core.statistics()
    assert statistics["evicted_pages"] > 0
    assert statistics["hit_tokens"] > 0


def test_the_plan_is_what_is_built(model: LoadedModel) -> None:
    """Bytes by the format, and the name that was asked for in every report."""
    plain = core_for(model, kv_dtype="auto").statistics()
    for name, kept in (("fp8", 8 / 32), ("mxfp8", (8 + 8 / 32) / 32), ("nvfp4", (4 + 8 / 16) / 32)):
        core = core_for(model, kv_dtype=name)
        statistics = core.statistics()
        assert statistics["bytes_per_token"] == plain["bytes_per_token"] * kept
        assert statistics["plan"]["kv_dtype"] == ("fp8_e4m3" if name == "fp8" else name)
        assert sum(pool.num_bytes for pool in core.runner.pools) == statistics["kv_bytes"]
    assert plain["plan"]["kv_dtype"] == "float32"


def test_no_two_formats_share_a_page_hash(model: LoadedModel) -> None:
    """The same prompt, the same weights, another format: pages that must never be taken for each other."""
    hashes: dict[str, set[bytes]] = {}
    for name in ("auto", *FORMATS):
        core, log = core_for(model, kv_dtype=name, page_size=4), EventLog()
        core.cache.tree.names.follow(log.append)
        run(core, PROMPTS[:2], GREEDY)
        stored = [event for event in log.since(0)[1] if isinstance(event, PagesStored)]
        hashes[name] = {digest for event in stored for digest in event.hashes}
        assert len(hashes[name]) > 10
    assert len(set.union(*hashes.values())) == sum(map(len, hashes.values()))


def test_what_does_not_fit_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    narrow = load_model(str(save_tiny("llama_gqa", tmp_path_factory.mktemp("narrow"), head_dim=24)))
    assert run(core_for(narrow, kv_dtype="fp8_e4m3"), PROMPTS[:1], GREEDY)
    with pytest.raises(InvalidInput, match="a vector of 24 numbers cannot be stored as mxfp8: it has blocks of 32"):
        core_for(narrow, kv_dtype="mxfp8")
    with pytest.raises(InvalidInput, match="'int3' is not a KV dtype"):
        engine_config(kv_dtype="int3")

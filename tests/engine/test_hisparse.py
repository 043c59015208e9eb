"""Latents in host memory: the same tokens as with all latents on the device, and every row reads what it selects."""

from __future__ import annotations

from functools import cache
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, prompt_bytes
from quire.errors import ModelCheckFailed
from quire.kernels.backend import AttentionBackend
from quire.memory.host_pool import HostPool
from quire.models.check import check_forward
from quire.models.hf import LoadedModel, load_model
from quire.scheduler.sampling_params import SamplingParams
from quire.sparse.coordinator import HiSparseCoordinator
from quire.spec.hisparse import HotBuffers
from tests.changes import HISPARSE, slow_unless_changed
from tests.covering import covering
from tests.engine.hosted import TOP_K, HostedOracle, hosted_core
from tests.engine.running import core_for, generated, run
from tests.engine.scripted import follow_script
from tests.engine.tiered import settle
from tests.tiny_latents import build_latent, save_latent
from tests.tiny_models import VOCAB_SIZE

NEW_TOKENS = 14
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=NEW_TOKENS, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
KINDS = ("deepseek_v32", "glm_moe_dsa")


@cache
def model_of(kind: str) -> LoadedModel:
    return load_model(save_latent(kind, mkdtemp()))


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return model_of(request.param)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB_SIZE - 1, length).tolist() for length in lengths]


def lengths_around(buffer_size: int) -> list[int]:
    """Prompts below, at and above what is selected and the buffer, and 8 times the buffer."""
    near = {TOP_K + d for d in (-2, 0, 2)} | {buffer_size + d for d in (-2, -1, 0, 1, 2)}
    return [*sorted(near), 8 * buffer_size]


@slow_unless_changed(*HISPARSE)
@covering(2, sizes=[(1, TOP_K), (16, 16), (64, 30)], kind=KINDS)
def test_tokens_are_those_of_latents_on_the_device(kind: str, sizes: tuple[int, int]) -> None:
    """Mixed batches in chunks, cold, then cached."""
    model, (page_size, buffer_size) = model_of(kind), sizes
    prompts = prompts_of(*lengths_around(buffer_size))
    settings = {"page_size": page_size, "max_num_batched_tokens": 50}
    resident, core = core_for(model, **settings, max_running_requests=8), hosted_core(model, buffer_size, **settings)
    for name, params in (("cold", GREEDY), ("warm", GREEDY), ("seeded", SEEDED)):
        assert run(core, prompts, params, name) == run(resident, prompts, params, name)
    found = core.statistics()
    assert found["hit_tokens"] == resident.statistics()["hit_tokens"] > 0
    hisparse = found["hisparse"]
    assert hisparse["host_bytes"] == core.plan.host_bytes
    hot = core.latents.coordinator.hot if core.latents is not None else None
    tables = [table for table in vars(hot).values() if getattr(table, "shape", ())[:2] == hot.shape] if hot else []
    assert sum(table.nbytes for table in tables) == core.plan.slot_table_bytes
    assert min(hisparse[name] for name in ("hit_tokens", "swapped_tokens", "swapped_bytes", "backed_up_tokens")) > 0
    core.close()


@slow_unless_changed(*HISPARSE)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_swap_in_the_same_tokens() -> None:
    """By the interpreter; all else is computed by torch."""
    pytest.importorskip("triton")
    model, found = model_of("deepseek_v32"), []
    settings = {"page_size": 16, "kv_dtype": "fp8_e4m3", "attention_backend": "torch"}
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for word in ("torch", "triton"):
        core = hosted_core(model, 16, **settings)
        assert core.latents is not None
        core.latents.coordinator.moves = AttentionBackend(word).moves
        tokens = run(core, prompts_of(40, 90), few)
        found.append((tokens, {**core.statistics()["hisparse"]}))
        core.close()
    assert found[0] == found[1] and found[0][1]["swapped_tokens"] > 0


def test_a_model_is_checked_on_hot_buffers_before_it_serves(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers begin as NaN, which no row may read, not even where it reads no token."""
    hot = HotBuffers(group=0, buffer_size=64, top_k=TOP_K)
    check_forward(model, hot)
    monkeypatch.setattr(HiSparseCoordinator, "_copy", lambda *given: None)
    with pytest.raises(ModelCheckFailed, match="memory that was never written"):
        check_forward(model, hot)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str) -> None:
    prompts = prompts_of(3, 40, 130)
    core = hosted_core(model_of(kind), 16, page_size=16)
    expected = [generated(build_latent(kind), prompt, NEW_TOKENS) for prompt in prompts]
    assert run(core, prompts, GREEDY) == expected
    core.close()


@slow_unless_changed(*HISPARSE)
@covering(2, stored=[(4, "fp8_e4m3"), (16, "fp8_e4m3"), (16, "bfloat16")], kind=KINDS)
def test_encoded_latents(kind: str, stored: tuple[int, str]) -> None:
    """Scales are swapped in with their rows."""
    model, (page_size, name) = model_of(kind), stored
    prompts = prompts_of(*lengths_around(16))
    # The operators that read host memory: scores of encoded keys may tie within what another order of sums changes.
    settings: dict[str, Any] = {"page_size": page_size, "kv_dtype": name, "attention_backend": "torch"}
    resident, core = core_for(model, **settings, max_running_requests=8), hosted_core(model, 16, **settings)
    for turn in ("cold", "warm"):
        assert run(core, prompts, GREEDY, turn) == run(resident, prompts, GREEDY, turn)
    assert core.statistics()["hisparse"]["swapped_tokens"] > 0
    core.close()


@slow_unless_changed(*HISPARSE)
def test_drafts_are_verified_in_host_memory(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected draft is in no hot buffer."""
    prompts = prompts_of(5, 12, 40)
    expected = run(core_for(model, page_size=4), prompts, GREEDY)
    core = hosted_core(model, TOP_K, page_size=4, speculative_config=NGRAM)
    oracle = HostedOracle(core, monkeypatch)
    follow_script(core, prompts, expected, "wrong in the third")
    for turn in ("cold", "warm"):
        assert run(core, prompts, GREEDY, turn) == expected
    found = core.statistics()["speculation"]
    assert found["draft_tokens"] > found["accepted_tokens"] > 0
    assert oracle.checked > 0
    core.close()


@slow_unless_changed(*HISPARSE)
def test_a_prompt_is_longer_than_all_hot_buffers(model: LoadedModel) -> None:
    prompt = prompts_of(400)[0]
    core = hosted_core(model, TOP_K, page_size=1, max_running_requests=1, max_num_batched_tokens=64)
    assert core.latents is not None and core.latents.coordinator.pool.num_frames == TOP_K + 1
    assert run(core, [prompt], GREEDY) == run(core_for(model, page_size=1), [prompt], GREEDY)
    core.close()


def disturbed(core: EngineCore, disturb: Any, at: int, salt: str) -> list[list[int]]:
    """The tokens of `PROMPTS` if `disturb` is called after step `at`."""
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        core.add(EngineRequest(request_id=f"{salt}{i}", prompt=prompt_bytes(prompt), params=SHORT, salt=salt))
        tokens[f"{salt}{i}"] = []
    for step in range(200):
        if step == at:
            disturb(salt)
        if not core.has_work():
            break
        for output in core.step():
            tokens[output.request_id].extend(output.token_ids)
        core.audit()
    assert not core.has_work()
    return list(tokens.values())


SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = prompts_of(30, 9, 17)
STEPS = range(11)


@slow_unless_changed(*HISPARSE)
@covering(1, what=["preemption", "abort"], tiers=[{}, {"host_memory": "4MiB", "load": "always"}])
def test_at_every_step(model: LoadedModel, what: str, tiers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on as they would, rows are used again, and no row reads what the last request left in its buffer. With
    tiers, all that may leaves the device at that step."""
    expected = run(core_for(model, page_size=4), PROMPTS, SHORT)
    core = hosted_core(model, TOP_K, page_size=4, max_running_requests=3, max_num_batched_tokens=16, **tiers)
    oracle = HostedOracle(core, monkeypatch)

    def disturb(salt: str) -> None:
        if what == "abort":
            core.abort(f"{salt}0")
        elif core.scheduler.num_running:
            core.scheduler._preempt(core.scheduler._rows.running[0])
        if tiers:
            settle(core)
            core.cache.offload.evict(core.cache.tree.num_evictable, 0, "")

    for at in STEPS:
        found = disturbed(core, disturb, at, f"{what}-{at}-")
        if what == "abort":
            assert found[0] == expected[0][: len(found[0])]
            assert found[1:] == expected[1:]
        else:
            assert found == expected
    assert oracle.checked > 0
    assert what == "abort" or core.statistics()["preemptions"] >= len(STEPS) - 1
    assert all(frames["private"] == 0 for frames in core.statistics()["frames"].values())
    if tiers:
        moved = core.statistics()["tiers"]
        assert moved["saved_frames"] > 0 and moved["demoted_pages"] > 0
        assert what == "abort" or moved["loaded_frames"] > 0
    core.close()


@slow_unless_changed(*HISPARSE)
def test_a_pool_that_is_full_while_requests_decode(model: LoadedModel) -> None:
    """They wait, and lose nothing."""
    prompts = prompts_of(20, 21, 30, 9)
    hisparse = {"device_buffer_size": TOP_K, "host_to_device_ratio": 1.25}
    bounds = {"kv_memory": 110_000, "max_running_requests": 4, "max_num_batched_tokens": 17}
    core = EngineCore(engine_config(model=model.name, page_size=4, hisparse=hisparse, **bounds), model=model)
    assert core.max_running_requests > 1 and core.plan.num_tokens < sum(map(len, prompts)) + 4 * NEW_TOKENS
    for turn in ("cold", "warm"):
        assert run(core, prompts, GREEDY, turn) == run(core_for(model, page_size=4), prompts, GREEDY, turn)
    found = core.statistics()
    assert found["preemptions"] > 0 and found["evicted_pages"] > 0
    core.close()


@pytest.mark.parametrize("failing", ["quire.engine.core.Scheduler", "quire.engine.tiers.build_pools"])
@pytest.mark.parametrize("tiers", [False, True])
def test_an_engine_that_fails_to_start_returns_the_memory_of_latents(
    failing: str, tiers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[HostPool] = []
    begin = HostPool.__init__
    monkeypatch.setattr(HostPool, "__init__", lambda host, *a, **named: made.append(host) or begin(host, *a, **named))
    monkeypatch.setattr(failing, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hosted_core(model_of("deepseek_v32"), 16, page_size=4, **({"host_memory": "1MiB"} if tiers else {}))
    host = max(made, key=lambda each: each.num_bytes)  # small ones are of the check of a loaded model
    assert host.num_bytes > 0 and len(host.memory) == 0


def test_a_page_of_host_memory_is_allocated_for_a_page_of_tokens() -> None:
    """A prompt of 100 tokens takes 2 pages of 64; the next 28 tokens take none."""
    core = hosted_core(model_of("deepseek_v32"), 16, page_size=64)
    prompt = EngineRequest(
        request_id="r",
        prompt=prompt_bytes(prompts_of(100)[0]),
        params=SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    )
    core.add(prompt)
    taken = []
    while core.has_work():
        core.step()
        taken.append(core.statistics()["frames"]["full"]["private"] + core.statistics()["frames"]["full"]["cached"])
    # The token of each step is written in the next one, and the last one never.
    assert taken[: 1 + 28] == [2] * 29
    assert set(taken[29:-1]) == {3}
    core.close()


def check_buffers(kind: str, page_size: int) -> None:
    """Every row reads exactly the latents that it selects, in every layer."""
    with pytest.MonkeyPatch.context() as patch:
        core = hosted_core(model_of(kind), 16, page_size=page_size, max_running_requests=3, max_num_batched_tokens=50)
        oracle = HostedOracle(core, patch)
        prompts = prompts_of(5, 9, 17, 20, 60)
        assert run(core, prompts, SHORT) == run(core, prompts, SHORT)
        assert oracle.checked > 1000
        hisparse = core.statistics()["hisparse"]
        assert min(hisparse["hit_tokens"], hisparse["swapped_tokens"]) > 0
        core.close()


@slow_unless_changed(*HISPARSE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_row_reads_what_it_selects(kind: str, page_size: int) -> None:
    check_buffers(kind, page_size)

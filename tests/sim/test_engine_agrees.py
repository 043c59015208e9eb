"""The engine with a real model and the simulator, on the same requests: every hit, eviction and preemption is the same,
request by request, because they are one code. Eviction depends on the time: in both, each step takes a second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from quire.cache.statistics import CacheStatistics
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.models.tokenizer import load_tokenizer
from quire.plan.step_cost import CostModel
from quire.scheduler.sampling_params import SamplingParams
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.trace import TraceRequest, open_trace
from quire.spec.ids import Ids
from tests.engine.scripted import follow_script

A_SECOND = CostModel(launch=0.0, weights=1.0, token=0.0, pair=0.0, reads=())
AGENTS = Path(__file__).parents[3] / "shared" / "data" / "traces" / "lmcache_agent"


@dataclass(frozen=True)
class Fate:
    """What became of a request."""

    hit_tokens: int
    preemptions: int
    evicted_pages: int
    output: tuple[int, ...]


def in_the_engine(core: EngineCore, prompts: dict[str, Ids], lengths: dict[str, int]) -> dict[str, Fate]:
    """Serve all of them, in the order of their ends; all are there from the start."""
    requests = {}
    add = core.scheduler.add

    def noted(request: object) -> None:
        requests[request.request_id] = request  # type: ignore[attr-defined]
        add(request)  # type: ignore[arg-type]

    core.scheduler.add = noted  # type: ignore[method-assign]
    count_steps(core)
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=lengths[name], temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(request_id=name, prompt=prompt.tobytes(), params=params))
    found = {}
    while core.has_work():
        for output in core.step():
            if output.finish_reason is not None:
                request = requests[output.request_id]
                tokens = tuple(request.output_tokens.tolist())
                evicted = core.cache.statistics().evicted_pages
                found[output.request_id] = Fate(request.num_cached, request.num_preemptions, evicted, tokens)
    return found


def count_steps(core: EngineCore) -> None:
    """Let its tree take the number of settled steps for the time."""
    settle, settled = core.scheduler.settle, 0

    def counted(*result: object) -> object:
        nonlocal settled
        settled += 1
        return settle(*result)  # type: ignore[arg-type]

    core.scheduler.settle = counted  # type: ignore[method-assign, assignment]
    core.cache.tree.policy.timed_by(lambda: float(settled))


def in_the_simulator(
    core: EngineCore, prompts: dict[str, Ids], fates: dict[str, Fate]
) -> tuple[dict[str, Fate], CacheStatistics]:
    """The same requests on the engine's own plan; what the model drew is the script. And what the cache says of it."""
    trace = [
        TraceRequest(name, prompt, np.array(fates[name].output, dtype=np.int32)) for name, prompt in prompts.items()
    ]
    settings = ReplaySettings(
        policy=core.config.eviction,
        chunk=core.config.max_num_batched_tokens,
        check="all",
        checkpoint_interval=core.config.checkpoint_interval,
        explain=core.config.explain,
        acceptance=1.0,  # if it drafts at all
    )
    replay = Replay(core.plan, A_SECOND, settings)
    result = replay.run(trace)
    found = {
        record.request_id: Fate(
            record.hit_tokens, record.preemptions, record.evicted_pages, fates[record.request_id].output
        )
        for record in result.records
    }
    return found, replay.cache.statistics()


MODELS = [("quire-bundled", "1536KiB"), ("quire-bundled-window", "640KiB"), ("quire-bundled-recurrent", "2MiB")]
ONE_MODEL = [MODELS[0], *(pytest.param(*more, marks=pytest.mark.slow) for more in MODELS[1:])]


def core_of(model: str, kv_memory: str, **more: object) -> EngineCore:
    return EngineCore(
        engine_config(
            model=model,
            kv_memory=kv_memory,
            device="cpu",
            max_num_batched_tokens=256,
            target_itl_ms="off",  # its steps do not depend on the time
            max_running_requests=12,
            checkpoint_interval=64,
            **more,
        )
    )


def agents(core: EngineCore, most: int) -> tuple[dict[str, Ids], dict[str, int]]:
    """Prompts of at most so many tokens, and the lengths of their outputs."""
    tokenizer = load_tokenizer(core.config.model)
    trace = open_trace(str(AGENTS / "taubench.jsonl.xz"), tokenize=lambda text: tokenizer.encode(text)[:most], limit=20)
    prompts = {request.request_id: request.prompt for request in trace}
    return prompts, {name: 30 if at % 3 else 4 for at, name in enumerate(prompts)}


def check(core: EngineCore, prompts: dict[str, Ids], real: dict[str, Fate]) -> None:
    simulated, statistics = in_the_simulator(core, prompts, real)
    assert list(simulated) == list(real)
    assert simulated == real
    assert len(real) == 20
    assert sum(fate.hit_tokens for fate in real.values()) > 0
    assert statistics == core.cache.statistics()
    dropped = sum(frames.dropped for frames in statistics.frames.values())
    assert statistics.evicted_pages + dropped > 0


@pytest.mark.parametrize(("model", "kv_memory"), ONE_MODEL)
@pytest.mark.skipif(not AGENTS.exists(), reason="no traces: shared/data is not beside the repository")
def test_agents_prompts_fare_alike(model: str, kv_memory: str) -> None:
    core = core_of(model, kv_memory)
    prompts, lengths = agents(core, min(core.plan.largest_request - 64, 500))
    real = in_the_engine(core, prompts, lengths)
    check(core, prompts, real)
    assert sum(fate.preemptions for fate in real.values()) > 0 or model != "quire-bundled"


@pytest.mark.parametrize(("model", "kv_memory"), ONE_MODEL)
@pytest.mark.skipif(not AGENTS.exists(), reason="no traces: shared/data is not beside the repository")
def test_with_drafts_they_fare_alike_too(model: str, kv_memory: str) -> None:
    """All drafts are right, so that both make the same ones."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    core = core_of(model, kv_memory, speculative_config=ngram, dtype="float32")
    prompts, lengths = agents(core, min(core.plan.largest_request - 64, 300))
    ample = core_of(model, "64MiB", enable_prefix_caching=False, dtype="float32")
    outputs = [fate.output for _, fate in sorted(in_the_engine(ample, prompts, lengths).items())]
    speculator = follow_script(core, [prompts[name].tolist() for name in sorted(prompts)], outputs, "all right")
    real = in_the_engine(core, prompts, lengths)
    assert [fate.output for _, fate in sorted(real.items())] == outputs
    assert speculator.counted().accepted_tokens == speculator.counted().draft_tokens > 100
    check(core, prompts, real)

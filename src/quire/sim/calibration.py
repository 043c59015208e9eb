"""Calibration: a cost model fitted to measured steps, and the measurement on the real engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.running import Lengths
from quire.errors import InvalidInput
from quire.sim.clock import CostModel, work_of

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

_BATCHES = (1, 4, 16)
_PROMPTS = (32, 128, 384)
_OUTPUTS = 12


@dataclass(frozen=True, slots=True)
class StepTime:
    """A measured step: the tokens `starts[i]..ends[i] - 1` that it computed of each request, and its seconds."""

    starts: Lengths
    ends: Lengths
    seconds: float


def fit_cost_model(records: Sequence[StepTime]) -> CostModel:
    """The cost model with the least squared relative error over these steps, and no negative cost.

    A step has a constant cost, which includes reading the weights, and costs for each new token, each (query, key) pair
    of prompts and each key that a single token reads. Raises InvalidInput for fewer than 8 steps.
    """
    if len(records) < 8:
        raise InvalidInput(f"{len(records)} measured steps are too few to fit costs.", fix="measure at least 8.")
    features = np.array([_features(record) for record in records])
    features /= np.array([record.seconds for record in records])[:, None]  # so that each step counts alike
    used = features.any(axis=0)
    found = np.zeros(features.shape[1])
    while used.any():
        scale = np.abs(features[:, used]).max(axis=0)
        found[:] = 0.0
        found[used] = np.linalg.lstsq(features[:, used] / scale, np.ones(len(records)), rcond=None)[0] / scale
        if (found >= 0).all():
            break
        used &= found > 0
    launch, token, pair, key = (float(cost) for cost in found)
    return CostModel(launch=launch, weights=0.0, token=token, pair=pair, reads=((key, 0),))


def measure_engine(model: str = "quire-bundled") -> list[StepTime]:
    """Run the real engine on prompts of a few sizes, alone and in batches, and measure the time of every step.

    Loads the model; needs some seconds on a CPU with the bundled one. Raises what loading raises.
    """
    from quire.engine.config import engine_config
    from quire.engine.core import EngineCore
    from quire.engine.messages import EngineRequest
    from quire.scheduler.sampling_params import SamplingParams

    core = EngineCore(engine_config(model=model, kv_memory="256MiB", enable_prefix_caching=False, overlap=False))
    random = np.random.Generator(np.random.PCG64(0))
    params = SamplingParams(max_tokens=_OUTPUTS, temperature=0.0, ignore_eos=True)
    records: list[StepTime] = []
    for warm in (False, True):  # the first round is for caches and lazy imports
        for batch, length in product(_BATCHES, _PROMPTS):
            for index in range(batch):
                prompt = random.integers(core.model.spec.vocab_size, size=length, dtype=np.int32).tobytes()
                core.add(EngineRequest(request_id=f"{batch}.{length}.{index}", prompt=prompt, params=params))
            found = _steps(core)
            records += found if warm else []
    return records


def _steps(core: EngineCore) -> list[StepTime]:
    """Run an engine until it has no requests, a step at a time."""
    records = []
    while core.scheduler.has_requests:
        step = core.scheduler.schedule()
        began = time.perf_counter()
        launched = core.runner.launch(step, None)
        drawn = launched.wait()
        records.append(StepTime(step.starts, step.ends, time.perf_counter() - began))
        core.scheduler.settle(step, drawn)
        core.cache.close_fence(launched.fence)
    return records


def _features(record: StepTime) -> tuple[float, float, float, float]:
    """The amounts that determine the cost of a step: 1, new tokens, pairs of prompts, keys read by single tokens."""
    tokens, pairs, contexts = work_of(record.starts, record.ends)
    return 1.0, tokens, pairs, int(contexts.sum())

"""VirtualClock: how long steps of a replay would take on a real device. An estimate, never a wait.

`measure_engine` fits a cost model to the times of the real engine's steps."""

from __future__ import annotations

import time
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.running import Lengths
from quire.plan.step_cost import CostFit, CostModel

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

_BATCHES = (1, 4, 16)  # requests that are measured together, all of one prompt length
_PROMPTS = (32, 128, 384)
_OUTPUTS = 12


def measure_engine() -> CostModel:
    """What steps of the real engine cost here, with the bundled model, prompts of a few sizes, alone and in batches.

    Needs some seconds on a CPU. Raises what loading raises.
    """
    from quire.engine.config import engine_config
    from quire.engine.core import EngineCore
    from quire.engine.messages import EngineRequest
    from quire.scheduler.sampling_params import SamplingParams

    settings = {"enable_prefix_caching": False, "overlap": False, "target_itl_ms": "off"}
    core = EngineCore(engine_config(model="quire-bundled", kv_memory="256MiB", **settings))
    random = np.random.Generator(np.random.PCG64(0))
    params = SamplingParams(max_tokens=_OUTPUTS, temperature=0.0, ignore_eos=True)
    for _ in range(2):  # the first round is for caches and lazy imports
        fit = CostFit()
        for batch, length in product(_BATCHES, _PROMPTS):
            for index in range(batch):
                prompt = random.integers(core.model.spec.vocab_size, size=length, dtype=np.int32).tobytes()
                core.add(EngineRequest(request_id=f"{batch}.{length}.{index}", prompt=prompt, params=params))
            _steps(core, fit)
    found = fit.model()
    assert found is not None
    return found


def _steps(core: EngineCore, fit: CostFit) -> None:
    """Run an engine until it has no requests, a step at a time."""
    while core.scheduler.has_requests:
        step = core.scheduler.schedule()
        began = time.perf_counter()
        launched = core.runner.launch(step, None)
        drawn = launched.wait()
        fit.add(step.starts, step.ends, time.perf_counter() - began)
        core.scheduler.settle(step, drawn)
        core.cache.close_fence(launched.fence)


class VirtualClock:
    """Time of a replay in seconds, and when the device will be free. It advances only by calls, and never waits.

    While the device is busy a launch costs it nothing; otherwise it is idle for that time.
    """

    def __init__(self, cost: CostModel) -> None:
        self.now = 0.0
        self._cost = cost
        self._free_at = 0.0

    def launch(
        self, starts: Lengths, ends: Lengths, *, drafts: Lengths | int = 0, arrives: float = 0.0, swap: float = 0.0
    ) -> float:
        """A step is launched now (`CostModel.seconds`); returns the time at which it will have settled. It waits for a
        load that ends at `arrives`, and in all layers together `swap` seconds for what is read from host memory."""
        seconds = self._cost.seconds(starts, ends, drafts) + swap
        self._free_at = max(self._free_at, self.now + self._cost.launch, arrives) + seconds
        return self._free_at

    def move_to(self, time: float) -> None:
        """Advance to `time`, never back."""
        self.now = max(self.now, time)

"""VirtualClock and CostModel: how long a step would take on a real device. An estimate, never a wait.

A cost model is computed from a device's published peaks, or fitted to measured steps of the real engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.running import Lengths
from quire.errors import InvalidInput
from quire.plan.devices import DEVICES, find_device
from quire.spec.group import GroupSpec
from quire.spec.layers import AttentionCall, CompressedCall, LatentCall
from quire.spec.model import ModelSpec

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

_COMPUTE_SHARE = 0.5  # of the published peak, reached by large matrix products
_MEMORY_SHARE = 0.8  # of the published bandwidth, reached by streaming reads
_LAUNCH_S = 0.0005  # host and launch time of a step with captured graphs
_LAST_LAYER = 1 / 32  # of a step's work, which remains when the last layer of a load has arrived

_BATCHES = (1, 4, 16)  # of requests that are measured, all of one prompt length
_PROMPTS = (32, 128, 384)
_OUTPUTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step, and of transfers.

        launch + max(weights, token * new tokens) + pair * (query, key) pairs of prompts + keys read by single tokens

    `reads` has a pair for each group: seconds for each key that a decoding token reads, and the most keys that it reads
    (0: all of its context). Bandwidths are bytes per second, of all ranks together and in each direction.
    """

    launch: float
    weights: float
    token: float
    pair: float
    reads: tuple[tuple[float, int], ...]
    host_bandwidth: float = 32e9
    storage_bandwidth: float = 7e9  # an NVMe drive

    def __post_init__(self) -> None:
        numbers = (self.launch, self.weights, self.token, self.pair, *(seconds for seconds, _ in self.reads))
        if min(numbers) < 0 or not sum(numbers) > 0 or min(self.host_bandwidth, self.storage_bandwidth) <= 0:
            raise InvalidInput("a step takes no time at all, or less.", fix="give times and bandwidths above zero.")

    def seconds(self, starts: Lengths, ends: Lengths, drafts: Lengths | None = None) -> float:
        """The device's time for a step that computes tokens `starts[i]..ends[i] - 1` of each request, of which the last
        `drafts[i]` are drafts, without the launch. A draft costs as much as a token of a prompt."""
        tokens, pairs, contexts = work_of(starts, ends, drafts)
        total = max(self.weights, self.token * tokens) + self.pair * pairs
        for seconds, most in self.reads:
            total += seconds * int((np.minimum(contexts, most) if most else contexts).sum())
        return total

    @classmethod
    def from_device(
        cls,
        name: str,
        spec: ModelSpec,
        groups: tuple[GroupSpec, ...],
        *,
        weight_bytes: int,
        active_parameters: int,
        ranks: int = 1,
    ) -> CostModel:
        """A cost model from the published peaks of a device (`quire.plan.devices` has the names) and what a model
        computes and reads. Assumes half of the peak of products, four fifths of the bandwidth, and that `ranks` devices
        share the work evenly. Raises InvalidInput for an unknown device."""
        if ranks < 1:
            raise InvalidInput(f"{ranks} devices.", fix="give at least 1.")
        _, tflops, memory, bus = DEVICES[find_device(name, otherwise="give --prefill-rate and --decode-ms").name]
        compute, bandwidth = ranks * tflops * 1e12 * _COMPUTE_SHARE, ranks * memory * 1e9 * _MEMORY_SHARE
        full, windowed = _pair_flops(spec)
        reads = tuple(
            (group.layout.bytes_per_token / bandwidth, group.reach.tokens)
            for group in groups
            if not group.reach.in_place
        )
        return cls(
            launch=_LAUNCH_S,
            weights=weight_bytes / bandwidth,
            token=(2 * active_parameters + windowed) / compute,
            pair=full / compute,
            reads=reads,
            host_bandwidth=ranks * bus * 1e9 * _MEMORY_SHARE,
        )

    @classmethod
    def from_flags(cls, *, prefill_rate: float, decode_ms: float, key_ns: float = 0.0) -> CostModel:
        """A cost model from plain numbers: prompt tokens per second, milliseconds of a decode step without its keys,
        and nanoseconds for a key that a decoding token reads."""
        if prefill_rate <= 0:
            raise InvalidInput(f"a prefill rate of {prefill_rate} tokens/s.", fix="give a rate above zero.")
        reads = ((key_ns / 1e9, 0),)
        return cls(launch=_LAUNCH_S, weights=decode_ms / 1e3, token=1 / prefill_rate, pair=0.0, reads=reads)


def work_of(starts: Lengths, ends: Lengths, drafts: Lengths | None = None) -> tuple[int, int, Lengths]:
    """Of a step as in `CostModel.seconds`: new tokens, (query, key) pairs of prompts and of drafts, and contexts of
    single tokens."""
    tokens = int((ends - starts).sum())
    if tokens == len(ends):
        return tokens, 0, ends
    known = ends if drafts is None else ends - drafts
    prompts = known - starts > 1
    first = np.where(prompts, starts, known)
    # Token p of a prompt reads p + 1 keys: the sum over first..ends - 1 is a difference of triangles.
    return tokens, int((ends * (ends + 1) - first * (first + 1)).sum()) // 2, known[~prompts]


def _pair_flops(spec: ModelSpec) -> tuple[float, float]:
    """Operations for each (query, key) pair in layers that read everything, and for each token in layers that read a
    window. Sparse layers are priced as if they read everything."""
    heads = spec.query_heads or 32
    full = windowed = 0.0
    for call in spec.calls:
        if isinstance(call, AttentionCall):
            flops = 2.0 * heads * (call.key_dim + call.value_dim)
            full, windowed = (full, windowed + flops * call.window) if call.window else (full + flops, windowed)
        elif isinstance(call, LatentCall):
            full += 2.0 * heads * (2 * call.rank + call.rope_dim)
        elif isinstance(call, CompressedCall):
            full += 2.0 * heads * (2 * call.nope_dim + call.rope_dim) / max(1, call.ratio)
    return full, windowed


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


class VirtualClock:
    """Time of a replay in seconds, and when the device will be free. It advances only by calls, and never waits.

    While the device is busy a launch costs it nothing; otherwise it is idle for that time.
    """

    def __init__(self, cost: CostModel) -> None:
        self.now = 0.0
        self._cost = cost
        self._free_at = 0.0

    def launch(
        self, starts: Lengths, ends: Lengths, *, drafts: Lengths | None = None, arrives: float = 0.0, swap: float = 0.0
    ) -> float:
        """A step is launched now (`CostModel.seconds`); returns the time at which it will have settled. Its layers wait
        for those of a load that ends at `arrives`; after that only the work of the last layer remains. In all layers
        together it waits `swap` seconds for what is read from host memory."""
        seconds = self._cost.seconds(starts, ends, drafts) + swap
        self._free_at = max(self._free_at, self.now + self._cost.launch) + seconds
        if arrives:
            self._free_at = max(self._free_at, arrives + seconds * _LAST_LAYER)
        return self._free_at

    def move_to(self, time: float) -> None:
        """Advance to `time`, never back."""
        self.now = max(self.now, time)

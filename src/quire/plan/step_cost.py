"""CostModel: how long a step takes. It is computed from a device's published peaks, or fitted to measured steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidInput
from quire.plan.devices import DEVICES, LAUNCH_S, MEMORY_SHARE, find_device
from quire.spec.group import GroupSpec
from quire.spec.layers import AttentionCall, CompressedCall, LatentCall
from quire.spec.model import ModelSpec

Lengths = npt.NDArray[np.int64]

_COMPUTE_SHARE = 0.5  # share of the published peak, reached by large matrix products
_NO_DIRECTION = 1e-7  # share of the largest eigenvalue; along smaller ones the measured steps do not differ


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
        slowest = min(self.host_bandwidth, self.storage_bandwidth)
        if min(numbers) < 0 or not sum(numbers) > 0 or slowest <= 0:
            raise InvalidInput("a step takes no time at all, or less.", fix="give times and bandwidths above zero.")

    def seconds(self, starts: Lengths, ends: Lengths, drafts: Lengths | int = 0) -> float:
        """The device's time for a step that computes tokens `starts[i]..ends[i] - 1` of each request, of which the last
        `drafts[i]` are drafts, without the launch. A draft costs as much as a token of a prompt."""
        tokens, pairs, contexts = work_of(starts, ends, drafts)
        total = max(self.weights, self.token * tokens) + self.pair * pairs
        for seconds, most in self.reads:
            total += seconds * int((np.minimum(contexts, most) if most else contexts).sum())
        return total

    @property
    def growth(self) -> float:
        """What a token of a prompt costs more for each one before it, in parts of what the first one costs."""
        return self.pair / self.token if self.token else 0.0

    def chunk_seconds(self, start: int, tokens: int) -> float:
        """What a chunk of a prompt, from token `start` on, adds to a step."""
        return tokens * (self.token + self.pair * (start + (tokens + 1) / 2))

    def chunk_tokens(self, start: int, seconds: float) -> float:
        """The tokens of a chunk that adds so many seconds: `chunk_seconds` inverted."""
        first = self.token + self.pair * (start + 0.5)
        half = first + math.sqrt(first * first + 2 * self.pair * seconds)
        return 2 * seconds / half if half else math.inf

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
        _, tflops, memory, bus = DEVICES[find_device(name, otherwise="give --prefill-rate and --decode-ms").name]
        compute, bandwidth = ranks * tflops * 1e12 * _COMPUTE_SHARE, ranks * memory * 1e9 * MEMORY_SHARE
        full, windowed = _pair_flops(spec)
        reads = tuple(
            (group.layout.bytes_per_token / bandwidth, group.reach.tokens)
            for group in groups
            if not group.reach.in_place
        )
        return cls(
            launch=LAUNCH_S,
            weights=weight_bytes / bandwidth,
            token=(2 * active_parameters + windowed) / compute,
            pair=full / compute,
            reads=reads,
            host_bandwidth=ranks * bus * 1e9 * MEMORY_SHARE,
        )

    @classmethod
    def from_flags(cls, *, prefill_rate: float, decode_ms: float, key_ns: float = 0.0) -> CostModel:
        """A cost model from plain numbers: prompt tokens per second, milliseconds of a decode step without its keys,
        and nanoseconds for a key that a decoding token reads."""
        reads = ((key_ns / 1e9, 0),)
        return cls(launch=LAUNCH_S, weights=decode_ms / 1e3, token=1 / prefill_rate, pair=0.0, reads=reads)


def work_of(starts: Lengths, ends: Lengths, drafts: Lengths | int = 0) -> tuple[int, int, Lengths]:
    """The work of a step as in `CostModel.seconds`: new tokens, (query, key) pairs of prompts and of drafts, and
    contexts of single tokens."""
    tokens = int((ends - starts).sum())
    if tokens == len(ends):
        return tokens, 0, ends
    known = ends - drafts
    prompts = known - starts > 1
    first = np.where(prompts, starts, known)
    # Token p of a prompt reads p + 1 keys: the sum over first..ends - 1 is a difference of triangles.
    return tokens, int((ends * (ends + 1) - first * (first + 1)).sum()) // 2, known[~prompts]


def growth_of(spec: ModelSpec, active_parameters: int) -> float:
    """As `CostModel.growth`, in floating-point operations."""
    full, windowed = _pair_flops(spec)
    return full / (2 * active_parameters + windowed)


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


class CostFit:
    """Fits a cost model to measured steps, with the least squared relative error and no negative cost. So a step that
    was disturbed, and took long, counts little.

    A step has a constant cost, which includes reading the weights, and costs for each new token, each (query, key) pair
    of prompts and each key that a single token reads. `keeps` is the weight of the earlier steps at each new one, among
    those with prompts, and among those without: a long answer does not change what prompts cost. O(1) for each step.
    """

    def __init__(self, keeps: float = 1.0) -> None:
        self._keeps = keeps
        self._sums = np.zeros((2, 4, 5))  # without and with prompts: products of amounts, and of amounts and seconds
        self._found: CostModel | None = None

    def add(self, starts: Lengths, ends: Lengths, seconds: float, drafts: Lengths | int = 0) -> None:
        """A step as in `CostModel.seconds` took this time."""
        tokens, pairs, contexts = work_of(starts, ends, drafts)
        # Divided by its seconds, so that each step counts alike.
        amounts = np.array((1.0, tokens, pairs, int(contexts.sum()), seconds)) / seconds
        sums = self._sums[int(pairs > 0)]
        sums *= self._keeps
        sums += np.outer(amounts[:4], amounts)
        self._found = None

    def model(self) -> CostModel | None:
        """The costs; None without a step, or if the steps took no time."""
        if self._found is None and self._sums.any():
            products, right = np.split(self._sums.sum(axis=0), [4], axis=1)
            scale = np.sqrt(np.diagonal(products))
            used, found = scale > 0, np.zeros(4)
            used[0] &= used[3] or not used[2]  # steps of prompts alone cost what their tokens do
            while used.any():
                by, some = scale[used], np.ix_(used, used)
                scaled = products[some] / np.outer(by, by)
                found[:] = 0.0
                found[used] = np.linalg.lstsq(scaled, right[used, 0] / by, rcond=_NO_DIRECTION)[0] / by
                if (found >= 0).all():
                    break
                used &= found > 0
            launch, token, pair, key = (float(cost) for cost in found)
            self._found = CostModel(launch=launch, weights=0.0, token=token, pair=pair, reads=((key, 0),))
        return self._found

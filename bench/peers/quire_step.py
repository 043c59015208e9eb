"""Quire's step as its engine runs it, without a model. The one place here that knows the scheduler and the runner.

An `EngineCore` with the engine's own defaults plans, builds pools and caches for a model that is described and never
loaded: its `run` computes nothing. So what is timed is what the engine does between two forward passes, and no
call of the cache is picked out by hand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from bench.bookkeeping.workloads import Sizes, Tokens, tokens

from quire.cache import KVCache, RequestKV
from quire.cache.running import Lengths
from quire.engine.config import EngineConfig, engine_config
from quire.engine.core import EngineCore
from quire.engine.device.page_tables import DevicePageTables
from quire.engine.device.runner import ModelRunner
from quire.engine.device.sampler import Drawn
from quire.engine.messages import EngineRequest
from quire.engine.planning import plan_settings
from quire.kernels.batch import PagedBatch
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel
from quire.plan.planner import make_plan
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.step import Places
from quire.spec.ids import Ids
from quire.spec.model import ModelSpec

DEVICE = torch.device("cpu")
VOCABULARY = 2_048
WINDOW = 256
_FOREVER = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
_MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
    "eos_token_id": 0,
}
_HYBRID = {
    "full": {"model_type": "llama", "num_hidden_layers": 1},
    "full+window": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 8,
    },
    "full+state": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 2,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_value_head_dim": 8,
    },
}
"""Models of the groups that the rows are named after, as small as they get."""


class DescribedModel:
    """What an engine asks of a loaded model, of one that has no weights. All logits are zero.

    With `plans`, a forward pass does what attention does before its first kernel: it plans each group's reading.
    """

    name = "described"
    device = DEVICE
    num_parameters = weight_bytes = 0
    eos_token_ids = (0,)
    pooler = None

    def __init__(self, kind: str, context: int) -> None:
        self.spec = ModelSpec.from_config(_MODEL | _HYBRID[kind] | {"max_position_embeddings": context})
        self.plans = False

    def identity(self, _epoch: int = 0, *, exact: bool = False) -> bytes:
        """Nothing of it is stored."""
        return b"described"

    def run(self, running: RunningForward, _ids: Any, _positions: Any, rows: torch.Tensor) -> torch.Tensor:
        """Zeros, one row for each that draws."""
        if self.plans:
            for batch in running.batches:
                if isinstance(batch, PagedBatch):
                    batch.slots_on(DEVICE)
        return torch.zeros(len(rows), VOCABULARY if self.plans else 1)


class FixedSampler:
    """Draws token 1 everywhere, in one call."""

    def prepare(self, places: Places, _device: torch.device, _proposal: None) -> Places:
        """Nothing to prepare."""
        return places

    def draw(self, _logits: torch.Tensor, places: Places, _proposal: None, _prepared: Places) -> Drawn:
        """One token for each place."""
        return Drawn(torch.ones(len(places), dtype=torch.int64))


def timed_step(core: EngineCore) -> tuple[list[Request], tuple[int, int, int]]:
    """What `EngineCore.step` does, one by one: the requests that got a token, and the CPU nanoseconds of `schedule`,
    `launch` and `settle`."""
    clock = time.process_time_ns
    began = clock()
    core.offload.retention.expire()
    step = core.scheduler.schedule()
    scheduled = clock()
    launched = core.runner.launch(step, None)
    in_flight = clock()
    found = core.scheduler.settle(step, launched.wait())
    core.cache.close_fence(launched.fence)
    return found.requests, (scheduled - began, in_flight - scheduled, clock() - in_flight)


class Steps:
    """An engine whose requests all decode, at different places of their pages.

    `whole` runs `EngineCore.step` with its own sampler and outputs; without it, steps are
    scheduled, launched and settled one by one with a sampler that costs nothing.
    """

    own_calls = 2

    def __init__(self, kind: str, page: int, running: int, sizes: Sizes, *, whole: bool = False) -> None:
        self.running, self._first, self._room = running, sizes.step_prompt, 16 * sizes.steps
        self._turn = 0
        # The first to be admitted draw tokens while the last prompts are computed, 2,048 tokens a step.
        warm_up = running * (self._first + 64) // 1_024 + 16
        context = -(-(self._first + 64 + warm_up + self._room) // 64) * 64
        self.core, self._model = new_core(
            kind, page, tokens=running * (context + page), context=context, running=running
        )
        if not whole:
            self.core.runner = self.core.loop.device = _runner_without_sampler(self.core)
        self._whole = whole
        self.parts: Sequence[str] = ("step",) if whole else ("schedule", "launch", "settle")
        self._left = 0

    def ready(self, steps: int) -> None:
        """Have room for so many steps in which everybody decodes; new requests begin where there is none."""
        if self._left >= steps:
            return
        self._model.plans = False
        for number in range(self.running):
            self.core.abort(f"{self._turn - 1}-{number}")
        self._drain()
        for number in range(self.running):
            length = self._first + number * 37 % 64
            prompt = tokens(length, "step", self._turn, number) % VOCABULARY
            self.core.add(EngineRequest(request_id=f"{self._turn}-{number}", prompt=prompt.tobytes(), params=_FOREVER))
        while len(self.core.step()) < self.running:
            pass
        self._turn, self._left = self._turn + 1, self._room
        self._model.plans = self._whole

    def step(self) -> Sequence[int]:
        """One decode step: CPU nanoseconds of each of its parts."""
        self._left -= 1
        if self._whole:
            began = time.process_time_ns()
            advanced = len(self.core.step())
            taken: Sequence[int] = (time.process_time_ns() - began,)
        else:
            requests, taken = timed_step(self.core)
            advanced = len(requests)
        if advanced != self.running:
            raise RuntimeError(f"{advanced} of {self.running} requests got a token")
        return taken

    def _drain(self) -> None:
        while self.core.has_work():
            self.core.step()


class Turnover:
    """As `Steps`, with an end and a new request in every step: requests draw as many tokens as requests run."""

    parts: Sequence[str] = ("add", "schedule", "launch", "settle")

    def __init__(self, kind: str, page: int, running: int, sizes: Sizes) -> None:
        self.running, self._first, self._count, self._due = running, sizes.step_prompt, 0, running
        context = -(-(self._first + 64 + running) // 64) * 64
        self.core, _ = new_core(kind, page, tokens=2 * running * (context + page), context=context, running=running)
        self.core.runner = self.core.loop.device = _runner_without_sampler(self.core)

    def ready(self, steps: int) -> None:
        """Begin, so that one request ends in each step."""
        while self._count < 3 * self.running:
            self.step()

    def step(self) -> Sequence[int]:
        """Add as many requests as ended in the step before, then a step: CPU nanoseconds of its parts."""
        core, clock = self.core, time.process_time_ns
        messages = [self._message() for _ in range(self._due)]
        began = clock()
        for message in messages:
            core.add(message)
        added = clock()
        advanced, taken = timed_step(core)
        self._due = sum(request.finish_reason is not None for request in advanced)
        return added - began, *taken

    def _message(self) -> EngineRequest:
        self._count += 1
        prompt = tokens(self._first + self._count * 37 % 64, "turnover", self._count) % VOCABULARY
        outputs = self._count if self._count <= self.running else self.running
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        return EngineRequest(request_id=str(self._count), prompt=prompt.tobytes(), params=params)


class Followers:
    """A leader that computes a long prompt, and requests behind it that begin with the same."""

    def __init__(self, page: int, followers: int, length: int) -> None:
        self.followers, self._length, self._turn = followers, length, 0
        context = -(-(length + 256) // 64) * 64
        pool = 2 * context + followers * 256
        self.core, _ = new_core("full", page, tokens=pool, context=context, running=followers + 1)
        self.core.runner = self.core.loop.device = _runner_without_sampler(self.core)

    def schedules(self) -> Iterator[tuple[int, int]]:
        """CPU nanoseconds of each `schedule` while the leader computes, but for the first, and how many waited."""
        core, self._turn = self.core, self._turn + 1
        prompt = tokens(self._length, "leader", self._turn) % VOCABULARY
        self._add("leader", prompt)
        core.step()
        for number in range(self.followers):
            own = tokens(64, "follower", self._turn, number) % VOCABULARY
            self._add(f"follower-{number}", np.concatenate((prompt, own)))
        core.step()
        while core.scheduler.num_running == 1:
            _, taken = timed_step(core)
            if core.scheduler.num_running == 1:
                yield taken[0], len(core.scheduler.waiting)
        for name in ("leader", *(f"follower-{number}" for number in range(self.followers))):
            core.abort(name)
        while core.has_work():
            core.step()
        core.flush(None)

    def _add(self, name: str, prompt: Tokens) -> None:
        self.core.add(EngineRequest(request_id=name, prompt=prompt.tobytes(), params=_FOREVER))


def new_core(kind: str, page: int, *, tokens: int, context: int, running: int) -> tuple[EngineCore, DescribedModel]:
    """An engine with its own defaults but for sizes, on a described model."""
    model = DescribedModel(kind, context)
    config: EngineConfig = engine_config(
        model=model.name,
        skip_tokenizer_init=True,
        device="cpu",
        canary="off",  # the model writes nothing, so pages would differ from what the canary expects of them
        page_size=page,
        max_running_requests=max(running, EngineConfig.model_fields["max_running_requests"].default),
    )
    memory = make_plan(model.spec, plan_settings(config).model_copy(update={"kv_memory": 2**40})).bytes_for(tokens)
    config = config.model_copy(update={"kv_memory": memory})
    return EngineCore(config, model=cast(LoadedModel, model)), model


def _runner_without_sampler(core: EngineCore) -> ModelRunner:
    return ModelRunner(core.model, core.cache, cast(Any, FixedSampler()), core.device, core.pools)


class StepCalls:
    """The calls of a cache in a decode step, as scheduler and runner make them, for rows that have no scheduler."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"explains": True, "page_tables": True}
    """What an engine gives its cache, where it is asked for nothing."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        following = sum(not group.reach.in_place for group in cache.groups)
        plan = cache.plan
        self._tables = DevicePageTables(following, plan.max_requests, plan.pages_per_row, device=DEVICE)
        self._batch = cache.rows.batch([])

    def extend(self, kvs: list[RequestKV]) -> None:
        """Room for one more token of everybody; the batch is made anew when others run."""
        if kvs != self._batch.kvs:
            self._batch = self.cache.rows.batch(kvs)
        self.cache.extend(self._batch, 1)

    def launch(self, ends: Lengths) -> Ids:
        """Changes of page tables, then for each group its states, or the slots to write; the last group's slots. What
        attention reads is of the whole steps, not of the cache."""
        cache, slots = self.cache, np.empty(0, dtype=np.int32)
        fence = cache.open_fence()
        self._tables.apply(self._tables.sent(cache.rows.page_table_changes()))
        for group in range(len(cache.groups)):
            if cache.launch(group, self._batch, ends) is None:
                slots = cache.rows.next_slots(self._batch, group)
        cache.close_fence(fence)
        return slots

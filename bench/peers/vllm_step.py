"""vLLM's own `Scheduler`, as its tests drive it: `schedule` and `update_from_output`, without a model or a GPU."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.bookkeeping.workloads import VOCABULARY, Sizes, tokens
from bench.peers.metadata_vllm import Requests, specs
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

WINDOW = 256
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "torch_dtype": "float16",
}


def new_scheduler(pool: int, page: int, *, context: int, running: int, kind: str) -> Scheduler:
    """A scheduler of so many tokens for each group; 2,048 tokens a step, prefix caching and no events, its defaults."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_LLAMA | {"max_position_embeddings": context}))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=context)
    groups = specs(page, kind, window=WINDOW)
    blocks = len(groups) * pool // page + 1
    cache = CacheConfig(block_size=page, enable_prefix_caching=True)
    if kind == "full+state":
        cache.mamba_cache_mode = "align"
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(max_model_len=context, is_encoder_decoder=False, max_num_seqs=running),
        device_config=DeviceConfig(device="cpu"),
    )
    kv_cache = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(groups)],
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=page,
    )


class Steps:
    """A scheduler whose requests all decode, at different places of their blocks, as `quire_step.Steps`."""

    parts: Sequence[str] = ("schedule", "update_from_output")
    own_calls = 4

    def __init__(self, kind: str, page: int, running: int, sizes: Sizes) -> None:
        self.running, self._first, self._room = running, sizes.step_prompt, 16 * sizes.steps
        warm_up = running * (self._first + 64) // 1_024 + 16
        context = -(-(self._first + 64 + warm_up + self._room) // 64) * 64
        self._scheduler = new_scheduler(running * (context + page), page, context=context, running=running, kind=kind)
        self._requests = Requests(page)
        self._left = 0

    def ready(self, steps: int) -> None:
        """Have room for so many steps in which everybody decodes; new requests begin where there is none."""
        if self._left >= steps:
            return
        self._scheduler.finish_requests(list(self._scheduler.requests), RequestStatus.FINISHED_ABORTED)
        for number in range(self.running):
            prompt = tokens(self._first + number * 37 % 64, "step", self._left, number)
            self._scheduler.add_request(self._requests.new(prompt.tolist()))
        while self._one() < self.running:
            pass
        self._left = self._room

    def step(self) -> tuple[int, int]:
        """One decode step: nanoseconds of CPU time of `schedule` and of `update_from_output`."""
        self._left -= 1
        clock = time.process_time_ns
        began = clock()
        scheduled = self._scheduler.schedule()
        first = clock() - began
        output = _drawn(scheduled)
        began = clock()
        self._scheduler.update_from_output(scheduled, output)
        return first, clock() - began

    def _one(self) -> int:
        """A step of any kind; how many tokens it drew."""
        scheduled = self._scheduler.schedule()
        output = _drawn(scheduled, self._scheduler)
        self._scheduler.update_from_output(scheduled, output)
        return sum(map(len, output.sampled_token_ids))


class Turnover:
    """As `Steps`, with an end and a new request in every step, as `quire_step.Turnover`."""

    parts: Sequence[str] = ("add", "schedule", "update_from_output")

    def __init__(self, kind: str, page: int, running: int, sizes: Sizes) -> None:
        self.running, self._first, self._count, self._due = running, sizes.step_prompt, 0, running
        context = -(-(self._first + 64 + running) // 64) * 64
        pool = 2 * running * (context + page)
        self._scheduler = new_scheduler(pool, page, context=context, running=running, kind=kind)
        self._requests = Requests(page)

    def ready(self, steps: int) -> None:
        """Begin, so that one request ends in each step."""
        while self._count < 3 * self.running:
            self.step()

    def step(self) -> tuple[int, ...]:
        """Add as many requests as ended in the step before, then a step: CPU nanoseconds of its parts."""
        scheduler, clock = self._scheduler, time.process_time_ns
        prompts = [self._prompt() for _ in range(self._due)]
        began = clock()
        for prompt, params in prompts:
            scheduler.add_request(self._requests.new(prompt, params))
        added = clock()
        scheduled = scheduler.schedule()
        decided = clock()
        output = _drawn(scheduled, scheduler)
        before = len(scheduler.requests)
        updating = clock()
        scheduler.update_from_output(scheduled, output)
        updated = clock()
        self._due = before - len(scheduler.requests)
        return added - began, decided - added, updated - updating

    def _prompt(self) -> tuple[list[int], SamplingParams]:
        self._count += 1
        prompt = tokens(self._first + self._count * 37 % 64, "turnover", self._count)
        return prompt.tolist(), SamplingParams(max_tokens=min(self._count, self.running))


def _drawn(scheduled: Any, scheduler: Scheduler | None = None) -> ModelRunnerOutput:
    """What a runner would answer: a token for each request, but for those whose prompt is not at its end."""
    names = list(scheduled.num_scheduled_tokens)
    drawn = [[11] for _ in names]
    if scheduler is not None:
        for place, name in enumerate(names):
            request = scheduler.requests[name]
            if request.num_computed_tokens < request.num_tokens:
                drawn[place] = []
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=drawn
    )

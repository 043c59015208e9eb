"""vLLM's `KVCacheManager` and `Request`, untouched. Tokens enter as lists, blocks are named by SHA-256 as by default.

It has no tree, and evicts inside `allocate_slots` alone, so there is no verb for that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from bench.bookkeeping.workloads import Arrival, Sizes, Tree, tokens
from bench.peers.metadata_worker import Operation, Stopwatch, replay, trace_of
from bench.peers.step_rows import counted_calls, timed_steps
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

torch.set_num_threads(1)
init_none_hash(sha256)
WINDOW = 1_024


def specs(page: int, kind: str, window: int = WINDOW) -> list[KVCacheSpec]:
    """The groups of a model; those beside the full one as in Quire's comparison."""
    attention: dict[str, Any] = {"block_size": page, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    full = FullAttentionSpec(**attention)
    if kind == "full":
        return [full]
    if kind == "full+window":
        return [full, SlidingWindowSpec(**attention, sliding_window=window)]
    state = MambaSpec(block_size=page, shapes=((page, 16),), dtypes=(torch.float16,), mamba_cache_mode="align")
    return [full, state]


def new_manager(pool: int, page: int, *, context: int, kind: str = "full", events: bool = False) -> KVCacheManager:
    """A manager of so many tokens; groups share the pool, so two of them get twice the blocks."""
    groups = specs(page, kind)
    config = KVCacheConfig(
        num_blocks=len(groups) * pool // page + 1,  # block 0 is never handed out
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(groups)],
    )
    return KVCacheManager(
        config, max_model_len=context, scheduler_block_size=page, hash_block_size=page, enable_kv_cache_events=events
    )


class Requests:
    """Makes requests, each with a name of its own; making one hashes its prompt."""

    def __init__(self, page: int) -> None:
        self._hasher = get_request_block_hasher(page, sha256)
        self._params = SamplingParams(max_tokens=100_000)
        self._count = 0

    def new(self, prompt: list[int], params: SamplingParams | None = None) -> Request:
        """A request that has computed nothing."""
        self._count += 1
        return Request(str(self._count), prompt, params or self._params, None, block_hasher=self._hasher)


def admit(manager: KVCacheManager, request: Request) -> int:
    """Find what is cached and make room for the rest, which caches it; -1 where there is no room."""
    blocks, found, _ = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, request.num_tokens - found, found, blocks) is None:
        return -1
    request.num_computed_tokens = request.num_tokens
    return int(found)


class System:
    """Generators as `metadata_worker` describes them."""

    OPERATIONS = frozenset(("match", "extend", "decode", "admit", "replay", "step", "step_calls", "turnover"))

    def __init__(self) -> None:
        self._filled: tuple[tuple[Sizes, int], KVCacheManager, Requests] | None = None

    def _full(self, sizes: Sizes, page: int) -> tuple[KVCacheManager, Requests]:
        """The chains and branches of the tree, cached; kept as long as the same is asked for."""
        if self._filled is None or self._filled[0] != (sizes, page):
            self._filled = None
            tree = Tree(sizes)
            manager, requests = new_manager(tree.num_tokens, page, context=2 * sizes.chain), Requests(page)
            for index in range(sizes.chains - 1, -1, -1):
                request = requests.new(tree.chain(index).tolist())
                admit(manager, request)
                manager.free(request)
            self._filled = (sizes, page), manager, requests
        return self._filled[1:]

    def match(self, sizes: Sizes, page: int, length: int) -> Operation:
        """A prompt of `length` cached tokens and one more: hash it and look its blocks up."""
        manager, requests = self._full(sizes, page)
        prompt = np.concatenate((Tree(sizes).chain(0)[:length], tokens(1, "next"))).tolist()
        times = max(1, 8_192 // length)
        yield {}
        while True:
            manager.get_computed_blocks(requests.new(prompt))
            with (watch := Stopwatch()):
                for _ in range(times):
                    _, found, _ = manager.get_computed_blocks(requests.new(prompt))
            yield watch.sample(times, tokens=found)

    def extend(self, sizes: Sizes, page: int) -> Operation:
        """Blocks for the prompts of a batch, hashed beforehand: `allocate_slots` for each."""
        count, length = sizes.extended
        manager, requests = new_manager(2 * count * length, page, context=2 * length), Requests(page)
        turn = 0
        yield {}
        while True:
            turn += 1
            batch = [requests.new(tokens(length, "extend", i, turn).tolist()) for i in range(count)]
            with (watch := Stopwatch()):
                for request in batch:
                    manager.allocate_slots(request, length)
            found = sum(len(manager.get_block_ids(request.request_id)[0]) for request in batch) * page
            for request in batch:
                manager.free(request)
            yield watch.sample(1, tokens=found)

    def decode(self, sizes: Sizes, page: int, kind: str, commits: bool) -> Operation:
        """One token more for every running request, one by one: `append_output_token_ids`, which hashes blocks that
        have become full, and `allocate_slots`, which caches them."""
        assert commits, "it cannot do otherwise"
        count, first, most = sizes.running, 4 * sizes.steps, 48 * sizes.steps
        manager = new_manager(count * most * 2, page, context=most + count + first, kind=kind)
        requests, batch = Requests(page), list[Request]()
        step = most
        yield {}
        while True:
            if step + sizes.steps > most:
                for request in batch:
                    manager.free(request)
                batch = [requests.new(tokens(first + i, "decode", i).tolist()) for i in range(count)]
                for request in batch:
                    admit(manager, request)
                step = 0
            watch = Stopwatch()
            for at in range(sizes.steps):
                token = 10 + (step + at) % 1_000
                with watch:
                    for request in batch:
                        request.append_output_token_ids(token)
                        manager.allocate_slots(request, 1)
                        request.num_computed_tokens += 1
            step += sizes.steps
            yield watch.sample(sizes.steps, slots=len(batch))

    def step(self, sizes: Sizes, page: int, kind: str, running: int) -> Operation:
        """`Scheduler.schedule` and `Scheduler.update_from_output` of a decode step."""
        from bench.peers.vllm_step import Steps

        return timed_steps(Steps(kind, page, running, sizes), sizes)

    def turnover(self, sizes: Sizes, page: int, kind: str, running: int) -> Operation:
        """The same where one request ends and another begins in each step, `add_request` included."""
        from bench.peers.vllm_step import Turnover

        return timed_steps(Turnover(kind, page, running, sizes), sizes)

    def step_calls(self, sizes: Sizes, page: int, kind: str, running: int) -> Operation:
        """Python functions that this step calls."""
        from bench.peers.vllm_step import Steps

        return counted_calls(Steps(kind, page, running, sizes), sizes)

    def admit(self, sizes: Sizes, page: int, events: str) -> Operation:
        """A prompt of which nothing is cached, in a pool that is full: hash, look up, allocate, which evicts."""
        on = events != "off"
        manager = new_manager(sizes.admit_pool, page, context=2 * sizes.admitted, events=on)
        requests = Requests(page)
        count = 0
        for count in range(1, sizes.admit_pool // sizes.admitted + 1):
            request = requests.new(tokens(sizes.admitted, "admit", count).tolist())
            admit(manager, request)
            manager.free(request)
        manager.take_events()
        yield {}
        while True:
            count += 1
            prompt = tokens(sizes.admitted, "admit", count).tolist()
            with (watch := Stopwatch()):
                request = requests.new(prompt)
                admit(manager, request)
                taken = manager.take_events() if on else []
            manager.free(request)
            hashes = sum(len(getattr(event, "block_hashes", ())) for event in taken)
            yield watch.sample(1, tokens=sizes.admitted, events=len(taken), hashes=hashes)

    def replay(self, sizes: Sizes, page: int, trace: str) -> Operation:
        """A whole trace, from an empty cache."""
        requests = trace_of(trace)
        longest = max(len(request.prompt) + len(request.output) for request in requests) + page
        yield {}
        while True:
            manager = new_manager(sizes.replay_pool, page, context=longest)
            yield replay(requests, Serving(requests, manager, page), sizes.replay_running)


class Serving:
    """vLLM in the loop of a replay. Blocks are cached as they are allocated and filled."""

    def __init__(self, trace: list[Arrival], manager: KVCacheManager, page: int) -> None:
        self._manager = manager
        self._make = Requests(page)
        self._prompts = [request.prompt.tolist() for request in trace]
        self._outputs = [request.output.tolist() for request in trace]
        self._requests: dict[int, Request] = {}

    def admit(self, index: int) -> int:
        """`Request`, which hashes; `get_computed_blocks`, `allocate_slots`."""
        request = self._make.new(self._prompts[index])
        found = admit(self._manager, request)
        if found >= 0:
            self._requests[index] = request
        return found

    def step(self, running: Sequence[int]) -> None:
        """`append_output_token_ids`, which hashes blocks that became full, and `allocate_slots`, one by one."""
        manager = self._manager
        for index in running:
            request = self._requests[index]
            request.append_output_token_ids(self._outputs[index][request.num_output_tokens])
            if manager.allocate_slots(request, 1) is None:
                raise RuntimeError("the pool is too small for what runs at once")
            request.num_computed_tokens += 1

    def finish(self, indices: Sequence[int]) -> None:
        """`free`."""
        for index in indices:
            self._manager.free(self._requests.pop(index))

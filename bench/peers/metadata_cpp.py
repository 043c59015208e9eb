"""SGLang's tree in C++ as its release 0.5.12 has it, behind `RadixCacheCpp`; compiled when it is first imported.

As in `metadata_sglang.py` their classes and functions run, and the batch around them is ours. Tokens enter as lists.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/extensions")

import numpy as np
import torch
from bench.bookkeeping.workloads import Arrival, Sizes, Tree, tokens
from bench.peers import sglang_stubs  # noqa: F401
from bench.peers.metadata_worker import Operation, Stopwatch, replay, trace_of
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.radix_cache_cpp import RadixCacheCpp
from sglang.srt.sampling.sampling_params import SamplingParams

torch.set_num_threads(1)
SETTINGS = SimpleNamespace(
    hicache_write_policy="write_through",
    enable_hierarchical_cache=False,
    attention_backend="torch_native",
    prefill_attention_backend=None,
    speculative_algorithm=None,
    strip_thinking_cache=False,
    page_size=1,
)


def new_cache(pool: int, page: int, *, context: int, requests: int = 16) -> RadixCacheCpp:
    """A cache of so many tokens."""
    SETTINGS.page_size = page
    common.get_global_server_args = schedule_batch.get_global_server_args = lambda: SETTINGS
    device = SimpleNamespace(device="cpu")
    if page == 1:
        allocator: Any = TokenToKVPoolAllocator(pool, torch.float16, "cpu", device, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(pool, page, torch.float16, "cpu", device, False)
    parameters = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(requests, context, "cpu", False),
        token_to_kv_pool_allocator=allocator,
        page_size=page,
    )
    return RadixCacheCpp(parameters, SETTINGS)


class System:
    """Generators as `metadata_worker` describes them."""

    OPERATIONS = frozenset(("match", "match_edge", "insert", "insert_again", "evict", "replay"))

    def __init__(self) -> None:
        self._tree: tuple[tuple[Sizes, int], RadixCacheCpp] | None = None

    def _full(self, sizes: Sizes, page: int) -> RadixCacheCpp:
        """The tree, filled; kept as long as the same is asked for."""
        if self._tree is None or self._tree[0] != (sizes, page):
            self._tree = None
            tree = Tree(sizes)
            cache = new_cache(tree.num_tokens + sizes.slack, page, context=16)
            for prompt, cached in tree.prompts():
                store(cache, prompt.tolist(), cached)
            self._tree = (sizes, page), cache
        return self._tree[1]

    def match(self, sizes: Sizes, page: int, length: int) -> Operation:
        """A prompt of `length` cached tokens and one more: `match_prefix`, which gives slot indices."""
        prompt = np.concatenate((Tree(sizes).chain(0)[:length], tokens(1, "next"))).tolist()
        return self._match(self._full(sizes, page), prompt)

    def match_edge(self, sizes: Sizes, page: int) -> Operation:
        """A chain that nothing has cut."""
        cache = new_cache(2 * sizes.chain, page, context=16)
        chain = Tree(sizes).chain(0)
        store(cache, chain.tolist(), 0)
        return self._match(cache, np.concatenate((chain, tokens(1, "next"))).tolist())

    def _match(self, cache: RadixCacheCpp, prompt: list[int]) -> Operation:
        times = max(1, 16_384 // len(prompt))
        yield {}
        while True:
            cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
            with (watch := Stopwatch()):
                for _ in range(times):
                    indices = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt))).device_indices
            yield watch.sample(times, tokens=len(indices))

    def insert(self, sizes: Sizes, page: int) -> Operation:
        """A node more behind the first `under` tokens of a chain: what its cache does to insert."""
        cache = self._full(sizes, page)
        prefix, count = Tree(sizes).chain(1)[: sizes.under], 0
        yield {}
        while True:
            added = []
            for _ in range(8):
                count += 1
                prompt = np.concatenate((prefix, tokens(sizes.node, "insert", count))).tolist()
                added.append((prompt, with_prefix(cache, prompt, sizes.under)))
            before = cache.evictable_size()
            with (watch := Stopwatch()):
                for prompt, value in added:
                    cache._insert(RadixKey(prompt), value)
            yield watch.sample(8, tokens=(cache.evictable_size() - before) // 8)

    def insert_again(self, sizes: Sizes, page: int) -> Operation:
        """A chain that is cached, computed once more; the caller's slots are freed, as `cache_finished_req` does."""
        cache = self._full(sizes, page)
        chain = Tree(sizes).chain(2).tolist()
        allocator = cache.token_to_kv_pool_allocator
        yield {}
        while True:
            value = take(cache, len(chain))
            before = allocator.available_size()
            with (watch := Stopwatch()):
                allocator.free(value[: cache._insert(RadixKey(chain), value)])
            yield watch.sample(1, tokens=allocator.available_size() - before)

    def evict(self, sizes: Sizes, page: int, count: int) -> Operation:
        """`count` tokens of a pool without a free slot, per token; what was evicted is filled again between samples."""
        cache = self._full(sizes, page)
        filled = 0
        prefix = Tree(sizes).chain(sizes.chains - 1)[: sizes.node]
        yield {}
        while True:
            while cache.token_to_kv_pool_allocator.available_size() >= sizes.node:
                filled += 1
                fresh = tokens(sizes.node, page, count, filled)
                store(cache, np.concatenate((prefix, fresh)).tolist(), sizes.node)
            with (watch := Stopwatch()):
                found = cache.evict(EvictParams(num_tokens=count))
            yield watch.sample(found.num_tokens_evicted, tokens=found.num_tokens_evicted)

    def replay(self, sizes: Sizes, page: int, trace: str) -> Operation:
        """A whole trace, from an empty cache."""
        requests = trace_of(trace)
        longest = max(len(request.prompt) + len(request.output) for request in requests) + page
        yield {}
        while True:
            cache = new_cache(sizes.replay_pool, page, context=longest, requests=sizes.replay_running)
            yield replay(requests, Serving(requests, cache), sizes.replay_running)


class Serving:
    """SGLang 0.5.12 in the loop of a replay, as `metadata_sglang.Serving` has the newer one."""

    def __init__(self, trace: list[Arrival], cache: RadixCacheCpp) -> None:
        self._cache = cache
        self._outputs = [request.output.tolist() for request in trace]
        self._requests = [
            schedule_batch.Req(str(i), "", r.prompt.tolist(), SamplingParams(max_new_tokens=len(r.output)))
            for i, r in enumerate(trace)
        ]
        self._running: list[int] = []
        self._batch: Any = None

    def admit(self, index: int) -> int:
        """`init_next_round_input`, lock, `alloc_for_extend`, `cache_unfinished_req`."""
        cache, request = self._cache, self._requests[index]
        request.init_next_round_input(cache)
        cache.inc_lock_ref(request.last_node)
        found, length = len(request.prefix_indices), len(request.fill_ids)
        available = cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size()
        if available < length - found + 2 * cache.page_size:
            cache.dec_lock_ref(request.last_node)
            return -1
        batch = SimpleNamespace(
            reqs=[request],
            prefix_lens=[found],
            extend_lens=[length - found],
            extend_num_tokens=length - found,
            seq_lens=torch.tensor([length]),
            seq_lens_cpu=torch.tensor([length]),
            device="cpu",
            req_to_token_pool=cache.req_to_token_pool,
            tree_cache=cache,
            maybe_evict_swa=_nothing,
        )
        common.alloc_for_extend(batch)
        request.kv_committed_len = request.kv_allocated_len = length
        cache.cache_unfinished_req(request)
        return found

    def step(self, running: Sequence[int]) -> None:
        """`alloc_for_decode`; the batch's tensors are made anew when other requests run."""
        if running != self._running:
            requests = [self._requests[index] for index in running]
            lengths = torch.tensor([request.kv_allocated_len for request in requests])
            self._running = list(running)
            self._batch = SimpleNamespace(
                reqs=requests,
                seq_lens=lengths,
                seq_lens_cpu=lengths.clone(),
                req_pool_indices=torch.tensor([request.req_pool_idx for request in requests]),
                device="cpu",
                req_to_token_pool=self._cache.req_to_token_pool,
                tree_cache=self._cache,
                model_config=SimpleNamespace(is_encoder_decoder=False),
                maybe_evict_swa=_nothing,
            )
        batch = self._batch
        common.alloc_for_decode(batch, 1)
        for request in batch.reqs:
            request.kv_committed_len += 1
            request.kv_allocated_len += 1
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1

    def finish(self, indices: Sequence[int]) -> None:
        """`release_kv_cache`, which inserts prompt and output."""
        for index in indices:
            request = self._requests[index]
            request.output_ids.extend(self._outputs[index])
            common.release_kv_cache(request, self._cache)


def take(cache: RadixCacheCpp, count: int) -> torch.Tensor:
    """So many free slots, evicting if it must."""
    allocator = cache.token_to_kv_pool_allocator
    if allocator.available_size() < count:
        cache.evict(EvictParams(num_tokens=count - allocator.available_size()))
    return allocator.alloc(count).clone()


def with_prefix(cache: RadixCacheCpp, prompt: list[int], cached: int) -> torch.Tensor:
    """The slots of a prompt of which `cached` tokens are cached."""
    fresh = take(cache, len(prompt) - cached)
    if not cached:
        return fresh
    indices = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt[:cached]))).device_indices
    assert len(indices) == cached
    return torch.cat((indices, fresh))


def store(cache: RadixCacheCpp, prompt: list[int], cached: int) -> None:
    """Cache a prompt, of which `cached` tokens are."""
    cache._insert(RadixKey(prompt), with_prefix(cache, prompt, cached))


def _nothing() -> None:
    return

"""SGLang's unified radix cache and allocators, with its tree in Rust (its default) or in Python.

Their own classes and functions run, `Req`, `alloc_for_extend` and `release_kv_cache` among them; the batch around them
and the published configuration are ours. Tokens enter as `array('q')`. Its allocators run as on a CPU: on a GPU their
arithmetic is a kernel, whose launch would be counted here in its place.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from bench.bookkeeping.workloads import Arrival, Sizes, Tokens, Tree, tokens
from bench.peers import sglang_stubs  # noqa: F401
from bench.peers.metadata_worker import Operation, Stopwatch, replay, trace_of
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import allocation, common
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

torch.set_num_threads(1)


def publish() -> None:
    """What the parts read of the server's configuration: no speculation, attention without triton."""
    allocation.attention_backends = lambda: ("torch_native", "torch_native")
    serving = SimpleNamespace(strip_thinking_cache=False)
    common.get_serving = schedule_batch.get_serving = lambda: serving
    common.get_spec = lambda: SimpleNamespace(speculative_algorithm=None)


def key(prompt: Tokens) -> array[int]:
    """Tokens as SGLang holds them."""
    return array("q", prompt.astype(np.int64).tobytes())


class System:
    """Generators as `metadata_worker` describes them."""

    OPERATIONS = frozenset(
        ("match", "match_edge", "insert", "insert_again", "evict", "free", "extend", "decode", "replay")
    )

    def __init__(self, core: str) -> None:
        publish()
        self._core = core
        self._tree: tuple[tuple[Sizes, int], UnifiedRadixCache] | None = None

    def new_cache(self, pool: int, page: int, *, context: int, requests: int = 16) -> UnifiedRadixCache:
        """A cache of so many tokens."""
        if page == 1:
            allocator: Any = TokenToKVPoolAllocator(pool, torch.float16, "cpu", None, False)
        else:
            allocator = PagedTokenToKVPoolAllocator(pool, page, torch.float16, "cpu", None, False)
        cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=ReqToTokenPool(requests, context, "cpu", False),
                token_to_kv_pool_allocator=allocator,
                page_size=page,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=self._core,
            )
        )
        expected = {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}[self._core]
        assert type(cache.tree_core).__name__ == expected, f"{cache.tree_core} instead of {expected}"
        return cache

    def _full(self, sizes: Sizes, page: int) -> UnifiedRadixCache:
        """The tree, filled; kept as long as the same is asked for."""
        if self._tree is None or self._tree[0] != (sizes, page):
            self._tree = None
            tree = Tree(sizes)
            cache = self.new_cache(tree.num_tokens + sizes.slack, page, context=16)
            for prompt, cached in tree.prompts():
                store(cache, key(prompt), cached)
            self._tree = (sizes, page), cache
        return self._tree[1]

    def match(self, sizes: Sizes, page: int, length: int) -> Operation:
        """A prompt of `length` cached tokens and one more, slot indices out, which is a call of its own."""
        prompt = np.concatenate((Tree(sizes).chain(0)[:length], tokens(1, "next")))
        return self._match(self._full(sizes, page), key(prompt))

    def match_edge(self, sizes: Sizes, page: int) -> Operation:
        """A chain that nothing has cut."""
        cache = self.new_cache(2 * sizes.chain, page, context=16)
        chain = Tree(sizes).chain(0)
        store(cache, key(chain), 0)
        return self._match(cache, key(np.concatenate((chain, tokens(1, "next")))))

    def _match(self, cache: UnifiedRadixCache, prompt: array[int]) -> Operation:
        times = max(4, 65_536 // len(prompt))
        yield {}
        while True:
            cache.path_device_indices(cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt))).last_device_node)
            with (watch := Stopwatch()):
                for _ in range(times):
                    found = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
                    indices = cache.path_device_indices(found.last_device_node)
            yield watch.sample(times, tokens=len(indices))

    def insert(self, sizes: Sizes, page: int) -> Operation:
        """A node more behind the first `under` tokens of a chain: `insert`, the prefix known to be cached."""
        cache = self._full(sizes, page)
        prefix, count = Tree(sizes).chain(1)[: sizes.under], 0
        yield {}
        while True:
            added = []
            for _ in range(8):
                count += 1
                prompt = key(np.concatenate((prefix, tokens(sizes.node, "insert", count))))
                added.append((prompt, with_prefix(cache, prompt, sizes.under)))
            before = cache.evictable_size()
            with (watch := Stopwatch()):
                for prompt, value in added:
                    cache.insert(InsertParams(key=RadixKey(prompt), value=value, prev_prefix_len=sizes.under))
            yield watch.sample(8, tokens=(cache.evictable_size() - before) // 8)

    def insert_again(self, sizes: Sizes, page: int) -> Operation:
        """A chain that is cached, computed once more: `insert`, which gives the caller's slots back."""
        cache = self._full(sizes, page)
        chain = key(Tree(sizes).chain(2))
        allocator = cache.token_to_kv_pool_allocator
        yield {}
        while True:
            value = take(cache, len(chain))
            before = allocator.available_size()
            with (watch := Stopwatch()):
                cache.insert(InsertParams(key=RadixKey(chain), value=value))
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
                store(cache, key(np.concatenate((prefix, tokens(sizes.node, page, count, filled)))), sizes.node)
            with (watch := Stopwatch()):
                found = cache.evict(EvictParams(num_tokens=count))
            yield watch.sample(found.num_tokens_evicted, tokens=found.num_tokens_evicted)

    def free(self, sizes: Sizes, page: int, verb: str) -> Operation:
        """Slots given back to the allocator of a large pool, nothing else: `verb` is for Quire."""
        allocator = self.new_cache(sizes.big_pool, page, context=16).token_to_kv_pool_allocator
        yield {}
        while True:
            before = allocator.available_size()
            taken = [allocator.alloc(sizes.freed).clone() for _ in range(8)]
            with (watch := Stopwatch()):
                for indices in taken:
                    allocator.free(indices)
            yield watch.sample(8, lost=before - allocator.available_size())

    def extend(self, sizes: Sizes, page: int) -> Operation:
        """Slots for the prompts of a batch, rows written: `alloc_for_extend`."""
        count, length = sizes.extended
        cache = self.new_cache(2 * count * length, page, context=2 * length, requests=count)
        prompts = [key(tokens(length, "extend", i)) for i in range(count)]
        yield {}
        while True:
            requests = [request_of(i, prompt, 1) for i, prompt in enumerate(prompts)]
            batch = extend_batch(cache, requests)
            with (watch := Stopwatch()):
                slots, _, _ = allocation.alloc_for_extend(batch)
            found = len(torch.unique(slots))
            cache.token_to_kv_pool_allocator.free(slots)
            for request in requests:
                cache.req_to_token_pool.free(request)
            yield watch.sample(1, tokens=found)

    def decode(self, sizes: Sizes, page: int, kind: str, commits: bool) -> Operation:
        """One token more for every running request, rows written: `alloc_for_decode`."""
        assert not commits, "it caches when a request ends"
        count, first, most = sizes.running, 4 * sizes.steps, 48 * sizes.steps
        cache = self.new_cache(count * most * 2, page, context=most + count + first + 1, requests=count)
        requests: list[Any] = []
        step = most
        yield {}
        while True:
            if step + sizes.steps > most:
                for request in requests:
                    allocated = request.kv.kv_allocated_len
                    row = cache.req_to_token_pool.req_to_token[request.kv.req_pool_idx, :allocated]
                    cache.token_to_kv_pool_allocator.free(row.to(torch.int64))
                    cache.req_to_token_pool.free(request)
                requests = [request_of(i, key(tokens(first + i, "decode", i)), most) for i in range(count)]
                allocation.alloc_for_extend(extend_batch(cache, requests))
                batch, step = decode_batch(cache, requests), 0
            watch = Stopwatch()
            for _ in range(sizes.steps):
                with watch:
                    slots = allocation.alloc_for_decode(batch, 1)
                    batch.seq_lens = batch.seq_lens + 1
                    batch.seq_lens_cpu = batch.seq_lens_cpu + 1
            step += sizes.steps
            yield watch.sample(sizes.steps, slots=len(torch.unique(slots)))

    def replay(self, sizes: Sizes, page: int, trace: str) -> Operation:
        """A whole trace, from an empty cache."""
        requests = trace_of(trace)
        longest = max(len(request.prompt) + len(request.output) for request in requests) + page
        yield {}
        while True:
            cache = self.new_cache(sizes.replay_pool, page, context=longest, requests=sizes.replay_running)
            yield replay(requests, Serving(requests, cache), sizes.replay_running)


class Serving:
    """SGLang in the loop of a replay. `Req` objects are made beforehand, untimed, and outputs are handed over at a
    request's end, as one array."""

    def __init__(self, trace: list[Arrival], cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self._outputs = [key(request.output) for request in trace]
        self._requests = [request_of(i, key(r.prompt), len(r.output)) for i, r in enumerate(trace)]
        self._running: list[int] = []
        self._batch: Any = None

    def admit(self, index: int) -> int:
        """`init_next_round_input`, lock, `alloc_for_extend`, `checkpoint_kv_cache`."""
        cache, request = self._cache, self._requests[index]
        request.init_next_round_input(cache)
        request.lock = cache.lock(request.last_node)
        found, length = request.prefix_len, len(request.origin_input_ids)
        available = cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size()
        if available < length - found + 2 * cache.page_size:
            cache.unlock(request.lock)
            request.lock = None
            return -1
        allocation.alloc_for_extend(extend_batch(cache, [request]))
        common.checkpoint_kv_cache(request, cache)
        return int(found)

    def step(self, running: Sequence[int]) -> None:
        """`alloc_for_decode`; the batch's tensors are made anew when other requests run."""
        if running != self._running:
            self._batch, self._running = decode_batch(self._cache, [self._requests[i] for i in running]), list(running)
        batch = self._batch
        allocation.alloc_for_decode(batch, 1)
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1

    def finish(self, indices: Sequence[int]) -> None:
        """`release_kv_cache`, which inserts prompt and output."""
        for index in indices:
            request = self._requests[index]
            request.output_ids.extend(self._outputs[index])
            request.finished_reason = schedule_batch.FINISH_LENGTH(len(self._outputs[index]))
            common.release_kv_cache(request, self._cache, checkpoint=True)


def take(cache: UnifiedRadixCache, count: int) -> torch.Tensor:
    """So many free slots, evicting if it must."""
    allocator = cache.token_to_kv_pool_allocator
    if allocator.available_size() < count:
        cache.evict(EvictParams(num_tokens=count - allocator.available_size()))
    return allocator.alloc(count).clone()


def with_prefix(cache: UnifiedRadixCache, prompt: array[int], cached: int) -> torch.Tensor:
    """The slots of a prompt of which `cached` tokens are cached."""
    fresh = take(cache, len(prompt) - cached)
    if not cached:
        return fresh
    found = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt[:cached])))
    indices = cache.path_device_indices(found.last_device_node)
    assert len(indices) == cached
    return torch.cat((indices, fresh))


def store(cache: UnifiedRadixCache, prompt: array[int], cached: int) -> None:
    """Cache a prompt, of which `cached` tokens are."""
    value = with_prefix(cache, prompt, cached)
    cache.insert(InsertParams(key=RadixKey(prompt), value=value, prev_prefix_len=cached))


def request_of(index: int, prompt: array[int], new: int) -> Any:
    """A request with its whole prompt to be computed."""
    request = schedule_batch.Req(str(index), "", prompt, SamplingParams(max_new_tokens=new))
    request.prefix_len, request.extend_end = 0, len(prompt)
    return request


def extend_batch(cache: UnifiedRadixCache, requests: list[Any]) -> Any:
    """What `alloc_for_extend` reads of a batch."""
    prefixes = [request.prefix_len for request in requests]
    lengths = [request.extend_end for request in requests]
    counts = [length - prefix for length, prefix in zip(lengths, prefixes, strict=True)]
    return SimpleNamespace(
        reqs=requests,
        prefix_lens=prefixes,
        extend_lens=counts,
        extend_num_tokens=sum(counts),
        seq_lens=torch.tensor(lengths, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
        device="cpu",
        req_to_token_pool=cache.req_to_token_pool,
        tree_cache=cache,
        hisparse_coordinator=None,
        is_dllm=_no,
        maybe_evict_swa=_no,
    )


def decode_batch(cache: UnifiedRadixCache, requests: list[Any]) -> Any:
    """What `alloc_for_decode` reads of a batch."""
    lengths = torch.tensor([request.kv.kv_allocated_len for request in requests], dtype=torch.int64)
    rows = torch.tensor([request.kv.req_pool_idx for request in requests], dtype=torch.int64)
    return SimpleNamespace(
        reqs=requests,
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        device="cpu",
        req_to_token_pool=cache.req_to_token_pool,
        tree_cache=cache,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        maybe_evict_swa=_no,
    )


def _no() -> bool:
    return False

"""Quire's cache, by the verbs of `KVCache` that its engine calls. Tokens enter as int32 arrays.

Caches have what an engine gives them by default (`StepCalls.DEFAULTS`), except in the rows of a tree or a pool alone.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from bench.bookkeeping.workloads import Arrival, Sizes, Tokens, Tree, tokens
from bench.peers.engines import Quire
from bench.peers.llm_rows import llm_steps
from bench.peers.metadata_worker import Operation, Stopwatch, replay, trace_of
from bench.peers.quire_step import Followers, StepCalls, Steps, Turnover
from bench.peers.step_rows import counted_calls, sample_of, timed_steps

from quire.cache import KVCache, RequestKV
from quire.errors import OutOfPages
from quire.spec.group import ReachSpec
from quire.testing import small_plan

WINDOW = 1_024
GROUPS = {
    "full": (ReachSpec(),),
    "full+window": (ReachSpec(), ReachSpec("window", WINDOW)),
    "full+state": (ReachSpec(), ReachSpec("state")),
}


def new_cache(pool: int, page: int, *, context: int, requests: int = 64, kind: str = "full", **options: Any) -> KVCache:
    """A cache of so many tokens."""
    reaches = GROUPS[kind]
    plan = small_plan(
        pool // page,
        page,
        context=context,
        max_requests=requests,
        groups=tuple(reach.kind for reach in reaches),
        reaches=reaches,
    )
    return KVCache(plan, **options)


def store(cache: KVCache, prompt: Tokens) -> None:
    """One request, from its prompt to its end."""
    kv = cache.begin(prompt)
    cache.extend([kv], [len(prompt) - kv.num_cached])
    cache.finish(kv, prompt)


class System:
    """Generators as `metadata_worker` describes them."""

    OPERATIONS = frozenset(
        (
            *("match", "match_edge", "insert", "insert_again", "evict", "evict_many"),
            *("free", "extend", "decode", "admit", "replay", "evict_pause"),
            *(
                "step",
                "turnover",
                "step_calls",
                "engine_step",
                "followers",
                "llm_step",
                "replay_command",
            ),
        )
    )

    def __init__(self) -> None:
        self._tree: tuple[tuple[Sizes, int], KVCache] | None = None

    def _full(self, sizes: Sizes, page: int) -> KVCache:
        """The tree, filled; kept as long as the same is asked for."""
        if self._tree is None or self._tree[0] != (sizes, page):
            self._tree = None
            tree = Tree(sizes)
            cache = new_cache(tree.num_tokens + sizes.slack, page, context=2 * sizes.chain, requests=16)
            for prompt, _ in tree.prompts():
                store(cache, prompt)
            self._tree = (sizes, page), cache
        return self._tree[1]

    def match(self, sizes: Sizes, page: int, length: int) -> Operation:
        """A prompt of `length` cached tokens and one more, page ids out."""
        cache = self._full(sizes, page)
        return self._match(cache, np.concatenate((Tree(sizes).chain(0)[:length], tokens(1, "next"))))

    def match_edge(self, sizes: Sizes, page: int) -> Operation:
        """A chain that nothing has cut."""
        cache = new_cache(2 * sizes.chain, page, context=2 * sizes.chain)
        chain = Tree(sizes).chain(0)
        store(cache, chain)
        return self._match(cache, np.concatenate((chain, tokens(1, "next"))))

    def _match(self, cache: KVCache, prompt: Tokens) -> Operation:
        times = max(4, 65_536 // len(prompt))
        yield {}
        while True:
            cache.match(prompt)
            with (watch := Stopwatch()):
                for _ in range(times):
                    pages = cache.match(prompt).match.pages
            yield watch.sample(times, tokens=len(pages) * cache.page_size)

    def insert(self, sizes: Sizes, page: int) -> Operation:
        """A node more behind the first `under` tokens of a chain: `commit`."""
        cache = self._full(sizes, page)
        prefix, count = Tree(sizes).chain(1)[: sizes.under], 0
        yield {}
        while True:
            added = []
            for _ in range(8):
                count += 1
                prompt = np.concatenate((prefix, tokens(sizes.node, "insert", count)))
                kv = cache.begin(prompt)
                cache.extend([kv], [len(prompt) - kv.num_cached])
                added.append((kv, prompt))
            before = cache.tree.num_pages
            with (watch := Stopwatch()):
                for kv, prompt in added:
                    cache.commit(kv, prompt)
            new = cache.tree.num_pages - before
            for kv, _ in added:
                cache.finish(kv)
            yield watch.sample(len(added), tokens=new * page // len(added))

    def insert_again(self, sizes: Sizes, page: int) -> Operation:
        """A chain that is cached, computed once more by a request that then gives its own pages up: `commit`."""
        cache = self._full(sizes, page)
        chain = Tree(sizes).chain(2)
        yield {}
        while True:
            kv = cache.begin(chain, hit=cache.match(chain[:1]))
            cache.extend([kv], [len(chain)])
            before = cache.pages.num_free_pages
            with (watch := Stopwatch()):
                cache.commit(kv, chain)
            given = cache.pages.num_free_pages - before
            cache.finish(kv)
            yield watch.sample(1, tokens=given * page)

    def evict(self, sizes: Sizes, page: int, count: int) -> Operation:
        """`count` tokens of a pool without a free page, per token; what was evicted is filled again between samples."""
        cache = self._full(sizes, page)
        filled = 0
        yield {}
        while True:
            while cache.pages.num_free_pages * page >= sizes.node:
                filled += 1
                store(
                    cache,
                    np.concatenate(
                        (Tree(sizes).chain(sizes.chains - 1)[: sizes.node], tokens(sizes.node, page, count, filled))
                    ),
                )
            with (watch := Stopwatch()):
                found = cache.evict(count // page)
            yield watch.sample(found * page, tokens=found * page)

    def evict_many(self, sizes: Sizes, page: int, nodes: int, pages: int) -> Operation:
        """`pages` pages of a tree with that many nodes of a page, three leaves behind each other one."""
        cache = new_cache((nodes + 2_000) * page, page, context=4 * page, requests=1_024)
        leaves = nodes * 3 // 4
        heads, tails = tokens((leaves + 2) // 3 * page, "heads"), tokens(leaves * page, "tails")
        for start in range(0, leaves, 999):
            prompts = [
                np.concatenate((heads[i // 3 * page : (i // 3 + 1) * page], tails[i * page : (i + 1) * page]))
                for i in range(start, min(start + 999, leaves))
            ]
            kvs = [cache.begin(prompt) for prompt in prompts]
            cache.extend(kvs, [2 * page - kv.num_cached for kv in kvs])
            for kv, prompt in zip(kvs, prompts, strict=True):
                cache.finish(kv, prompt)
        yield {}
        while True:
            with (watch := Stopwatch()):
                found = cache.evict(pages)
            yield watch.sample(pages, pages=found)

    def free(self, sizes: Sizes, page: int, verb: str) -> Operation:
        """Private tokens given up in a large pool: by `finish` of an aborted request, or by the allocator alone."""
        cache = new_cache(sizes.big_pool, page, context=4 * sizes.freed)
        prompt = tokens(sizes.freed, "free")
        yield {}
        while True:
            before = cache.pages.num_free_pages
            if verb == "finish":
                kvs = [cache.begin(prompt) for _ in range(8)]
                cache.extend(kvs, [sizes.freed] * 8)
                with (watch := Stopwatch()):
                    for kv in kvs:
                        cache.finish(kv)
            else:
                taken = [cache.pages.alloc_pages(sizes.freed // page) for _ in range(8)]
                with (watch := Stopwatch()):
                    for pages in taken:
                        cache.pages.free_pages(pages)
            yield watch.sample(8, lost=before - cache.pages.num_free_pages)

    def extend(self, sizes: Sizes, page: int) -> Operation:
        """Room for the prompts of a batch, rows written, and the slot of every token."""
        count, length = sizes.extended
        cache = new_cache(2 * count * length, page, context=2 * length, requests=count)
        prompts = [tokens(length, "extend", i) for i in range(count)]
        starts, ends = np.zeros(count, dtype=np.int64), np.full(count, length, dtype=np.int64)
        yield {}
        while True:
            kvs = [cache.begin(prompt) for prompt in prompts]
            with (watch := Stopwatch()):
                batch = cache.rows.batch(kvs)
                cache.extend(batch, ends)
                slots = cache.rows.slots(batch, starts, ends)
            for kv in kvs:
                cache.finish(kv)
            yield watch.sample(1, tokens=len(np.unique(slots)))

    def decode(self, sizes: Sizes, page: int, kind: str, commits: bool) -> Operation:
        """One token more for every running request, and what its step reads: tables brought up to date, frames and
        slots. Requests are at different places of their pages, so that `running / page` of them reach a new one in a
        step; with `commits`, they commit what they have filled at once."""
        count, first, most = sizes.running, 4 * sizes.steps, 48 * sizes.steps
        cache = new_cache(
            count * most * 2,
            page,
            context=most + count + first,
            requests=count,
            kind=kind,
            checkpoint_interval=most * 9,
            **StepCalls.DEFAULTS,
        )
        calls, step, kvs = StepCalls(cache), most, list[RequestKV]()
        known = [tokens(most + count + first, "decode", i) for i in range(count)]
        yield {}
        while True:
            if step + sizes.steps > most:
                for kv in kvs:
                    cache.finish(kv)
                kvs = self._running(cache, first, known)
                lengths, step = first + np.arange(count, dtype=np.int64), 0
            watch = Stopwatch()
            for _ in range(sizes.steps):
                ends = lengths + 1
                with watch:
                    calls.extend(kvs)
                    slots = calls.launch(ends)
                    if commits:
                        full = (ends % page == 0).nonzero()[0].tolist()
                        if full:
                            cache.commit([kvs[i] for i in full], [known[i][: ends[i]] for i in full])
                lengths = ends
            step += sizes.steps
            yield watch.sample(sizes.steps, slots=len(np.unique(slots)))

    def _running(self, cache: KVCache, first: int, known: list[Tokens]) -> list[RequestKV]:
        """Requests of `first`, `first` + 1, ... tokens, of those that are known of each."""
        lengths = first + np.arange(len(known), dtype=np.int64)
        prompts = [of_one[:length] for of_one, length in zip(known, lengths.tolist(), strict=True)]
        kvs = [cache.begin(prompt, hit=cache.match(prompt[:1])) for prompt in prompts]
        cache.extend(kvs, lengths)
        fence = cache.open_fence()
        for group in range(len(cache.groups)):
            cache.launch(group, kvs, lengths)
        cache.close_fence(fence)
        for kv, prompt in zip(kvs, prompts, strict=True):
            cache.commit(kv, prompt)
        return kvs

    def evict_pause(self, sizes: Sizes, page: int) -> Operation:
        """The longest `extend` of `pauses` ones that need room in a full pool, for 256 tokens each: what a step waits
        for at worst. `median` is the median of them."""
        cache = self._full(sizes, page)
        few, filled = min(256, sizes.node), 0
        while cache.pages.num_free_pages * page >= few:
            filled += 1
            store(cache, tokens(few, "pause", filled))
        yield {}
        while True:
            taken = []
            for _ in range(sizes.pauses):
                filled += 1
                prompt = tokens(few, "pause", filled)
                kv = cache.begin(prompt, hit=cache.match(prompt))
                with (watch := Stopwatch()):
                    cache.extend([kv], [few])
                cache.finish(kv, prompt)
                taken.append(watch.sample(1))
            longest = max(taken, key=lambda sample: sample["cpu"])
            middle = float(np.median([sample["cpu"] for sample in taken]))
            yield {"cpu": longest["cpu"], "wall": longest["wall"], "median": middle, "steps": len(taken)}

    def admit(self, sizes: Sizes, page: int, events: str) -> Operation:
        """A prompt of which nothing is cached, in a pool that is full: match, begin, extend, commit. With events `on`
        they are taken from the cache; where they are `read`, every key in them is made in the row, too."""
        taken: list[Any] = []
        emit = {} if events == "off" else {"emit": taken.append}
        cache = new_cache(sizes.admit_pool, page, context=2 * sizes.admitted, requests=4, **emit, **StepCalls.DEFAULTS)
        count = 0
        while cache.pages.num_free_pages * page >= sizes.admitted:
            count += 1
            store(cache, tokens(sizes.admitted, "admit", count))
        yield {}
        while True:
            count += 1
            prompt = tokens(sizes.admitted, "admit", count)
            evicted, hashes = cache.statistics().evicted_pages, 0
            taken.clear()
            with (watch := Stopwatch()):
                hit = cache.match(prompt)
                kv = cache.begin(prompt, hit=hit)
                cache.extend([kv], [len(prompt)])
                cache.commit(kv, prompt)
                if events == "read":
                    hashes = sum(len(event.hashes) for event in taken)
            if events == "on":
                hashes = sum(len(event.hashes) for event in taken)
            cache.finish(kv)
            evicted = (cache.statistics().evicted_pages - evicted) * page
            yield watch.sample(1, tokens=evicted, events=len(taken), hashes=hashes)

    def step(self, sizes: Sizes, page: int, kind: str, running: int) -> Operation:
        """A whole decode step without the model: `Scheduler.schedule`, `ModelRunner.launch`, `Scheduler.settle`."""
        return timed_steps(Steps(kind, page, running, sizes), sizes)

    def turnover(self, sizes: Sizes, page: int, kind: str, running: int) -> Operation:
        """The same where one request ends and another begins in each step: `EngineCore.add`, chunks of its prompt, and
        commits of all that has ended."""
        return timed_steps(Turnover(kind, page, running, sizes), sizes)

    def step_calls(self, sizes: Sizes, page: int, kind: str, running: int) -> Operation:
        """Python functions that this step calls."""
        return counted_calls(Steps(kind, page, running, sizes), sizes)

    def engine_step(self, sizes: Sizes, page: int, kind: str, running: int) -> Operation:
        """`EngineCore.step`, with sampler and outputs."""
        return timed_steps(Steps(kind, page, running, sizes, whole=True), sizes)

    def followers(self, sizes: Sizes, page: int) -> Operation:
        """`Scheduler.schedule` while a leader computes a prompt that others wait for: the median of its calls."""
        followers = Followers(page, sizes.followers, sizes.led)
        yield {}
        while True:
            began = time.perf_counter()
            calls = list(followers.schedules())
            sample = sample_of([(taken,) for taken, _ in calls], ["schedule"], time.perf_counter() - began)
            yield sample | {"cpu": sample["parts"]["schedule"][0], "waiting": min(waiting for _, waiting in calls)}

    def llm_step(self, sizes: Sizes, page: int, folder: str) -> Operation:
        """CPU time of a whole `LLM` in this process, per decode step."""
        return llm_steps(Quire(), sizes, folder)

    def replay_command(self, sizes: Sizes, page: int, trace: str) -> Operation:
        """`quire replay` of a trace with the policy that engines have by default, a process of its own; per run."""
        yield {}
        while True:
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            command = [
                sys.executable,
                "-m",
                "quire",
                "replay",
                trace,
                "--policy",
                "density",
                "--page-size",
                str(page),
                "--json",
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            wall = time.perf_counter() - began
            yield {"cpu": cpu * 1e6, "wall": wall * 1e6, "answered": len(done.stdout) > 0}

    def replay(self, sizes: Sizes, page: int, trace: str) -> Operation:
        """A whole trace, from an empty cache."""
        requests = trace_of(trace)
        yield {}
        while True:
            yield replay(requests, Serving(requests, sizes, page), sizes.replay_running)


class Serving:
    """Quire in the loop of a replay: pages are committed when a prompt has been computed and when a request ends."""

    def __init__(self, trace: list[Arrival], sizes: Sizes, page: int) -> None:
        longest = max(len(request.prompt) + len(request.output) for request in trace)
        self._cache = new_cache(
            sizes.replay_pool,
            page,
            context=min(longest, sizes.replay_pool),
            requests=sizes.replay_running,
            seconds=lambda: self._seconds,
            **StepCalls.DEFAULTS,
        )
        self._seconds = 0.0  # the policy counts them; by the machine's clock each run would have other hits
        self._calls = StepCalls(self._cache)
        self._trace = trace
        self._whole = [np.concatenate((request.prompt, request.output)) for request in trace]
        self._kvs: dict[int, RequestKV] = {}
        self._lengths: dict[int, int] = {}

    def admit(self, index: int) -> int:
        """Match, begin, extend, slots, commit."""
        cache, prompt = self._cache, self._trace[index].prompt
        kv = cache.begin(prompt, hit=cache.match(prompt))
        start, end = kv.num_cached, len(prompt)
        try:
            cache.extend([kv], [end - start])
        except OutOfPages:
            cache.finish(kv)
            return -1
        cache.rows.slots([kv], np.array([start]), np.array([end]))
        cache.commit(kv, prompt)
        self._kvs[index] = kv
        self._lengths[index] = end
        return start

    def step(self, running: Sequence[int]) -> None:
        """What scheduler and runner call for a step of one token each."""
        self._seconds += 0.02
        kvs = [self._kvs[index] for index in running]
        starts = np.array([self._lengths[index] for index in running], dtype=np.int64)
        self._calls.extend(kvs)
        self._calls.launch(starts + 1)
        for index in running:
            self._lengths[index] += 1

    def finish(self, indices: Sequence[int]) -> None:
        """Commit all tokens and end."""
        for index in indices:
            self._cache.finish(self._kvs.pop(index), self._whole[index])

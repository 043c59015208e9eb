"""What decode steps of windows and states do, and how seldom: work follows what changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from quire.cache import KVCache
from quire.cache.groups import PagedGroup
from quire.cache.passing import Passing
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids
from quire.testing import small_plan
from tests.offload import cached_bytes
from tests.offload.cached_bytes import ALICE, asking, tokens_of
from tests.offload.tiered_cache import TieredCache
from tests.scheduler.hybrid_server import FULL, STATE, HybridServer, ids, prompt

PAGE, ROWS = 16, 8


def counting(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of what frees frames of windows."""
    calls: Counter[str] = Counter()
    for owner, name in ((Passing, "pass_by"), (PagedGroup, "evict")):
        real = getattr(owner, name)

        def counted(*given: object, real: object = real, name: str = name, **named: object) -> object:
            calls[name] += 1
            return real(*given, **named)  # type: ignore[operator]

        monkeypatch.setattr(owner, name, counted)
    return calls


def windows(frames: int) -> HybridServer:
    """Requests at different places of their pages, all of which decode."""
    reaches = (FULL, ReachSpec("window", 32))
    server = HybridServer(*reaches, num_pages=400, page_size=PAGE, frames=(400, frames), max_requests=ROWS, chunk=512)
    for row in range(ROWS):
        server.submit(prompt(row, 40 + 2 * row), max_tokens=200)
    for _ in range(40):
        server.step()
    return server


def test_windows_move_on_twice_a_page_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step some request ends a page, and most steps move no window."""
    server, calls = windows(frames=60), counting(monkeypatch)
    for _ in range(4 * PAGE):
        server.step()
        server.cache.audit()
    assert calls["pass_by"] == 8
    assert 0 < calls["evict"] <= 3 * 8
    server.finish()


def test_windows_move_on_at_once_where_frames_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool with few frames beside those that are read: nobody is preempted, or waits."""
    server, calls = windows(frames=4 * ROWS), counting(monkeypatch)
    for _ in range(4 * PAGE):
        server.step()
        server.cache.audit()
    assert calls["pass_by"] > 8
    assert not server.scheduler.num_preemptions
    server.finish()


def test_a_prompt_finds_the_frames_that_windows_have_passed() -> None:
    """What has been passed since windows have moved on is as free as if they moved on in each step."""
    waits, mattered = set(), 0
    for frames in range(3 * ROWS, 6 * ROWS):
        servers = [windows(frames) for _ in range(2)]
        idle = []
        for server, moves in zip(servers, (True, False), strict=True):
            server.scheduler.abort("r0")
            for _ in range(1 + frames % 8):
                server.step()
            if moves:
                server.scheduler._pass_late()
            idle.append(server.cache.groups[1].num_held)
            server.submit(prompt(99, 30), max_tokens=4)
            server.step()
        found = [len(server.scheduler.waiting) for server in servers]
        assert found[0] == found[1], frames
        waits.add(found[0])
        mattered += idle[0] < idle[1]
    assert waits >= {0, 1} and mattered, "no pool was short because of it, so this shows little"


@pytest.mark.parametrize("stores", [True, False])
def test_a_batch_that_decodes_again_has_the_states_that_single_requests_have(stores: bool) -> None:
    """The short way of a batch, beside the long way of a list, over ends of pages and checkpoints."""
    plan = small_plan(200, 4, max_requests=6, groups=("full", "state"), reaches=(FULL, STATE), frames=(200, 30))
    caches = [KVCache(plan, checkpoint_interval=8, share_prefixes=stores) for _ in range(2)]
    tokens = [np.array(prompt(row, 90), dtype=np.int32) for row in range(4)]
    starts = [3 + 2 * row for row in range(4)]
    both = [[cache.begin(each[:start]) for each, start in zip(tokens, starts, strict=True)] for cache in caches]
    for cache, kvs in zip(caches, both, strict=True):
        cache.extend(kvs, starts)
        cache.launch(1, kvs, np.array(starts))
    batch = caches[0].rows.batch(both[0])
    for step in range(1, 60):
        ends, found = np.array(starts) + step, []
        for cache, kvs, asked in zip(caches, both, (batch, both[1]), strict=True):
            cache.extend(asked, 1)
            found.append(cache.launch(1, asked, ends, np.ones(4, dtype=np.int64)))
            if step % 7 == 0:
                cache.commit(kvs, [each[:end] for each, end in zip(tokens, ends.tolist(), strict=True)])
            cache.audit()
        short, long = found
        assert short is not None and long is not None
        for name in ("lengths", "sources", "targets"):
            assert getattr(short, name).tolist() == getattr(long, name).tolist(), (step, name)
    states = [cache.statistics().frames["state"] for cache in caches]
    assert states[0] == states[1]
    assert bool(states[0].left) == stores


def test_a_step_computes_no_request_whose_pages_have_become_those_that_still_arrive() -> None:
    """The host has what a request draws, and another request loads it. When the first one's pages are committed, it
    gets those that arrive. This happens before a step is made, and not while it is: then nobody would wait for them."""
    world, draw = TieredCache(num_pages=30, host=60, reaches=(FULL, STATE), frames=(30, 30)), 7
    known, before = np.full(8 * cached_bytes.PAGE, draw, dtype=np.int32), tokens_of(range(20, 24))
    for tokens in (known, before):
        world.compute(tokens)
    world.drain()
    cache = world.cache
    cache.offload.evict(30, 0, "")
    scheduler = Scheduler(cache, scheduling_policy("fcfs"), max_running=4, max_tokens=64, ahead=world.ahead)

    def add(name: str, tokens: Ids, most: int) -> Request:
        request = Request(name, tokens, SamplingParams(max_tokens=most), max_tokens=most, namespace=ALICE)
        scheduler.add(request)
        return request

    def step() -> None:
        step = scheduler.schedule()
        assert all(kv.is_ready for kv in step.batch.kvs), "a step reads pages whose records are not checked"
        fence = cache.open_fence()
        cache.launch(1, step.batch, step.ends, step.draw_counts)
        scheduler.settle(step, np.full(len(step.draws), draw))
        cache.close_fence(fence)
        cache.audit()

    first = add("first", ids([draw, draw]), 20)
    for _ in range(cached_bytes.PAGE + 1):
        step()
    add("before", asking(before), 1)
    add("loads", asking(known), 1)  # after those of the one before it
    for number in range(9):
        if number % 3 == 2:
            add(f"new {number}", ids([3, 3]), 2)
        step()
    kv = first.kv
    assert kv is not None and kv.loads and not kv.is_ready, "it has got no page that arrives, so this shows little"
    while scheduler.has_requests:
        world.advance()
        step()
    assert first.output_tokens.tolist() == [draw] * 20
    world.drain()

"""Engines whose KV memory gets smaller and larger while requests run: no token is another one, and none is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from quire.cache import resizing
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.device.runner import ModelRunner
from quire.engine.elastic import memory_of
from quire.engine.messages import EngineRequest, Later, MemoryReport, ResizeRequest
from quire.errors import InvalidInput, PlanError, RefusedCombination, RequestTooLarge
from quire.memory.allocator.id_pool import IdPool
from quire.memory.host_pool import HostPool
from quire.offload import host_resizing
from quire.scheduler.sampling_params import SamplingParams
from tests.changes import CORE, DEVICE, TIERS, in_turns, slow_unless_changed
from tests.engine.running import run

MODELS = ("quire-bundled", "quire-bundled-window", "quire-bundled-recurrent")
POOLS = [*((model, False) for model in MODELS), *((model, True) for model in MODELS[1:])]
"""Models, and whether their groups share an arena."""

WATCHED = (*CORE, *DEVICE, *TIERS, "src/quire/loop/", "src/quire/plan/", "tests/engine/test_elastic")
RANGE = {"quire-bundled": "1MiB..4MiB", "quire-bundled-window": "2MiB..6MiB", "quire-bundled-recurrent": "2MiB..6MiB"}


def prompts() -> list[list[int]]:
    random = np.random.default_rng(7)
    shared = random.integers(1000, size=80).tolist()
    sizes = random.integers(10, 120, 24)
    return [shared * (at % 3 == 0) + random.integers(1000, size=int(size)).tolist() for at, size in enumerate(sizes)]


def params() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=6 + at % 20, temperature=0.0, ignore_eos=True) for at in range(len(prompts()))]


def engine(model: str, memory: str = "", **settings: Any) -> EngineCore:
    """An engine in float32, whose tokens do not depend on what else runs."""
    return EngineCore(
        engine_config(
            **{
                "model": model,
                "kv_memory": memory or RANGE[model],
                "dtype": "float32",
                "target_itl_ms": "off",
                "max_running_requests": 6,
                "max_num_batched_tokens": 128,
                "max_model_len": 512,
                "checkpoint_interval": 64,
                **settings,
            }
        )
    )


@cache
def expected(model: str) -> list[list[int]]:
    core = engine(model, "32MiB", enable_prefix_caching=False, max_running_requests=32)
    found = run(core, prompts(), params())
    core.close()
    return found


def answer(core: EngineCore, later: Later[MemoryReport]) -> MemoryReport:
    """What is answered at once."""
    found = later.poll(False)
    assert found is not None
    core.audit()
    return found


def resized(core: EngineCore, num_bytes: int, **options: Any) -> MemoryReport:
    return answer(core, core.resize(ResizeRequest(device_bytes=num_bytes, **options)))


def added(core: EngineCore, name: str) -> dict[str, list[int]]:
    """Queue the prompts; the tokens of each, none yet."""
    for at, (prompt, own) in enumerate(zip(prompts(), params(), strict=True)):
        core.add(
            EngineRequest(request_id=f"{name}-{at}", prompt=np.array(prompt, dtype=np.int32).tobytes(), params=own)
        )
    return {f"{name}-{at}": [] for at in range(len(prompts()))}


def stepped(core: EngineCore, tokens: dict[str, list[int]], between: Callable[[int], None]) -> list[list[int]]:
    """Step until idle, with something between steps."""
    for step in range(20_000):
        if not core.has_work():
            break
        for output in core.step():
            tokens[output.request_id].extend(output.token_ids)
        between(step)
    assert not core.has_work()
    return list(tokens.values())


def swing(core: EngineCore, model: str, times: int, **settings: Any) -> None:
    """Serve the prompts again and again while the size swings between the least and the most, all tokens right."""
    memory = core.memory().device
    done = 0

    def between(step: int) -> None:
        nonlocal done
        if step % 7 == 3:
            small = done % 2 == 0
            found = resized(core, memory.least if small else memory.most, preempt=done % 6 == 4)
            assert found.device.reached == core.plan.pool_bytes or small
            done += 1

    for turn in range(100):
        assert stepped(core, added(core, f"t{turn}"), between) == expected(model)
        core.audit()
        if done >= 2 * times:
            break
    assert done >= 2 * times


@pytest.mark.parametrize("pools", in_turns(POOLS, 2, *WATCHED), ids=str)
def test_the_size_swings_under_load_and_tokens_stay(pools: tuple[str, bool]) -> None:
    model, arena = pools
    core = engine(model, canary="all", arena=arena)
    assert arena == (core.plan.arena is not None)
    swing(core, model, 10)
    statistics = core.statistics()
    assert statistics["moved_frames"] > 0
    assert not statistics["canary"]["found_pages"] and not statistics["failed_requests"]
    core.close()


@slow_unless_changed(*WATCHED)
@pytest.mark.parametrize(("model", "arena"), POOLS)
def test_the_size_swings_with_drafts_and_lower_tiers(model: str, arena: bool, tmp_path: Any) -> None:
    settings: dict[str, Any] = {"host_memory": "64MiB", "storage": str(tmp_path), "storage_size": "64MiB"}
    if model != "quire-bundled-recurrent":
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    core = engine(model, canary="all", load="always", arena=arena, **settings)
    swing(core, model, 10)
    statistics = core.statistics()
    assert statistics["moved_frames"] > 0 and statistics["tiers"]["host_hit_tokens"] > 0
    assert not statistics["canary"]["found_pages"]
    core.close()


def test_a_shrink_waits_for_requests_that_run_and_says_which() -> None:
    core = engine("quire-bundled")
    memory = core.memory().device
    tokens = added(core, "r")
    for _ in range(6):
        for output in core.step():
            tokens[output.request_id].extend(output.token_ids)
    found = resized(core, memory.least)
    assert not found.done and memory.least < found.device.reached < memory.most
    assert {each.name for each in found.holders} <= tokens.keys()
    assert all(0 < each.num_bytes <= each.most_bytes for each in found.holders)
    preempted = core.statistics()["preemptions"]
    assert stepped(core, tokens, lambda step: None) == expected("quire-bundled")
    found = core.memory()
    assert found.done and found.device.reached <= memory.least and not found.holders
    assert core.statistics()["preemptions"] == preempted, "a shrink that waits preempted a request"
    core.close()


def test_new_requests_do_not_keep_a_shrink_from_its_end() -> None:
    core = engine("quire-bundled")
    memory = core.memory().device
    tokens = added(core, "r")
    reached_at = []

    def between(step: int) -> None:
        if step == 5:
            core.resize(ResizeRequest(device_bytes=memory.least))
        if step > 5 and core.memory().done and core.scheduler.waiting:
            reached_at.append(step)

    assert stepped(core, tokens, between) == expected("quire-bundled")
    assert reached_at, "the memory was smaller only when nothing waited any more"
    core.close()


def test_all_memory_is_given_back_and_comes_again() -> None:
    core = engine("quire-bundled", "4MiB..64MiB", host_memory="64MiB", load="always")
    memory = core.memory().device
    warm = run(core, prompts(), params(), "cold")
    assert warm == expected("quire-bundled")
    tokens = added(core, "r")
    for _ in range(6):
        for output in core.step():
            tokens[output.request_id].extend(output.token_ids)
    found = answer(core, core.release_memory(0.0))
    assert found.done and found.released and found.device.reached < memory.most // 20
    assert core.scheduler.num_running == 0 and core.cache.tree.num_pages == 0
    for _ in range(20):
        assert not len(core.step())
    hits = core.statistics()["tiers"]["host_hit_tokens"]
    found = answer(core, core.resume_memory(0.0))
    assert found.done and not found.released and found.device.reached == core.plan.pool_bytes
    assert stepped(core, tokens, lambda step: None) == expected("quire-bundled")
    assert run(core, prompts(), params(), "warm") == expected("quire-bundled")
    assert core.statistics()["tiers"]["host_hit_tokens"] > hits, "what was cached is not found on the host"
    core.close()


def test_a_request_for_the_memory_of_before_is_refused_and_what_was_accepted_runs() -> None:
    core = engine("quire-bundled", "256KiB..4MiB", max_model_len=2048)
    memory = core.memory().device
    largest = core.cache.resizing.plan.largest_request
    prompt = np.arange(largest - 20, dtype=np.int32) % 1000
    own = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)

    def ask(name: str) -> None:
        core.add(EngineRequest(request_id=name, prompt=prompt.tobytes(), params=own))

    ask("before")
    found = resized(core, memory.least)
    assert not found.done
    with pytest.raises(RequestTooLarge, match="the KV memory is smaller now and has") as caught:
        ask("after")
    assert "quire memory --resize" in caught.value.fix
    tokens: dict[str, list[int]] = {"before": []}
    assert len(stepped(core, tokens, lambda step: None)[0]) == 16
    assert core.is_due() or core.memory().done
    until = time.monotonic() + 10
    while not core.memory().done and time.monotonic() < until:
        core.step()
    assert core.memory().done
    core.close()


def test_what_cannot_be_changes_nothing() -> None:
    core = engine("quire-bundled")
    before = core.memory()
    for request in (
        ResizeRequest(device_bytes=before.device.most + 1),
        ResizeRequest(device_bytes=before.device.least - 1),
        ResizeRequest(),
        ResizeRequest(device_bytes=before.device.least, wait_s=-1),
    ):
        with pytest.raises(InvalidInput) as caught:
            core.resize(request)
        assert caught.value.fix
        assert core.memory() == before
    memory_of(core).floors.append(refused)
    with pytest.raises(PlanError, match="a floor"):
        core.resize(ResizeRequest(device_bytes=before.device.least))
    assert core.memory() == before
    core.close()


def refused(plan: Any) -> None:
    raise PlanError("a floor needs more.", fix="lower it.")


def test_the_least_of_a_range_has_to_hold_a_page() -> None:
    with pytest.raises(PlanError, match="cannot hold one page") as caught:
        engine("quire-bundled", "1KiB..4MiB")
    assert "give at least" in caught.value.fix


def test_a_size_without_a_range_is_fixed() -> None:
    core = engine("quire-bundled", "1MiB")
    with pytest.raises(RefusedCombination, match="small pools on cpu have a fixed size") as caught:
        core.resize(ResizeRequest(device_bytes=2**20))
    assert "--kv-memory 1GiB..4GiB" in caught.value.fix
    size = core.memory().device
    assert core.memory().done and size.least == size.reached == size.most == core.plan.pool_bytes
    core.close()


def test_pages_that_are_pinned_keep_their_memory() -> None:
    core = engine("quire-bundled", "512KiB..4MiB", retain_share=0.9)
    run(core, prompts(), params())
    from quire.engine.messages import RetainRequest

    prompt = np.array(prompts()[0], dtype=np.int32).tobytes()
    assert core.retain(RetainRequest(prompt=prompt, ttl_seconds=60.0, pin=True)).granted_tokens
    with pytest.raises(PlanError, match="retentions have pinned") as caught:
        core.resize(ResizeRequest(device_bytes=core.memory().device.least))
    assert "release pins" in caught.value.fix
    core.close()


@pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_host_memory_gets_smaller_and_larger_and_records_stay_right(stored: bool, tmp_path: Any) -> None:
    """Records move in host memory, beside saves, loads and archives."""
    more = {"storage": str(tmp_path), "storage_size": "64MiB", "prefetch": "wait_complete"} if stored else {}
    core = engine("quire-bundled", "1MiB..2MiB", load="always", host_memory="16MiB", **more)
    most = core.memory().host
    assert most is not None and most.reached <= most.most == 16 * 2**20 and core.memory().done
    done = 0

    def between(step: int) -> None:
        nonlocal done
        if step % 60 == 4:
            size = (most.most * 45 // 100, most.most)[done % 2]
            found = answer(core, core.resize(ResizeRequest(host_bytes=size)))
            assert found.host is not None and (found.host.reached <= size or not found.done)
            done += 1

    for turn in range(4):
        assert stepped(core, added(core, f"t{turn}"), between) == expected("quire-bundled")
        answer(core, core.resize(ResizeRequest(host_bytes=most.most * 30 // 100)))
        last = run(core, prompts()[-9:], params()[-9:], f"again{turn}")
        assert last == expected("quire-bundled")[-9:], "what has stayed has other bytes"
        answer(core, core.resize(ResizeRequest(host_bytes=most.most)))
    tiers = core.statistics()["tiers"]
    assert done > 4 and tiers["host_hit_tokens"] + tiers["storage_hit_tokens"] > 0
    assert not tiers["failed_moves"]
    resizing = memory_of(core)._host._resizing
    assert resizing is not None and resizing.num_moved > 0
    core.close()


def test_sessions_at_rest_give_their_host_copies_up_and_requests_that_run_keep_theirs() -> None:
    """What these hold moves together meanwhile, so that the memory beyond is given back."""
    core = engine("quire-bundled", "4MiB..64MiB", load="always", host_memory="4MiB", session_share=0.8)
    random, own = np.random.default_rng(1), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    def ask(name: str, params: SamplingParams, session: str = "") -> None:
        prompt = random.integers(1000, size=200).astype(np.int32).tobytes()
        core.add(EngineRequest(request_id=name, prompt=prompt, params=params, session_id=session))

    for at in range(4):
        ask(f"r{at}", own, f"s{at}")
        while core.has_work():
            core.step()
    ask("runs", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    for _ in range(20):
        core.step()
    most = core.memory().host
    assert most is not None and core.cache.sessions.num_held == 4
    found = answer(core, core.resize(ResizeRequest(host_bytes=most.least)))
    assert found.host is not None and not found.done and found.host.reached < most.most // 4
    assert core.cache.sessions.num_held == 0
    assert stepped(core, {"runs": []}, lambda step: None)[0]
    until = time.monotonic() + 60
    while not core.memory().done and time.monotonic() < until:
        core.step()
    found = core.memory()
    assert found.done and found.host is not None and found.host.reached <= found.host.least
    core.close()


def test_host_memory_that_is_not_there_has_no_size() -> None:
    core = engine("quire-bundled")
    assert core.memory().host is None
    with pytest.raises(RefusedCombination, match="there is none"):
        core.resize(ResizeRequest(host_bytes=2**20))
    core.close()


def held(ids: IdPool, frames: list[int]) -> None:
    """These frames of an unused pool are in use."""
    every = ids.take(ids.num_free)
    rest = every[~np.isin(every, frames)]
    ids.take_back(rest)
    ids.put(rest)


def test_frames_that_are_set_apart_leave_with_their_memory_and_not_before() -> None:
    core = engine("quire-bundled", canary="all")
    group, memory = core.cache.groups[0], core.memory().device
    last = group.num_frames
    held(group.frames.allocator.ids, [1, last - 1, last])
    for frame in (last, 1, last - 1):
        group.set_apart(frame)
    core.audit()
    assert resized(core, memory.least).done, "damaged frames at the end keep a shrink from its end"
    assert group.quarantined == [1]
    assert resized(core, memory.most).done
    core.audit()
    tokens = added(core, "r")
    assert answer(core, core.release_memory(0.0)).done and not group.quarantined
    answer(core, core.resume_memory(0.0))
    assert stepped(core, tokens, lambda step: None) == expected("quire-bundled")
    core.close()


@pytest.mark.parametrize("model", MODELS[1:])
def test_frames_of_both_groups_that_are_set_apart_leave_with_the_memory_of_an_arena(model: str) -> None:
    core = engine(model, canary="all", arena=True)
    arena, memory = core.plan.arena, core.memory().device
    assert arena is not None
    for group in core.cache.groups:
        pool = group.frames.allocator.ids
        if group.index == arena.upper:
            held(pool, [pool.size, pool.size - 1])
        else:  # the end of its memory in the middle of the arena, and its first frame
            held(pool, [1, pool.num_free])
        for frame in np.flatnonzero(pool.is_out(slice(None))).tolist():
            group.set_apart(frame)
    core.audit()
    found = resized(core, memory.least)
    assert found.done and found.device.reached <= memory.least
    assert [group.quarantined for group in core.cache.groups if group.index != arena.upper] == [[1]]
    assert not core.cache.groups[arena.upper].quarantined
    assert resized(core, memory.most).device.reached == memory.most
    core.audit()
    tokens = added(core, "r")
    assert answer(core, core.release_memory(0.0)).done and not any(each.quarantined for each in core.cache.groups)
    answer(core, core.resume_memory(0.0))
    assert stepped(core, tokens, lambda step: None) == expected(model)
    core.close()


def test_a_request_that_waits_for_released_memory_takes_no_damaged_frame_back() -> None:
    core = engine("quire-bundled", canary="all")
    group = core.cache.groups[0]
    answer(core, core.release_memory(0.0))
    tokens = added(core, "r")
    group.quarantined.append(-1)  # found while the last step settled: it is not given up yet
    for _ in range(5):
        core.step()
    assert group.quarantined == [-1], "it is used again"
    group.quarantined.clear()
    answer(core, core.resume_memory(0.0))
    assert stepped(core, tokens, lambda step: None) == expected("quire-bundled")
    core.close()


def test_a_size_that_is_reached_is_counted_and_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine("quire-bundled")
    memory = core.memory().device

    def look(ids: object) -> int:
        raise AssertionError("all ids are looked at")

    with monkeypatch.context() as asked:
        asked.setattr(np, "flatnonzero", look)
        assert core.memory().device.reached == memory.most or core.memory().done
    assert resized(core, memory.least).done
    with monkeypatch.context() as asked:
        asked.setattr(np, "flatnonzero", look)
        assert core.memory().done and core.statistics()["resizes"] == 1
    core.close()


def test_steps_go_on_between_tries_of_a_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again when a request has ended, or after a while: not at each step, which it would drain."""
    core, now = engine("quire-bundled"), 0.0
    part, cache = memory_of(core), core.cache
    monkeypatch.setattr(part, "_seconds", lambda: now)
    tokens = added(core, "r")
    for _ in range(6):
        for output in core.step():
            tokens[output.request_id].extend(output.token_ids)
    assert not resized(core, core.memory().device.least).done
    changes = cache.num_changes
    cache.parts.changed()
    assert cache.num_changes > changes and not part.is_due, "pages were cached, and none is free for it"
    now = 0.06
    assert part.is_due
    now = 0.0
    cache.tree.release(cache.tree.pin(next(iter(cache.tree.nodes()))))
    assert part.is_due
    assert stepped(core, tokens, lambda step: None) == expected("quire-bundled")
    assert core.memory().done
    core.close()


@pytest.mark.parametrize("owner", [resizing, host_resizing])
def test_so_many_bytes_move_at_once_and_no_more(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "MOVED_BYTES", 1)
    core = engine("quire-bundled", "1MiB..2MiB", load="always", host_memory="16MiB")
    part, on_host = memory_of(core), owner is host_resizing
    assert run(core, prompts(), params()) == expected("quire-bundled")
    before, moves, memory = core.cache.counters.moved_frames, 0, core.memory()
    assert memory.host is not None and part._host._resizing is not None

    def moved() -> int:
        return part._host._resizing.num_moved if on_host else core.cache.counters.moved_frames - before

    size = {"host_bytes": memory.host.most * 3 // 100} if on_host else {"device_bytes": memory.device.least}
    found = answer(core, core.resize(ResizeRequest(**size)))
    assert not found.done and moved() == 1
    monkeypatch.setattr(part, "_seconds", iter(range(100, 10**6)).__next__)
    while not core.memory().done:
        last = moved()
        core.step()
        assert moved() - last <= 1
        moves += moved() > last
    assert moves > 1
    assert run(core, prompts(), params(), "again") == expected("quire-bundled")
    core.close()


def test_moves_that_are_left_preempt_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine("quire-bundled", "1MiB..2MiB", max_running_requests=2)
    run(core, prompts(), params())
    tokens = added(core, "r")
    for _ in range(4):
        for output in core.step():
            tokens[output.request_id].extend(output.token_ids)
    monkeypatch.setattr(resizing, "MOVED_BYTES", 1)
    found = resized(core, core.memory().device.least, preempt=True)
    assert not found.done and not core.statistics()["preemptions"], "a request was preempted, which fits"
    monkeypatch.setattr(memory_of(core), "_seconds", iter(range(100, 10**6)).__next__)
    assert stepped(core, tokens, lambda step: None) == expected("quire-bundled")
    core.close()


def test_the_size_of_host_memory_it_was_started_with_can_be_had_again() -> None:
    core = engine("quire-bundled", "1MiB..2MiB", load="always", host_memory="16MiB")
    most = core.memory().host
    assert most is not None and most.asked == most.most == 16 * 2**20
    host = core.cache.offload.tiers.hosts[0]  # type: ignore[attr-defined]
    held(host.allocator.ids, [host.num_frames])
    host.quarantined.append(host.num_frames)
    found = answer(core, core.resize(ResizeRequest(host_bytes=most.most // 2)))
    assert found.done and found.host is not None and found.host.reached <= most.most // 2 and not host.quarantined
    found = answer(core, core.resize(ResizeRequest(host_bytes=most.most)))
    assert found.done and found.host == most
    core.close()


def lost(self: Any, *given: Any) -> None:
    """Nothing is done."""


@slow_unless_changed(*WATCHED)
@pytest.mark.parametrize("owner", [ModelRunner, HostPool])
def test_a_move_that_is_not_done_is_noticed(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames whose bytes stay where they were give other tokens, or the canary or a digest finds them."""
    expected("quire-bundled")
    monkeypatch.setattr(owner, "move_frames" if owner is ModelRunner else "move", lost)
    core = engine("quire-bundled", "1MiB..2MiB", load="always", host_memory="16MiB", canary="all")
    most, wrong = core.memory(), False
    assert most.host is not None
    for turn in range(4):
        wrong |= run(core, prompts(), params(), f"t{turn}") != expected("quire-bundled")
        size = {"host_bytes": most.host.most * 3 // 10} if owner is HostPool else {"device_bytes": most.device.least}
        core.resize(ResizeRequest(**size))
        wrong |= run(core, prompts()[-9:], params()[-9:], f"again{turn}") != expected("quire-bundled")[-9:]
        core.resize(ResizeRequest(device_bytes=most.device.most, host_bytes=most.host.most))
    statistics = core.statistics()
    core.close()
    assert wrong or statistics["canary"]["found_pages"] or statistics["tiers"]["failed_moves"]

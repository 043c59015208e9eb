"""Engines over tiers where everything is short, ends early or comes late: the same tokens, and nothing left behind."""

from __future__ import annotations

import random
import threading
from itertools import count
from typing import Any

import numpy as np
import pytest

from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.memory.frame_copies import FrameCopies
from quire.models.hf import LoadedModel
from quire.spec.ids import Ids
from quire.testing.stores import SlowStore
from tests.changes import TIERS, slow_unless_changed
from tests.engine import running
from tests.engine.running import run, tight_core
from tests.engine.tiered import (
    GREEDY,
    OTHERS,
    PROMPTS,
    Case,
    at_rest,
    below_only,
    build,
    case_of,
    closed,
    settle,
    small,
)
from tests.tiers.scripted_store import ScriptedStore

pytestmark = pytest.mark.usefixtures("threads_end")


@slow_unless_changed(*TIERS, "src/quire/scheduler/")
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("deepseek_v32", "fp8_e4m3"),
        pytest.param("deepseek_v3", "fp4_e2m1", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "mxfp8", marks=pytest.mark.slow),
        ("gpt_oss", "nvfp4"),
    ],
)
def test_encoded_pages(name: str, kv_dtype: str) -> None:
    """Scales and what they are of go and come together."""
    model = LoadedModel(build(name), name=name)
    settings: dict[str, Any] = {"page_size": 4, "max_num_batched_tokens": 17, "kv_dtype": kv_dtype}
    plain = tight_core(model, num_tokens=400, window_tokens=200, **settings)
    expected = run(plain, PROMPTS, GREEDY)
    core = small(model, **settings, host=8.0)
    for turn in range(2):
        assert run(core, PROMPTS, GREEDY, f"p{turn}") == expected
        run(core, OTHERS, GREEDY, f"o{turn}")
    found = closed(core)
    assert found["saved_bytes"] > 0 and found["loaded_bytes"] > 0 and not found["defects"]


@slow_unless_changed(*TIERS, "src/quire/scheduler/")
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("llama_gqa", "write_back"),
        pytest.param("deepseek_v32", "write_through", marks=pytest.mark.slow),
        ("gemma3_text", "write_back"),
        pytest.param("mistral_all_slide", "write_through", marks=pytest.mark.slow),
        pytest.param("falcon_h1", "write_through_selective", marks=pytest.mark.slow),
        ("falcon_h1", "write_through"),
    ],
)
def test_a_host_that_is_as_small_as_the_device(name: str, write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are given up all the time, with a store behind them. Audited after every step."""
    monkeypatch.setattr(running, "AUDIT_EVERY", 1)
    monkeypatch.setattr("quire.engine.tier_storage.open_store", lambda url, capacity: ScriptedStore())
    case = case_of(name)
    core = small(case.model, write_policy=write, host=1.0, overlap=write == "write_back", storage="anywhere")
    for turn in range(2):
        case.check(core, turn)
    found = closed(core)
    assert found["saved_bytes"] > 0
    if all(group.reach.kind == "full" for group in case.model.spec.groups(4)):
        assert found["fetched_bytes"] > 0  # of others, frames of pages that stay cached are computed again
    assert found["failed_moves"] == 0 and not found["defects"]


def test_several_answers_to_one_prompt(dense: Case) -> None:
    """As with n > 1: they begin together, on what only the host has."""
    expected = dense.expected
    core = small(dense.model, max_running_requests=6)
    dense.check(core)
    prompts, answers = [PROMPTS[1]] * 3 + [PROMPTS[4]] * 2, [expected[1]] * 3 + [expected[4]] * 2
    assert run(core, prompts, GREEDY, "n") == answers
    assert closed(core)["loaded_bytes"] > 0


@slow_unless_changed(*TIERS, "src/quire/scheduler/")
@pytest.mark.parametrize(
    "write", [pytest.param("write_through", marks=pytest.mark.slow), "write_through_selective", "write_back"]
)
def test_preempted_requests_go_on_from_the_host(dense: Case, write: str) -> None:
    """Requests that begin small and grow: those that are pushed out come back with what they had."""
    model = dense.model
    params = GREEDY.__class__(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [prompt[:20] for prompt in (*PROMPTS, *OTHERS)]
    prompts = [[7 + index, *prompt] for index, prompt in enumerate(prompts)]
    expected = run(tight_core(model, num_tokens=1000, page_size=4), prompts, params)
    core = small(model, num_tokens=128, max_running_requests=8, write_policy=write, host=6.0)
    assert run(core, prompts, params) == expected
    assert core.statistics()["preemptions"] > 0
    found = closed(core)
    assert found["loaded_bytes"] > 0 and found["host_hit_tokens"] == 0  # which only new requests count
    assert core.statistics()["hit_tokens"] == 0


@pytest.mark.parametrize("seed", [0, 1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20)]])
def test_aborts_at_any_moment(dense: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they wait, read ahead, load, compute and decode. Those that are left say what they would have said."""
    store = SlowStore(ScriptedStore(), (0.0, 0.004), seed=seed)
    monkeypatch.setattr("quire.engine.tier_storage.open_store", lambda url, capacity: store)
    model, expected, others = dense
    core = small(model, host=1.5, storage="anywhere", overlap=bool(seed % 2), write_policy="write_through")
    rng = random.Random(seed)
    known = list(zip((*PROMPTS, *OTHERS), (*expected, *others), strict=True))
    waiting: dict[str, list[int]] = {}
    said: dict[str, list[int]] = {}
    aborted = 0
    for turn in count():
        if turn < 80 and len(waiting) < 8:
            prompt, answer = rng.choice(known)
            name = f"r{turn}"
            waiting[name], said[name] = answer, []
            data = np.array(prompt, dtype=np.int32).tobytes()
            core.add(EngineRequest(request_id=name, prompt=data, params=GREEDY))
        if waiting and rng.random() < 0.3:
            name = rng.choice(list(waiting))
            core.abort(name)
            aborted += 1
            del waiting[name]
        for output in core.step():
            said[output.request_id] += output.token_ids
            if output.finish_reason == "length":
                assert said[output.request_id] == waiting.pop(output.request_id)
            assert output.finish_reason != "error"
        if turn % 5 == 0:
            core.audit()
        if turn >= 80 and not core.has_work():
            break
    assert not waiting and aborted > 5
    found = at_rest(core)
    assert found["failed_moves"] == 0 and not found["defects"]
    core.close()


def test_a_step_is_launched_before_its_load_is_copied(dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame is copied before the step is launched, which would never be if the request waited for the bytes."""
    model, expected = dense.model, dense.expected
    core = small(model, host=8.0)
    dense.check(core)
    settle(core)
    assert below_only(core)
    launched = threading.Event()
    log: list[str] = []
    to_device, launch, forward = FrameCopies.to_device, core.runner.launch, core.runner._forward

    def copied(self: FrameCopies, group: int, device: Ids, host: Ids) -> None:
        assert launched.wait(30), "the step was not launched"
        to_device(self, group, device, host)
        log.append("copied")

    def begins(*given: Any) -> Any:
        launched.set()
        return launch(*given)

    def computes(*given: Any, **named: Any) -> Any:
        log.append("computes")
        return forward(*given, **named)

    assert core.tiers is not None
    monkeypatch.setattr(core.tiers.mover._executor, "_piece_bytes", 1)
    monkeypatch.setattr(FrameCopies, "to_device", copied)
    monkeypatch.setattr(core.runner, "launch", begins)
    monkeypatch.setattr(core.runner, "_forward", computes)
    assert run(core, PROMPTS[1:2], GREEDY, "again") == expected[1:2]
    first = log.index("computes")
    assert first > 1 and "copied" not in log[first:], "and computes when all have come"
    assert closed(core)["loaded_bytes"] > 0


def test_a_tier_that_is_not_asked_for_is_not_there(dense: Case) -> None:
    """No threads, no records, no ids for pages below."""
    model, expected = dense.model, dense.expected
    before = threading.active_count()
    core: EngineCore = tight_core(model, num_tokens=200, page_size=4)
    assert run(core, PROMPTS, GREEDY) == expected
    assert threading.active_count() == before
    assert core.tiers is core.offload.tiers is core.offload.prefetcher is None
    assert core.statistics()["tiers"] is None
    assert core.cache.pages.num_pages == core.plan.num_pages

"""Latents in host memory beside tiers: index keys leave the device and come back, and latents stay where they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from quire.engine.core import EngineCore
from quire.memory.allocator.host import HostTokenToKVPoolAllocator
from quire.memory.record import HEADER_BYTES
from quire.offload.host_groups import PageIdGroup
from quire.plan.budget import MemoryPlan
from quire.plan.plan import Plan
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.hisparse import HotBuffers
from quire.spec.ids import Ids, Tier
from tests.changes import HISPARSE, TIERS, slow_unless_changed
from tests.covering import covering, few
from tests.engine import apart
from tests.engine.running import core_for, run
from tests.engine.tiered import GREEDY, PROMPTS, Case, at_rest, case_of, closed, end_all, settle, small
from tests.tiny_latents import SPARSE
from tests.tiny_models import VOCAB_SIZE

BUFFER, TOP_K = 12, 8


@contextmanager
def latents_on_host(buffer_size: int = BUFFER) -> Iterator[None]:
    """Engines that are made meanwhile have their latents in host memory."""
    planned = Plan.memory.fget
    assert planned is not None

    def memory(plan: Plan) -> MemoryPlan:
        found: MemoryPlan = planned(plan)
        group = next(at for at, each in enumerate(found.groups) if each.name == "full")
        return replace(found, hot=HotBuffers(group=group, buffer_size=buffer_size, top_k=TOP_K))

    with patch.object(Plan, "memory", property(memory)):
        yield


@pytest.fixture(scope="module", params=few(SPARSE, 2))
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    end_all()


def latents_of(core: EngineCore) -> PageIdGroup:
    tiers = core.offload.tiers
    assert tiers is not None
    return next(host for host in tiers.hosts if isinstance(host, PageIdGroup))


GRID = (
    (1, "write_back"),
    (4, "write_through"),
    (4, "write_through_selective"),
    (4, "write_back"),
    (16, "write_through"),
)
"""Page size, when a page is saved."""


@slow_unless_changed(*HISPARSE, *TIERS)
@covering(3, point=GRID, name=SPARSE)
def test_index_keys_are_loaded_and_latents_are_not(name: str, point: tuple[int, str]) -> None:
    case, (page_size, write) = case_of(name), point
    with latents_on_host():
        core = small(case.model, page_size, write_policy=write)
    for turn in range(3):
        case.check(core, turn)
    latents, plan = latents_of(core), core.plan
    found = closed(core)
    index = next(at for at in range(len(plan.groups)) if at != latents.index)
    record = HEADER_BYTES + plan.groups[index].layout.bytes_per_frame
    assert found["host_hit_tokens"] > 0 and found["loaded_frames"] > 0
    assert found["loaded_bytes"] == found["loaded_frames"] * record
    assert found["saved_bytes"] == found["saved_frames"] * record
    assert found["demoted_pages"] > 0 and not found["defects"]
    assert core.statistics()["hisparse"]["swapped_tokens"] > 0


@slow_unless_changed(*HISPARSE, *TIERS)
def test_what_is_stored_comes_back_after_a_restart(case: Case, tmp_path: Path) -> None:
    settings = {"storage": str(tmp_path), "page_size": 4}
    with latents_on_host():
        first = small(case.model, **settings)
        case.check(first)
        assert closed(first)["archived_frames"] > 0
        again = small(case.model, **settings)
    case.check(again)
    found = closed(again)
    assert found["storage_hit_tokens"] > 0 and found["fetched_frames"] > 0 and not found["defects"]


@slow_unless_changed(*HISPARSE, *TIERS)
def test_a_damaged_record_is_found_before_it_is_read(case: Case) -> None:
    """The page is computed again, and its id is not allocated any more."""
    with latents_on_host():
        core = small(case.model, 4)
    case.check(core)
    settle(core)
    latents, cache = latents_of(core), core.cache
    cache.offload.evict(cache.tree.num_evictable, 0, "")
    below = np.flatnonzero((latents.table.frame != 0) & (cache.parts.frames.anchor(Tier.DEVICE).frame == 0))
    assert core.tiers is not None and len(below)
    core.tiers.host.rows(latents.index)[below, HEADER_BYTES] ^= 1
    case.check(core, "again")
    found = closed(core)
    assert found["defects"]["host:digest"] > 0
    cached = [page for node in cache.tree.nodes() for page in node.pages.tolist()]
    assert latents.quarantined and set(latents.quarantined).isdisjoint(cached)
    assert cache.pages.ids.is_out(np.array(latents.quarantined)).all()


@slow_unless_changed(*HISPARSE, *TIERS)
def test_latents_of_a_prompt_arrive_on_the_host_and_stay_there(case: Case) -> None:
    settings = {"page_size": 4, "num_tokens": 256, "max_num_batched_tokens": 17, "max_running_requests": 3}
    with latents_on_host():
        prefill = apart.prefill_engine(case.model, **settings)
        decode = apart.decode_engine(case.model, [prefill], **settings)
    assert apart.run_apart(decode, [prefill], PROMPTS, GREEDY) == case.expected
    found = at_rest(decode)
    assert found["peer_hit_tokens"] > 0 and not found["defects"]
    decode.close()
    prefill.close()


def test_a_prompt_of_100_tokens_takes_two_pages_of_64_and_28_more_tokens_none(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    real = HostTokenToKVPoolAllocator.alloc_pages

    def alloc_pages(allocator: HostTokenToKVPoolAllocator, num_pages: int) -> Ids:
        if allocator is core.cache.pages:
            taken.append(num_pages)
        return real(allocator, num_pages)

    with latents_on_host():
        core = small(case.model, 64, num_tokens=512, max_num_batched_tokens=128)
    monkeypatch.setattr(HostTokenToKVPoolAllocator, "alloc_pages", alloc_pages)
    for num_written, expected in ((28, [2]), (29, [2, 1])):
        taken.clear()
        prompt = np.random.default_rng(num_written).integers(1, VOCAB_SIZE - 1, 100).tolist()
        run(
            core, [prompt], SamplingParams(temperature=0, max_tokens=num_written + 1, ignore_eos=True), f"{num_written}"
        )
        assert taken == expected
    closed(core)


def test_settings_alone_give_latents_in_host_memory_and_tiers(case: Case, tmp_path: Path) -> None:
    settings = {"page_size": 4, "hisparse": {"device_buffer_size": 16}, "storage": str(tmp_path), "load": "always"}
    core = core_for(case.model, **settings, storage_size=64 << 20, host_memory=128 << 20)
    assert run(core, PROMPTS, GREEDY) == case.expected
    assert core.tiers is not None and core.latents is not None and core.latents.host is core.tiers.host
    assert core.plan.host_bytes <= (128 << 20) // 2
    assert closed(core)["archived_frames"] > 0

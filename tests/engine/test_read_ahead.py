"""Engines with windows or states that read ahead from storage what cached pages have lost: the same tokens, reused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.core import EngineCore
from tests.engine.running import run
from tests.engine.tiered import GREEDY, PROMPTS, Case, case_of, closed, end_all, settle, small
from tests.mutants import injected

PROMPT = PROMPTS[1]
REUSABLE = (len(PROMPT) - 1) // 4 * 4
"""Tokens of it, in whole pages of four; the last token is always computed."""


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """An engine that is closed has no thread left."""
    before = threading.active_count()
    yield
    end_all()
    assert threading.active_count() <= before


@pytest.fixture(scope="module", params=["falcon_h1", "gemma3_text"])
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


def drop_parts(core: EngineCore) -> None:
    """What is read in part leaves device and host; the pages stay, with keys and values of all their tokens."""
    settle(core)
    assert core.offload.tiers is not None
    before = core.cache.tree.num_pages + core.cache.tree.num_below
    for group, host in zip(core.cache.groups, core.offload.tiers.hosts, strict=True):
        group.evict(group.num_frames)
        host.evict(host.num_frames)
        left = group.table.reclaims and (group.num_cached or host.counters().cached)
        assert not left, f"group {group.name} has frames still"
    assert core.cache.tree.num_pages + core.cache.tree.num_below == before > 0


def again_without(case: Case, folder: Path) -> tuple[dict[str, Any], int]:
    """The same prompt twice, the second time without what it needs of windows or states; the tiers' statistics of the
    second time, and how many of its tokens were reused."""
    model, expected, _ = case
    core = small(model, storage=str(folder / "kv"), host=8.0)
    assert run(core, [PROMPT], GREEDY, "first") == expected[1:2]
    drop_parts(core)
    assert run(core, [PROMPT], GREEDY, "again") == expected[1:2]
    reused = core.statistics()["hit_tokens"]
    found = closed(core)
    assert found["failed_moves"] == 0 and not found["defects"]
    return found, reused


def test_what_cached_pages_have_lost_comes_from_storage(case: Case, tmp_path: Path) -> None:
    """Of keys and values of all tokens nothing is fetched: those are there."""
    found, reused = again_without(case, tmp_path)
    assert found["storage_hit_tokens"] == reused == REUSABLE
    core = small(case[0], host=8.0)
    sizes = core.tiers.settings.record_bytes if core.tiers is not None else ()
    partial = [at for at, group in enumerate(core.cache.groups) if not group.reach.whole]
    needed = {at: len(core.cache.groups[at].reach.needed(REUSABLE // 4)) for at in partial}
    core.close()
    assert found["fetched_bytes"] == sum(sizes[at] * needed[at] for at in partial) > 0


def test_without_that_it_is_computed_again(case: Case, tmp_path: Path) -> None:
    """As it was while only pages behind the cached ones were looked for."""
    with injected("storage-is-asked-behind-cached-pages-only"):
        found, reused = again_without(case, tmp_path)
    assert (found["storage_hit_tokens"], found["fetched_bytes"], reused) == (0, 0, 0)


def test_who_waited_for_another_prompt_in_vain_asks_for_its_own(case: Case, tmp_path: Path) -> None:
    """Two prompts begin alike; of the first one's end nothing is stored, of the second one's all is."""
    model, expected, _ = case
    settings = {"storage": str(tmp_path / "kv"), "host": 8.0, "num_tokens": 512}
    first = small(model, **settings)
    assert run(first, [PROMPT], GREEDY) == expected[1:2]
    closed(first)
    again = small(model, **settings)
    assert run(again, [PROMPTS[2], PROMPT], GREEDY, "both") == [expected[2], expected[1]]
    assert again.statistics()["hit_tokens"] >= REUSABLE
    assert closed(again)["storage_hit_tokens"] > 0, "but for what the first one has computed meanwhile"

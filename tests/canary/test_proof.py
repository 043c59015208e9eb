"""What an engine does about broken laws, audits that are asked for, and memory that is short."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cache import audit
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.errors import EngineDead
from quire.offload.host_groups import HostGroup
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.running import run, tight_core
from tests.engine.tiered import Case, below_only, case_of, settle, small

PROMPTS = [list(range(first, first + 30)) for first in (1, 60, 120)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def dense() -> Case:
    return case_of("llama_gqa")


def request(name: str, prompt: list[int]) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=np.array(prompt, dtype=np.int32).tobytes(), params=GREEDY)


def audited(core: EngineCore) -> dict[str, Any]:
    """The answer to an audit that is asked for now, after some steps."""
    later = core.audit_cache()
    assert core.is_due()
    for _ in range(1000):
        if (found := later.poll(True)) is not None:
            return found
        core.step()
    raise AssertionError("it never ends")


def test_an_audit_is_whole_when_the_engine_rests(dense: Case) -> None:
    core = tight_core(dense.model, num_tokens=400, page_size=4)
    run(core, PROMPTS, GREEDY)
    found = audited(core)
    assert found["ended"] and found["whole"] and not found["faults"] and not found["violation"]
    assert found["pages"] >= core.cache.tree.num_pages > 0 and found["nodes"] >= 3
    json.dumps(found)


def test_an_audit_beside_requests_ends_and_is_not_whole(dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tight_core(dense.model, num_tokens=400, page_size=4)
    for at, prompt in enumerate(PROMPTS):
        core.add(request(f"r{at}", prompt))
    core.step()
    seconds = iter(np.arange(0.0, 1e6, 1.0))
    monkeypatch.setattr(audit, "perf_counter", seconds.__next__)  # a piece takes a second: one for each step
    found = audited(core)
    assert found["ended"] and not found["whole"] and not found["faults"]
    assert core.has_work()


def test_a_broken_law_stops_admission_and_requests_that_run_end(dense: Case, tmp_path: Path) -> None:
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary_reports=str(tmp_path))
    core.add(request("runs", PROMPTS[0]))
    core.step()
    core.cache.groups[0].table.frame[0] = 3  # the padding page
    ends = list(core.step().noted)
    assert "padding page" in core.statistics()["violation"]
    with pytest.raises(EngineDead, match="a law is broken") as refused:
        core.add(request("late", PROMPTS[1]))
    assert "padding page" in refused.value.detail
    core.cache.groups[0].table.frame[0] = 0
    while core.has_work():
        ends += core.step()
    assert [end.finish_reason for end in ends if end.finish_reason] == ["length"]
    assert core.statistics()["violation"], "it stays"
    [path] = tmp_path.glob("violation-*.json")
    evidence = json.loads(path.read_text())
    assert "padding page" in evidence["faults"][0]
    assert [each["request"] for each in evidence["requests"]] == ["runs"]


def test_an_idle_engine_finds_a_lost_page(dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tight_core(dense.model, num_tokens=400, page_size=4)
    run(core, PROMPTS, GREEDY)
    core.cache.pages.ids.take(1)
    monkeypatch.setattr("quire.canary.parts._IDLE_AFTER_S", 0.0)
    for _ in range(1000):
        assert core.is_due() or core.audits.auditor.num_whole
        core.step()
        if core.audits.violation:
            break
    assert "no owner" in core.audits.violation


def test_what_held_memory_when_it_was_short(dense: Case) -> None:
    core = tight_core(dense.model, num_tokens=64, page_size=4)
    for at, prompt in enumerate(PROMPTS):
        core.add(request(f"r{at}", prompt))
    for _ in range(5):
        core.step()
    found = core.history()
    assert found["num_shortages"] >= 1
    short = found["shortages"][0]
    assert short["why"] and short["requests"][0]["request"] == "r0" and short["requests"][0]["pages"] >= 8
    assert short["frames"]["full"]["free"] <= 16
    while core.has_work():
        core.step()
    highest = {(each["tier"], each["group"], each["state"]): each["frames"] for each in core.history()["highest"]}
    assert 8 <= highest["device", "full", "used"] <= 16


def _share_a_host_frame(core: EngineCore) -> None:
    column = _host(core).table.frame
    pages = column.nonzero()[0]
    column[pages[-1]] = column[pages[0]]


def _free_a_host_frame(core: EngineCore) -> None:
    host = _host(core)
    host.allocator.free_pages(host.table.frame[host.table.frame.nonzero()[0][:1]])


def _lose_a_copy(core: EngineCore) -> None:
    page, _ = below_only(core)[0]
    _host(core).table.frame[page] = 0


def _host(core: EngineCore) -> HostGroup:
    assert core.offload.tiers is not None
    return core.offload.tiers.hosts[0]


@pytest.mark.parametrize("damage", [_share_a_host_frame, _free_a_host_frame, _lose_a_copy])
def test_broken_tables_of_host_memory_are_found(dense: Case, damage: Callable[[EngineCore], None]) -> None:
    core = small(dense.model)
    dense.check(core)
    settle(core)
    assert len(below_only(core)) > 2
    assert not audited(core)["faults"]
    damage(core)
    found = audited(core)
    assert found["faults"] and found["violation"]
    core.close()

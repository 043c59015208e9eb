"""Faults in a running engine are found in bounded time. Requests that read no damage go on; the others are computed
again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.canary.finding import Kind
from quire.canary.parts import MOST_TRIES, CanaryPart
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, RetainRequest
from quire.scheduler.sampling_params import SamplingParams
from tests.canary import faults
from tests.engine.running import run, tight_core
from tests.engine.tiered import Case, case_of

KINDS = {
    faults.bit_flip: {Kind.BYTES},
    faults.neighbour_write: {Kind.BYTES},
    faults.stale_reuse: {Kind.OVERWRITTEN, Kind.BYTES},
    faults.skipped_write: {Kind.UNWRITTEN},
    faults.wrong_slot: {Kind.WRONG_SLOT, Kind.UNWRITTEN},
    faults.wrong_slot_on_the_device: {Kind.UNWRITTEN},
}
RNG = np.random.default_rng(5)
OLD = RNG.integers(1, 200, 41).tolist()
NEW = [RNG.integers(1, 200, n).tolist() for n in (23, 37)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def dense() -> Case:
    return case_of("llama_gqa")


@pytest.fixture(scope="module")
def expected(dense: Case) -> list[list[list[int]]]:
    """The tokens of an engine without a canary."""
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary="off")
    return [run(core, [OLD], GREEDY), run(core, NEW, GREEDY)]


def steps_of(core: EngineCore, prompts: list[list[int]], name: str) -> Iterator[dict[str, list[int]]]:
    """Run these prompts; the tokens so far after each step."""
    tokens: dict[str, list[int]] = {}
    for at, prompt in enumerate(prompts):
        ids = np.array(prompt, dtype=np.int32).tobytes()
        core.add(EngineRequest(request_id=f"{name}-{at}", prompt=ids, params=GREEDY))
        tokens[f"{name}-{at}"] = []
    while core.has_work():
        for output in core.step():
            assert output.finish_reason != "error", output.error
            tokens[output.request_id] += output.token_ids
        yield tokens


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_each_fault_is_found_and_contained(
    fault: Callable[[EngineCore, pytest.MonkeyPatch], None],
    dense: Case,
    expected: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With `--canary all` each is found in the step in which a page with it is cached, or looked at."""
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary="all", canary_reports=str(tmp_path))
    assert run(core, [OLD], GREEDY, "old") == expected[0]
    fault(core, monkeypatch)
    *_, tokens = steps_of(core, NEW, "new")
    found = core.reports.to_dicts()
    assert found, "nothing was found"
    assert {each["kind"] for each in found} <= {str(kind) for kind in KINDS[fault]}
    by_device = fault in (faults.skipped_write, faults.wrong_slot, faults.wrong_slot_on_the_device)
    for each in found:
        assert each["step"] - each["good_step"] <= 2
        assert each["wrote_request"] == ("new-0" if by_device or fault is faults.stale_reuse else "old-0"), each
        assert bool(each["readers"]) == by_device
    reports = sorted(tmp_path.glob("canary-*.json"))
    assert [json.loads(path.read_text())["page"] for path in reports] == [each["page"] for each in found]
    assert all(path.stat().st_mode & 0o77 == 0 for path in reports)
    if not by_device:  # requests that read nothing of it are not disturbed, and the prefix is computed again
        assert list(tokens.values()) == expected[1]
        assert core.statistics()["canary"]["recomputed_requests"] == 0
    if fault is not faults.stale_reuse:
        core.audit()
        assert run(core, [OLD], GREEDY, "again") == expected[0]
        assert run(core, NEW, GREEDY, "more") == expected[1]
        assert core.reports.to_dicts() == found, "what was contained is found again"


def test_a_request_that_read_damage_is_computed_again(dense: Case, expected: list[list[list[int]]]) -> None:
    """It began on the page before the damage: what it draws after it is computed again is right."""
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary="all")
    assert run(core, [OLD], GREEDY, "old") == expected[0]
    steps = steps_of(core, [OLD, NEW[0]], "both")
    next(steps)
    [kv] = [each for each in core.cache.rows.live.values() if each.label == "both-0"]
    faults.flip(core, int(core.cache.groups[0].table.frame[core.cache.rows.page_ids(kv)[4]]))
    before = dict(next(steps))
    assert core.statistics()["canary"]["recomputed_requests"] == 1
    assert core.reports.to_dicts()[0]["readers"] == ["both-0"]
    assert core.statistics()["frames"]["full"]["quarantined"] == 1
    core.audit()
    drawn = len(before["both-0"])
    *_, tokens = steps
    assert tokens["both-1"] == expected[1][0]
    assert len(tokens["both-0"]) == GREEDY.max_tokens
    assert tokens["both-0"][: drawn - 1] == expected[0][0][: drawn - 1]  # the step that read it drew one more
    core.audit()
    assert run(core, [OLD], GREEDY, "again") == expected[0]


@pytest.mark.parametrize("pin", [False, True])
def test_a_damaged_page_of_a_retained_prefix_is_computed_again(
    dense: Case, expected: list[list[list[int]]], pin: bool
) -> None:
    """Without tiers. The retention ends: until it expired, the prefix would be cached up to the damaged page only."""
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary="all", max_model_len=100)
    assert run(core, [OLD], GREEDY, "old") == expected[0]
    prompt = np.array(OLD, dtype=np.int32)
    granted = core.retain(RetainRequest(prompt=prompt.tobytes(), ttl_seconds=1000.0, pin=pin))
    assert granted.granted_tokens == 40 and granted.pinned == pin
    faults.flip(core, int(core.cache.groups[0].table.frame[core.cache.match(prompt).match.pages[4]]))
    core.step()
    assert core.statistics()["canary"]["found_pages"] == core.statistics()["canary"]["quarantined_frames"] == 1
    assert core.statistics()["retentions_lost"] == 1 and not core.offload.retention.num_pages
    core.audit()
    assert run(core, [OLD], GREEDY, "again") == expected[0]
    assert core.cache.match(prompt).num_tokens == 40


def test_damage_that_comes_back_fails_the_request(dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is computed again a few times; then it ends with an error that a client can retry on."""
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary="all")
    other = NEW[0]
    ids = np.array(OLD, dtype=np.int32).tobytes()
    core.add(EngineRequest(request_id="bad", prompt=ids, params=GREEDY))
    ends, tried = [], 0
    while core.has_work():
        if (request := next(iter(core.scheduler.requests), None)) is not None and not request.num_launched:
            faults.skipped_write(core, monkeypatch)
            tried += 1
        ends += [output for output in core.step() if output.finish_reason is not None]
    assert tried == MOST_TRIES + 1
    assert [(end.finish_reason, end.status) for end in ends] == [("error", 500)]
    core.audit()
    run(core, [other], GREEDY, "later")


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_small_share_finds_it_too(
    fault: Callable[[EngineCore, pytest.MonkeyPatch], None], dense: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1 %, within the time of two sweeps, which `statistics` reports."""
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary="1%")
    now = [0.0]
    part = core.part(CanaryPart)
    assert part is not None
    canary = part.canary
    canary._seconds = lambda: now[0]
    canary.budget._at = None
    run(core, [OLD], GREEDY, "old")

    def rest() -> int:
        """Idle steps until two sweeps have ended; how many."""
        sweeps, steps = canary.totals.sweeps, 0
        while canary.totals.sweeps < sweeps + 2:
            now[0] += 0.5
            assert core.is_due()
            core.step()
            steps += 1
        return steps

    rest()
    assert not core.reports.newest
    fault(core, monkeypatch)
    *_, _ = steps_of(core, NEW, "new")
    assert rest() <= 40
    assert core.reports.newest


def test_damaged_frames_in_the_whole_pool_still_leave_room(dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one frame in 64 is quarantined, and a request that fits in no other way gets it."""
    core = tight_core(dense.model, num_tokens=64, page_size=4, max_running_requests=2, canary="all")
    longest = list(range(1, 57))
    expected = run(core, [longest], GREEDY, "a")
    for turn in range(4):
        faults.bit_flip(core, monkeypatch)
        assert run(core, [longest], GREEDY, f"b{turn}") == expected
    assert core.statistics()["canary"]["quarantined_frames"] == 4
    assert core.statistics()["frames"]["full"]["quarantined"] <= 1


def test_a_damaged_frame_stays_out_of_use_while_a_request_waits_for_something_else(
    dense: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn waits for a step in flight of the turn before. There is room."""
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary="all", overlap=True)
    run(core, [OLD], GREEDY, "old")
    faults.bit_flip(core, monkeypatch)
    run(core, [NEW[0]], GREEDY, "new")
    assert core.statistics()["frames"]["full"]["quarantined"] == 1
    prompt = np.array(NEW[1], dtype=np.int32)
    for name in ("left", "comes back"):
        core.add(EngineRequest(request_id=name, prompt=prompt.tobytes(), params=GREEDY, session_id="s"))
        if name == "left":
            while not core.scheduler.num_running or len(core.scheduler._rows.running[0].tokens) == len(prompt):
                core.step()
            prompt = core.scheduler._rows.running[0].tokens.copy()
            core.abort(name)
    core.step()
    [waiting] = core.scheduler.waiting
    assert "last step of its session" in waiting.wait_reason and not core.scheduler.num_running
    assert core.statistics()["frames"]["full"]["quarantined"] == 1
    while core.has_work():
        core.step()


def test_a_hit_on_another_prompt_is_found(dense: Case) -> None:
    """Two pages of the tree that are exchanged are found where a prompt begins on them."""
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary="all")
    run(core, [OLD], GREEDY, "old")
    node = next(core.cache.tree.nodes())
    run_of = np.frombuffer(node.run, dtype=np.int32).copy()
    run_of[[1, 2]] = run_of[[2, 1]]
    node.run = run_of.tobytes()
    *_, _ = steps_of(core, [OLD], "hit")
    assert {each["kind"] for each in core.reports.to_dicts()} >= {str(Kind.WRONG_PREFIX)}
    assert core.statistics()["canary"]["recomputed_requests"] == 1


def test_off_is_off(dense: Case) -> None:
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary="off")
    run(core, [OLD], GREEDY)
    assert core.statistics()["canary"] is None
    assert core.part(CanaryPart) is None
    assert not any(isinstance(part, CanaryPart) for part in core.runner.parts)


def test_a_report_names_no_tokens_and_no_salt(dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tight_core(dense.model, num_tokens=400, page_size=4, canary="all")
    run(core, [OLD], GREEDY, "old", salt="a secret salt")
    faults.bit_flip(core, monkeypatch)
    run(core, [NEW[0]], GREEDY, "new")
    text = json.dumps(core.reports.to_dicts())
    assert "secret" not in text and "tokens" not in text

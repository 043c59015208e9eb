"""Sessions beside tiers, drafts, hot buffers and the canary: the tokens are those of the same turns without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cache.session import SessionGrant, Start
from quire.counters import plain
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.scheduler.sampling_params import SamplingParams
from tests.canary import faults
from tests.engine import drafted, tiered
from tests.engine.hosted import HostedOracle, hosted_core
from tests.engine.running import tight_core
from tests.engine.test_hisparse import model_of
from tests.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
LENGTHS = (21, 38)  # of the first prompts; pages have 4 or 16 tokens
TURNS = 4


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    tiered.end_all()


class Talks:
    """Two conversations, in sessions or in none. `grants` are those of the last turn."""

    def __init__(self, *, sessions: bool) -> None:
        self.answers: list[list[int]] = []
        self.grants: list[SessionGrant | None] = []
        self._sessions = sessions
        self._draw = np.random.default_rng(3)
        self._histories = [self._some(length) for length in LENGTHS]

    def _some(self, count: int) -> list[int]:
        return list(self._draw.integers(1, VOCAB_SIZE - 1, count).tolist())

    def turn(self, core: EngineCore) -> None:
        """Both conversations go on at once."""
        tokens: dict[str, list[int]] = {}
        grants: dict[str, SessionGrant | None] = {}
        for number, history in enumerate(self._histories):
            name = f"talk{number}-{len(self.answers)}"
            tokens[name], grants[name] = [], None
            prompt = np.array(history, dtype=np.int32).tobytes()
            session_id = f"s{number}" if self._sessions else ""
            core.add(EngineRequest(request_id=name, prompt=prompt, params=GREEDY, session_id=session_id))
        while core.has_work():
            for output in core.step():
                assert output.finish_reason != "error", output.error
                tokens[output.request_id] += output.token_ids
                grants[output.request_id] = output.session or grants[output.request_id]
        core.audit()
        self.answers += tokens.values()
        self.grants = list(grants.values())
        self._histories = [
            [*history, *drawn, *self._some(6)] for history, drawn in zip(self._histories, tokens.values(), strict=True)
        ]

    @property
    def starts(self) -> list[Start]:
        return [grant.start for grant in self.grants if grant is not None]


def answers_without(core: EngineCore, turns: int = TURNS) -> list[list[int]]:
    """Those of the same turns in no session. Nothing stays cached on the device."""
    talks = Talks(sessions=False)
    for _ in range(turns):
        talks.turn(core)
    assert not core.statistics()["sessions"]
    core.cache.evict(core.plan.num_pages)
    return talks.answers


def check_continued(core: EngineCore) -> dict[str, Any]:
    """Sessions were continued, in part of a page too, and hold nothing when they are closed."""
    found = core.statistics()
    assert min(found[f"session{name}"] for name in ("s_continued", "_resumed_tokens", "_partial_tokens")) > 0
    core.cache.sessions.close_all()
    core.audit()
    left = core.statistics()
    assert left["sessions_held"] == left["session_held_pages"] == 0
    assert all(frames["private"] == 0 for frames in left["frames"].values())
    return found


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3_next"])
def test_tiers_and_a_restart_of_the_store(name: str, tmp_path: Path) -> None:
    """Held rows end for the host to have the only copies, then the engine ends and another one has the store alone."""
    model = tiered.case_of(name).model
    # Both rows have room: without this size 400 tokens get 4 states, and one request runs with these.
    states = None if name == "llama_gqa" else 12
    bounds: dict[str, Any] = {"num_tokens": 400, "session_share": 0.5, "max_mamba_cache_size": states}

    def core_of(**more: Any) -> EngineCore:
        return tiered.small(model, **bounds, **more)

    plain = core_of()
    expected = answers_without(plain, 6)
    tiered.closed(plain)
    talks, stored = Talks(sessions=True), {"storage": str(tmp_path / "kv"), "write_policy": "write_through"}
    core = core_of(**stored)
    talks.turn(core)
    talks.turn(core)
    assert talks.starts == [Start.CONTINUED] * 2
    tiered.settle(core)
    while states and core.cache.sessions.give_way(by="a test"):
        tiered.settle(core)  # a state is saved when its row ends, and a reclaim waits for no save
    core.cache.parts.reclaim([group.num_frames for group in core.cache.groups], "a test", ())
    tiered.settle(core)
    assert tiered.below_only(core) and core.statistics()["sessions_given_up"] == 2
    talks.turn(core)
    assert talks.starts == [Start.LOST] * 2 and core.statistics()["tiers"]["host_hit_tokens"] > 0
    talks.turn(core)
    assert talks.starts == [Start.CONTINUED] * 2
    check_continued(core)
    tiered.closed(core)
    core = core_of(**stored)
    talks.turn(core)
    assert talks.starts == [Start.NEW] * 2 and core.statistics()["tiers"]["storage_hit_tokens"] > 0
    talks.turn(core)
    assert talks.starts == [Start.CONTINUED] * 2
    assert talks.answers == expected
    check_continued(core)
    tiered.closed(core)


@pytest.mark.parametrize(
    ("name", "speculation"),
    [
        ("llama_gqa", drafted.CHAIN),
        pytest.param("llama_gqa", drafted.TREE, marks=pytest.mark.slow),
        pytest.param(drafted.STATES, drafted.CHAIN, marks=pytest.mark.slow),
    ],
    ids=["chain", "tree", "states"],
)
def test_drafts_from_the_text(name: str, speculation: dict[str, Any]) -> None:
    """Of the same turns before: some are accepted and some not, at the end of turns too."""
    model = drafted.llama() if name == "llama_gqa" else drafted.states()[0]
    expected = answers_without(tight_core(model, num_tokens=400, page_size=4, **drafted.BOUNDS))
    core, talks = drafted.core_with(model, speculation, session_share=0.5), Talks(sessions=True)
    speculator = drafted.drafts_freely(core)
    assert answers_without(core) == expected
    before = speculator.counted().accepted_tokens
    for at in range(TURNS):
        talks.turn(core)
        assert talks.starts == [Start.CONTINUED if at else Start.NEW] * 2
    assert talks.answers == expected
    counted = plain(speculator.counted())
    assert counted["draft_tokens"] > counted["accepted_tokens"] > before
    check_continued(core)


def test_hot_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a session read the latents that they select, from the host and from a buffer that was held."""
    model = model_of("deepseek_v32")
    plain = hosted_core(model, 16, page_size=16)
    expected = answers_without(plain)
    plain.close()
    core, talks = hosted_core(model, 16, page_size=16, session_share=0.5), Talks(sessions=True)
    oracle = HostedOracle(core, monkeypatch)
    for at in range(TURNS):
        talks.turn(core)
        assert talks.starts == [Start.CONTINUED if at else Start.NEW] * 2
    assert talks.answers == expected and oracle.checked > 0
    found = check_continued(core)["hisparse"]
    assert min(found[name] for name in ("hit_tokens", "swapped_tokens", "backed_up_tokens")) > 0
    core.close()


def canary_core(**more: Any) -> EngineCore:
    settings: dict[str, Any] = {"canary": "all", "session_share": 0.5}
    return tight_core(tiered.case_of("llama_gqa").model, num_tokens=400, page_size=4, **settings, **more)


def damage_held_row(core: EngineCore) -> None:
    """A bit of a frame in the middle of the first session's row."""
    kv = next(each for each in core.cache.rows.live.values() if each.is_held and each.label.startswith("talk0"))
    faults.flip(core, int(core.cache.groups[0].table.frame[core.cache.rows.page_ids(kv)[3]]))


def check_contained(core: EngineCore, talks: Talks, expected: list[list[int]]) -> None:
    """Damage below one row was found once, and both conversations go on."""
    assert core.statistics()["frames"]["full"]["quarantined"] == 1
    assert len(core.reports.newest) == 1
    while len(talks.answers) < len(expected):
        talks.turn(core)
        assert talks.starts == [Start.CONTINUED] * 2
    assert len(core.reports.newest) == 1
    check_continued(core)


def test_damage_below_a_row_at_rest() -> None:
    """It is found while nothing runs. The row ends, the next turn computes what is not cached any more, and every token
    is right; the other session goes on."""
    expected = answers_without(canary_core())
    core, talks = canary_core(), Talks(sessions=True)
    talks.turn(core)
    talks.turn(core)
    damage_held_row(core)
    for _ in range(100):
        core.step()
        if core.reports.newest:
            break
    core.audit()
    listed = {each.session_id: each for each in core.sessions(None).sessions}
    assert listed["s0"].held_tokens == 0 and "damaged" in listed["s0"].reason
    assert listed["s1"].held_tokens > 0
    talks.turn(core)
    assert talks.starts == [Start.LOST, Start.CONTINUED]
    check_contained(core, talks, expected)
    assert talks.answers == expected
    assert core.statistics()["canary"]["recomputed_requests"] == 0


def test_damage_below_a_row_that_goes_on() -> None:
    """It is found in the step that reads it, which draws one token, and the turn is computed again."""
    expected = answers_without(canary_core())
    core, talks = canary_core(), Talks(sessions=True)
    talks.turn(core)
    talks.turn(core)
    damage_held_row(core)
    damaged = len(talks.answers)
    talks.turn(core)
    assert talks.starts == [Start.CONTINUED] * 2
    assert core.statistics()["canary"]["recomputed_requests"] == 1
    assert core.reports.to_dicts()[0]["readers"] == [f"talk0-{damaged}"]
    assert talks.answers[: len(talks.answers)] == [*expected[:damaged], talks.answers[damaged], expected[damaged + 1]]
    assert len(talks.answers[damaged]) == GREEDY.max_tokens

"""What each workload is for, and that it is the same everywhere."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from quire.errors import InvalidInput
from quire.sim.hit_bounds import HitBounds
from quire.sim.trace import Trace, TraceRequest, open_trace
from quire.sim.trace_request import VOCABULARY, Text, text_seed, tokens_of
from quire.sim.workloads import WORKLOADS
from tests.sim.tiny_traces import digest

PINNED_TOKENS = [4746, 70928, 41678, 26560, 8743]
PINNED_DIGESTS = {
    "chat": "98bbfef067d37782",
    "sessions": "9427bece5f980141",
    "alternating": "e1d43e0badfd8c39",
    "agents": "3195110df598fbae",
    "agent-sessions": "337d5baf960e8b9f",
    "rag-scan": "14b99be9032f657d",
    "mixed-prefixes": "07ec5fca6ef6e4a7",
    "match-unit": "a5abbede46af623e",
    "over-commit": "d3c1ecfb22149b73",
    "two-loads": "2f58856c3abd4918",
    "near-capacity": "6a31a092825d9e20",
    "abort-storm": "eb44007ce6b6f890",
    "fillers": "1421434b411ce877",
    "fits": "e5a3e2e546118526",
    "rl-groups": "c62e709ccd9e7cf6",
    "same-text-other-namespace": "c9d6f0608af7fb32",
    "noisy-neighbour": "e0c5ef80b1573569",
}


def test_tokens_are_the_same_on_every_machine() -> None:
    assert tokens_of([Text(("a", 1), 3), Text(("a", 2), 2)]).tolist() == PINNED_TOKENS
    assert tokens_of([]).tolist() == []


def test_a_text_is_a_prefix_of_a_longer_one_and_like_no_other() -> None:
    keys = {text_seed(name) for name in (("a",), ("b",), (0,), (1,), (-1,), (0, 0), ("a", 0), (2**64 - 1,), ("",))}
    assert len(keys) == 9
    one, other = (tokens_of([Text(("piece", number), 20_000)]) for number in (1, 2))
    assert (tokens_of([Text(("piece", 1), 500)]) == one[:500]).all()
    assert one.min() >= 0 and one.max() < VOCABULARY
    assert (one == other).sum() < 5
    assert len(np.unique(one)) > 18_000


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_drawn_from_its_seed(name: str) -> None:
    limit = 60 if name == "agent-sessions" else 400  # its prompts are long
    trace = open_trace(name, seed=7, limit=limit)
    assert digest(trace) == digest(trace) == digest(open_trace(name, seed=7, limit=limit))
    assert digest(trace) != digest(open_trace(name, seed=8, limit=limit))
    arrivals = [each.arrival for each in trace]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0.0
    before: set[str] = set()
    for each in trace:
        assert len(each.prompt) and len(each.output)
        assert each.request_id not in before and (not each.after or each.after in before)
        before.add(each.request_id)
    assert (trace.prompt_tokens, len(trace)) == (sum(len(each.prompt) for each in trace), len(before))
    assert trace.prompt_tokens < 3_000_000


def test_workloads_stay_what_they_are() -> None:
    """A measured trace can be made again. Change a digest only with the change that explains it."""
    assert {name: digest(open_trace(name, limit=20)) for name in WORKLOADS} == PINNED_DIGESTS


def test_settings_are_checked() -> None:
    assert len(open_trace("chat:requests=7,rate=0.5")) == 7
    for source, why in (
        ("chat:pages=3", r"no setting 'pages'. Fix: it has requests=200"),
        ("chat:requests=many", r"not a number such as 200: 'many'"),
        ("chat:requests=1.5", r"not a number such as 200"),
        ("chat:requests=0", r"'requests' of workload 'chat' is 0"),
        ("chat:rate=nan", r"is nan"),
    ):
        with pytest.raises(InvalidInput, match=why):
            open_trace(source)


# -- what each is for


def hit_rate(trace: Trace, page_size: int = 16) -> float:
    return HitBounds(trace, page_size).ideal_hit_rate


def by_session(trace: Trace) -> dict[str, list[int]]:
    """Prompt and output tokens of each request, by session."""
    found: dict[str, list[int]] = {}
    for each in trace:
        found.setdefault(each.session, []).append(len(each.prompt) + len(each.output))
    return found


def test_chat_and_sessions_repeat_what_was_said() -> None:
    for name, low, high in (("chat", 0.85, 0.93), ("sessions", 0.75, 0.9)):
        trace = open_trace(f"{name}:requests=1000", seed=1)
        assert low < hit_rate(trace) < high
        last = {}
        for each in trace:
            if each.after:
                said = last[each.session]
                assert each.after == said.request_id and each.think > 0
                assert (each.prompt[: len(said.prompt)] == said.prompt).all()
                assert (each.prompt[len(said.prompt) :][: len(said.output)] == said.output).all()
            last[each.session] = each
        turns = Counter(each.session for each in trace).values()
        assert 2 < np.mean(list(turns)) < 5


def test_alternating_sessions_take_turns_and_do_not_fit_together() -> None:
    trace = open_trace("alternating:tokens=5000")
    assert [each.session for each in trace] == ["s0", "s1"] * 6
    most = max(map(max, by_session(trace).values()))
    assert HitBounds(trace, 16).optimal_hit_tokens(most + 500) < 0.2 * trace.prompt_tokens
    assert hit_rate(trace) > 0.8


def test_agents_come_back_at_once_or_after_minutes() -> None:
    trace = open_trace("agents:tasks=64,calls=20")
    gaps = np.array([each.think for each in trace if each.after])
    assert (gaps < 1).mean() == pytest.approx(0.86, abs=0.03)
    assert (gaps < 10).mean() == pytest.approx(0.95, abs=0.02)
    assert gaps.max() > 60


def agent_sessions(seed: int = 3) -> list[TraceRequest]:
    return list(open_trace("agent-sessions:sessions=20", seed=seed))


def test_sessions_of_agents_share_prompts_and_projects() -> None:
    """Ten sessions have two of the three prompts at most; each begins with one of these."""
    first = [each for each in agent_sessions() if not each.after]
    assert len(first) == 20
    openings = Counter(each.prompt[:6000].tobytes() for each in first)
    assert 2 <= len(openings) <= 3 and openings.most_common(1)[0][1] >= 7
    assert len({each.prompt.tobytes() for each in first}) == 20


def test_turns_of_agents_append_to_what_was_said_or_begin_with_a_summary() -> None:
    found = {each.request_id: each for each in agent_sessions()}
    appended, rewritten, forked, fresh = [], 0, 0, 0
    for each in found.values():
        if not each.after:
            continue
        before = found[each.after]
        if before.session.count("/") > each.session.count("/"):  # a sub-agent has ended
            own, turn = each.request_id.rsplit(".", 1)
            before = found[f"{own}.{int(turn) - 1}"]
        said = np.concatenate((before.prompt, before.output))
        repeats = len(each.prompt) > len(said) and (each.prompt[: len(said)] == said).all()
        if each.session != before.session:
            forked, fresh = forked + repeats, fresh + (not repeats)
        elif repeats:
            appended.append(len(each.prompt) - len(said))
        else:
            rewritten += 1
            assert len(each.prompt) < len(before.prompt) / 2, "a summary is shorter"
            assert (each.prompt[:6000] == before.prompt[:6000]).all()
            assert bytes(before.output) in bytes(each.prompt)
    summaries = [tokens for tokens in appended if tokens <= 400]
    turns = [tokens for tokens in appended if tokens > 400]
    assert len(summaries) == rewritten > 3
    assert 500 <= min(turns) < 600 and 5500 < max(turns) <= 6000
    assert 20 < forked < 2 * fresh < 4 * forked


def test_gaps_of_agents_are_seconds_for_tools_and_minutes_for_people() -> None:
    found = {each.request_id: each for each in agent_sessions()}
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for each in found.values():
        if each.after and found[each.after].session == each.session:
            gaps[found[each.after].calls_tool].append(each.think)
    tool, person = np.array(gaps[True]), np.array(gaps[False])
    assert tool.min() >= 0.3 and tool.max() <= 30 and person.min() >= 20 and person.max() <= 1200
    assert np.median(tool) == pytest.approx(3.0, rel=0.2) and 100 < np.median(person) < 240
    assert len(tool) / (len(tool) + len(person)) == pytest.approx(0.87, abs=0.03)
    ends = {(each.calls_tool, int(each.output[-1])) for each in found.values()}
    assert len(ends) == len({end for _, end in ends}) == 2, "as a model ends its answers"


def test_sessions_of_agents_end_without_a_word() -> None:
    """Some end with a call whose result never comes; nothing else tells that a session has ended."""
    requests = agent_sessions()
    last: dict[str, TraceRequest] = {}
    for each in sorted(requests, key=lambda each: int(each.request_id.rsplit(".", 1)[1])):
        last[each.session] = each
    ends = [each.calls_tool for session, each in last.items() if "/" not in session]
    assert len(ends) == 20 and 2 <= sum(ends) <= 9
    turns = Counter(each.session for each in requests if "/" not in each.session).values()
    assert min(turns) >= 10 and max(turns) > 50


def test_a_scan_leaves_one_prompt_worth_keeping() -> None:
    trace = open_trace("rag-scan")
    hot = [each for each in trace if len(each.prompt) > 2000 and len(each.prompt) <= 2148]
    assert hit_rate(trace) * trace.prompt_tokens == (200 // 8 - 1) * 2048
    assert len(hot) >= 25
    assert HitBounds(trace, 16).optimal_hit_tokens(6000) == (200 // 8 - 1) * 2048


def test_mixed_prefixes_are_few_large_and_many_small() -> None:
    lengths = np.array([len(each.prompt) for each in open_trace("mixed-prefixes")])
    assert 2 < (lengths > 4000).sum() < 40
    assert ((lengths > 600) & (lengths < 4000)).sum() == 0


@pytest.mark.parametrize("unit", [1, 16, 64, 528])
def test_match_unit_is_shared_around_the_unit(unit: int) -> None:
    trace = open_trace(f"match-unit:unit={unit}")
    found = Counter[str]()
    seen: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    for each in trace:
        keys = [earlier[:unit].tolist() == each.prompt[:unit].tolist() for earlier in seen]
        found[each.session] += any(keys)
        seen.append(each.prompt)
    own = 2 * unit
    assert found[f"{unit}+{own}"] == found[f"{unit + 1}+{own}"] == 3
    assert found[f"{unit - 1}+{own}"] == 0
    assert {"1600+600", "1500+700"} <= found.keys()


def test_over_commit_starts_and_cannot_end() -> None:
    trace = open_trace("over-commit:pool=16384,ratio=1.5")
    assert trace.prompt_tokens < 16384 < trace.prompt_tokens + trace.output_tokens
    assert trace.prompt_tokens + trace.output_tokens == pytest.approx(1.5 * 16384, rel=0.1)
    assert list(trace)[-1].arrival < 5


def test_two_loads_fit_one_at_a_time() -> None:
    trace = open_trace("two-loads:pool=10000")
    lengths = [len(each.prompt) + len(each.output) for each in trace]
    assert set(lengths) == {6000}
    assert Counter(each.arrival for each in trace).most_common(1)[0][1] == 2


def test_near_capacity_is_two_pages_less_to_two_more() -> None:
    lengths = by_session(open_trace("near-capacity:pool=4096,page=16"))
    assert {session: set(found) for session, found in lengths.items()} == {
        f"{pages:+d} pages": {4096 + 16 * pages} for pages in (-2, -1, 0, 1, 2)
    }


def test_an_abort_storm_leaves_one_in_nine() -> None:
    leaves = [(each.abort_after, len(each.output)) for each in open_trace("abort-storm:requests=300")]
    left = [(after, length) for after, length in leaves if after is not None]
    assert len(left) == round(0.89 * 300)
    assert all(0 <= after < length for after, length in left)
    assert 60 < sum(after == 0 for after, _ in left) < 120


def test_rl_groups_share_a_prompt_under_the_same_weights_only() -> None:
    trace = open_trace("rl-groups")
    groups = Counter((each.namespace, each.session) for each in trace)
    assert len(groups) == 3 * 4 and min(groups.values()) >= 8 and max(groups.values()) <= 64
    prompts = {(each.namespace, each.session): (len(each.prompt) - 1) // 16 * 16 for each in trace}
    expected = sum((count - 1) * prompts[group] for group, count in groups.items())
    assert HitBounds(trace, 16).ideal_hit_tokens == expected
    assert len({each.prompt.tobytes() for each in trace}) == 4


def test_the_same_text_is_found_in_its_own_namespace_only() -> None:
    trace = open_trace("same-text-other-namespace")
    texts = Counter((each.namespace, each.prompt.tobytes()) for each in trace)
    assert set(texts.values()) == {2} and len(texts) == 5 * len({text for _, text in texts})
    assert HitBounds(trace, 1).ideal_hit_tokens == sum(len(each.prompt) - 1 for each in trace) // 2


def test_the_quiet_tenant_is_one_in_ten() -> None:
    trace = open_trace("noisy-neighbour")
    assert Counter(each.namespace.salt for each in trace) == {"noisy": 180, "quiet": 20}
    quiet = sum(len(each.prompt) for each in trace if each.namespace.salt == "quiet")
    assert hit_rate(trace) * trace.prompt_tokens > 0.7 * quiet
    places = [at for at, each in enumerate(trace) if each.namespace.salt == "quiet"]
    assert max(np.diff(places)) < 30, "the quiet tenant is there all the time"


def test_fillers_stand_between_the_same_requests() -> None:
    trace = open_trace("fillers:fillers=300")
    order = [each.session for each in trace]
    assert order == ["before"] * 24 + ["filler"] * 300 + ["after"] * 24
    before, after = ([each for each in trace if each.session == session] for session in ("before", "after"))
    assert [each.prompt.tobytes() for each in before] == [each.prompt.tobytes() for each in after]
    assert {(len(each.prompt), len(each.output)) for each in trace if each.session == "filler"} == {(1, 1)}


@pytest.mark.parametrize("pool", [2048, 32768])
def test_fits_fits(pool: int) -> None:
    trace = open_trace(f"fits:pool={pool}")
    partly_full = 16 * len(by_session(trace))
    assert HitBounds(trace, 16).working_set_tokens + partly_full < pool

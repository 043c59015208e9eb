"""Replays with speculation: the same outputs, prefixes that are hit as often, and the costs of a draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.cache.running import Lengths
from quire.errors import InvalidInput, WrongContent
from quire.plan.step_cost import CostModel, work_of
from quire.scheduler.step import Step
from quire.sim.pools import plain_pools
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.result import ReplayResult
from quire.sim.trace import open_trace
from quire.spec.speculation import SpeculativeConfig
from quire.speculative.verify import Accepted
from tests.changes import SIMULATOR, slow_unless_changed
from tests.covering import covering, few
from tests.sim.replays import COST, HYBRIDS, replay_of, requests, run

FASTER = CostModel.from_flags(prefill_rate=20_000, decode_ms=2.5, key_ns=10)


def ngram(num_drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig.parse({"method": "ngram", "num_steps": num_drafts})


def counts(result: ReplayResult) -> tuple[int, int]:
    """Drafts that were accepted, and all."""
    assert result.speculation is not None
    return result.speculation["accepted_tokens"], result.speculation["draft_tokens"]


@covering(groups=HYBRIDS, page_size=[1, 4, 16])
def test_a_starved_replay_draws_the_same(groups: str, page_size: int) -> None:
    """Every read is checked, and what a wrong draft wrote is wrong."""
    trace = requests([(20, 30)] * 6 + [(40, 9)], shared=4)
    pages = {1: 110, 4: 28, 16: 8}[page_size]
    result = run(trace, num_pages=pages, page_size=page_size, groups=groups, speculation=ngram(3), acceptance=0.6)
    assert result.preemptions > 0 or groups == "state"
    assert result.count("length") == 7
    accepted, drafted = counts(result)
    assert 0 < accepted < drafted


@slow_unless_changed(*SIMULATOR, "src/quire/speculative/")
@pytest.mark.parametrize("groups", few(HYBRIDS, 2))
def test_prefixes_are_hit_as_often(groups: str) -> None:
    """One request after the other, in an order of eviction that learns nothing, so that only what drafts reserve and
    drop could make a difference. The state at the end of a page that a draft reaches is not stored: who goes on from
    there begins a little earlier."""
    trace = open_trace("chat:requests=30,rate=1", seed=2)
    serial = [replace(request, arrival=at * 1e4, after="") for at, request in enumerate(trace)]
    settings = {"num_pages": 600, "page_size": 16, "context": 9_000, "chunk": 2048, "groups": groups, "check": "reads"}
    settings["policy"] = "lru"
    plain = run(serial, **settings)
    result = run(serial, **settings, speculation=ngram(4), acceptance=0.8)
    assert plain.evicted_tokens > 0 < plain.hit_tokens
    assert result.hit_rate >= (0.98 if groups == "state" else 0.99) * plain.hit_rate
    assert result.output_tokens == plain.output_tokens
    assert result.steps < 0.5 * plain.steps
    accepted, drafted = counts(result)
    assert 0.5 < accepted / drafted < 0.8, "a draft after a wrong one is not accepted"


@slow_unless_changed(*SIMULATOR, "src/quire/speculative/")
def test_prefixes_of_requests_that_run_together_are_hit_as_often() -> None:
    """Requests end earlier, so others are beside them, as on a device that decodes as fast without drafts."""
    settings = {"num_pages": 1000, "page_size": 16, "context": 40_000, "chunk": 2048, "check": "off"}
    rates = {"plain": 0.0, "drafts": 0.0}
    for seed in range(3):
        trace = open_trace("agents", limit=100, seed=seed)
        plain = run(trace, **settings, cost=FASTER)
        result = run(trace, **settings, speculation=ngram(4), acceptance=0.7)
        assert plain.evicted_tokens > 0 < result.evicted_tokens
        assert result.seconds == pytest.approx(plain.seconds, rel=0.1)
        rates = {"plain": rates["plain"] + plain.hit_rate, "drafts": rates["drafts"] + result.hit_rate}
    assert rates["drafts"] >= 0.98 * rates["plain"] > 0


def test_acceptance_is_as_given_or_as_recorded() -> None:
    trace = requests([(10, 400)] * 3)
    found = {chance: run(trace, num_pages=400, speculation=ngram(1), acceptance=chance) for chance in (0.0, 0.4, 1.0)}
    shares = [accepted / drafted for accepted, drafted in map(counts, found.values())]
    assert shares == [0.0, pytest.approx(0.4, abs=0.05), 1.0]
    tokens_per_step = found[1.0].speculation["tokens_per_step"]  # type: ignore[index]
    assert tokens_per_step == pytest.approx(2, abs=0.02)
    recorded = [replace(each, acceptance=1.0 if each.request_id == "r0" else 0.0) for each in trace]
    accepted, drafted = counts(run(recorded, num_pages=400, speculation=ngram(1)))
    assert accepted / drafted == pytest.approx(1 / 5, abs=0.01), "one request in two, in a half of the steps of others"
    with pytest.raises(InvalidInput, match="records no acceptance"):
        run(trace, num_pages=400, speculation=ngram(1))


def test_no_step_is_in_flight_while_drafts_are_made() -> None:
    with pytest.raises(InvalidInput, match="overlap"):
        replay_of(overlap=True, speculation=ngram(2), acceptance=0.5)


def test_what_a_rejected_draft_wrote_is_never_read() -> None:
    """Were it kept, the next step would read it."""
    replay = replay_of(num_pages=64, speculation=ngram(3), acceptance=0.5)
    (part,) = replay.drafts
    accepted = part.accepted

    def careless(step: Step, drawn: Lengths) -> Accepted:
        return accepted(step, drawn)._replace(kept=step.draw_counts)

    part.accepted = careless  # type: ignore[method-assign]
    with pytest.raises((WrongContent, AssertionError)):
        replay.run(requests([(10, 40)]))


def test_a_draft_costs_a_token_of_a_prompt() -> None:
    one, drafted = np.array([99]), np.array([3])
    tokens, pairs, contexts = work_of(one, one + 4, drafted)
    assert (tokens, pairs, contexts.tolist()) == (4, 101 + 102 + 103, [100])
    cost = CostModel(launch=0.0, weights=0.0, token=1.0, pair=0.5, reads=((0.25, 0),))
    assert cost.seconds(one, one + 4, drafted) == 4 + 0.5 * 306 + 0.25 * 100
    assert cost.seconds(one, one + 1) == 1 + 0.25 * 100


def test_pools_have_the_reserve() -> None:
    plan = plain_pools(1_000, 10, context=900, max_running=4, speculation=ngram(4))
    assert plan.tokens_per_step == 5
    assert plan.largest_request == 900 <= 1_000 + 1 - 10
    result = Replay(plan, COST, ReplaySettings(acceptance=1.0, check="all")).run(requests([(500, 399)]))
    assert result.count("length") == 1

"""Replays with latents in host memory: hits as of the selections alone, times of swap-ins, more requests, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bench.sparse.drawn import drifting_selections, lru_hits

from quire.errors import InvalidInput
from quire.plan.hisparse import HiSparseCosts
from quire.plan.step_cost import CostModel
from quire.sim.comparison import Grid, SimulatedModel, compare
from quire.sim.hisparse import SimulatedHiSparse, VirtualBuffers
from quire.sim.pools import model_pools
from quire.sim.replay import ReplaySettings
from quire.sim.result import ReplayResult
from quire.sim.selections import SelectionRecorder, Selections, optimal_hits
from quire.sparse.hot_slots import HotSlots
from quire.spec.catalogue import CATALOGUE
from quire.spec.hisparse import HiSparseConfig
from quire.spec.model import ModelSpec
from tests.sim.replays import requests
from tests.sim.tiny_traces import trace_of

TOP_K, LAYERS = 16, 3
SPEC = ModelSpec.from_config(CATALOGUE["deepseek-v3.2"].config | {"index_topk": TOP_K, "num_hidden_layers": LAYERS})
COST = CostModel.from_flags(prefill_rate=1e6, decode_ms=5)
FAST = replace(COST, host_bandwidth=1e15)
SMALL = HiSparseConfig(device_buffer_size=24)
LATENT_BYTES = LAYERS * (512 + 64) * 2


def runs(
    trace: list[Any], hisparse: SimulatedHiSparse, *, cost: CostModel = COST, tokens: int = 1024, running: int = 64
) -> tuple[ReplayResult, ReplayResult]:
    """Replays with all latents on the device and with hot buffers, with all checks."""
    grid = Grid(
        models=[SimulatedModel(name="tiny", spec=SPEC, cost=lambda plan: cost)], policies=["lru"], pools=[tokens],
        page_sizes=[16], max_running=running, settings=ReplaySettings(check="all"), hisparse=[hisparse],
    )  # fmt: skip
    resident, hot = compare(trace_of(trace), grid, lambda what, ended: None)
    return resident, hot


def test_more_requests_run_at_once_in_the_same_bytes() -> None:
    """With everything read and audited. The hot buffers are between nothing and Belady's optimum."""
    resident, hot = runs(requests([(200, 50)] * 24), SimulatedHiSparse(config=SMALL), cost=FAST)
    use = hot.hisparse
    assert resident.hisparse is None and use is not None
    assert (use.device_buffer_size, use.top_k, use.source) == (24, TOP_K, "drift 0.95")
    assert (use.resident_tokens, use.resident_most_running) == (1024, resident.most_running)
    assert hot.most_running >= 2 * resident.most_running and hot.mean_running > resident.mean_running
    assert use.tokens > 1024 and hot.place == resident.place
    assert not use.loses and hot.seconds < resident.seconds and hot.gap_closed is resident.gap_closed
    assert use.optimal_hit_rate is not None and 0 < use.hit_rate < use.optimal_hit_rate < 1
    assert [each.output_tokens for each in hot.records] == [50] * 24
    lengths = [250] * 24
    plan = model_pools(SPEC, 1024, 16, lengths=lengths, max_running=64, chunk=2048)
    assert use.device_bytes <= plan.pool_bytes < use.device_bytes + 64 * plan.bytes_per_page


def test_what_a_step_waits_for() -> None:
    """Alone, a request waits in each step for what it swaps in and for bookkeeping, and prompts for what is behind
    them on the host."""
    trace = requests([(100, 11)])
    fast, slow = (runs(trace, SimulatedHiSparse(config=SMALL, link_rate=rate), running=1)[1] for rate in (1e15, 1e6))
    use = slow.hisparse
    assert use is not None and fast.hisparse is not None and use.hit_rate == fast.hisparse.hit_rate
    steps = slow.steps - 1  # the first is the prompt
    assert steps == 10 and use.prompt_bytes == 0
    bookkeeping = LAYERS * HiSparseCosts().bookkeeping_s
    assert use.swap_s_per_step == pytest.approx(use.swapped_bytes_per_step / 1e6 + bookkeeping)
    assert use.swapped_bytes_per_step * steps % LATENT_BYTES == pytest.approx(0)
    assert slow.seconds - fast.seconds == pytest.approx(steps * use.swapped_bytes_per_step / 1e6)
    assert "with all latents on the device" in use.loses
    follow_up = [*trace, replace(trace[0], request_id="again", arrival=100.0)]
    again, soon = (
        runs(follow_up, SimulatedHiSparse(config=SMALL, link_rate=rate), running=1)[1] for rate in (1e6, 1e15)
    )
    assert again.hisparse is not None and again.hisparse.prompt_bytes == 96 * LATENT_BYTES
    waits, waits_less = (each.records[1].first_token - 100.0 for each in (again, soon) if each.records[1].first_token)
    assert waits - waits_less == pytest.approx(96 * LATENT_BYTES / 1e6)


def test_recorded_selections_hit_as_they_do_alone() -> None:
    """Every request takes those of one recorded request and index, from the first to the last."""
    drawn = drifting_selections(0.9, context=100, top_k=TOP_K, steps=30, num_requests=4)
    recorded = replace(drawn, request=drawn.request // 2, index=drawn.request % 2)
    order = np.lexsort((recorded.index, recorded.step))
    recorded = recorded.rows(order)
    assert (recorded.num_requests, recorded.num_indexes) == (2, 2)
    settings = SimulatedHiSparse(config=SMALL, selections=recorded, source="some.npz")
    use = runs(requests([(100, 31)] * 4), settings)[1].hisparse
    assert use is not None and use.source == "some.npz"
    assert use.hit_rate == lru_hits(recorded, 24).rate
    assert use.optimal_hit_rate == optimal_hits(recorded, 24).rate
    longer = runs(requests([(100, 301)] * 4), settings)[1].hisparse
    assert longer is not None and longer.optimal_hit_rate is not None
    assert 0 < use.hit_rate < longer.hit_rate <= longer.optimal_hit_rate  # fewer of its steps fill the buffers


def test_selections_of_another_size_are_refused() -> None:
    plan = model_pools(SPEC, 2048, 16, lengths=[250], max_running=4, chunk=64, hisparse=SMALL)

    def buffers(selections: Selections, **changes: Any) -> VirtualBuffers:
        settings = SimulatedHiSparse(config=SMALL, selections=selections, source="some.npz")
        return VirtualBuffers(settings, replace(plan, **changes), COST)

    narrow = drifting_selections(0.9, context=40, top_k=8, steps=3)
    with pytest.raises(InvalidInput, match=r"some\.npz has selections of 8 tokens, and the model selects 16"):
        buffers(narrow)
    assert plan.hot is not None
    with pytest.raises(InvalidInput, match="of 8 tokens, and a buffer has 4"):
        buffers(narrow, hot=replace(plan.hot, top_k=8, buffer_size=4))
    with pytest.raises(InvalidInput, match="has no rows"):
        buffers(narrow.rows(np.zeros(3, dtype=np.bool_)))
    with pytest.raises(InvalidInput, match="hisparse in the device bytes of 32 tokens"):
        model_pools(SPEC, 32, 16, lengths=[250], max_running=4, chunk=64, hisparse=HiSparseConfig())


def test_a_recorder_gives_up_beyond_its_limit() -> None:
    found = drifting_selections(0.7, context=6, top_k=3, steps=4)
    for limit, recorded in ((12, 4), (11, 0)):
        recorder = SelectionRecorder(HotSlots(1, 1, 4), limit=limit)
        for call in found.calls():
            recorder.swap_in(0, call.request, call.positions, call.newest.astype(np.int64))
        assert (len(recorder.selections().step), recorder.is_complete) == (recorded, recorded == 4)
        assert recorder.hit_tokens == lru_hits(found, 4).hit_tokens

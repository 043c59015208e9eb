"""The times that an engine reports of its sequences for tracing: each once, in order, those of the loop."""

from __future__ import annotations

import time

import numpy as np
import pytest

from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, SequenceTimes
from quire.engine.reporting import TimesPart
from quire.loop import Launched, Part
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.running import AMPLE, core_for
from tests.engine.tiered import Case

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


class Launches(Part):
    """When steps were launched, by the clock of the loop, with the requests that they computed."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}

    def launched(self, launched: Launched) -> None:
        for request in launched.step.requests:
            self.first.setdefault(request.request_id, launched.began)


def request(name: str, length: int, params: SamplingParams = PARAMS) -> EngineRequest:
    prompt = np.arange(1, 1 + length, dtype=np.int32) * (1 + len(name)) % 50 + 1
    return EngineRequest(request_id=name, prompt=prompt.tobytes(), params=params)


def stepped(core: EngineCore, until: int = 1000) -> dict[str, list[SequenceTimes]]:
    """What the next steps report."""
    found: dict[str, list[SequenceTimes]] = {}
    while core.has_work() and (until := until - 1) >= 0:
        for output in core.step():
            if output.times is not None:
                assert not output.token_ids and output.finish_reason is None
                found.setdefault(output.request_id, []).append(output.times)
    return found


@pytest.fixture
def core(dense: Case) -> EngineCore:
    where = "http://127.0.0.1:4318/v1/traces"
    settings = {"max_num_batched_tokens": 32, "max_running_requests": 2, "otlp_traces_endpoint": where}
    config = engine_config(model=dense.model.name, kv_memory=AMPLE, **settings)
    return EngineCore(config, model=dense.model, parts=[Launches()])


def test_each_sequence_reports_once_when_what_happened(core: EngineCore) -> None:
    launches = core.part(Launches)
    assert launches is not None
    before = time.monotonic()
    for name in ("a", "bb", "ccc"):  # the third waits for room, and each prompt takes several steps
        core.add(request(name, 100))
    found = stepped(core)
    assert {name: len(times) for name, times in found.items()} == {"a": 1, "bb": 1, "ccc": 1}
    for name, (times,) in found.items():
        assert times.launched == launches.first[name]
        order = (before, times.queued, times.matched, times.admitted, times.launched, times.first_token)
        assert list(order) == sorted(order) and times.first_token < time.monotonic()
        assert times.fetched is None
    assert found["ccc"][0].matched > found["a"][0].first_token, "it waits until that one has ended"


def test_a_sequence_that_ends_before_a_token_has_none(core: EngineCore) -> None:
    core.add(request("a", 100))
    found = stepped(core, until=1)
    core.abort("a")
    found |= stepped(core)
    (times,) = found["a"]
    assert times.launched > 0 and times.first_token == 0.0
    part = core.part(TimesPart)
    assert part is not None and not part._prompts


def test_without_tracing_there_is_no_such_part(dense: Case) -> None:
    core = core_for(dense.model)
    core.add(request("a", 20))
    assert core.part(TimesPart) is None and stepped(core) == {}

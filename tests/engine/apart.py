"""Two or three engines in one process, of which some compute prompts for others, and what must be true of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.running import tiered_core

COMMON = {
    "transfer_secret": "a secret of these tests",
    "transfer_connector": "tcp",
    "transfer_listen": "127.0.0.1:0",
    "transfer_min_tokens": 1,
}
_LONGEST_S = 60.0


def prefill_engine(model: LoadedModel, *, num_tokens: int, **settings: Any) -> EngineCore:
    """An engine that computes prompts for others, at a free port."""
    return tiered_core(model, num_tokens=num_tokens, **{**COMMON, "role": "prefill", **settings})


def decode_engine(model: LoadedModel, others: Sequence[EngineCore], *, num_tokens: int, **settings: Any) -> EngineCore:
    """An engine that has these compute its prompts. Returns when it is connected."""
    peers = ",".join(address_of(other) for other in others)
    core = tiered_core(
        model, num_tokens=num_tokens, **{**COMMON, "role": "decode", "prefill_peers": peers or None, **settings}
    )
    wait_for(lambda: len(ready_peers(core)) == len(others), core, *others)
    return core


def wait_for(check: Callable[[], bool], core: EngineCore, *others: EngineCore) -> None:
    """Let the engines make steps until this is true of the first."""
    until = time.monotonic() + _LONGEST_S
    while not check():
        assert time.monotonic() < until, transfer_of(core)
        turn(core, *others)


def address_of(core: EngineCore) -> str:
    """Where an engine listens for others."""
    return str(transfer_of(core)["address"])


def transfer_of(core: EngineCore) -> Any:
    """The statistics of its transfers."""
    return core.statistics()["transfer"]


def ready_peers(core: EngineCore) -> list[str]:
    """Names of prefill engines that it can ask."""
    return [peer["name"] for peer in transfer_of(core)["prefill_peers"] if peer["state"] == "connected"]


def turn(*cores: EngineCore) -> dict[str, list[int]]:
    """One step of each engine that has something to do; the tokens that came out, by request."""
    found: dict[str, list[int]] = {}
    is_idle = True
    for core in cores:
        if core.has_work() or core.has_moves():
            is_idle = False
            for output in core.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
                assert output.finish_reason != "error", output.error
    if is_idle:
        time.sleep(0.001)
    return found


def run_apart(
    core: EngineCore,
    others: Sequence[EngineCore],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    name: str = "r",
) -> list[list[int]]:
    """As `running.run`, with the other engines beside it."""
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        request_id = f"{name}-{i}"
        prompt_bytes = np.array(prompt, dtype=np.int32).tobytes()
        core.add(EngineRequest(request_id=request_id, prompt=prompt_bytes, params=params))
        tokens[request_id] = []
    until, steps = time.monotonic() + _LONGEST_S, 0
    while core.has_work():
        assert time.monotonic() < until, f"it never ends: {core.statistics()['waiting_reason']}"
        for request_id, new in turn(core, *others).items():
            tokens[request_id].extend(new)
        steps += 1
        if steps % 50 == 0:
            for each in (core, *others):
                each.audit()
    while any(each.has_moves() for each in (core, *others)):
        assert time.monotonic() < until, "transfers never end"
        turn(core, *others)
    for each in (core, *others):
        each.audit()
    return list(tokens.values())

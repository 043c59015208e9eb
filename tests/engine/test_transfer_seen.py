"""What is said of prompts that another engine computes, or should have: explanations, usage, metrics and the log."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.cache.request_kv import CacheUse
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, TokenOutput
from quire.observe.metrics import ServerMetrics
from quire.transfer.control import Silent
from tests.engine.apart import address_of, decode_engine, prefill_engine, run_apart, transfer_of, turn
from tests.engine.tiered import GREEDY, LONGEST, PROMPTS, Case, case_of

PAGE = 4
PROMPT = PROMPTS[1]
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama")


def engines(case: Case, **settings: Any) -> tuple[EngineCore, EngineCore]:
    room = 8 * LONGEST
    prefill = prefill_engine(case.model, num_tokens=room, page_size=PAGE, transfer_name="prefill-0")
    return prefill, decode_engine(
        case.model, [prefill], num_tokens=room, page_size=PAGE, transfer_name="decode-0", **settings
    )


def answered(core: EngineCore, *others: EngineCore) -> TokenOutput:
    """The last output for the prompt."""
    core.add(EngineRequest(request_id="r", prompt=np.array(PROMPT, dtype=np.int32).tobytes(), params=GREEDY))
    last, until = None, time.monotonic() + 60
    while core.has_work():
        assert time.monotonic() < until
        for output in core.step():
            last = output
        turn(*others) if others else time.sleep(0.001)
    assert last is not None
    return last


def reasons(core: EngineCore) -> list[tuple[str, int, str]]:
    explanation = core.explain("r")["r"].to_dict()
    assert sum(reason["tokens"] for reason in explanation["reasons"]) == len(PROMPT)
    return [(reason["cause"], reason["tokens"], reason.get("detail", "")) for reason in explanation["reasons"]]


def samples(core: EngineCore) -> dict[tuple[str, ...], float]:
    text = (
        ServerMetrics(core.ready().metrics, core.statistics, lambda: True, model_name="m", version="1").text().decode()
    )
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels.keys() - {"model_name"}))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "transfer" in sample.name or "tier_hit" in sample.name
    }


def test_a_prompt_came_from_its_peer(case: Case) -> None:
    prefill, decode = engines(case)
    try:
        output = answered(decode, prefill)
        assert output.use == CacheUse(num_cached_tokens=WHOLE, num_peer_tokens=WHOLE)
        found = reasons(decode)
        assert found[0] == ("hit", WHOLE, "from prefill-0") and len(found) == 2
        where = {"name": "prefill-0", "address": address_of(prefill), "state": "connected"}
        assert transfer_of(decode)["prefill_peers"] == [where]
        assert transfer_of(prefill)["decode_peers"] == [{"name": "decode-0", "address": "127.0.0.1"}]
        got, sent = samples(decode), samples(prefill)
        assert got["quire_transfer_asks_total", "prefill-0"] == 1
        assert got["quire_transfer_received_tokens_total", "prefill-0"] == WHOLE
        assert got["quire_transfer_ask_seconds_count", "prefill-0"] == 1
        assert got["quire_transfer_part_seconds_count", "prefill-0"] >= 1
        assert got["quire_transfer_connected_peers", "prefill"] == 1
        assert got["quire_tier_hit_tokens_total", "peer"] == WHOLE and got["quire_tier_hit_tokens_total", "host"] == 0
        assert not [name for name in got if name[0] == "quire_transfer_fallbacks_total"]
        bytes_sent = sent["quire_transfer_sent_bytes_total", "decode-0"]
        assert bytes_sent == got["quire_transfer_received_bytes_total", "prefill-0"] > 0
        assert sent["quire_transfer_served_asks_total", "decode-0"] == 1
        assert sent["quire_transfer_xfer_time_seconds_count", "decode-0"] >= 1
        assert sent["quire_transfer_connected_peers", "decode"] == 1
        run_apart(decode, [prefill], [PROMPT], GREEDY, "again")
        assert samples(decode)["quire_tier_hit_tokens_total", "device"] == WHOLE
        node = decode.transfer
        assert node is not None
        node._events.append(Silent(next(iter(node.decode.open_tokens)), True))
        node.settle()
        assert transfer_of(decode)["prefill_peers"] == [{**where, "state": "silent"}]
        assert samples(decode)["quire_transfer_connected_peers", "prefill"] == 0
    finally:
        decode.close()
        prefill.close()


def test_a_prompt_is_computed_here_because_its_peer_is_slow(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = engines(case, transfer_seconds=0.2)
    try:
        with caplog.at_level(logging.WARNING):
            output = answered(decode)  # the prefill engine makes no step
        assert output.use is None  # nothing was cached
        peer, last = reasons(decode)
        assert peer == ("peer", WHOLE, "computed here; asked prefill-0: the peer is too slow")
        assert last[:2] == ("last_token", len(PROMPT) - WHOLE)
        assert samples(decode)["quire_transfer_fallbacks_total", "deadline", "prefill-0"] == 1
        assert transfer_of(decode)["fallbacks"] == 1
        (said,) = [record.getMessage() for record in caplog.records if "computed here" in record.getMessage()]
        assert "prefill-0" in said and "--transfer-seconds" in said
    finally:
        decode.close()
        prefill.close()


def test_a_prompt_is_computed_here_because_no_peer_is_connected(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = engines(case)
    try:
        with caplog.at_level(logging.INFO):
            prefill.close()
            until = time.monotonic() + 60
            while transfer_of(decode)["prefill_peers"]:
                assert time.monotonic() < until
                turn(decode)
            answered(decode)
        assert reasons(decode)[0] == ("peer", WHOLE, "computed here; no prefill engine is connected")
        assert samples(decode)["quire_transfer_fallbacks_total", "unconnected", ""] == 1
        assert samples(decode)["quire_transfer_connected_peers", "prefill"] == 0
        assert [
            record for record in caplog.records if record.getMessage().startswith("Prefill engine prefill-0 is gone")
        ]
    finally:
        decode.close()

"""Prompts of which a part is stored: that is fetched, and only the rest comes from another engine."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, TokenOutput
from quire.offload.prefetcher import Prefetcher
from quire.testing.stores import SlowStore
from quire.tiers.store import Answer
from tests import waits
from tests.engine.apart import decode_engine, prefill_engine, transfer_of, turn
from tests.engine.running import run, tiered_core
from tests.engine.tiered import GREEDY, LONGEST, PROMPTS, Case, at_rest, case_of, closed
from tests.tiers.scripted_store import ScriptedStore

PAGE = 4
PROMPT = PROMPTS[1]
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE
STORED = 24
ROOM: dict[str, Any] = {"num_tokens": 8 * LONGEST, "page_size": PAGE}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ScriptedStore:
    made = ScriptedStore()
    monkeypatch.setattr("quire.engine.tier_storage.open_store", lambda url, capacity: made)
    return made


def fill(case: Case) -> None:
    """Store the first pages of the prompt."""
    core = tiered_core(case.model, storage="anywhere", **ROOM)
    run(core, [PROMPT[: STORED + 1]], GREEDY)
    closed(core)


def engines(case: Case, **settings: Any) -> tuple[EngineCore, EngineCore]:
    prefill = prefill_engine(case.model, transfer_name="prefill-0", **ROOM)
    return prefill, decode_engine(case.model, [prefill], **{"storage": "anywhere", **ROOM, **settings})


def answered(core: EngineCore, *others: EngineCore) -> tuple[list[int], TokenOutput]:
    """The tokens for the prompt, and the last output."""
    core.add(EngineRequest(request_id="r", prompt=np.array(PROMPT, dtype=np.int32).tobytes(), params=GREEDY))
    last, tokens, until = None, [], time.monotonic() + 60
    while core.has_work():
        assert time.monotonic() < until, core.statistics()["waiting_reason"]
        for output in core.step():
            last = output
            tokens += output.token_ids
        turn(*others) if others else time.sleep(0.001)
    assert last is not None
    while any(each.has_moves() for each in (core, *others)):
        assert time.monotonic() < until
        turn(core, *others)
    return tokens, last


def sources(core: EngineCore) -> list[tuple[int, str]]:
    reasons = core.explain("r")["r"].to_dict()["reasons"]
    return [(reason["tokens"], reason.get("detail", "")) for reason in reasons if reason["cause"] in ("hit", "peer")]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3", "qwen3_next", "gemma3_text"])
def test_the_rest_of_a_stored_prompt_comes_from_a_peer(name: str, store: ScriptedStore) -> None:
    case = case_of(name)
    fill(case)
    prefill, decode = engines(case)
    try:
        tokens, last = answered(decode, prefill)
        assert tokens == case.expected[1]
        assert sources(decode) == [(STORED, "from storage"), (WHOLE - STORED, "from prefill-0")]
        assert last.use is not None and last.use[2:] == (STORED, WHOLE - STORED)
        found = transfer_of(decode)
        assert (found["asks"], found["fallbacks"], found["received_tokens"]) == (1, 0, WHOLE - STORED)
        assert at_rest(decode)["fetched_frames"] > 0
    finally:
        decode.close()
        prefill.close()


def test_a_prompt_that_is_stored_is_asked_of_no_peer(store: ScriptedStore) -> None:
    case = case_of("llama")
    core = tiered_core(case.model, storage="anywhere", **ROOM)
    run(core, [PROMPT], GREEDY)
    closed(core)
    prefill, decode = engines(case)
    try:
        assert answered(decode, prefill)[0] == case.expected[1]
        assert sources(decode) == [(WHOLE, "from storage")]
        assert transfer_of(decode)["asks"] == transfer_of(decode)["fallbacks"] == 0
    finally:
        decode.close()
        prefill.close()


def test_what_is_stored_is_used_when_the_peer_is_gone(store: ScriptedStore) -> None:
    """It stops while the request waits for it."""
    case = case_of("llama")
    fill(case)
    prefill, decode = engines(case, transfer_seconds=0.3)
    try:
        assert answered(decode)[0] == case.expected[1]
        assert sources(decode) == [
            (STORED, "from storage"),
            (WHOLE - STORED, "computed here; asked prefill-0: the peer is too slow"),
        ]
    finally:
        prefill.close()
        decode.close()


@pytest.mark.parametrize("answer", [Answer.MISS, Answer.RETRY])
def test_a_peer_computes_what_the_store_has_lost(
    answer: Answer, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are found, and are not there when they are fetched."""
    case = case_of("llama")
    fill(case)
    real, number = ScriptedStore.get, STORED // PAGE // 2
    monkeypatch.setattr(
        ScriptedStore, "get", lambda self, keys, to: [*real(self, keys, to)[:number], *[answer] * (len(keys) - number)]
    )
    prefill, decode = engines(case)
    try:
        assert answered(decode, prefill)[0] == case.expected[1]
        assert sources(decode) == [(number * PAGE, "from storage"), (WHOLE - number * PAGE, "from prefill-0")]
        assert transfer_of(decode)["fallbacks"] == 0
        at_rest(decode)
    finally:
        decode.close()
        prefill.close()


@pytest.mark.parametrize("why", ["slow", "failing", "refusing", "busy"])
def test_a_peer_computes_it_all_if_the_store_gives_no_answer(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("llama")
    store = ScriptedStore()
    over = threading.Event()
    opened = SlowStore(store, (waits.FOR_EVER_S, waits.FOR_EVER_S), sleep=over.wait) if why == "slow" else store
    monkeypatch.setattr("quire.engine.tier_storage.open_store", lambda url, capacity: opened)
    if why == "failing":
        store.failing.add("exists")
    elif why == "refusing":
        monkeypatch.setattr(ScriptedStore, "exists", lambda self, keys: [Answer.RETRY] * len(keys))
    elif why == "busy":
        monkeypatch.setattr(Prefetcher, "_look", lambda self, prefetch, scope: False)
    prefill, decode = engines(case, prefetch="break_even")
    try:
        began = time.monotonic()
        decode.add(EngineRequest(request_id="r", prompt=np.array(PROMPT, dtype=np.int32).tobytes(), params=GREEDY))
        tokens: list[int] = []
        while decode.has_work():
            assert time.monotonic() < began + 60
            tokens += turn(decode, prefill).get("r", [])
        assert tokens == case.expected[1]
        assert sources(decode) == [(WHOLE, "from prefill-0")]
    finally:
        over.set()
        decode.close()
        prefill.close()


def test_an_engine_that_asks_no_peer_counts_no_fallback(store: ScriptedStore) -> None:
    case = case_of("llama")
    prefill = prefill_engine(case.model, storage="anywhere", **ROOM)
    try:
        assert run(prefill, [PROMPT], GREEDY) == [case.expected[1]]
        assert transfer_of(prefill)["fallbacks"] == 0
    finally:
        prefill.close()

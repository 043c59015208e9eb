"""Prompts that another engine computes: the same tokens as of one engine, pages moved and counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.errors import InvalidInput, PeerRefused
from quire.transfer.messages import Send, Serves
from tests.covering import covering
from tests.engine.apart import (
    COMMON,
    address_of,
    decode_engine,
    prefill_engine,
    ready_peers,
    run_apart,
    transfer_of,
    wait_for,
)
from tests.engine.running import tiered_core
from tests.engine.tiered import GREEDY, LONGEST, OTHERS, PROMPTS, case_of

KINDS = ("llama", "gpt_oss", "deepseek_v3", "deepseek_v32", "qwen3_next", "gemma3_text", "falcon_h1")


@covering(5, name=KINDS, page_size=[1, 4, 16])
def test_tokens_are_those_of_one_engine(name: str, page_size: int) -> None:
    case = case_of(name)
    room = 8 * LONGEST
    prefill = prefill_engine(case.model, num_tokens=room, page_size=page_size)
    decode = decode_engine(case.model, [prefill], num_tokens=room, page_size=page_size)
    try:
        assert run_apart(decode, [prefill], PROMPTS, GREEDY, "cold") == case.expected
        got, sent = transfer_of(decode), transfer_of(prefill)
        assert got["received_tokens"] > 0 and got["received_bytes"] > 0, got
        assert got["fallbacks"] == 0, got
        assert sent["sent_bytes"] == got["received_bytes"]
        assert run_apart(decode, [prefill], OTHERS, GREEDY, "others") == case.others
        assert run_apart(decode, [prefill], PROMPTS, GREEDY, "warm") == case.expected
    finally:
        decode.close()
        prefill.close()


def test_a_prompt_that_a_peer_asks_for_is_computed_here() -> None:
    """Two engines that name each other answer each other's prompts, and none asks on."""
    case = case_of("llama")
    first = prefill_engine(case.model, num_tokens=8 * LONGEST, page_size=4, role="both")
    second = decode_engine(case.model, [first], num_tokens=8 * LONGEST, page_size=4, role="both")
    third = decode_engine(case.model, [second], num_tokens=8 * LONGEST, page_size=4)
    try:
        assert run_apart(third, [second, first], PROMPTS, GREEDY) == case.expected
        assert transfer_of(third)["asks"] > 0 and transfer_of(third)["fallbacks"] == 0
        assert transfer_of(second)["asks"] == 0, "a prompt for a peer is not asked for once more"
        assert run_apart(second, [first, third], OTHERS, GREEDY) == case.others
        assert transfer_of(second)["asks"] > 0
    finally:
        for engine in (third, second, first):
            engine.close()


def test_a_role_changes_while_engines_run() -> None:
    case = case_of("llama")
    room = 8 * LONGEST
    first = prefill_engine(case.model, num_tokens=room, role="both", prefill_peers="127.0.0.1:9")
    second = decode_engine(case.model, [first], num_tokens=room, role="both", transfer_listen="127.0.0.1:0")
    turns = (("both", "both"), ("prefill", "both"), ("decode", "prefill"), ("both", "decode"))
    try:
        for number, (asking, asked) in enumerate(turns):
            assert (second.set_role(asking), first.set_role(asked)) == (asking, asked)
            before = transfer_of(second)
            assert run_apart(second, [first], PROMPTS, GREEDY, f"turn{number}") == case.expected
            after = transfer_of(second)
            assert (after["received_tokens"] > before["received_tokens"]) is (number in (0, 2))
            assert (after["fallbacks"] > before["fallbacks"]) is (number == 3)
            for core in (first, second):
                core.flush(None)
        with pytest.raises(InvalidInput, match="'neither' is no role"):
            first.set_role("neither")
    finally:
        second.close()
        first.close()


def test_engines_that_derive_other_keys_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("gemma3_text")
    prefill = prefill_engine(case.model, num_tokens=LONGEST)
    ours = prefill.identity(0)
    with monkeypatch.context() as patch:
        plan = replace(prefill.plan, groups=prefill.plan.groups[::-1])
        patch.setattr(prefill, "plan", plan)
        with pytest.raises(PeerRefused) as refused:
            ours.compare(prefill.identity(0))
        assert refused.value.field == "namespaces"
    monkeypatch.setattr("quire.engine.transfer.namespace_seed", lambda namespace, identity: bytes(32))
    settings = {**COMMON, "role": "decode", "prefill_peers": address_of(prefill)}
    decode = tiered_core(case.model, num_tokens=LONGEST, **settings)
    try:
        wait_for(lambda: "namespaces" in "".join(transfer_of(decode)["problems"].values()), decode, prefill)
        assert not ready_peers(decode)
        assert transfer_of(prefill)["refused_connections"].keys() <= {"namespaces"}
    finally:
        decode.close()
        prefill.close()


def test_a_peer_that_computes_no_prompts_is_not_asked() -> None:
    case = case_of("llama")
    first = prefill_engine(case.model, num_tokens=8 * LONGEST, role="both", prefill_peers="127.0.0.1:9")
    second = decode_engine(case.model, [first], num_tokens=8 * LONGEST)
    assert first.transfer is not None and second.transfer is not None
    try:
        first.set_role("decode")
        wait_for(lambda: not ready_peers(second), second, first)
        assert transfer_of(second)["prefill_peers"][0]["state"] == "off"
        assert run_apart(second, [first], PROMPTS, GREEDY, "local") == case.expected
        found = transfer_of(second)
        assert found["asks"] == 0 and set(found["received"][""]["fallbacks"]) == {"role"}, found
        assert second.transfer.why_local(LONGEST) == "no prefill engine that is connected computes prompts now"
        first.set_role("both")
        wait_for(lambda: bool(ready_peers(second)), second, first)
        assert run_apart(second, [first], OTHERS, GREEDY, "apart") == case.others
        assert transfer_of(second)["received_tokens"] > 0
    finally:
        second.close()
        first.close()


def test_a_role_that_changes_in_the_handshake_is_said_afterwards() -> None:
    case = case_of("llama")
    first = prefill_engine(case.model, num_tokens=LONGEST, role="both", prefill_peers="127.0.0.1:9")
    assert first.transfer is not None
    said: list[Send] = []
    side = first.transfer.prefill
    side._send = said.append
    try:
        side.connected("decode-0@1", b"", "decode-0")
        first.set_role("decode")
        side.connected("decode-1@1", b"", "decode-1")
        assert said == [Send("decode-0@1", Serves(False)), Send("decode-1@1", Serves(False))]
    finally:
        first.close()


def test_a_role_needs_what_the_engine_was_started_with() -> None:
    case = case_of("llama")
    alone, prefill = tiered_core(case.model, num_tokens=LONGEST), prefill_engine(case.model, num_tokens=LONGEST)
    decode = decode_engine(case.model, [prefill], num_tokens=LONGEST)
    try:
        with pytest.raises(InvalidInput, match="has no role"):
            alone.set_role("both")
        with pytest.raises(InvalidInput, match="has no peer"):
            prefill.set_role("decode")
        with pytest.raises(InvalidInput, match="listens to no other"):
            decode.set_role("both")
        assert (transfer_of(prefill)["role"], transfer_of(decode)["role"]) == ("prefill", "decode")
    finally:
        for core in (decode, prefill, alone):
            core.close()

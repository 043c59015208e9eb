"""Prompts that another engine computes: the same tokens as of one engine, pages moved and counted."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.core import EngineCore
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
    turn,
    wait_for,
)
from tests.engine.running import tiered_core
from tests.engine.tiered import GREEDY, LONGEST, OTHERS, PROMPTS, case_of
from tests.transfer.test_connectors import NEEDS_NIXL

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


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_frames_move_in_arenas_while_pages_are_sent_and_arrive(name: str) -> None:
    """Both engines have an arena for little more than the longest request, and the canary looks at cached frames."""
    case = case_of(name)
    settings: dict[str, Any] = {"page_size": 4, "arena": True, "canary": "all", "max_num_batched_tokens": 17}
    settings |= {"num_tokens": LONGEST + 40, "max_running_requests": 3}
    prefill = prefill_engine(case.model, **settings)
    decode = decode_engine(case.model, [prefill], **settings)
    try:
        for turn, (prompts, expected) in enumerate([(PROMPTS, case.expected), (OTHERS, case.others)] * 3):
            assert run_apart(decode, [prefill], prompts, GREEDY, f"turn{turn}") == expected
        got = transfer_of(decode)
        assert got["received_tokens"] > 0 and got["fallbacks"] == 0, got
        for core in (prefill, decode):
            assert core.plan.arena is not None and core.statistics()["moved_frames"] > 0
            assert not core.statistics()["canary"]["found_pages"]
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


def test_an_engine_with_the_dtype_of_the_model_by_name_fits_one_without() -> None:
    case = case_of("llama")
    prefill = prefill_engine(case.model, num_tokens=8 * LONGEST)
    decode = decode_engine(case.model, [prefill], num_tokens=8 * LONGEST, kv_dtype="float32")
    assert run_apart(decode, [prefill], PROMPTS, GREEDY) == case.expected
    assert transfer_of(decode)["received_tokens"] > 0
    decode.close()
    prefill.close()


def test_a_secret_is_any_bytes_and_a_machine_has_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case, secret = case_of("llama"), os.fsdecode(b"\xff\x80" * 8)
    monkeypatch.setattr("socket.gethostname", lambda: "k\u00fcche nr. 5")
    prefill = prefill_engine(case.model, num_tokens=8 * LONGEST, transfer_secret=secret)
    decode = decode_engine(case.model, [prefill], num_tokens=8 * LONGEST, transfer_secret=secret)
    assert run_apart(decode, [prefill], PROMPTS, GREEDY) == case.expected
    assert transfer_of(decode)["received_tokens"] > 0
    decode.close()
    prefill.close()


@NEEDS_NIXL
def test_a_peer_that_is_removed_still_asks() -> None:
    """Two engines name each other, and one of them then asks no more. What the other asks for still arrives."""
    case = case_of("llama")
    settings: dict[str, Any] = {"num_tokens": 8 * LONGEST, "role": "both", "transfer_connector": "nixl"}
    first = prefill_engine(case.model, **settings)
    second = decode_engine(case.model, [first], **settings)
    try:
        first.set_prefill_peers([address_of(second)])
        wait_for(lambda: len(ready_peers(first)) == 1, first, second)
        first.set_prefill_peers([])
        wait_for(lambda: not transfer_of(first)["prefill_peers"], first, second)
        assert run_apart(second, [first], PROMPTS, GREEDY) == case.expected
        assert transfer_of(second)["received_tokens"] > 0 and transfer_of(second)["fallbacks"] == 0
    finally:
        second.close()
        first.close()


def test_peers_change_while_engines_run() -> None:
    """Each turn's prompts come from the peer of the turn, and without one they are computed here, without a word."""
    case = case_of("llama")
    room = 8 * LONGEST
    first, second = (prefill_engine(case.model, num_tokens=room) for _ in range(2))
    decode = decode_engine(case.model, [], num_tokens=room)
    both = (first, second)
    where = [address_of(peer) for peer in both]
    try:
        turns = (([], set()), (where[:1], {0}), (where[1:], {1}), ([], set()), (where, {0, 1}))
        for number, (peers, senders) in enumerate(turns):
            before = [transfer_of(core) for core in (decode, *both)]
            assert decode.set_prefill_peers(peers) == decode.set_prefill_peers(peers) == peers
            wait_for(lambda peers=peers: named(decode) == set(peers), decode, *both)
            assert run_apart(decode, both, PROMPTS, GREEDY, f"turn{number}") == case.expected
            now = [transfer_of(core) for core in (decode, *both)]
            sent = {at for at in (0, 1) if now[at + 1]["sent_tokens"] > before[at + 1]["sent_tokens"]}
            assert sent <= senders and bool(sent) is bool(peers)
            assert now[0]["fallbacks"] == 0 and now[0]["held_bytes"] == 0
            assert (now[0]["asks"] > before[0]["asks"]) is bool(peers)
            for core in (decode, *both):
                core.flush(None)
    finally:
        for core in (decode, *both):
            core.close()


def named(core: EngineCore) -> set[str]:
    """Addresses of the prefill engines that it is connected to."""
    return {peer["address"] for peer in transfer_of(core)["prefill_peers"]}


def test_what_can_be_no_peer_changes_nothing() -> None:
    case = case_of("llama")
    first = prefill_engine(case.model, num_tokens=LONGEST, role="both")
    decode = decode_engine(case.model, [first], num_tokens=LONGEST)
    try:
        good, own = address_of(first), address_of(first)
        for core, peers, said in (
            (decode, [good, "nowhere"], "'nowhere' is not HOST:PORT"),
            (decode, [good, "127.0.0.1:0"], "nothing listens at port 0"),
            (decode, [good, "127.0.0.1:9", good], "is given twice"),
            (first, ["127.0.0.1:9", own], "no peer of itself"),
        ):
            with pytest.raises(InvalidInput, match=said):
                core.set_prefill_peers(peers)
        first.set_role("prefill")
        with pytest.raises(InvalidInput, match="computes its own prompts"):
            first.set_prefill_peers(["127.0.0.1:9"])
        assert first.set_prefill_peers([]) == []
        turn(decode, first)
        assert named(decode) == {good} and not transfer_of(first)["problems"]
    finally:
        decode.close()
        first.close()


def test_peers_need_an_address_to_send_pages_to() -> None:
    case = case_of("llama")
    open_to_all = prefill_engine(case.model, num_tokens=LONGEST, role="both", transfer_listen="0.0.0.0:0")
    try:
        with pytest.raises(InvalidInput, match="names no host"):
            open_to_all.set_prefill_peers(["127.0.0.1:9"])
    finally:
        open_to_all.close()


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
        for verb in (lambda: alone.set_role("both"), lambda: alone.set_prefill_peers([])):
            with pytest.raises(InvalidInput, match="has no role"):
                verb()
        with pytest.raises(InvalidInput, match="listens to no other"):
            decode.set_role("both")
        assert (transfer_of(prefill)["role"], transfer_of(decode)["role"]) == ("prefill", "decode")
    finally:
        for core in (decode, prefill, alone):
            core.close()

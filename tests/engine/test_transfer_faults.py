"""Transfers with faults: right tokens in time, and nothing left on either side."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest

from quire.cache.hold import Hold, Reason
from quire.client.health import stuck
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.models.hf import LoadedModel
from quire.offload.tiering import Moving
from quire.scheduler.step import Step
from quire.spec.events import Namespace
from quire.tiers.transfer import Lane, Transfer
from quire.transfer.connector import Write
from quire.transfer.control import Arrived
from quire.transfer.messages import Ask, Cancel, Gone, Message, Release, Send, Want, tag_of
from tests.changes import TRANSFER, slow_unless_changed
from tests.covering import covering
from tests.engine.apart import address_of, decode_engine, prefill_engine, run_apart, transfer_of, turn
from tests.engine.running import core_for, run
from tests.engine.tiered import GREEDY, PROMPTS, build
from tests.engine.transfer_runs import MODELS, Faults, check_rest, cut, faulty, flush, new_weights, remove, run_pairs
from tests.transfer.memory_connector import Fault

PAGE = 4
LONG_S = 20.0


@cache
def tiny(name: str = "llama_gqa") -> LoadedModel:
    return LoadedModel(build(name), name=name)


@cache
def alone() -> list[list[int]]:
    """The tokens of one engine."""
    return run(core_for(tiny(), page_size=PAGE), PROMPTS, GREEDY)


@contextmanager
def pair(*, fault: Fault | None = None, connector: str = "memory", **settings: Any) -> Iterator[list[EngineCore]]:
    """A decode and a prefill engine. Every write has this fault."""
    faults = Faults((), [lambda rng: fault or Fault()])
    with faulty(faults):
        common: dict[str, Any] = {"page_size": PAGE, "transfer_connector": connector, "max_num_batched_tokens": 16}
        common |= settings
        prefill = prefill_engine(tiny(), num_tokens=640, **common)
        decode = decode_engine(tiny(), [prefill], num_tokens=640, **common)
        faults.rate = 1.0 if fault is not None else 0.0
        try:
            yield [decode, prefill]
        finally:
            decode.close()
            prefill.close()


def add(core: EngineCore, name: str, number: int = 0) -> None:
    prompt = np.array(PROMPTS[number], dtype=np.int32).tobytes()
    core.add(EngineRequest(request_id=name, prompt=prompt, params=GREEDY))


def until(is_so: object, *cores: EngineCore, seconds: float = LONG_S) -> dict[str, list[int]]:
    """Steps of these engines until something is so; the tokens that came out."""
    assert callable(is_so)
    found: dict[str, list[int]] = {}
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, [transfer_of(core) for core in cores]
        for name, tokens in turn(*cores).items():
            found.setdefault(name, []).extend(tokens)
    return found


@slow_unless_changed(*TRANSFER)
@covering(2, name=MODELS, connector=["memory", "tcp"])
def test_runs_with_faults(name: str, connector: str) -> None:
    assert run_pairs(tiny(name), 5000, 10, connector)["received_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["memory", "tcp"])
@pytest.mark.parametrize("name", [*MODELS, "deepseek_v3"])
def test_many_runs_with_faults(name: str, connector: str) -> None:
    assert run_pairs(tiny(name), 10_000, 250, connector)["runs"] == 250


def check_swapped_pages() -> None:
    """Bytes in the wrong place are found out before a request reads them, or anything else."""
    for kind, fault in (("tcp", Fault(swap=True)), ("memory", Fault(short=True))):
        happened = run_pairs(tiny(), 100, 6, kind, events=(), rates=(1.0,), bytes_faults=[lambda rng, it=fault: it])
        assert happened["damaged"], happened


def check_late_writes() -> None:
    """A write that lands after the deadline of its request lands in frames that nothing else uses."""
    faults = [lambda rng: Fault(late=True, delay_s=rng.uniform(0.25, 0.6))]
    assert run_pairs(tiny(), 200, 10, events=(), rates=(0.7,), bytes_faults=faults)["late"]


def check_new_weights() -> None:
    """No page of other weights is sent, whichever engine gets them first."""
    assert run_pairs(tiny(), 300, 24, events=(new_weights,), rates=(0.0,))["new_weights"]


def check_removals() -> None:
    """A peer that is removed while it writes writes on into frames that nothing else uses, and is then asked again."""
    faults = [lambda rng: Fault(late=True, delay_s=rng.uniform(0.05, 0.3))]
    happened = run_pairs(tiny(), 600, 12, events=(remove, flush), rates=(0.7,), bytes_faults=faults)
    assert happened["remove"] and happened["late"] and happened["received_tokens"]


def check_cuts() -> None:
    """After a lost connection everything is free, and the next prompt is asked for again."""
    assert run_pairs(tiny(), 400, 12, events=(cut, flush), rates=(0.0,))["cut"]


@slow_unless_changed(*TRANSFER)
def test_what_lands_in_the_wrong_place_is_not_read() -> None:
    check_swapped_pages()


@slow_unless_changed(*TRANSFER)
def test_a_late_write_lands_in_held_frames() -> None:
    check_late_writes()


@slow_unless_changed(*TRANSFER)
def test_pages_of_other_weights_are_not_sent() -> None:
    check_new_weights()


@slow_unless_changed(*TRANSFER)
def test_lost_connections_leave_nothing() -> None:
    check_cuts()


@slow_unless_changed(*TRANSFER)
def test_removed_peers_write_into_held_frames() -> None:
    check_removals()


def test_a_peer_that_never_answers_holds_host_frames_and_no_cached_page() -> None:
    with pair(fault=Fault(late=True, delay_s=4.0)) as (decode, prefill):
        assert decode.transfer is not None
        side = decode.transfer.decode
        (peer,) = side.open_tokens
        side.ready(peer, is_ready=False)
        run(decode, [PROMPTS[1][:33]], GREEDY, "before")  # a part of the prompt is cached
        side.ready(peer, is_ready=True)
        add(decode, "mine")
        until(lambda: prefill.transfer and prefill.transfer.prefill._writes, decode, prefill)
        side.do(side.receiver.tick(math.inf))  # its deadline
        assert until(lambda: not decode.has_work(), decode, seconds=5)["mine"] == alone()[0]
        held = transfer_of(decode)["held_bytes"]
        assert held > 0, "frames that may still be written are counted"
        tiers = decode.offload.tiers
        assert tiers is not None
        assert sum(host.counters().moving for host in tiers.hosts) > 0
        until(lambda: not tiers.moving, decode, prefill)
        assert decode.cache.tree.num_protected == 0, "no cached page is held for it"
        assert transfer_of(decode)["fallbacks"] > 0
        assert run_until_idle(decode, prefill, 0) == alone()[0], "its pages are cached, and need no peer"
        until(lambda: not decode.has_moves(), decode, prefill)
        decode.audit()
        assert not sum(host.counters().moving for host in tiers.hosts)


def test_a_removed_peer_delays_no_request_and_keeps_its_frames_until_its_last_write() -> None:
    with pair(fault=Fault(late=True, delay_s=4.0)) as (decode, prefill):
        assert decode.transfer is not None and prefill.transfer is not None
        where, side = address_of(prefill), prefill.transfer.prefill
        add(decode, "mine")
        until(lambda: side._writes, decode, prefill)
        decode.set_prefill_peers([])
        assert until(lambda: not decode.has_work(), decode, seconds=5)["mine"] == alone()[0]
        (counts,) = transfer_of(decode)["received"].values()
        assert counts["fallbacks"] == {"removed": 1}
        decode.set_prefill_peers([where])
        until(lambda: not side.ids and not transfer_of(prefill)["decode_peers"], decode, prefill, seconds=2)
        assert transfer_of(decode)["held_bytes"] > 0, "it still writes"
        assert not transfer_of(decode)["prefill_peers"] and not transfer_of(decode)["problems"]
        until(lambda: transfer_of(decode)["prefill_peers"], decode, prefill)
        assert transfer_of(decode)["held_bytes"] == 0
        assert run_apart(decode, [prefill], PROMPTS[1:2], GREEDY) == alone()[1:2]
        assert transfer_of(decode)["asks"] == 2
        check_rest(decode, spoiled=False)


def run_until_idle(decode: EngineCore, prefill: EngineCore, number: int) -> list[int]:
    add(decode, "mine", number)
    return until(lambda: not decode.has_work(), decode, prefill)["mine"]


def has_arrived(core: EngineCore, *kinds: type[Message]) -> bool:
    """Whether a message of these kinds waits for the engine's next step."""
    node = core.transfer
    assert node is not None and node._control is not None
    node._events += node._control.events()
    return any(isinstance(each, Arrived) and isinstance(each.message, kinds) for each in node._events)


def test_an_aborted_request_is_aborted_at_the_peer_too() -> None:
    with pair() as (decode, prefill):
        assert prefill.transfer is not None
        side = prefill.transfer.prefill
        add(decode, "mine")
        until(lambda: side.ids, decode, prefill)
        decode.abort("mine")
        until(
            lambda: has_arrived(prefill, Cancel, Release), decode, seconds=5
        )  # else the prompt may be computed before
        until(lambda: not side.ids and not side._prompts, decode, prefill, seconds=5)
        assert prefill.statistics()["aborted_requests"] == 1


def test_new_weights_refuse_what_was_asked_before() -> None:
    with pair() as (decode, prefill):
        assert prefill.transfer is not None
        add(decode, "mine")
        until(lambda: prefill.transfer and prefill.transfer.prefill.ids, decode, prefill)
        prefill.set_weights_epoch(1)
        got = until(lambda: not decode.has_work(), decode, prefill, seconds=5)
        assert got["mine"] == alone()[0]
        (counts,) = transfer_of(decode)["received"].values()
        assert counts["fallbacks"] == {"weights": 1}


def test_a_want_of_pages_that_the_prompt_lacks_is_refused() -> None:
    with pair() as (_, prefill):
        assert prefill.transfer is not None
        side, told = prefill.transfer.prefill, list[Send]()
        side._send = told.append
        tokens = np.array(PROMPTS[0][:32], dtype=np.int32)
        scope = side._tiers.names.scope(Namespace())
        side.asked("stranger", Ask(1, 1, 9.0, scope, "", "", tokens.tobytes()))
        places = ([-1], [8], [2**30], [3, 3], [4, 3])
        for part, at in enumerate(places):
            side.asked("stranger", Want(1, part, (np.array(at, dtype=np.int32).tobytes(),), b""))
        side.asked("stranger", Want(1, len(places), (b"", b""), b""))
        until(lambda: not prefill.has_work(), prefill)
        turn(prefill)
        prefill.transfer.before_schedule()
        gone = [send.message for send in told if isinstance(send.message, Gone)]
        assert [each.part for each in gone] == list(range(len(places) + 1))
        assert all("does not have" in each.reason for each in gone), gone
        side.lost("stranger")
        assert not side._prompts


def test_a_peer_that_cannot_be_reached_is_waited_for_no_longer() -> None:
    """Its part is not over without a proof; the request does not need one."""
    with pair(fault=Fault(late=True, delay_s=3.0)) as (decode, prefill):
        assert decode.transfer is not None and prefill.transfer is not None
        add(decode, "mine")
        until(lambda: prefill.transfer and prefill.transfer.prefill._writes, decode, prefill)
        side = decode.transfer.decode
        side.do(side.receiver.silent(next(iter(side.open_tokens))))
        assert until(lambda: not decode.has_work(), decode, seconds=5)["mine"] == alone()[0]
        assert transfer_of(decode)["held_bytes"] > 0, "the write was waited for"
        until(lambda: not decode.has_moves() and not prefill.has_moves(), decode, prefill)


def test_a_salt_too_long_for_messages_is_computed_here() -> None:
    with pair() as (decode, prefill):
        prompt = np.array(PROMPTS[0], dtype=np.int32).tobytes()
        decode.add(EngineRequest(request_id="mine", prompt=prompt, params=GREEDY, salt="s" * 5000))
        assert until(lambda: not decode.has_work(), decode, prefill)["mine"] == alone()[0]
        assert transfer_of(decode)["asks"] == 0
        assert run_apart(decode, [prefill], PROMPTS, GREEDY) == alone()
        assert transfer_of(decode)["asks"] > 0, "the connection has not suffered"


def test_peers_are_served_between_steps() -> None:
    """What they ask for adds and aborts requests, which would change a step that is being made."""
    with pair() as (decode, prefill):
        assert prefill.transfer is not None
        side, schedule, inside = prefill.transfer.prefill, prefill.scheduler.schedule, [False]

        def scheduling() -> Step:
            inside[0] = True
            found = schedule()
            inside[0] = False
            return found

        def settled() -> None:
            assert not inside[0], "in the middle of a step"
            settle()

        settle = side.settle
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill.scheduler, "schedule", scheduling)
            patch.setattr(side, "settle", settled)
            assert run_apart(decode, [prefill], PROMPTS[:1], GREEDY) == alone()[:1]


def test_a_prompt_longer_than_the_context_of_the_peer_is_computed_here() -> None:
    prefill = prefill_engine(tiny(), num_tokens=320, page_size=PAGE, max_model_len=48)
    decode = decode_engine(tiny(), [prefill], num_tokens=640, page_size=PAGE)
    try:
        assert run_apart(decode, [prefill], PROMPTS, GREEDY) == alone()
        (counts,) = transfer_of(decode)["received"].values()
        assert counts["fallbacks"] and counts["tokens"] > 0, "the short prompts were computed there"
    finally:
        decode.close()
        prefill.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_write_that_fails_is_tried_once_more(times: int) -> None:
    with pair() as (decode, prefill), pytest.MonkeyPatch.context() as patch:
        assert prefill.transfer is not None
        side, real = prefill.transfer.prefill, prefill.transfer.connector.write
        failing = [Write.failed("the connection broke") for _ in range(times)]
        patch.setattr(side._connector, "write", lambda *given: failing.pop() if failing else real(*given))
        assert run_apart(decode, [prefill], PROMPTS[:1], GREEDY) == alone()[:1]
        (received,), (sent,) = (
            transfer_of(core)[way].values() for core, way in ((decode, "received"), (prefill, "sent"))
        )
        assert sent["failures"] == {"write": times}
        assert received["fallbacks"] == ({} if times == 1 else {"unsent": 1})
        assert not failing


def test_pages_are_held_until_they_have_landed_and_no_longer() -> None:
    with pair() as (_, prefill):
        assert prefill.transfer is not None
        side = prefill.transfer.prefill
        tokens = np.array(PROMPTS[0][:32], dtype=np.int32)
        num_pages, tiers = len(tokens) // PAGE, side._tiers
        frames = tiers.hosts[0].take(num_pages)
        spans = side._host.spans(0, frames)
        target = prefill.transfer.connector.open(tag_of(1, 0), spans)
        prefill.transfer.connector.connect(peer := prefill.transfer._hello.peer, prefill.transfer.connector.address())
        side.asked(peer, Ask(1, 1, 9.0, tiers.names.scope(Namespace()), "", "", tokens.tobytes()))
        side.asked(peer, Want(1, 0, (np.arange(num_pages, dtype=np.int32).tobytes(),), target))
        until(lambda: side._writes, prefill)
        assert sum(tiers.hosts[0]._reads.values()) == num_pages
        until(lambda: not side._writes, prefill)
        assert side.sender.is_open(peer, 1)
        assert not tiers.hosts[0]._reads, "what has landed can be evicted"
        side.lost(peer)
        tiers.hosts[0].free_frames(frames)
        prefill.audit()


def test_pages_that_the_host_has_are_written_before_anything_else_is_saved() -> None:
    """The second ask for a prompt waits for no step of this engine."""
    with pair() as (_, prefill):
        assert prefill.transfer is not None
        side, tokens = prefill.transfer.prefill, np.array(PROMPTS[0][:32], dtype=np.int32)
        tiers = side._tiers
        scope = tiers.names.scope(Namespace())
        side.asked("first", Ask(1, 1, 9.0, scope, "", "", tokens.tobytes()))
        until(lambda: side._prompts["first", 1].is_done and not tiers.moving, prefill)
        side.settle()
        side.lost("first")
        side.asked("second", Ask(2, 1, 9.0, scope, "", "", tokens.tobytes()))
        side.asked("second", Want(2, 0, (np.arange(4, dtype=np.int32).tobytes(),), b""))
        side.settle()
        assert len(side._writes) == 1 and not side._prompts["second", 2].is_done
        side.lost("second")


def test_pages_that_were_lost_are_refused_while_others_are_saved() -> None:
    """A busy prefill engine always saves something."""
    with pair() as (_, prefill):
        assert prefill.transfer is not None
        side, told = prefill.transfer.prefill, list[Send]()
        side._send = told.append
        tokens, tiers = np.array(PROMPTS[0][:32], dtype=np.int32), side._tiers
        side.asked("stranger", Ask(1, 1, 9.0, tiers.names.scope(Namespace()), "", "", tokens.tobytes()))
        until(lambda: side._prompts["stranger", 1].is_done and not tiers.moving, prefill)
        prefill.flush(None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(tiers.moving, Transfer(Lane.SAVE, ()), Moving(Hold(Reason.SAVE, "", None), []))
            side.asked("stranger", Want(1, 0, (np.arange(8, dtype=np.int32).tobytes(),), b""))
            side.settle()
        assert isinstance(told[-1].message, Gone), told
        side.lost("stranger")


def test_parts_after_one_that_is_not_computed_are_not_looked_for() -> None:
    """Each look matches the whole prompt, and a long prompt has thousands of parts."""
    with pair() as (_, prefill), pytest.MonkeyPatch.context() as patch:
        assert prefill.transfer is not None
        side, looks = prefill.transfer.prefill, list[int]()
        tokens, tiers = np.array(PROMPTS[0][:32], dtype=np.int32), side._tiers
        patch.setattr(tiers, "read", lambda namespace, prompt, places: looks.append(int(places[0][0])))
        for ask in (1, 2):
            side.asked("stranger", Ask(ask, 1, 9.0, tiers.names.scope(Namespace()), "", "", tokens.tobytes()))
            for part in range(8):
                side.asked("stranger", Want(ask, part, (np.array([part], dtype=np.int32).tobytes(),), b""))
        side.settle()
        assert looks == [0, 0], "once for each prompt"
        side.lost("stranger")


@pytest.mark.parametrize("failing", ["control", "connector"])
def test_a_network_thread_that_fails_is_seen_and_ends_what_was_asked(failing: str) -> None:
    """At once, and not at the deadline of the request."""
    with pair(connector="tcp", transfer_seconds=3000.0) as (decode, prefill):
        assert decode.transfer is not None and not list(stuck(decode.statistics()))
        add(decode, "mine")
        until(lambda: prefill.transfer and prefill.transfer.prefill.ids, decode, prefill)
        owner = decode.transfer._control if failing == "control" else decode.transfer.connector
        loop = vars(owner)["_loop"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "resume", lambda connection: 1 // 0)
            loop.call(lambda: 1 // 0)
            assert until(lambda: not decode.has_work(), decode)["mine"] == alone()[0]
        cause = {"control": "unreachable", "connector": "connector"}[failing]
        (counts,) = transfer_of(decode)["received"].values()
        assert counts["fallbacks"] == {cause: 1}
        assert list(transfer_of(decode)["failed_threads"]) == [failing]
        said = [each for each in stuck(decode.statistics()) if each.startswith(f"transfer {failing}: ")]
        assert len(said) == 1 and "ZeroDivisionError" in said[0]
        add(decode, "later", 1)
        assert until(lambda: not decode.has_work(), decode)["later"] == alone()[1], "nothing is asked any more"
        assert transfer_of(decode)["asks"] == 1

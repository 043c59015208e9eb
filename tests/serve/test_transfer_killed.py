"""Prefill and decode engines as processes: same tokens, and what is left when one is killed or stopped midway."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.serve.apart import (
    CONNECTORS,
    SECONDS,
    apart,
    ask,
    at_rest,
    connected,
    go_on,
    kill,
    prompt,
    start,
    stop,
    transfer,
)
from tests.serve.live_server import LiveServer

FOR_EVER = ("--transfer-seconds", "3600")
"""A request that waited for a killed engine would not be answered before its client gives up."""


def causes(server: LiveServer) -> Counter[str]:
    """Prompts of a decode engine that it computed itself, by cause."""
    return sum((Counter(each["fallbacks"]) for each in transfer(server)["received"].values()), Counter[str]())


def in_background(server: LiveServer, *numbers: int) -> list[threading.Thread]:
    """Requests that may fail, as that of a killed server."""

    def send(number: int) -> None:
        with contextlib.suppress(AssertionError, OSError):
            ask(server, prompt(number))

    threads = [threading.Thread(target=send, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    return threads


def test_a_prompt_arrives_and_the_next_one_does_not_need_the_peer(tiny_model: Path) -> None:
    with apart(tiny_model, "tcp", *FOR_EVER) as (prefill, (decode,), _):
        expected = [ask(prefill, prompt(number)) for number in (1, 2)]
        assert ask(decode, prompt(1)) == expected[0]
        assert transfer(decode)["received_bytes"] == transfer(prefill)["sent_bytes"] > 0
        kill(prefill)
        assert ask(decode, prompt(2)) == expected[1]
        assert causes(decode).total() == 1 and not causes(decode)["deadline"]
        at_rest(decode)


@pytest.mark.slow
@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_killed_and_a_stopped_prefill_engine(tiny_model: Path, connector: str) -> None:
    with apart(tiny_model, connector) as (prefill, (decode,), port):
        expected = {number: ask(prefill, prompt(number)) for number in (*range(40, 46), 48)}
        assert ask(decode, prompt(40)) == expected[40]
        before = transfer(decode)
        assert before["received_bytes"] > 0 and before["fallbacks"] == 0
        assert transfer(prefill)["sent_bytes"] == before["received_bytes"]
        ask(decode, prompt(1))

        stop(prefill)
        assert ask(decode, prompt(41)) == expected[41], "it is computed here when the peer is silent"
        assert causes(decode)["deadline"] + causes(decode)["silent"] == 1, f"after {SECONDS} s"
        connected(decode, is_so=False)
        held = transfer(decode)["held_bytes"]
        assert held == 0 or connector != "tcp", "nothing lands under a tag that tcp has shut"
        assert ask(decode, prompt(42)) == expected[42]
        go_on(prefill)
        connected(decode)
        at_rest(decode)
        assert ask(decode, prompt(43)) == expected[43]
        assert transfer(decode)["received_tokens"] > before["received_tokens"], "transfers work again"

        for turn in range(2):
            running = in_background(decode, *range(50 + 8 * turn, 54 + 8 * turn))
            time.sleep(0.03 * turn)
            kill(prefill)
            seen = causes(decode)
            assert ask(decode, prompt(44 + 4 * turn)) == expected[44 + 4 * turn]
            assert causes(decode) - seen - Counter(deadline=1000), "it is told that its peer has ended"
            for thread in running:
                thread.join(SECONDS + 10)
                assert not thread.is_alive()
            at_rest(decode)
            prefill.close()
            with start(tiny_model, "prefill", port, connector) as again:
                connected(decode)
                got = transfer(decode)["received_tokens"]
                assert ask(decode, prompt(45)) == expected[45]
                ask(decode, prompt(46 + turn))
                assert transfer(decode)["received_tokens"] > got
                at_rest(again)
                if turn == 0:
                    kill(again)
            if turn == 0:
                prefill = start(tiny_model, "prefill", port, connector)
                connected(decode)


@pytest.mark.slow
@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_killed_and_a_stopped_decode_engine(tiny_model: Path, connector: str) -> None:
    with apart(tiny_model, connector) as (prefill, (decode,), port):
        expected = ask(prefill, prompt(1))
        assert ask(decode, prompt(1)) == expected

        running = in_background(decode, *range(2, 6))
        time.sleep(0.05)
        stop(decode)
        assert ask(prefill, prompt(1)) == expected
        assert decode.engine().status() == psutil.STATUS_STOPPED, "the prefill engine does not wait for it"
        go_on(decode)
        for thread in running:
            thread.join(30)
        at_rest(prefill)
        at_rest(decode)

        for turn in range(2):
            running = in_background(decode, *range(10 * turn + 10, 10 * turn + 16))
            time.sleep(0.05 * turn)
            kill(decode)
            decode.close()
            for thread in running:
                thread.join(30)
            assert ask(prefill, prompt(1)) == expected
            assert not transfer(prefill)["decode_peers"]
            at_rest(prefill)
            decode = start(tiny_model, "decode", port, connector)
            connected(decode)
            assert ask(decode, prompt(1)) == expected
            assert transfer(decode)["received_tokens"] > 0
        decode.close()

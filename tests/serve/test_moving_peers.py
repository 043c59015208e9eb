"""Prefill engines of a server change while clients ask it: no request fails, and the new ones compute prompts."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest

from tests.serve.apart import CONNECTORS, WAIT_S, ask, at_rest, free_port, kill, prompt, start, transfer
from tests.serve.live_server import LiveServer

NUM_CLIENTS = 4


def set_peers(server: LiveServer, *ports: int) -> None:
    """The engines at these ports, and no others, are its peers, and it is connected to them."""
    peers = [f"127.0.0.1:{port}" for port in ports]
    assert server.request("/v1/cache/peers", {"prefill_peers": peers}, method="PUT") == (200, {"prefill_peers": peers})
    until = time.monotonic() + WAIT_S
    while {peer["address"] for peer in transfer(server)["prefill_peers"]} != set(peers):
        assert time.monotonic() < until, transfer(server)
        time.sleep(0.01)


def received(server: LiveServer, port: int) -> int:
    """Tokens that came from the engine at a port."""
    return int(transfer(server)["received"].get(f"127.0.0.1:{port}", {"tokens": 0})["tokens"])


def grows(server: LiveServer, port: int) -> None:
    """Wait until more of them have come."""
    before, until = received(server, port), time.monotonic() + WAIT_S
    while received(server, port) == before:
        assert time.monotonic() < until, transfer(server)
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("connector", CONNECTORS)
def test_peers_change_under_load(tiny_model: Path, connector: str) -> None:
    first_port, second_port = free_port(), free_port()
    with (
        start(tiny_model, "prefill", first_port, connector) as first,
        start(tiny_model, "prefill", second_port, connector) as second,
        start(tiny_model, "decode", 0, connector) as decode,
    ):
        answers: dict[int, list[int]] = {}
        failures: list[BaseException] = []
        numbers, is_over = itertools.count(), threading.Event()

        def client() -> None:
            while not is_over.is_set() and not failures:
                number = next(numbers)
                try:
                    answers[number] = ask(decode, prompt(number))
                except BaseException as error:
                    failures.append(error)

        clients = [threading.Thread(target=client) for _ in range(NUM_CLIENTS)]
        for thread in clients:
            thread.start()
        try:
            for ports in ((first_port,), (second_port,), (first_port, second_port), (), (second_port,)):
                set_peers(decode, *ports)
                for port in ports:
                    grows(decode, port)
            kill(second)
            set_peers(decode, first_port)
            grows(decode, first_port)
        finally:
            is_over.set()
            for thread in clients:
                thread.join(WAIT_S)
        assert not failures, failures
        assert answers and answers == {number: ask(first, prompt(number)) for number in answers}
        assert at_rest(decode)["transfer"]["problems"] == {}
        at_rest(first)


def test_what_is_no_peer_is_refused(tiny_model: Path) -> None:
    with start(tiny_model, "decode", 0, "tcp") as decode:
        for peers, said in (
            (["nowhere"], "is not HOST:PORT"),
            ("127.0.0.1:1", "list"),
            (["a:1", "a:1"], "given twice"),
        ):
            status, answer = decode.request("/v1/cache/peers", {"prefill_peers": peers}, method="PUT")
            assert status == 400 and said in answer["error"]["message"], answer
        assert ask(decode, prompt(1)) and transfer(decode)["fallbacks"] == 0, "it computes its prompts"

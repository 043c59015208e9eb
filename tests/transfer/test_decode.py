"""DecodeSide: which peer is asked, and what open asks of a peer count for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from quire.memory.host_pool import HostPool
from quire.spec.events import Namespace
from quire.testing import small_plan
from quire.transfer.connectors.tcp import TcpConnector
from quire.transfer.decode import DecodeSide
from quire.transfer.messages import Ask, Release, Send

PAGE = 4
PROMPT = np.arange(64, dtype=np.int32)


@pytest.fixture
def sent() -> list[Send]:
    return []


@pytest.fixture
def side(sent: list[Send]) -> Iterator[DecodeSide]:
    host = HostPool(small_plan(8, PAGE).groups, (8,))
    connector = TcpConnector(host.memory, name="decode-0@1", secret=b"a secret of tests")
    yield DecodeSide(
        connector,
        host,
        lambda namespace: b"s" * 16,
        sent.append,
        num_groups=1,
        page_size=PAGE,
        seconds=30.0,
        least_tokens=1,
    )
    connector.close()
    host.close()


def test_open_tokens_of_a_peer_that_was_silent_are_those_of_its_open_asks(side: DecodeSide, sent: list[Send]) -> None:
    """A peer that has just hung is not preferred to one that answers."""
    for peer in ("prefill-0@1", "prefill-1@1"):
        side.counts.connected(peer, peer.partition("@")[0])
        side.ready(peer, is_ready=True)
    asking = side.ask(PROMPT, Namespace(), 60)
    assert asking is not None and asking.label == asking.peer.partition("@")[0]
    side.ready(asking.peer, is_ready=False)  # Silent
    side.do(side.receiver.silent(asking.peer))
    side.ready(asking.peer, is_ready=True)  # Speaks
    assert side.open_tokens == {asking.peer: 60, ({"prefill-0@1", "prefill-1@1"} - {asking.peer}).pop(): 0}
    asking.release(0)
    assert set(side.open_tokens.values()) == {0}
    assert [type(each.message) for each in sent] == [Ask, Release]

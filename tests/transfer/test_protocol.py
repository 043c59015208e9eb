"""The machines against each other: every order within small bounds, and random orders of many asks and parts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.changes import TRANSFER, slow_unless_changed
from tests.covering import few
from tests.transfer.protocol_model import Bounds, Ends, World, explore

SMALL = {
    "no fault": Bounds(),
    "a break": Bounds(breaks=1),
    "a kill": Bounds(kills=1),
    "a stop": Bounds(stops=1, fails=False),
    "a duplicate": Bounds(duplicates=1, fails=False),
    "new weights": Bounds(ends=1),
    "a removal": Bounds(leaves=1, fails=False),
    "a connector that shuts tags": Bounds(breaks=1, shuts=True),
    "two parts": Bounds(parts=2, fails=False),
}
LARGE = {
    "two parts, a break": Bounds(parts=2, breaks=1, fails=False),
    "two parts, a kill": Bounds(parts=2, kills=1, fails=False),
    "two parts, a stop": Bounds(parts=2, stops=1, fails=False),
    "two parts, a duplicate": Bounds(parts=2, duplicates=1, fails=False),
    "two parts that fail": Bounds(parts=2),
    "two parts, a removal and a break": Bounds(parts=2, leaves=1, breaks=1, fails=False),
    "two asks, one by one, and a removal": Bounds(asks=2, leaves=1, fails=False, at_once=False),
    "a removal, a kill and a stop": Bounds(leaves=1, kills=1, stops=1),
    "two asks": Bounds(asks=2, fails=False),
    "two asks, one by one, and a break": Bounds(asks=2, breaks=1, fails=False, at_once=False),
    "two asks, one by one, and a duplicate": Bounds(asks=2, duplicates=1, fails=False, at_once=False),
    "a break, a kill and a stop": Bounds(breaks=1, kills=1, stops=1),
    "two duplicates and a break": Bounds(duplicates=2, breaks=1, fails=False),
}


@pytest.mark.parametrize("name", few(SMALL, 4))
def test_every_order(name: str) -> None:
    happened = explore(SMALL[name])
    assert happened["states"] > 500
    needed = {"deliver decode Sent", "deliver decode Gone", "deliver prefill Cancel", "deliver prefill Release", "time"}
    assert needed <= happened.keys()


def test_what_each_bound_adds_has_happened() -> None:
    assert explore(SMALL["a break"]).keys() >= {"break", "notice decode", "notice prefill", "connect"}
    assert explore(SMALL["a kill"]).keys() >= {"kill decode", "kill prefill", "notice decode", "notice prefill"}
    assert explore(SMALL["a stop"]).keys() >= {"stop decode", "stop prefill", "silent", "continue"}
    assert explore(SMALL["new weights"])["end all"]
    assert explore(SMALL["a removal"]).keys() >= {"leave", "notice decode", "notice prefill", "connect"}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", LARGE)
def test_every_order_of_more(name: str) -> None:
    assert explore(LARGE[name])["states"] > 5000


class Lives(RuleBasedStateMachine):
    """Hypothesis chooses what happens next."""

    BOUNDS = Bounds(asks=8, parts=4, duplicates=4, breaks=2, kills=1, stops=2, ends=1, leaves=2)

    def __init__(self) -> None:
        super().__init__()
        self.world, self.ends = World(self.BOUNDS), Ends()

    @rule(data=st.data())
    def several(self, data: st.DataObject) -> None:
        for _ in range(5):
            actions = sorted(self.world.actions(), key=repr)
            if not actions:
                return
            self.world.do(data.draw(st.sampled_from(actions)))
            self.world.check()

    def teardown(self) -> None:
        self.ends.check(self.world)


class LivesWithShutTags(Lives):
    """The same with a connector whose `shut` returns True."""

    BOUNDS = Bounds(asks=8, parts=4, duplicates=8, breaks=2, stops=2, ends=1, leaves=2, shuts=True)


Lives.TestCase.settings = LivesWithShutTags.TestCase.settings = settings(max_examples=200, stateful_step_count=30)
TestLives = slow_unless_changed(*TRANSFER, "tests/transfer/")(Lives.TestCase)
TestLivesWithShutTags = slow_unless_changed(*TRANSFER, "tests/transfer/")(LivesWithShutTags.TestCase)

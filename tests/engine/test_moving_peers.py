"""Prefill engines are added, removed, killed and stopped while prompts are asked for. All that changes is the time."""

from __future__ import annotations

import time
from functools import cache
from random import Random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.models.hf import LoadedModel
from tests.changes import TRANSFER, slow_unless_changed
from tests.engine.apart import address_of, decode_engine, prefill_engine, ready_peers, transfer_of, turn
from tests.engine.running import core_for, run
from tests.engine.tiered import GREEDY, build
from tests.engine.transfer_runs import Faults, check_rest, faulty, node_of
from tests.tiny_models import VOCAB_SIZE
from tests.transfer.memory_connector import Fault

PAGE = 4
NUM_PEERS = 3
LONG_S = 20.0
NUMBERS = st.integers(0, NUM_PEERS - 1)


@cache
def tiny() -> LoadedModel:
    return LoadedModel(build("llama_gqa"), name="llama_gqa")


@cache
def prompt_of(number: int) -> list[int]:
    """It shares its beginning with others."""
    rng, first = Random(number), Random(number % 3)
    tokens = [first.randrange(1, VOCAB_SIZE - 1) for _ in range(24)]
    return tokens + [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(number % 5 * PAGE + 9)]


@cache
def alone() -> EngineCore:
    return core_for(tiny(), page_size=PAGE)


@cache
def expected(number: int) -> list[int]:
    """The tokens of one engine."""
    return run(alone(), [prompt_of(number)], GREEDY)[0]


class MovingPeers(RuleBasedStateMachine):
    """One decode engine and three that it may ask. The model is the set of peers, and the tokens of one engine."""

    @initialize(seed=st.integers(0, 2**16), late=st.booleans())
    def start(self, seed: int, late: bool) -> None:
        self.faults = Faults((), [lambda rng: Fault(late=late, delay_s=rng.uniform(0.0, 0.2))])
        self.patches = faulty(self.faults)
        self.patches.__enter__()
        self.faults.rng, self.faults.rate = Random(seed), 0.5
        self.common = {"page_size": PAGE, "transfer_connector": "memory", "max_num_batched_tokens": 16}
        self.others = [self.prefill("127.0.0.1:0") for _ in range(NUM_PEERS)]
        self.where = [address_of(core) for core in self.others]
        self.decode = decode_engine(tiny(), [], num_tokens=160, host=2.0, **self.common)
        self.stopped: set[int] = set()
        self.asked: dict[str, int] = {}
        self.got: dict[str, list[int]] = {}
        self.move(set(range(NUM_PEERS)))

    def prefill(self, listen: str) -> EngineCore:
        core = prefill_engine(tiny(), num_tokens=640, transfer_listen=listen, **self.common)
        sender = node_of(core).prefill.sender
        sender._margin_s, sender._drain_s = 0.05, 0.2
        return core

    @rule(peers=st.sets(NUMBERS))
    def move(self, peers: set[int]) -> None:
        self.peers = {self.where[at] for at in peers}
        assert set(self.decode.set_prefill_peers(sorted(self.peers))) == self.peers

    @rule(numbers=st.lists(st.integers(0, 999), min_size=1, max_size=3), waits=st.booleans())
    def ask(self, numbers: list[int], waits: bool) -> None:
        """What other prompts have left is flushed. It often `waits` until there is a peer to ask."""
        could = self.peers - {self.where[at] for at in self.stopped}
        until = time.monotonic() + LONG_S
        while waits and could and not self.connected & could:
            assert time.monotonic() < until, transfer_of(self.decode)
            self.steps(1)
        self.decode.flush(None)
        for number in numbers:
            name = f"r-{len(self.asked)}"
            self.asked[name], self.got[name] = number, []
            prompt = np.array(prompt_of(number), dtype=np.int32).tobytes()
            self.decode.add(EngineRequest(request_id=name, prompt=prompt, params=GREEDY))

    @rule(
        numbers=st.lists(st.integers(0, 999), min_size=1, max_size=3), count=st.integers(0, 8), peers=st.sets(NUMBERS)
    )
    def ask_and_move(self, numbers: list[int], count: int, peers: set[int]) -> None:
        self.ask(numbers, waits=True)
        self.steps(count)
        self.move(peers)

    @rule(at=NUMBERS)
    def stop_or_continue(self, at: int) -> None:
        self.stopped ^= {at}

    @rule(at=NUMBERS)
    def kill(self, at: int) -> None:
        """Another engine follows at its address."""
        self.others[at].close()
        self.others[at] = self.prefill(self.where[at])
        self.stopped.discard(at)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            running = [core for at, core in enumerate(self.others) if at not in self.stopped]
            for name, tokens in turn(self.decode, *running).items():
                self.got[name] += tokens if name in self.got else []
        self.decode.audit()

    def teardown(self) -> None:
        try:
            self.end()
        finally:
            for core in (self.decode, *self.others):
                core.close()
            self.patches.__exit__(None, None, None)

    def end(self) -> None:
        self.stopped.clear()
        cores, until = (self.decode, *self.others), time.monotonic() + LONG_S
        while any(core.has_work() or core.has_moves() for core in cores) or self.connected != self.peers:
            assert time.monotonic() < until, [transfer_of(core) for core in cores]
            self.steps(1)
        for name, number in self.asked.items():
            assert self.got[name] == expected(number), f"{name}: prompt {number}"
        for core in cores:
            check_rest(core, spoiled=False)

    @property
    def connected(self) -> set[str]:
        return set(ready_peers(self.decode))


MovingPeers.TestCase.settings = settings(max_examples=6, stateful_step_count=20, deadline=None)
TestMovingPeers = slow_unless_changed(*TRANSFER)(MovingPeers.TestCase)

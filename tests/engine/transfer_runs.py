"""Seeded runs of a decode and a prefill engine with faults of bytes, messages, connections, memory and weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import numpy as np
import pytest

from quire.counters import statistics_of
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.errors import InvalidInput
from quire.models.hf import LoadedModel
from quire.offload.tiering import Tiering
from quire.scheduler.sampling_params import SamplingParams
from quire.tiers.mover import ThreadMover
from quire.transfer import control, node
from quire.transfer.connector import Connector, Spans, Write
from quire.transfer.connectors import registry
from quire.transfer.connectors.registry import open_connector
from quire.transfer.connectors.tcp import TcpConnector
from quire.transfer.node import TransferNode
from tests.engine.apart import address_of, decode_engine, prefill_engine, ready_peers, transfer_of
from tests.engine.running import core_for, run
from tests.tiny_models import VOCAB_SIZE
from tests.transfer.memory_connector import Fault, MemoryConnector

SECONDS = 0.25  # that a request waits for the other engine
LONGEST_S = 15.0  # in which a run must end on a busy machine
_SPOILS = Counter(short=1, swap=1, late=1)
RUNS_OF_ENGINES = 12  # until others are made
MODELS = ("llama_gqa", "gpt_oss", "qwen3_next")
BYTE_FAULTS: tuple[Callable[[Random], Fault], ...] = (
    lambda rng: Fault(delay_s=rng.uniform(0, 0.05)),
    lambda rng: Fault(drop=True),
    lambda rng: Fault(short=True),
    lambda rng: Fault(swap=True),
    lambda rng: Fault(late=True, delay_s=rng.uniform(0, 2 * SECONDS)),
)


class Faults:
    """What goes wrong now: `bytes_of` gives the fault of a write."""

    def __init__(self, rates: Sequence[float], bytes_faults: Sequence[Callable[[Random], Fault]]) -> None:
        self.rng = Random(0)
        self.rates, self._bytes_faults = rates, bytes_faults
        self.rate = 0.0
        self.happened: Counter[str] = Counter()

    def bytes_of(self, peer: str = "", tag: int = 0) -> Fault | None:
        if self.rng.random() >= self.rate:
            return None
        fault = self.rng.choice(self._bytes_faults)(self.rng)
        names = [name for name in ("drop", "short", "swap", "late") if getattr(fault, name)]
        self.happened[names[0] if names else "delay"] += 1
        return fault


class FaultyTcp(TcpConnector):
    """Writes that are dropped, too short, or have pages in each other's place."""

    faults: Faults

    def write(self, peer: str, tag: int, spans: Spans, target: bytes) -> Write:
        fault = self.faults.bytes_of()
        if fault is not None and fault.drop:
            dropped = Write()
            self.dropped.append(dropped)
            return dropped
        if fault is not None and fault.short:
            spans = spans[:-1]
        if fault is not None and fault.swap and len(set(spans[:, 1].tolist())) == 1:
            spans = spans[::-1]
        return super().write(peer, tag, spans, target)

    def disconnect(self, peer: str) -> None:
        for write in self.dropped:
            write.end("the peer was disconnected.")
        super().disconnect(peer)

    @property
    def dropped(self) -> list[Write]:
        found: list[Write] = vars(self).setdefault("_dropped", [])
        return found


@contextmanager
def faulty(faults: Faults) -> Iterator[None]:
    """Connectors have these faults, and silence is noticed soon."""

    def opened(kind: str, memory: Any, *, unauthenticated: bool, **settings: Any) -> Connector:
        if kind == "memory":
            return MemoryConnector(memory, **settings, faults=faults.bytes_of)
        if kind == "tcp":
            made = FaultyTcp(memory, **settings)
            made.faults = faults
            return made
        return open_connector(kind, memory, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._CONNECTORS, "memory", ("MemoryConnector", ""))
        patch.setattr(node, "open_connector", opened)
        patch.setattr(control, "SILENT_S", 1.0)
        patch.setattr(control, "_LEAST_BACKOFF_S", 0.01)
        yield


Event = Callable[["Pair"], float | None]
"""What happens to a pair. It returns for how many seconds the prefill engine stands still, if it does."""


def node_of(core: EngineCore) -> TransferNode:
    assert core.transfer is not None
    return core.transfer


def check_rest(core: EngineCore, *, spoiled: bool) -> None:
    """Nothing is asked, sent or held, and every page is its own. `spoiled`: bytes were, on the way."""
    node = node_of(core)
    assert not node.decode.asks and not node.decode.receiver.asks and not node.decode.held_bytes
    assert not getattr(node.connector, "_tags")  # noqa: B009 - of both connectors
    assert not node.prefill.ids and not node.prefill._prompts and not node.prefill._writes
    assert not any(client.asks for client in node.prefill.sender.clients.values())
    core.audit()
    tiers = core.offload.tiers
    assert tiers is not None and not tiers.moving
    for host in tiers.hosts:
        assert not host._reads and not host.still_read and not host.counters().moving
    assert core.cache.tree.num_protected == 0
    _check_records(tiers)
    found = statistics_of(tiers.sections())["tiers"]
    assert not [each for each in found["defects"] if each.startswith("host:")], "a peer wrote into reused frames"
    assert not found["defects"] or spoiled, "pages of other weights were sent"
    assert not found["fetched_frames"], "pages of a peer count as stored"


def _check_records(tiers: Tiering) -> None:
    """Every record of a cached page is its own."""
    assert isinstance(tiers.mover, ThreadMover)
    copies = tiers.mover._executor._copies
    for host in tiers.hosts:
        pages = np.flatnonzero(host.table.frame).astype(np.int32)
        found = copies.defects(host.index, host.table.frame[pages], tiers.names.keys_of(pages))
        assert not any(found), f"a peer wrote into frames of others: {found}"


class Pair:
    """A prefill engine, starved or not, and a decode engine, with the tokens that one engine alone gives."""

    def __init__(
        self, model: LoadedModel, rng: Random, connector: str, faults: Faults, events: Sequence[Event]
    ) -> None:
        self.events = events
        self.model, self.faults, self.rng = model, faults, rng
        self.page_size = rng.choice((1, 4, 16))
        self.epoch = self._number = 0
        self._paused_until = 0.0
        self.stale: EngineCore | None = None  # has the weights of before
        self._alone = core_for(model, pages=None, page_size=self.page_size, max_num_batched_tokens=48)
        self._expected: dict[tuple[Any, ...], list[int]] = {}
        base = Random(rng.random())
        self._prefixes = [[base.randrange(1, VOCAB_SIZE - 1) for _ in range(40)] for _ in range(3)]
        common: dict[str, Any] = {
            "page_size": self.page_size,
            "transfer_connector": connector,
            "transfer_seconds": SECONDS,
            "max_num_batched_tokens": rng.choice((17, 48)),
            "max_running_requests": 3,
            "max_model_len": 256,
        }
        states = any(group.reach.kind == "state" for group in model.spec.groups(self.page_size))
        common |= {"max_mamba_cache_size": 8} if states else {}
        self.prefill = prefill_engine(model, num_tokens=160, host=rng.choice((0.5, 1.0, 6.0)), **common)
        self.decode = decode_engine(
            model, [self.prefill], num_tokens=rng.choice((112, 320)), host=rng.choice((1.0, 4.0)), **common
        )
        self.engines = (self.decode, self.prefill)
        sender = self.node(self.prefill).prefill.sender
        sender._margin_s, sender._drain_s = 0.05, 0.2

    @staticmethod
    def node(core: EngineCore) -> TransferNode:
        return node_of(core)

    def close(self) -> None:
        for core in self.engines:
            core.close()

    def expected(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The tokens of one engine."""
        key = (*prompt, params.temperature, params.seed)
        if key not in self._expected:
            self._expected[key] = run(self._alone, [prompt], params)[0]
        return self._expected[key]

    def run(self, seed: int) -> None:
        """One run: some requests, each right and in time, and then nothing is left on either side."""
        rng = self.rng = self.faults.rng = Random(seed)
        self.faults.rate = rng.choice(self.faults.rates)
        events = rng.sample(self.events, min(len(self.events), rng.choice((0, 1, 1, 2))))
        due = sorted((rng.choice((0, rng.randrange(1, 40))), number) for number in range(len(events)))
        asked: dict[str, tuple[list[int], SamplingParams]] = {}
        got: dict[str, list[int]] = {}
        self.gone: set[str] = set()  # requests that were aborted
        self.open: dict[str, None] = {}
        self._let_happen(events, due, 0)
        for core, count in ((self.decode, rng.randrange(1, 4)), (self.prefill, rng.choice((0, 0, 2)))):
            for _ in range(count):
                self._number += 1
                name = f"run-{self._number}"
                prompt = [*rng.choice(self._prefixes)[: rng.randrange(1, 41)]]
                prompt += [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(rng.choice((0, 1, 16, 30)))]
                params = SamplingParams(
                    max_tokens=4, ignore_eos=True, temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(9)
                )
                asked[name], got[name] = (prompt, params), []
                core.add(
                    EngineRequest(request_id=name, prompt=np.array(prompt, dtype=np.int32).tobytes(), params=params)
                )
        self.open |= dict.fromkeys(asked)
        began, step = time.monotonic(), 0
        while any(core.has_work() for core in self.engines):
            step += 1
            self._let_happen(events, due, step)
            assert time.monotonic() < began + LONGEST_S, [core.statistics()["waiting_reason"] for core in self.engines]
            self._turn(got, stopped=time.monotonic() < self._paused_until)
            if self.stale is not None and rng.random() < 0.2:
                self._renew()
            if not self.node(self.decode).asks and rng.random() < 0.1:
                self.decode.set_prefill_peers([address_of(self.prefill)])
        for name, (prompt, params) in asked.items():
            if name not in self.gone:
                assert got[name] == self.expected(prompt, params), f"{name}: {prompt}"
        self._renew()
        self.decode.set_prefill_peers([address_of(self.prefill)])
        self._rest()

    def _let_happen(self, events: Sequence[Event], due: list[tuple[int, int]], step: int) -> None:
        while due and due[0][0] <= step:
            event = events[due.pop(0)[1]]
            self.faults.happened[event.__name__] += 1
            self._paused_until = time.monotonic() + (event(self) or 0.0)

    def _renew(self) -> None:
        if self.stale is not None:
            self.stale.set_weights_epoch(self.epoch)
            self.stale = None

    def _turn(self, got: dict[str, list[int]], *, stopped: bool = False) -> None:
        moved = False
        for core in self.engines[: 1 if stopped else 2]:
            if core.has_work() or core.has_moves():
                moved = True
                for output in core.step():
                    assert output.finish_reason != "error", output.error
                    got[output.request_id].extend(output.token_ids)
                    if output.finish_reason is not None:
                        self.open.pop(output.request_id, None)
        if not moved:
            time.sleep(0.001)

    def _rest(self) -> None:
        """Everything ends, and nothing is held."""
        self.faults.rate = 0.0
        until = time.monotonic() + LONGEST_S
        while any(core.has_moves() for core in self.engines) or not self._is_connected:
            assert time.monotonic() < until, [transfer_of(core) for core in self.engines]
            self._turn({})
        for core in self.engines:
            check_rest(core, spoiled=bool(self.faults.happened & _SPOILS))

    @property
    def _is_connected(self) -> bool:
        return bool(ready_peers(self.decode))


def pause(pair: Pair) -> float:
    return pair.rng.choice((0.05, SECONDS, 1.5 * SECONDS))


def abort(pair: Pair) -> None:
    if pair.open:
        name = pair.rng.choice(list(pair.open))
        pair.gone.add(name)
        for core in pair.engines:
            core.abort(name)


def abort_there(pair: Pair) -> None:
    for name in list(pair.node(pair.prefill).prefill.ids):
        pair.prefill.abort(name)


def flush(pair: Pair) -> None:
    pair.rng.choice(pair.engines).flush(None)


def refuse(pair: Pair) -> None:
    """The next prompt is refused, after frames were prepared for it."""
    side = pair.node(pair.prefill).prefill
    begin = side._begin

    def refuse(*given: Any) -> None:
        side._begin = begin
        raise InvalidInput("there is no room.")

    side._begin = refuse


def new_weights(pair: Pair) -> None:
    """Of one engine now, of the other a little later."""
    pair.epoch += 1
    first, second = pair.rng.sample(pair.engines, 2)
    first.set_weights_epoch(pair.epoch)
    pair.stale = second


def cut(pair: Pair) -> None:
    """The connection breaks; both sides learn it."""
    if pair.faults.happened["late"]:
        return  # a late write after a closed connection is one of a peer that lied
    loop = getattr(pair.node(pair.decode)._control, "_loop")  # noqa: B009 - of the thread
    for link in list(loop.connections):
        with suppress(OSError):
            link.socket.shutdown(2)


def remove(pair: Pair) -> None:
    """The prefill engine is no peer any more, for a while."""
    pair.decode.set_prefill_peers([])


EVENTS: tuple[Event, ...] = (pause, abort, abort_there, flush, refuse, new_weights, cut, remove)


def run_pairs(
    model: LoadedModel,
    first: int,
    count: int,
    connector: str = "memory",
    *,
    events: Sequence[Event] = EVENTS,
    rates: Sequence[float] = (0.0, 0.2, 0.7),
    bytes_faults: Sequence[Callable[[Random], Fault]] = BYTE_FAULTS,
) -> Counter[str]:
    """Runs with these seeds; what happened in them."""
    found: Counter[str] = Counter()
    for begin in range(first, first + count, RUNS_OF_ENGINES):
        faults = Faults(rates, bytes_faults)
        with faulty(faults):
            pair = Pair(model, Random(begin), connector, faults, events)
            try:
                for seed in range(begin, min(begin + RUNS_OF_ENGINES, first + count)):
                    pair.run(seed)
                    found["runs"] += 1
                for name in ("received_tokens", "fallbacks", "asks"):
                    found[name] += transfer_of(pair.decode)[name]
                assert pair.decode.offload.tiers is not None
                found["damaged"] += sum(
                    statistics_of(pair.decode.offload.tiers.sections())["tiers"]["defects"].values()
                )
            finally:
                pair.close()
        found += faults.happened
    return found

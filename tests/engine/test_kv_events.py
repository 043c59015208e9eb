"""An engine's events on the wire: what readers know of each tier, and what is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from quire.client.health import stuck
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.kv_events import EventsPart
from quire.errors import InvalidInput
from quire.observe.kv_batch import block_hash
from quire.observe.kv_publisher import KvPublisher
from quire.prefix.node import Node
from quire.spec.events import Namespace
from tests.engine.running import core_for, run
from tests.engine.tiered import GREEDY, OTHERS, PROMPTS, Case, case_of, end_all, settle, small
from tests.observe.test_kv_publisher import Reader, until

pytest.importorskip("zmq", reason="pyzmq is not installed")

HERE = "tcp://127.0.0.1:0"


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    yield
    end_all()


def publisher_of(core: EngineCore) -> KvPublisher:
    part = core.part(EventsPart)
    assert part is not None
    return part.publisher


def rest(core: EngineCore) -> KvPublisher:
    """Step until nothing is left to do, and all events are out."""
    publisher = publisher_of(core)
    while core.has_work() or core.is_due():
        core.step()
    until(lambda: not publisher.counters().waiting)
    return publisher


def blocks(core: EngineCore, count: Any) -> set[int]:
    """Those of the first `count(node)` pages of all nodes."""
    nodes: list[Node] = list(core.cache.tree.nodes())
    return {
        block_hash(each)
        for node in nodes
        for each in [key for run in node.hashes for key in run.digests][: count(node)]
    }


def check(core: EngineCore, reader: Reader) -> None:
    """The reader knows what each tier has."""
    rest(core)
    reader.ask(reader.next)
    tree = core.cache.tree
    assert set(reader.blocks.get("GPU", {})) == blocks(core, lambda node: node.num_pages * tree.is_here(node))
    assert set(reader.blocks.get("CPU", {})) == blocks(core, tree.num_copies)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_text"])
def test_readers_know_what_each_tier_has(name: str) -> None:
    case: Case = case_of(name)
    core = small(case.model, kv_events=HERE, kv_events_replay=HERE)
    reader = Reader(rest(core))
    try:
        for turn in range(3):
            case.check(core, turn)
            settle(core)
            check(core, reader)
        assert reader.blocks["CPU"].keys() - reader.blocks["GPU"].keys()
        stored = [event for batch in reader.batches for event in batch if event["type"] == "BlockStored"]
        kind = {"kv_cache_spec_kind": "full_attention", "group_idx": 0} if name == "gemma3_text" else {}
        assert all(
            {key: event[key] for key in ("kv_cache_spec_kind", "group_idx") if key in event} == kind for event in stored
        )
        core.flush(Namespace())
        settle(core)
        check(core, reader)
        assert not any(reader.blocks.values())
    finally:
        reader.close()


def test_a_snapshot_follows_when_a_reader_asks() -> None:
    core = core_for(case_of("llama_gqa").model, pages=60, page_size=4, kv_events=HERE, kv_events_replay=HERE)
    woken: list[int] = []
    core.wake = lambda: woken.append(1)
    run(core, PROMPTS, GREEDY)
    reader = Reader(rest(core))
    try:
        reader.ask(-1)
        until(lambda: bool(woken))
        assert core.is_due() and not reader.blocks
        check(core, reader)
        assert reader.blocks["GPU"] and core.statistics()["kv_events"]["snapshots"] == 1
    finally:
        reader.close()
        core.close()


def test_a_restarted_engine_is_a_gap() -> None:
    """Its first number is above all that were before, and its first event is that nothing is cached."""
    model, seen = case_of("llama_gqa").model, 0
    for _ in range(2):
        core = core_for(model, pages=60, page_size=4, kv_events=HERE, kv_events_replay=HERE)
        run(core, OTHERS, GREEDY)
        reader = Reader(rest(core))
        try:
            reader.ask(seen)
            assert reader.batches[0][0] == {"type": "AllBlocksCleared"} and reader.next > seen + 1
            seen = reader.next
        finally:
            reader.close()
            core.close()


def test_a_thread_that_fails_is_in_health(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_for(case_of("llama_gqa").model, pages=60, page_size=4, kv_events=HERE)
    rest(core)

    def fail(*_: object) -> bytes:
        raise OSError("no more")

    monkeypatch.setattr(publisher_of(core)._batches, "encode", fail)
    tokens = run(core, PROMPTS, GREEDY)
    until(lambda: bool(publisher_of(core).totals.problem))
    assert list(stuck(core.statistics())) == ["events of the cache: OSError: no more"]
    assert run(core, PROMPTS, GREEDY, "again") == tokens
    core.close()


def test_other_machines_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        core_for(case_of("llama_gqa").model, pages=60, page_size=4, kv_events=HERE).close()
        assert not caplog.records
        core_for(case_of("llama_gqa").model, pages=60, page_size=4, kv_events="tcp://0.0.0.0:0").close()
    assert "can read the tokens and salts of all prompts" in caplog.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_events": "127.0.0.1:5557"}, "is no address of ZeroMQ"),
        ({"kv_events_replay": HERE}, "--kv-events-replay does nothing without --kv-events"),
        ({"kv_events": HERE, "enable_prefix_caching": False}, "--kv-events does nothing without prefix caching"),
    ],
)
def test_settings_that_do_nothing_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        engine_config(**settings)
    assert text in str(refused.value)


def test_an_address_in_use_is_refused_and_nothing_stays_open() -> None:
    model = case_of("llama_gqa").model
    core = core_for(model, pages=60, page_size=4, kv_events=HERE)
    used = publisher_of(core).address
    for settings in ({"kv_events": used}, {"kv_events": HERE, "kv_events_replay": used}):
        with pytest.raises(InvalidInput, match="in use"):
            core_for(model, pages=60, page_size=4, **settings)
    core.close()
    core_for(model, pages=60, page_size=4, kv_events=used).close()


def test_without_its_library_it_is_refused_before_the_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidInput, match="pyzmq"):
        EngineCore(engine_config(model="nowhere/nothing", kv_events=HERE))


def test_an_event_costs_the_engine_no_hash() -> None:
    """Keys of pages are made by the thread that publishes them."""
    core = core_for(case_of("llama_gqa").model, pages=60, page_size=4, kv_events=HERE)
    publisher_of(core).close()
    run(core, PROMPTS, GREEDY)
    runs = [each for node in core.cache.tree.nodes() for each in node.hashes]
    assert runs and all(each._run.digests is None for each in runs)
    core.close()

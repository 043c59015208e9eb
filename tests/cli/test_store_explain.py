"""`quire store explain` and `quire explain --lookups`: why engines on one store do not find each other's pages."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from threading import Event, Thread

import pytest

from quire.connectors.checked_store import CheckedStore
from quire.connectors.lookup_log import LookupLog
from quire.testing.contracts.records import make_key, write
from quire.tiers.store import Answer, StoreKey
from quire.tiers.stores.directory import DirectoryStore
from tests.cli.conftest import Run

FACTS = {"engine": "vllm", "model": "org/m", "weights": "w1", "dtype": "bfloat16", "page_size": 16, "rank": "0/1"}
WIDE = {"COLUMNS": "200"}
PAGE, NEW = make_key(1).page, make_key(2).page


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three engines that say what they are of, of which two have one model; and one that said nothing."""
    store = DirectoryStore(tmp_path / "store", 1 << 20)
    for facts in (FACTS, FACTS | {"weights": "w2", "page_size": 32}, FACTS | {"engine": "sglang", "model": "other"}):
        assert CheckedStore(store, facts, {0: 100}).save([(PAGE, 0)], [bytes(100)]) == [Answer.HIT]
    assert write(store, [make_key(1, scope=9)], [bytes(200)]) == [Answer.HIT]
    store.close()
    return tmp_path / "store"


def test_engines_and_what_differs(run: Run, place: Path) -> None:
    done = run("store", "explain", place, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["engines"]) == 4 and all(engine["records"] == 1 for engine in found["engines"])
    assert sum(engine["facts"] is None for engine in found["engines"]) == 1
    (pair,) = found["differences"]
    differ = {name: set(both) for name, both in pair["differ"].items()}
    assert differ == {"weights": {"w1", "w2"}, "page_size": {16, 32}}
    text = run("store", "explain", place, env=WIDE).stdout
    assert "0 hits between" in text and "other weights: w" in text and "not said" in text
    first = pair["scopes"][0]
    against = json.loads(run("store", "explain", place, "--scope", first, "--json").stdout)["differences"]
    assert len(against) == 2 and any("engine" in pair["differ"] for pair in against)
    refused = run("store", "explain", place, "--scope", "00")
    assert refused.exit_code == 2 and "no scope here begins with" in refused.output


def test_facts_are_no_pages(run: Run, place: Path) -> None:
    found = json.loads(run("store", "inspect", place, "--json").stdout)
    assert found["records"] == 4 and all(scope["parts"] == 1 for scope in found["scopes"])
    assert json.loads(run("store", "gc", place, "--older-than", "0s", "--json").stdout)["removed"] == 4
    assert json.loads(run("store", "explain", place, "--json").stdout)["engines"] == []


def test_why_a_prompt_was_not_found(run: Run, place: Path, tmp_path: Path) -> None:
    """Each cause that the log and the store tell."""
    engine = CheckedStore.open(str(place), FACTS | {"weights": "w3"}, {0: 100}, log=str(tmp_path / "log"))
    assert engine.log is not None
    log = engine.log

    def ask(scope: bytes, request: str, keys: list[tuple[bytes, int]], found: int) -> None:
        log.looked_up(scope, request, [(key, Answer.HIT if at < found else Answer.MISS) for at, key in enumerate(keys)])

    ask(engine.scope, "other-weights", [(NEW, 0), (PAGE, 0)], 1)
    ask(engine.scope, "never", [(make_key(3).page, 0)], 0)
    ask(engine.scope, "early", [(NEW, 0)], 0)
    assert engine.save([(NEW, 0), (make_key(4).page, 0)], [bytes(100)] * 2) == [Answer.HIT] * 2
    ask(engine.scope, "all", [(NEW, 0)], 1)
    log.looked_up(engine.scope, "slow", [((NEW, 0), Answer.RETRY)])
    log.looked_up(engine.scope, "aborted", [((NEW, 0), None)])
    engine.store.remove([StoreKey(engine.scope, make_key(4).page, 0)])
    ask(engine.scope, "evicted-0-1f", [(NEW, 0), (make_key(4).page, 0)], 1)
    engine.store.remove([StoreKey(engine.scope, NEW, 0)])
    assert write(engine.store, [StoreKey(engine.scope, NEW, 0)], [bytes(164)]) == [Answer.HIT]
    assert engine.load([(NEW, 0)], [bytearray(100)]) == [Answer.MISS]
    ask(engine.scope, "damaged", [(NEW, 0)], 0)
    engine.close()
    with open(tmp_path / "log", "a") as file:
        file.write('{"time": 1, "saved": [\n[]\n')
    done = run("explain", "--lookups", tmp_path / "log", "--store", place, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["torn_lines"] == 2
    found = {row["request"]: (row["cause"], row["detail"]) for row in json.loads(done.stdout)["lookups"]}
    assert {name: cause for name, (cause, _) in found.items()} == {
        "other-weights": "other",
        "never": "new",
        "early": "later",
        "damaged": "bad",
        "all": "found",
        "slow": "unanswered",
        "aborted": "unanswered",
        "evicted-0-1f": "gone",
    }
    assert found["other-weights"][1].endswith(": weights")
    assert found["damaged"][1].endswith(": magic")
    assert run("explain", "--lookups", tmp_path / "log", "evic").exit_code != 0
    one = run("explain", "--lookups", tmp_path / "log", "evicted", env=WIDE)
    assert one.exit_code == 0 and "evicted or removed before" in one.stdout
    log = tmp_path / "log"
    for refused in (("--lookups", log, "unknown"), ("--lookups", place), ("sessions", "--store", place)):
        assert run("explain", *refused).exit_code == 2
    for ignored in (["--url", "http://127.0.0.1:1"], ["--pool-tokens", "1/8"], ["evicted", "another"]):
        assert run("explain", "--lookups", log, *ignored).exit_code == 2


def test_a_log_whose_disk_hangs_holds_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(StringIO):
        def write(self, text: str) -> int:
            writes.set()
            assert lets_go.wait(30)
            return super().write(text)

    writes, lets_go = Event(), Event()
    monkeypatch.setattr("quire.connectors.lookup_log._CLOSE_S", 0.1)
    log = LookupLog(tmp_path / "log")
    log._file.close()
    monkeypatch.setattr(log, "_file", Hanging())

    def call() -> None:
        for number in range(3000):
            log.looked_up(b"s" * 16, str(number), [((PAGE, 0), Answer.MISS)])
        log.close()

    caller = Thread(target=call, daemon=True)
    caller.start()
    caller.join(20)
    is_held = caller.is_alive()
    assert writes.is_set()
    lets_go.set()
    assert not is_held


def test_a_log_begins_anew_when_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.connectors.lookup_log._MOST_BYTES", 1000)
    log = LookupLog(tmp_path / "log")
    for number in range(20):
        log.looked_up(b"s" * 16, str(number), [((PAGE, 0), Answer.MISS)])
    log.close()
    log.looked_up(b"s" * 16, "closed", [((PAGE, 0), Answer.MISS)])
    texts = [(tmp_path / name).read_text() for name in ("log.1", "log")]
    assert all(0 < len(text) < 1300 for text in texts)
    assert [json.loads(line)["request"] for line in texts[1].splitlines()][-1] == "19"

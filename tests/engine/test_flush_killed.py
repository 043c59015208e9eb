"""A flush outlives the engine: it was killed while its store was forgetting, or ended before that was done."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.client.llm import LLM
from quire.engine import tiers as engine_tiers
from quire.scheduler.sampling_params import SamplingParams
from quire.tiers import tombstones
from quire.tiers.scope_facts import is_facts
from quire.tiers.stores.directory import DirectoryStore
from quire.tiers.tombstones import tombstone_scope
from tests.changes import STORES, TIERS, slow_unless_changed
from tests.serve.tiny_model import make_tiny_model

PROMPTS = [[first, *range(1, 100)] for first in range(1, 7)]
PAGES = 6 * len(PROMPTS)
GREEDY = SamplingParams(temperature=0, max_tokens=4)
KILLED = """
import sys, threading
from quire.engine.lean_imports import without_compiler
without_compiler("cpu")
from quire.engine import core
from quire.tiers import tombstones
from quire.tiers.stores.directory import DirectoryStore
from tests.engine.test_flush_killed import tiered, ask

llm = tiered(sys.argv[1], sys.argv[2])
for salt in ("alice", "bob"):
    assert ask(llm, salt) == [0] * 6
while llm.engine.has_moves():
    llm.engine.offload.ahead.wait_moves(1.0)
    llm.engine.step()
tombstones._AT_ONCE, core.FLUSH_S, real, calls = 4, 0.2, DirectoryStore.remove, []

def remove(store, keys):
    calls.append(len(keys))
    if len(calls) == 3:
        print("halfway", flush=True)
        threading.Event().wait()
    return real(store, keys)

DirectoryStore.remove = remove
done = llm.flush(salt="alice" if sys.argv[3] == "one" else None)
print("answered", done.storage, flush=True)
threading.Event().wait()
"""


def tiered(model: str | Path, directory: str | Path) -> LLM:
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        kv_memory="1MiB",
        dtype="float32",
        show_plan=False,
        storage=str(directory),
        storage_size="8MiB",
        load="always",
        prefetch="wait_complete",
    )


def ask(llm: LLM, salt: str) -> list[int]:
    """How many tokens of each prompt came from storage."""
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, salt=salt)
    assert all(output.num_cached_tokens >= output.num_storage_tokens for output in found)
    return [output.num_storage_tokens for output in found]


def settle(llm: LLM) -> None:
    while llm.engine.has_moves():
        llm.engine.offload.ahead.wait_moves(1.0)
        llm.engine.step()


def stored(directory: Path) -> tuple[int, int]:
    """Pages, and marks."""
    store = DirectoryStore(directory, None)
    try:
        marks = [tombstone_scope(entry.key) for entry in store.entries() if not is_facts(entry.key)]
    finally:
        store.close()
    return marks.count(None), len(marks) - marks.count(None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def killed(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """A store in which an engine has flushed one salt of two, or everything, and was killed on the way."""
    what, when = request.param
    command = [sys.executable, "-c", KILLED, str(model), str(tmp_path / "store"), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        while said and when not in said:
            said = process.stdout.readline()
        process.kill()
    assert said.startswith(when), "it ended too early"
    assert when == "halfway" or said.split() == ["answered", "hidden"]
    return tmp_path / "store", what


@slow_unless_changed(*STORES, *TIERS)
@pytest.mark.parametrize(
    "killed",
    [
        ("one", "halfway"),
        *(pytest.param(more, marks=pytest.mark.slow) for more in (("one", "answered"), ("all", "halfway"))),
    ],
    indirect=True,
)
def test_what_was_flushed_stays_so(killed: tuple[Path, str], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, what = killed
    before, marks = stored(directory)
    assert before == 2 * PAGES - 8 and marks == 1, "it was not killed half way"
    with tiered(model, directory) as llm:
        assert llm.engine.offload.tiers is not None
        forgetting = llm.engine.offload.tiers.deletion
        with monkeypatch.context() as patch:
            patch.setattr(DirectoryStore, "remove", lambda store, keys: 0)  # so that all of it is still there
            assert ask(llm, "alice") == [0] * 6
            assert (sum(ask(llm, "bob")) > 0) == (what == "one"), "the other tenant's is there, if it was not flushed"
            settle(llm)
            assert forgetting.scopes
        forgetting._due_at = 0.0
        settle(llm)
        assert not forgetting.scopes
        llm.engine.flush(None)
        assert ask(llm, "alice") == ask(llm, "bob") == [0] * 6
        settle(llm)
    assert stored(directory) == (2 * PAGES, 0), "what is there now was computed since"
    with tiered(model, directory) as llm:
        assert sum(ask(llm, "alice")) > 0
        assert llm.flush(salt="alice").storage == "gone"
        assert stored(directory) == (PAGES, 0)
        assert ask(llm, "alice") == [0] * 6


def test_to_end_does_not_wait_until_all_is_forgotten(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stops between two batches, says so, and what it archived meanwhile still arrives."""
    llm = tiered(model, tmp_path / "store")
    assert ask(llm, "alice") == [0] * 6
    settle(llm)
    assert llm.engine.tiers is not None
    store: Any = llm.engine.tiers.store
    removed: list[int] = []

    def remove(keys: list[Any]) -> int:
        removed.append(len(keys))
        if len(removed) == 3:
            end()
        return DirectoryStore.remove(store, keys)

    def end() -> None:
        """The engine is told to end while this batch is removed."""
        assert llm.engine.offload.tiers is not None
        llm.engine.offload.tiers.deletion.end()

    monkeypatch.setattr(tombstones, "_AT_ONCE", 4)
    monkeypatch.setattr(store, "remove", remove)
    assert llm.flush(salt="alice").storage == "hidden"
    assert ask(llm, "bob") == [0] * 6
    with caplog.at_level(logging.WARNING):
        llm.close()
    assert "1 flushes are not at their end" in caplog.text
    assert removed == [4, 4, 4]
    assert stored(tmp_path / "store") == (2 * PAGES - 12, 1)
    with tiered(model, tmp_path / "store") as after:
        assert ask(after, "alice") == [0] * 6
        assert sum(ask(after, "bob")) > 0


def test_to_end_stops_what_takes_long(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiered(model, tmp_path / "store")
    ask(llm, "alice")
    settle(llm)
    assert llm.engine.tiers is not None and llm.engine.offload.tiers is not None
    forgetting, store = llm.engine.offload.tiers.deletion, llm.engine.tiers.store
    real, ended = DirectoryStore.remove, forgetting.end
    begun, told, removed = threading.Event(), threading.Event(), []

    def remove(each: DirectoryStore, keys: list[Any]) -> int:
        removed.append(len(keys))
        begun.set()
        assert told.wait(60), "it never was told to stop"
        return real(each, keys)

    def end() -> None:
        ended()
        told.set()

    monkeypatch.setattr(tombstones, "_AT_ONCE", 4)
    monkeypatch.setattr(engine_tiers, "_DELETE_S", 0.0)
    monkeypatch.setattr(type(store), "remove", remove)
    monkeypatch.setattr(forgetting, "end", end)
    llm.engine.flush(None)
    assert begun.wait(60)
    llm.close()
    assert removed == [4]
    assert stored(tmp_path / "store") in ((PAGES - 4, 1), (PAGES - 3, 1))  # what the pages are of goes too

"""An engine ends whole: what it had on its way to storage is there, however it ends, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.client.llm import LLM
from quire.errors import EngineDead, HostMemoryError
from quire.scheduler.sampling_params import SamplingParams
from quire.tiers.scope_facts import is_facts, read_facts
from quire.tiers.stores.directory import DirectoryStore
from tests.changes import TIERS, slow_unless_changed
from tests.serve.tiny_model import make_tiny_model

PROMPT = list(range(1, 101))
PAGES = len(PROMPT) // 16
GREEDY = SamplingParams(temperature=0, max_tokens=4)
SCRIPT = """
import sys
from quire.engine.lean_imports import without_compiler
without_compiler("cpu")
from quire.client.llm import LLM
from quire.scheduler.sampling_params import SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, kv_memory="1MiB", dtype="float32", show_plan=False,
          storage=sys.argv[2], storage_size="8MiB", load="always", prefetch="wait_complete")
llm.generate({"prompt_token_ids": list(range(1, 101))}, SamplingParams(temperature=0, max_tokens=4))
if sys.argv[3] == "raises":
    raise SystemExit(7)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def stored(directory: Path) -> int:
    """The stored pages; beside them the store says what they are of."""
    store = DirectoryStore(directory, None)
    try:
        keys = [entry.key for entry in store.entries()]
        pages = [key for key in keys if not is_facts(key)]
        for facts in read_facts(store, {key.scope for key in pages}).values():
            assert (facts["engine"], facts["page_size"], len(keys)) == ("quire", 16, len(pages) + 1)
        assert len(keys) <= len(pages) + 1
        return len(pages)
    finally:
        store.close()


def tiered(model: Path, directory: Path, **settings: Any) -> LLM:
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        kv_memory="1MiB",
        dtype="float32",
        show_plan=False,
        **{"storage": str(directory), "storage_size": "8MiB", "load": "always", "prefetch": "wait_complete"} | settings,
    )


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not [thread for thread in threading.enumerate() if thread not in before and "quire" in thread.name]


@slow_unless_changed("src/quire/engine/", "src/quire/client/", *TIERS)
@pytest.mark.parametrize("end", [pytest.param("ends", marks=pytest.mark.slow), "raises"])
def test_a_script_that_just_ends_leaves_all_it_cached(end: str, model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(model), str(tmp_path / "store"), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (7 if end == "raises" else 0), done.stderr
    assert stored(tmp_path / "store") == PAGES
    with tiered(model, tmp_path / "store") as llm:
        [output] = llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    assert (output.num_host_tokens, output.num_storage_tokens) == (0, PAGES * 16)


def test_a_with_block_closes(model: Path, tmp_path: Path) -> None:
    with tiered(model, tmp_path / "store") as llm:
        llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    assert stored(tmp_path / "store") == PAGES
    llm.close()  # may be called twice
    with pytest.raises(EngineDead, match="closed"):
        llm.generate({"prompt_token_ids": PROMPT}, GREEDY)


def test_a_store_that_hangs_does_not_keep_the_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.engine.tiers.STORE_DRAIN_S", 0.1)
    monkeypatch.setattr("quire.tiers.mover.CLOSE_S", 0.1)
    llm = tiered(model, tmp_path / "store")
    tiers = llm.engine.tiers
    assert tiers is not None and tiers.store is not None
    answers = threading.Event()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("quire-mover")]
    prepare = tiers.store.prepare
    monkeypatch.setattr(tiers.store, "prepare", lambda *args: answers.wait() and prepare(*args))
    llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    llm.close()
    assert "storage did not come back from 1 calls (archive)" in caplog.text
    answers.set()
    for thread in threads:
        thread.join(60)
    tiers.store.close()


def test_what_is_forgotten_is_closed(model: Path, tmp_path: Path) -> None:
    llm = tiered(model, tmp_path / "store")
    llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    del llm
    assert stored(tmp_path / "store") == PAGES


def test_an_engine_that_fails_to_start_holds_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.core.Scheduler", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiered(model, tmp_path / "store")
    assert stored(tmp_path / "store") == 0


def test_host_memory_that_is_not_there_is_refused_with_what_is(model: Path, tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError) as caught:
        tiered(model, tmp_path / "store", host_memory="900TiB")
    assert "The largest size that fits is" in caught.value.message
    assert "--host-memory" in caught.value.fix


def test_host_memory_is_touched_with_progress(model: Path, tmp_path: Path) -> None:
    from quire.engine.config import engine_config
    from quire.engine.core import EngineCore

    heard: list[tuple[int, int]] = []
    config = engine_config(model=str(model), kv_memory="1MiB", host_memory="160MiB", dtype="float32")
    core = EngineCore(config, progress=lambda done, total: heard.append((done, total)))
    core.close()
    done, totals = zip(*heard, strict=True)
    assert len(set(totals)) == 1
    assert done[-1] == totals[0] <= 160 * 2**20
    assert len(done) >= 3
    assert np.all(np.diff(done) > 0)

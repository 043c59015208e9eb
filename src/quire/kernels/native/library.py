"""The library of compiled kernels: built once per machine and version from the C++ sources of this folder, then loaded.

States of a process: not requested; loaded; absent, for a reason that is logged once. Whatever uses the library has a
path on torch's operators for the last state.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from filelock import FileLock

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
_FLAGS = ("-std=c++17", "-O3", _NATIVE, "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_BUILD_S = 600.0
_MOST_KEPT = 8  # libraries in the cache
_LOST = "attention and what surrounds it run on torch's operators, which are slower"


class NoLibrary(Exception):
    """Why there is no library, as a sentence with what would help."""


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library and its file, or no library and the `reason`."""

    library: ctypes.CDLL | None = None
    path: Path | None = None
    reason: str = ""


_switch = {"on": True}


def use_native(enabled: bool) -> None:
    """Whether `native` finds a library in this process from now on; it does by default."""
    _switch["on"] = enabled


def native() -> Native:
    """The library of this process. The first call in the life of a cache folder compiles it, which takes seconds."""
    return _loaded() if _switch["on"] else Native(reason="native kernels are switched off.")


@cache
def _loaded() -> Native:
    try:
        path = build(sources(), cache_folder())
        try:
            return Native(ctypes.CDLL(str(path)), path)
        except OSError as error:
            logger.warning("'%s' cannot be loaded and is compiled again: %s", path, error)
            path.unlink()
            return Native(ctypes.CDLL(str(build(sources(), cache_folder()))), path)
    except (NoLibrary, OSError) as error:
        logger.warning("no native kernels, so that %s: %s", _LOST, error)
        return Native(reason=str(error))


def address_of(array: npt.NDArray[Any]) -> int:
    """Where the numbers of an array are, for a call of the library. The caller keeps the array."""
    address: int = array.__array_interface__["data"][0]
    return address


def sources() -> dict[str, str]:
    """The text of each source file by name."""
    return {path.name: path.read_text() for path in sorted(_FOLDER.glob("*.cpp")) + sorted(_FOLDER.glob("*.h"))}


def cache_folder() -> Path:
    """Where compiled libraries are kept. Raises NoLibrary if the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "quire" / "native"
    except RuntimeError as error:
        raise NoLibrary("there is no home folder to keep them in; set XDG_CACHE_HOME.") from error


def build(texts: Mapping[str, str], folder: Path) -> Path:
    """The library compiled from `texts`, in `folder`; compiled at most once, whichever processes request it.

    It needs no compiler if it is there. Raises NoLibrary.
    """
    openmp = _openmp_of_torch()
    key = sha256(repr((sorted(texts.items()), _FLAGS, os.environ.get("CXX"), openmp.name, _cpu())).encode())
    path = folder / f"{key.hexdigest()[:24]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign(folder)
        if not path.exists():
            with FileLock(path.with_suffix(".lock")):
                if not path.exists():
                    _compile(texts, path, openmp)
    except OSError as error:
        raise NoLibrary(
            f"'{folder}' cannot be written ({error.strerror}); set XDG_CACHE_HOME to one that can."
        ) from error
    return path


def _openmp_of_torch() -> Path:
    """The OpenMP runtime that torch has loaded. With another one, threads of two pools would wait for each other."""
    maps = Path("/proc/self/maps")
    names = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    found = sorted((name for name in names if re.search(r"/lib(gomp|iomp5|omp)[-.\w]*\.so", name)), key=_is_foreign)
    if not found:
        raise NoLibrary("torch has loaded no OpenMP runtime whose threads they could share.")
    return Path(found[0])


def _is_foreign(name: str) -> bool:
    return Path(torch.__file__).parent not in Path(name).parents


def _cpu() -> list[str]:
    """What the compiler may use of this CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))]


def _refuse_foreign(folder: Path) -> None:
    """Raise NoLibrary if another user can write libraries there: this process would run their code."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise NoLibrary(f"'{folder}' is of user {status.st_uid}; set XDG_CACHE_HOME to a folder of your own.")
    if status.st_mode & 0o022:
        raise NoLibrary(f"other users can write to '{folder}'; `chmod go-w {folder}` ends that.")


def _compile(texts: Mapping[str, str], path: Path, openmp: Path) -> None:
    """Compile all sources side by side, and link them as `path` in one step."""
    given = shlex.split(os.environ.get("CXX", ""))  # may have arguments, such as `ccache g++`
    choices = [given] if given else [[name] for name in _COMPILERS]
    compiler = next((words for words in choices if shutil.which(words[0])), None)
    if compiler is None:
        raise NoLibrary(f"there is no C++ compiler ({' '.join(given) or 'c++'}); install one, such as the package g++.")
    logger.info("compiling native kernels for this CPU, once")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        folder = Path(scratch)
        for name, text in texts.items():
            (folder / name).write_text(text)
        units = [name for name in texts if name.endswith(".cpp")]
        _run_all([[*compiler, *_FLAGS, "-c", name, "-o", f"{name}.o"] for name in units], folder)
        objects = [f"{name}.o" for name in units]
        _run_all([[*compiler, "-shared", "-o", path.name, *objects, str(openmp)]], folder)
        with (folder / path.name).open("rb") as linked:
            os.fsync(linked.fileno())  # else a crash of the machine may leave the name without the bytes
        (folder / path.name).replace(path)
    _remove_old(path.parent)


def _remove_old(folder: Path) -> None:
    """Remove the libraries of older versions. Processes that have loaded one keep it."""
    found = sorted(folder.glob("*.so"), key=lambda each: each.stat().st_mtime, reverse=True)
    for path in found[_MOST_KEPT:]:
        path.unlink(missing_ok=True)
        path.with_suffix(".lock").unlink(missing_ok=True)


def _run_all(commands: list[list[str]], folder: Path) -> None:
    with ExitStack() as ends:
        running = []
        for command in commands:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            ends.enter_context(process)
            ends.callback(process.kill)
            running.append(process)
        for process, (compiler, *_) in zip(running, commands, strict=True):
            try:
                said = process.communicate(timeout=_BUILD_S)[1]
            except subprocess.TimeoutExpired as error:
                raise NoLibrary(f"{compiler} took more than {_BUILD_S:.0f} s.") from error
            if process.returncode:
                first = next((line for line in said.splitlines() if "error" in line), said.strip()[-200:])
                raise NoLibrary(f"{compiler} failed: {first}")

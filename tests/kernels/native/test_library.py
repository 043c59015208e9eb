"""The library of compiled kernels: built once, loaded with torch's threads, and absent for a stated reason."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.kernels.native import library
from quire.kernels.native.library import NoLibrary, build, cache_folder, native, sources, use_native
from tests.changes import KERNELS, slow_unless_changed

SMALL = {"threads.cpp": sources()["threads.cpp"], "answer.cpp": 'extern "C" int answer() { return 42; }'}
compiles = pytest.mark.skipif(native().library is None, reason=native().reason)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not requested the library, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library._loaded.cache_clear()
    yield tmp_path / "quire" / "native"
    library._loaded.cache_clear()


def compiler(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@compiles
def test_it_runs_on_the_threads_of_torch(tmp_path):
    found = ctypes.CDLL(str(build(SMALL, tmp_path)))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            assert found.quire_threads() == threads
    finally:
        torch.set_num_threads(before)
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    assert str(library._openmp_of_torch()) in runtimes


@compiles
def test_it_is_compiled_once_and_found_without_a_compiler(tmp_path, monkeypatch):
    counted = compiler(tmp_path / "cxx", f'echo "$@" >> {tmp_path}/calls\nexec c++ "$@"')
    monkeypatch.setenv("CXX", str(counted))
    first = build(SMALL, tmp_path / "cache")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3, "two sources and the link"
    counted.unlink()
    assert build(SMALL, tmp_path / "cache") == first
    changed = {**SMALL, "answer.cpp": SMALL["answer.cpp"].replace("42", "43")}
    with pytest.raises(NoLibrary, match="no C\\+\\+ compiler"):
        build(changed, tmp_path / "cache")


@compiles
@compiles
def test_a_compiler_may_have_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "env LC_ALL=C c++")
    assert build(SMALL, tmp_path).exists()


@compiles
def test_libraries_of_older_versions_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.kernels.native.library._MOST_KEPT", 2)
    built = [build({**SMALL, "answer.cpp": SMALL["answer.cpp"] + f"// {at}"}, tmp_path) for at in range(4)]
    assert [path.exists() for path in built] == [False, False, True, True]


@slow_unless_changed(*KERNELS)
def test_processes_that_start_at_once_compile_once(tmp_path, monkeypatch):
    counted = compiler(tmp_path / "cxx", f'echo x >> {tmp_path}/calls\nexec c++ "$@"')
    monkeypatch.setenv("CXX", str(counted))
    script = (
        "import sys, ctypes; from pathlib import Path; from quire.kernels.native.library import build\n"
        f"print(ctypes.CDLL(str(build({SMALL!r}, Path(sys.argv[1])))).answer())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in running] == ["42\n"] * 3
    assert len((tmp_path / "calls").read_text().splitlines()) == 3


def test_without_a_compiler_the_reason_is_logged_once(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", str(fresh / "none"))
    with caplog.at_level(logging.WARNING):
        assert native() is native()
    assert native().library is None and "install one" in native().reason
    assert [record.message for record in caplog.records if "slower" in record.message] == [caplog.records[0].message]


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch, tmp_path):
    broken = compiler(tmp_path / "cxx", "echo 'a.cpp:1: error: no such target' >&2; exit 1")
    monkeypatch.setenv("CXX", str(broken))
    assert native().library is None and "no such target" in native().reason
    assert [path.suffix for path in fresh.iterdir()] == [".lock"], "nothing half built stays"


def test_a_library_that_does_not_load_is_no_library(fresh, monkeypatch, tmp_path):
    odd = compiler(tmp_path / "cxx", 'for last; do :; done\nwhile [ "$1" != -o ]; do shift; done\necho odd > "$2"')
    monkeypatch.setenv("CXX", str(odd))
    assert native().library is None and native().reason


@compiles
@pytest.mark.parametrize("size", [0, 100])
def test_a_damaged_library_is_compiled_again(fresh, monkeypatch, size):
    monkeypatch.setattr(library, "sources", lambda: SMALL)
    path = build(SMALL, fresh)
    path.write_bytes(path.read_bytes()[:size])
    assert native().path == path and native().library.answer() == 42


def test_a_cache_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    tmp_path.joinpath("quire").write_text("a file in place of the folder")
    assert native().library is None and "set XDG_CACHE_HOME" in native().reason


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_a_read_only_cache(fresh, tmp_path):
    tmp_path.chmod(0o500)
    assert native().library is None and "set XDG_CACHE_HOME" in native().reason
    tmp_path.chmod(0o700)


def test_a_folder_that_others_can_write_is_refused(fresh):
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert native().library is None and "other users" in native().reason


def test_it_can_be_switched_off():
    use_native(False)
    try:
        assert native().library is None and "switched off" in native().reason
    finally:
        use_native(True)


def test_the_cache_is_in_the_users_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "quire" / "native"

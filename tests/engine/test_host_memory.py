"""What may be had of the host's memory: control groups made of files, and a real one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.host_memory import alone_on_this_host, host_memory
from quire.errors import HostMemoryError
from quire.plan.host import HostMemory, largest_host_bytes
from quire.settings.setting import parse_bytes
from tests.engine.containers import four_gib as four_gib

MIB = 2**20
GIB = 2**30


def tree(root: Path, own: str, files: dict[str, str]) -> Path:
    """A system's files below `root`."""
    for name, text in {"proc/self/cgroup": own, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group_2(folder: str, most: str | int, used: int, inactive: int = 0, high: str | int = "max") -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{most}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\nfile {inactive}\ninactive_file {inactive}\nactive_file 7\n",
    }


def group_1(folder: str, most: int, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{most}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"cache 9\ninactive_file 1\ntotal_inactive_file {inactive}\n",
    }


NO_LIMIT = 9223372036854771712


def test_without_a_limit_the_machine_is_all_there_is(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cgroup.procs": "", **group_2("sys/fs/cgroup/a", "max", 5)}
    found = host_memory(tree(tmp_path, "0::/a\n", files))
    assert found.limit is None
    assert found.total == psutil.virtual_memory().total
    assert 0 < found.available <= found.total


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert host_memory(tmp_path).limit is None


@pytest.mark.parametrize(
    ("limits", "limit", "available"),
    [
        ({"a": (64, 10), "a/b": (32, 9), "a/b/c": (48, 8)}, 32, 23),
        ({"a": (64, 60), "a/b": (32, 9), "a/b/c": (48, 8)}, 32, 4),  # a sibling has most of what the parent has
        ({"a": ("max", 10), "a/b": ("max", 9), "a/b/c": (48, 8)}, 48, 40),
        ({"a": (16, 10), "a/b": ("max", 9), "a/b/c": ("max", 8)}, 16, 6),
        ({"a": (16, 20), "a/b": ("max", 9), "a/b/c": ("max", 8)}, 16, 0),
    ],
)
def test_every_ancestor_limits(
    tmp_path: Path, limits: dict[str, tuple[int | str, int]], limit: int, available: int
) -> None:
    files: dict[str, str] = {}
    for folder, (most, used) in limits.items():
        scaled = most * MIB if isinstance(most, int) else most
        files |= group_2(f"sys/fs/cgroup/{folder}", scaled, used * MIB)
    found = host_memory(tree(tmp_path, "0::/a/b/c\n", files))
    assert (found.limit, found.available) == (limit * MIB, available * MIB)


def test_groups_beside_the_own_do_not_matter(tmp_path: Path) -> None:
    files = group_2("sys/fs/cgroup/other", MIB, MIB) | group_2("sys/fs/cgroup/own", 64 * MIB, MIB)
    found = host_memory(tree(tmp_path, "0::/own\n", files))
    assert (found.limit, found.available) == (64 * MIB, 63 * MIB)


def test_files_that_would_be_dropped_are_available(tmp_path: Path) -> None:
    files = group_2("sys/fs/cgroup/a", 64 * MIB, 60 * MIB, inactive=50 * MIB)
    assert host_memory(tree(tmp_path, "0::/a\n", files)).available == 54 * MIB


def test_more_files_than_usage_is_no_more_than_the_limit(tmp_path: Path) -> None:
    files = group_2("sys/fs/cgroup/a", 64 * MIB, 6 * MIB, inactive=50 * MIB)
    assert host_memory(tree(tmp_path, "0::/a\n", files)).available == 64 * MIB


def test_where_a_group_is_slowed_down_is_a_limit_too(tmp_path: Path) -> None:
    files = group_2("sys/fs/cgroup/a", 64 * MIB, 6 * MIB, high=32 * MIB)
    found = host_memory(tree(tmp_path, "0::/a\n", files))
    assert (found.limit, found.available) == (32 * MIB, 26 * MIB)


def test_version_1(tmp_path: Path) -> None:
    own = "5:cpu,cpuacct:/elsewhere\n4:memory:/a/b\n0::/\n"
    files = group_1("sys/fs/cgroup/memory", NO_LIMIT, GIB)
    files |= group_1("sys/fs/cgroup/memory/a", 64 * MIB, 40 * MIB, inactive=10 * MIB)
    files |= group_1("sys/fs/cgroup/memory/a/b", 48 * MIB, 8 * MIB)
    found = host_memory(tree(tmp_path, own, files))
    assert (found.limit, found.available) == (48 * MIB, 34 * MIB)


def test_a_container_sees_its_group_where_others_see_the_root(tmp_path: Path) -> None:
    """Without a namespace of its own, the paths are the host's and the mount starts at the container's group."""
    own = "4:memory:/docker/1f/worker\n"
    files = group_1("sys/fs/cgroup/memory", 64 * MIB, 8 * MIB)
    files |= group_1("sys/fs/cgroup/memory/worker", 32 * MIB, 8 * MIB)
    assert host_memory(tree(tmp_path, own, files)).available == 24 * MIB


@pytest.mark.parametrize("own", ["0::/../../init\n", "0::/gone\n", "0::/\n"])
def test_a_path_that_is_not_to_be_found_leaves_the_mounted_group(tmp_path: Path, own: str) -> None:
    files = group_2("sys/fs/cgroup", 64 * MIB, 8 * MIB)
    assert host_memory(tree(tmp_path, own, files)).available == 56 * MIB


# -- a real group

PROGRAM = """
import os, re, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.host_memory import alone_on_this_host, host_memory
from quire.plan.host import largest_host_bytes
from tests.engine.containers import four_gib as four_gib
from quire.errors import HostMemoryError
from quire.memory.host_pool import HostPool
from quire.plan.budget import MemoryPlan
from quire.settings.setting import parse_bytes
from quire.plan.host import host_budget, host_frames
from quire.spec.group import GroupSpec
from quire.spec.layout import DType, Field, PageLayout

field = Field(name="k", shape=(64,), dtype=DType.BFLOAT16, layers=(0, 1, 2, 3))
group = GroupSpec(name="full", layout=PageLayout(256, (field,)))
plan = MemoryPlan(page_size=256, groups=(group,), num_pages=1000, context=1000, max_requests=1)
try:
    host_budget(parse_bytes("8GiB"), host_memory(), device_bytes=plan.pool_bytes)
except HostMemoryError as error:
    print(error)
    named = parse_bytes(re.findall(r"--host-memory (\\w+)", str(error))[0])
size = host_budget(named, host_memory(), device_bytes=plan.pool_bytes)
pool = HostPool(plan.groups, host_frames(plan, size))
print("reserved", pool.num_bytes, "of", size, "left", host_memory().available)
pool.close()
print("closed", host_memory().available)
"""


@pytest.mark.slow
def test_4_gib_refuse_8_and_hold_what_the_refusal_names(four_gib: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(four_gib)], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    refused, reserved, closed = found.stdout.splitlines()
    assert "the container's limit is 4.00 GiB" in refused
    assert "8.00 GiB of host memory were asked for" in refused
    taken, granted, left = (int(word) for word in reserved.split() if word.isdigit())
    assert 3.4 * GIB < taken <= granted < 4 * GIB
    assert 0 < left < GIB / 2
    assert int(closed.split()[1]) > left + 0.95 * taken


HOLDER = """
import sys, time
from pathlib import Path
from quire.engine.host_memory import alone_on_this_host
with alone_on_this_host(Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.readline()
    Path(sys.argv[1], "ended").touch()
"""


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """One that takes host memory, until it is told or killed."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout is not None and held.stdout.readline() == "mine\n"
        yield held
        held.kill()


def test_memory_is_taken_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with another_process(tmp_path) as other:
        assert other.stdin is not None
        monkeypatch.setattr("quire.engine.host_memory._PATIENCE_S", 0.1)
        with alone_on_this_host(tmp_path):
            assert not (tmp_path / "ended").exists(), "it is not waited for for ever"
        monkeypatch.undo()
        other.stdin.write("go\n")
        other.stdin.flush()
        with alone_on_this_host(tmp_path):
            assert (tmp_path / "ended").exists()


def test_a_process_killed_while_it_takes_memory_blocks_no_other(tmp_path: Path) -> None:
    with another_process(tmp_path) as other:
        other.kill()
        with alone_on_this_host(tmp_path):
            assert not (tmp_path / "ended").exists()


def test_memory_is_taken_where_no_other_process_can_meet(tmp_path: Path) -> None:
    with alone_on_this_host(tmp_path / "not there"):
        pass


def test_pools_of_a_cpu_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is available is read before they have taken their part of it."""
    memory = HostMemory(total=64 * GIB, available=GIB // 4, limit=None)
    monkeypatch.setattr("quire.engine.tiers.host_memory", lambda: memory)
    config = engine_config(kv_memory="64MiB", host_memory=f"{largest_host_bytes(GIB // 4) - 2**26 + 2**22}")
    with pytest.raises(HostMemoryError, match="--host-memory"):
        EngineCore(config)
    config = engine_config(kv_memory="64MiB", host_memory="120MiB")
    with closing(EngineCore(config)) as core:
        assert core.tiers is not None and 119 * 2**20 < core.tiers.host.num_bytes <= 120 * 2**20


def test_pools_that_the_machine_has_no_memory_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would grant them, and kill the process while it touches them."""
    memory = HostMemory(total=64 * GIB, available=GIB // 8, limit=GIB)
    monkeypatch.setattr("quire.engine.device.runner.host_memory", lambda: memory)
    with pytest.raises(HostMemoryError, match=r"of KV memory were asked for; 128.* limit is 1.00 GiB") as refused:
        EngineCore(engine_config(kv_memory="256MiB"))
    (named,) = re.findall(r"use --kv-memory (\w+)", refused.value.fix)
    with closing(EngineCore(engine_config(kv_memory=named))) as core:
        assert core.plan.pool_bytes <= parse_bytes(named)


def test_pools_are_refused_before_host_memory_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """To touch it takes long, and what it takes is not what the pools lack."""
    memory = HostMemory(total=64 * GIB, available=GIB // 4, limit=None)
    for module in ("engine.tiers", "engine.device.runner"):
        monkeypatch.setattr(f"quire.{module}.host_memory", lambda: memory)
    touched: list[int] = []
    with pytest.raises(HostMemoryError, match=r"of KV memory were asked for") as refused:
        EngineCore(engine_config(kv_memory="1GiB", host_memory="8MiB"), progress=lambda done, of: touched.append(done))
    assert "--kv-memory" in refused.value.fix and not touched

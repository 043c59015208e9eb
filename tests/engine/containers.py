"""A real control group for tests of memory limits, where this machine lets one be made."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

GIB = 2**30


@pytest.fixture
def four_gib() -> Iterator[Path]:
    """A control group of 4 GiB below that of this process, or below the root; removed afterwards."""
    if sys.platform != "linux" or os.getuid() != 0:
        pytest.skip("only root may make a control group")
    if psutil.virtual_memory().available < 6 * GIB:
        pytest.skip("this machine has no 4 GiB to spare")
    own = dict(line.strip().split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    first, limit = Path("/sys/fs/cgroup/memory" + own.get("memory", "")), "memory.limit_in_bytes"
    if "memory" not in own:
        first, limit = Path("/sys/fs/cgroup"), "memory.max"
    folder = first / f"quire-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (folder / limit).write_text(str(4 * GIB))
        except OSError as error:
            pytest.skip(f"control groups here do not limit memory: {error}")
        yield folder
    finally:
        folder.rmdir()

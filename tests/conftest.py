"""Settings of all tests: hypothesis draws the same examples each time, so that a failure repeats; files in order."""

import gc
import math
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.durations import ROOT, Durations, kept
from tests.progress import Progress

# Collecting makes objects and hardly any garbage, and a look for garbage among all of them takes a third longer.
gc.disable()

# Tiny tensors: a second thread only waits for the first, and spins while it does. Servers under test inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton reads it when it is first imported: tests run its kernels by the interpreter, on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config))
    config.pluginmanager.register(Progress(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, and before them files whose seconds are not known."""
    seconds = kept()
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(ROOT).as_posix(), math.inf))


def pytest_collection_finish() -> None:
    """From here on garbage is collected. What there is counts as old. It does not stay frozen: full collections would
    be frequent, and what one test leaves open would fail another."""
    gc.freeze()
    gc.unfreeze()
    gc.enable()

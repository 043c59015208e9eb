"""Settings of all tests: hypothesis draws the same examples each time, so that a failure repeats; files in order."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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

ROOT = Path(__file__).parent

LONG = ("bench", "mutants", "cluster", "serve", "examples", "engine", "transfer", "tiers", "offload")
"""Folders of files that take long. They are begun first, so that no process is alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.relative_to(ROOT).parts[0], len(LONG)))

"""Fixtures: a tiny model and one real server for all tests that only read its answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors; servers started here inherit it

from live_server import LiveServer
from tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[LiveServer]:
    """A server with a pool smaller than the model's context. At the end it must go quietly."""
    live = LiveServer("--model", str(tiny_model), "--kv-memory", "100KiB")
    yield live
    live.terminate()
    assert live.wait() == 0, live.log()
    assert not live.children_left()

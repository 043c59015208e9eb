"""Fixtures: a tiny model and one real server for all tests that only read its answers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors; servers started here inherit it

from tests.programs import ForkedContext
from tests.serve.chat_templates import CHAT_TEMPLATES
from tests.serve.live_server import LiveServer
from tests.serve.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def drafting(tiny_model: Path) -> Iterator[LiveServer]:
    """A server that drafts from n-grams."""
    ngram = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
    settings = ("--served-model-name", "tiny", "--kv-memory", "1MiB", "--log-level", "info")
    with LiveServer.drafting("--model", str(tiny_model), *settings, "--speculative-config", ngram) as live:
        yield live


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[LiveServer]:
    """A server with a pool smaller than the model's context. At the end it must go quietly."""
    with LiveServer.quire("--model", str(tiny_model), "--kv-memory", "100KiB") as live:
        yield live
        live.terminate()
        assert live.wait() == 0, live.log()
        assert not live.children_left()


@pytest.fixture(scope="session")
def scripted() -> Iterator[LiveServer]:
    """A server that answers what the prompt says between `@@@` and `@@@`, for a model of the family Hermes."""
    with LiveServer.scripted() as live:
        yield live


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with the bundled model, which knows no tools, and a chat template of Hermes."""
    path: Path = tmp_path_factory.mktemp("templates") / "hermes.jinja"
    path.write_text(CHAT_TEMPLATES["hermes"].replace("think>", "thought>"))  # a model that does not reason
    with LiveServer.quire("--chat-template", str(path), "--kv-memory", "32MiB") as live:
        yield live


@pytest.fixture
def forked_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes of this process are forked, and are not its children."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: ForkedContext())

"""Fixtures: a runner and a tiny model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

os.environ.setdefault("OMP_NUM_THREADS", "1")

from quire.cli.app import app
from tests.serve.tiny_model import make_tiny_model

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run() -> Run:
    """Runs `quire` with arguments, in this process."""

    def run_quire(*arguments: object, **options: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)  # type: ignore[arg-type]

    return run_quire

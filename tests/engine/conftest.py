"""Fixtures for engines over tiers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.engine.tiered import Case, case_of, end_all


@pytest.fixture
def threads_end() -> Iterator[None]:
    """An engine that is closed has no thread left."""
    before = threading.active_count()
    yield
    end_all()
    assert threading.active_count() <= before


@pytest.fixture(scope="session")
def dense() -> Case:
    return case_of("llama_gqa")

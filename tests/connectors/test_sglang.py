"""`quire.connectors.sglang` inside SGLang: its own controller, threads, host pools and allocator, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.changes import unless_changed
from tests.connectors.peer import names_of, outcomes_of

pytestmark = unless_changed(
    __name__, "src/quire/connectors/", "src/quire/tiers/", "bench/peers/hicache_sglang.py", "tests/connectors/"
)
CASES = [Path(__file__).with_name(f"sglang_{name}cases.py") for name in ("", "fault_", "hybrid_")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All cases run in one process, which takes seconds to start."""
    return outcomes_of("sglang-cache", CASES, tmp_path_factory.mktemp("sglang"), "tests.connectors.sglang_harness")


@pytest.mark.parametrize("name", [name for cases in CASES for name in names_of(cases)])
def test_inside_sglang(name: str, outcomes: dict[str, str]) -> None:
    assert name in outcomes, f"{name} did not run"
    assert not outcomes[name], outcomes[name]

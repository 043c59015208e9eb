"""The bench of tenants runs, with few of everything."""

from __future__ import annotations

import pytest
from bench.bookkeeping.tenants import Load, measured


@pytest.mark.parametrize("tenants", [0, 5])
def test_steps_of_tenants_are_measured(tenants: int) -> None:
    found = measured(Load(tenants=tenants, waiting=24, pages=2_048, running=8), steps=5)
    assert (
        found.startswith(f"{tenants} tenants, 24 wait, 2,048 page ids, full: median ") and "ended in 5 steps" in found
    )

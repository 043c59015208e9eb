"""What `quire doctor` warns of."""

from __future__ import annotations

import pytest

from quire.cli import doctor


@pytest.mark.parametrize(("load", "cores", "warns"), [(9.0, 2, True), (0.5, 2, False), (9.0, 1, False)])
def test_cores_that_other_work_keeps_busy(
    monkeypatch: pytest.MonkeyPatch, load: float, cores: int, warns: bool
) -> None:
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(doctor, "usable_cores", lambda: cores)
    monkeypatch.setattr(doctor, "_cuda_devices", list)
    warned = [warning for warning in doctor.examine()["warnings"] if "--threads 1" in warning]
    assert bool(warned) is warns

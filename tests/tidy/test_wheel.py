"""What is installed is what is in the repository, the sources of native kernels included."""

from __future__ import annotations

import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from quire.kernels.native import library

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    built = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("quire/")}
    files = [path for path in (ROOT / "src" / "quire").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert built == {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert {f"quire/kernels/native/{name}" for name in library.sources()} <= built
    assert any(name.endswith(".cpp") for name in built) and any(name.endswith(".h") for name in built)

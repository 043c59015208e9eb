"""Modules that are executed when one of them is used: in the order of their imports, once, by one thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from quire.engine.deferred_modules import DeferredModules, later, submodule

FILES = {
    "__init__.py": "log = []\nfrom rooms import attic, cellar\nfrom rooms.attic import Box, hang\n",
    "attic.py": (
        "import rooms\nrooms.log.append('attic')\nfrom rooms import cellar\nsize = cellar.size + 1\n"
        "class Box: pass\ndef hang(): return size\n__all__ = ['size']\n"
    ),
    "cellar.py": "import rooms\nrooms.log.append('cellar')\nsize = 1\n",
    "light.py": "",
    "garden.py": "import rooms\nseen = list(rooms.log)\n",
}


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package whose modules can be deferred."""
    folder = tmp_path / "rooms"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield "rooms"
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.split(".")[0] == "rooms"]:
        del sys.modules[name]


def deferred(package: str) -> DeferredModules:
    return DeferredModules({f"{package}.attic": {"Box": later, "hang": later}, f"{package}.cellar": {}})


def test_modules_are_executed_when_a_name_of_one_is_used(rooms: str) -> None:
    deferred(rooms)
    package = import_module(rooms)
    assert package.log == [] and not hasattr(package.cellar, "__wrapped__")
    assert package.attic.size == 2 and package.log == ["attic", "cellar"]
    assert package.cellar.size == 1 and package.log == ["attic", "cellar"]
    with pytest.raises(AttributeError, match="colour"):
        print(package.cellar.colour)


def test_a_star_takes_the_names_of_a_deferred_module(rooms: str) -> None:
    deferred(rooms)
    import_module(rooms)
    names: dict[str, object] = {}
    exec("from rooms.attic import *", names)
    assert names["size"] == 2


def test_a_stand_in_is_called_as_the_real_one_and_has_its_instances(rooms: str) -> None:
    deferred(rooms)
    package = import_module(rooms)
    assert not isinstance(3, package.Box) and package.log == []
    assert package.hang() == 2 and package.log == ["attic", "cellar"]
    assert isinstance(package.attic.Box(), package.Box) and not isinstance(3, package.Box)
    assert isinstance(package.Box(), package.attic.Box)


def test_a_module_that_was_not_at_the_start_is_imported_after_them(rooms: str) -> None:
    modules = deferred(rooms)
    package = import_module(rooms)
    modules.watch(rooms, light=["rooms.light"])
    import_module("rooms.light")
    assert package.log == []
    assert import_module("rooms.garden").seen == ["attic", "cellar"]


def test_a_module_of_a_deferred_package_can_be_deferred_too(rooms: str) -> None:
    DeferredModules({"rooms": {"cellar": submodule}, "rooms.cellar": {}})
    names: dict[str, object] = {}
    exec("from rooms import cellar", names)
    assert names["cellar"] is sys.modules["rooms.cellar"]
    assert "log" not in vars(sys.modules["rooms"])
    assert sys.modules["rooms"].log[0] == "attic"


def test_threads_wait_for_the_one_that_executes(rooms: str, tmp_path: Path) -> None:
    gate = threading.Event()
    (tmp_path / rooms / "cellar.py").write_text("import sys\nsys.gate.wait()\nsize = 1\n")
    sys.gate = gate  # type: ignore[attr-defined]
    deferred(rooms)
    package = import_module(rooms)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(package.cellar.size)) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert found == [1, 1]
    del sys.gate  # type: ignore[attr-defined]

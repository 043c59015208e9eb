"""Imports without a look for garbage: it is collected again afterwards, and what counts as old stays alive or not."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from quire.garbage import kept_imports, late_collection

BOTH = pytest.mark.parametrize("imports", [kept_imports, late_collection])
Imports = Callable[[], AbstractContextManager[None]]


class Circle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def made() -> weakref.ref[Circle]:
    return weakref.ref(Circle())


@BOTH
def test_nothing_is_collected_meanwhile_and_again_afterwards(imports: Imports) -> None:
    with imports():
        assert not gc.isenabled()
    assert gc.isenabled()


@BOTH
def test_an_error_leaves_the_collector_on(imports: Imports) -> None:
    with pytest.raises(ImportError), imports():
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == 0


@BOTH
def test_a_collector_that_was_off_stays_off(imports: Imports) -> None:
    gc.disable()
    with imports():
        pass
    assert not gc.isenabled()


def test_garbage_of_kept_imports_stays() -> None:
    with kept_imports():
        circle = made()
    gc.collect()
    assert circle() is not None


def test_garbage_of_any_process_is_old() -> None:
    with late_collection():
        circle = made()
    assert gc.get_freeze_count() == 0
    gc.collect(1)
    assert circle() is not None
    gc.collect()
    assert circle() is None


def test_what_another_froze_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with late_collection():
        pass
    assert gc.get_freeze_count() >= before - 100


def test_an_engine_in_a_script_is_imported_without_a_full_collection() -> None:
    script = """
import gc
from quire import LLM
before = gc.get_stats()[2]["collections"]
LLM(kv_memory="4MiB", show_plan=False)
print(gc.get_stats()[2]["collections"] - before <= 1, gc.isenabled(), gc.get_freeze_count())
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "True True 0\n"

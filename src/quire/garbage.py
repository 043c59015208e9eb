"""When Python looks for garbage: not while modules are imported, which makes hardly any. A look takes a fifth more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_imports() -> Iterator[None]:
    """For imports in a process that is Quire's own: no garbage is collected meanwhile, and what the process has at the
    end is never looked at again. So use it before anything large is made."""
    with _no_collection():
        yield
        gc.freeze()


@contextmanager
def late_collection() -> Iterator[None]:
    """For imports in any process: no garbage is collected meanwhile. All objects that the process has at the end count
    as old, and are looked at with all that is old."""
    with _no_collection():
        yield
        if not gc.get_freeze_count():  # else another's frozen objects would be thawed
            gc.freeze()
            gc.unfreeze()


@contextmanager
def _no_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

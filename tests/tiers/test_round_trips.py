"""Every layout there is, at every page size: device, host, storage, another host frame, another device frame."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from quire.memory.frame_copies import FrameCopies
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.spec.group import GroupSpec
from quire.spec.layout import PageLayout
from quire.tiers.mover import ThreadMover
from quire.tiers.store import Store
from quire.tiers.stores.registry import open_store
from quire.tiers.transfer import Lane, Transfer, Units
from tests.changes import STORES, TIERS, slow_unless_changed
from tests.covering import few
from tests.memory.frame_bytes import assert_frames, fill, ids, pieces_of
from tests.memory.layouts import PAGE_SIZES, layouts

FRAMES = 6
NOWHERE = ids([])
DEVICE, HOST = [2, 3, 6], [5, 1, 2]  # a run, and one by itself
OTHER_HOST, OTHER_DEVICE = [3, 4, 6], [1, 5, 4]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(open_store(str(tmp_path / "store"), capacity=2**30)) as store:
        yield store


def moved(mover: ThreadMover, link: Lane, scope: bytes, units: Units, record_bytes: int) -> None:
    move = Transfer(link, [units], scope, len(units) * record_bytes)
    assert mover.submit(move)
    mover.complete(move)
    assert move.is_whole, (link, move.error, move.defects)
    assert move.moved_bytes == len(units) * record_bytes


def check_round_trip(name: str, layout: PageLayout, store: Store, seed: int) -> None:
    scope = hashlib.sha256(name.encode()).digest()[:16]
    pages = tuple(hashlib.sha256(bytes([place])).digest() for place in range(len(DEVICE)))
    first, second = Pool(layout, FRAMES), Pool(layout, FRAMES)
    fill(first, np.random.default_rng(seed))
    source = pieces_of(first)
    with closing(HostPool([GroupSpec(name="g", layout=layout)], [FRAMES], threads=1)) as host:
        size = host.format(0).num_bytes
        with closing(ThreadMover(FrameCopies([first], host), store)) as mover:
            moved(mover, Lane.SAVE, scope, Units(0, ids(DEVICE), ids(HOST), pages), size)
            moved(mover, Lane.ARCHIVE, scope, Units(0, NOWHERE, ids(HOST), pages), size)
        host.rows(0)[:] = 255
        with closing(ThreadMover(FrameCopies([second], host), store)) as mover:
            moved(mover, Lane.FETCH, scope, Units(0, NOWHERE, ids(OTHER_HOST), pages), size)
            moved(mover, Lane.LOAD, scope, Units(0, ids(OTHER_DEVICE), ids(OTHER_HOST), pages), size)
        untouched = sorted({*range(FRAMES + 1)} - {*OTHER_HOST})
        assert (host.rows(0)[untouched] == 255).all(), name
    back = dict(zip(OTHER_DEVICE, DEVICE, strict=True))
    assert_frames(pieces_of(second), source, back, name)


def check_round_trips(store: Store, page_size: int, first: int, step: int) -> None:
    found = list(layouts(page_size, (40 if page_size == 1 else 160) * 2**10))
    assert len(found) > 180
    for count, (name, layout) in list(enumerate(found, 1))[first::step]:
        check_round_trip(name, layout, store, count)


@slow_unless_changed(*STORES, *TIERS)
@pytest.mark.parametrize("page_size", few(PAGE_SIZES, 2))
def test_every_layout_comes_back_from_storage(store: Store, page_size: int) -> None:
    """Each at one page size."""
    check_round_trips(store, page_size, PAGE_SIZES.index(page_size), len(PAGE_SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_layout_comes_back_from_storage_at_every_page_size(store: Store, page_size: int) -> None:
    check_round_trips(store, page_size, 0, 1)

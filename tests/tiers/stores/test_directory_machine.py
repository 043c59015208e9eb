"""A directory of a few slots under random operations, beside a dictionary: everything is evicted all the time."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.testing.choices import Choices
from quire.testing.contracts.store_model import StoreModel
from quire.tiers.stores.directory import DirectoryStore
from tests.choices import drawn
from tests.tiers.stores.directory_medium import DirectoryMedium

SIZES = (64, 5000, 9000, 20_000)


def run(path: Path, choices: Choices, num_steps: int) -> Counter[str]:
    """Random operations, and now and then the store is closed and opened again, with another capacity too."""
    slab_bytes = choices.one_of((None, 4096, 16 << 10))
    store = DirectoryStore(path, choices.one_of((24 << 10, 48 << 10, 96 << 10)), slab_bytes=slab_bytes)
    model = StoreModel(store, sizes=SIZES, evicts=True)
    medium = DirectoryMedium(path)
    for _ in range(num_steps):
        if choices.chance(4):
            store.close()
            model.happened["evicted"] += store.statistics["evicted"]
            store = DirectoryStore(path, choices.one_of((None, 24 << 10, 96 << 10)), slab_bytes=slab_bytes)
            model.store, model.prepared = store, {}
        if choices.chance(4):
            store.compact()
        model.step(choices)
        medium.check()
    model.check()
    store.close()
    medium.check()
    model.happened["evicted"] += store.statistics["evicted"]
    return model.happened


@settings(max_examples=25)
@given(data=st.data())
def test_any_sequence(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), drawn(data), 25)


@pytest.mark.parametrize("seed", range(4))
def test_long_sequences(tmp_path: Path, seed: int) -> None:
    happened = run(tmp_path, Choices.seeded(seed), 300)
    assert happened["evicted"] and happened["hit"] and happened["stored"] >= 10

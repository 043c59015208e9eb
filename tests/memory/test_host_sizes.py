"""Host memory whose records move, and whose end is given back."""

from __future__ import annotations

import numpy as np

from quire.memory.host_pool import HostPool
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.layout import DType, Field, PageLayout


def test_records_move_and_the_memory_of_others_is_given_back() -> None:
    """Two groups in one mapping: what one gives back is not the other's."""
    layouts = [
        PageLayout(16, (Field(name="k", shape=(width,), dtype=DType.UINT8, layers=(0,)),)) for width in (300, 9000)
    ]
    groups = [GroupSpec(name=f"g{at}", layout=layout, reach=ReachSpec()) for at, layout in enumerate(layouts)]
    pool = HostPool(groups, [400, 100])
    for group in (0, 1):
        for frame in range(len(pool.rows(group))):
            pool.rows(group)[frame] = frame % 251
    sources, targets = np.array([70, 90], dtype=np.int32), np.array([3, 5], dtype=np.int32)
    pool.move(1, sources, targets)
    pool.keep(1, 60)
    kept = [*range(61)]
    for frame in kept:
        moved = dict(zip(targets.tolist(), sources.tolist(), strict=True))
        assert (pool.rows(1)[frame] == moved.get(frame, frame) % 251).all()
    assert not pool.rows(1)[62:].any(), "what comes again is zero"
    assert all((pool.rows(0)[frame] == frame % 251).all() for frame in range(401))
    pool.keep(0, 0)
    assert not pool.rows(0)[2:-2].any() and all((pool.rows(1)[frame] != 0).any() for frame in kept[1:])
    pool.close()

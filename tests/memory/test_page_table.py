"""Page tables on a device: brought up to date by changes alone, they are what the cache says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.cache import KVCache
from quire.memory.pool import DevicePageTables
from quire.spec.group import ReachSpec
from quire.testing import small_plan
from quire.testing.choices import Choices

CUDA = pytest.param("cuda", True, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("device", "sent"), [("cpu", False), ("cpu", True), CUDA])
def test_tables_follow_requests_that_begin_grow_share_and_end(device: str, sent: bool) -> None:
    """Random lives on a pool that evicts all the time, two groups, pages shared and given up as duplicates."""
    choices, size = Choices.seeded(3), 2
    plan = small_plan(
        24, size, context=30, max_requests=5, groups=("a", "b"), reaches=(ReachSpec(), ReachSpec()), frames=(24, 24)
    )
    cache = KVCache(plan, page_tables=True)
    tables = DevicePageTables(2, plan.max_requests, plan.pages_per_row, device=torch.device(device))
    if sent:
        tables.host = None
    live: list[tuple[object, np.ndarray]] = []
    changed = duplicates = 0
    for _ in range(3_000):
        if live and (len(live) == 5 or choices.chance(40)):
            kv, tokens = live.pop(choices.below(len(live)))
            cache.finish(kv, tokens[: cache.rows.allocated(kv)])
        elif len(live) < 5:
            tokens = np.array([choices.below(2) for _ in range(choices.between(1, 20))], dtype=np.int32)
            kv = cache.begin(tokens)
            if len(tokens) - kv.num_cached <= cache.admission.num_available_pages * size - size:
                cache.extend([kv], [len(tokens) - kv.num_cached])
            live.append((kv, tokens))
        if live and choices.chance(50):
            kv, tokens = choices.one_of(live)
            cache.commit(kv, tokens[: cache.rows.allocated(kv)])
        changes = cache.rows.page_table_changes()
        changed += len(changes)
        tables.apply(tables.sent(changes))
        if live:
            kvs = [kv for kv, _ in live]
            batch = cache.rows.batch(kvs)
            lengths = np.array([cache.rows.allocated(kv) for kv in kvs])
            for group in range(2):
                expected = cache.rows.page_table(batch, lengths, group)
                found = tables.rows(group, torch.from_numpy(batch.rows).to(device), expected.shape[1]).cpu().numpy()
                for row, length in enumerate(lengths.tolist()):
                    pages = -(-length // size)
                    assert found[row, :pages].tolist() == expected[row, :pages].tolist()
        duplicates = cache.statistics().duplicate_pages
    assert duplicates > 50 and cache.statistics().evicted_pages > 50
    assert cache.rows.page_table_changes().frames.shape == (2, 0) and changed > 1_000

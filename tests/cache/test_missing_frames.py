"""What a step reads and writes has a frame, or the step does not begin: the padding page belongs to no request."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.cache import KVCache
from quire.cache.request_kv import RequestKV
from quire.errors import MissingFrame
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids, Tier
from quire.testing import small_plan

Ask = Callable[[KVCache, RequestKV], object]


def lengths(*some: int) -> np.ndarray:
    return np.array(some, dtype=np.int64)


ASKED: dict[str, Ask] = {
    "page-table": lambda cache, kv: cache.rows.page_table([kv], lengths(6)),
    "changes": lambda cache, _: cache.rows.page_table_changes(),
    "slots": lambda cache, kv: cache.rows.slots([kv], lengths(0), lengths(6)),
}


def made(group: str, at: int) -> tuple[KVCache, RequestKV]:
    """A request of three pages, one of which has lost its frame in one group."""
    reaches = (ReachSpec(), ReachSpec("window", 3))
    plan = small_plan(8, 2, context=40, max_requests=4, groups=("full", "window"), reaches=reaches)
    cache = KVCache(plan, page_tables=True)
    kv = cache.begin(np.arange(6, dtype=np.int32))
    cache.extend([kv], [6])
    page: Ids = cache.rows.page_ids(kv)[at : at + 1]
    cache.parts.frames.of(Tier.DEVICE, ["full", "window"].index(group)).frame[page] = 0
    return cache, kv


def page_table_of_windows(cache: KVCache, kv: RequestKV) -> object:
    return cache.rows.page_table([kv], lengths(6), 1)


READS = [*(("full", ask) for ask in ASKED.values()), ("window", ASKED["changes"]), ("window", page_table_of_windows)]


@pytest.mark.parametrize(("group", "ask"), READS)
@pytest.mark.parametrize("at", range(3))
def test_no_reader_is_given_the_padding_page(group: str, ask: Ask, at: int) -> None:
    cache, kv = made(group, at)
    with pytest.raises(MissingFrame, match=f"in group '{group}'"):
        ask(cache, kv)


@pytest.mark.parametrize("ask", [ASKED["changes"], page_table_of_windows])
def test_a_page_before_the_window_may_have_lost_its_frame(ask: Ask) -> None:
    cache, kv = made("window", 0)
    cache.commit(kv, np.arange(6, dtype=np.int32))  # the window of 3 tokens has passed the first page
    ask(cache, kv)

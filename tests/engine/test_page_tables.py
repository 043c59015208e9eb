"""Page tables on a device: brought up to date by changes alone, they are what the cache says, and kernels read them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from quire.cache import KVCache
from quire.engine.device.page_tables import DevicePageTables
from quire.kernels import page_arrays
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.moves import TORCH, Moves
from quire.kernels.page_arrays import StepTable, shared_runs
from quire.memory.residency import PageTableChanges
from quire.spec.group import ReachSpec
from quire.testing import small_plan
from quire.testing.choices import Choices
from tests.changes import DEVICE, slow_unless_changed

CUDA = pytest.param("cuda", "auto", marks=pytest.mark.gpu)
INTERPRETED = pytest.param("cpu", "triton", marks=pytest.mark.filterwarnings("ignore::RuntimeWarning"))


class Apart:
    """Torch's operators, on tables of their own also on a CPU."""

    set_entries = staticmethod(TORCH.set_entries)


def moves_of(device: str, word: Any) -> Moves:
    if word == "apart":
        return cast(Moves, Apart())
    if word == "triton":
        pytest.importorskip("triton")
    return AttentionBackend(word, torch.device(device)).moves


@slow_unless_changed(*DEVICE)
@pytest.mark.parametrize(("device", "word"), [("cpu", "torch"), ("cpu", "apart"), INTERPRETED, CUDA])
def test_tables_follow_requests_that_begin_grow_share_and_end(device: str, word: str) -> None:
    check_tables(device, moves_of(device, word), 300 if word == "triton" else 3000)


def check_tables(device: str, moves: Moves, steps: int, seed: int = 3) -> None:
    """Random lives on a pool that evicts all the time, two groups, pages shared and given up as duplicates. Some steps
    fail after their changes were sent. Runs that sequences share are those of a search."""
    choices, size = Choices.seeded(seed), 2
    plan = small_plan(
        24, size, context=30, max_requests=5, groups=("a", "b"), reaches=(ReachSpec(), ReachSpec()), frames=(24, 24)
    )
    cache = KVCache(plan, page_tables=True)
    tables = DevicePageTables(2, plan.max_requests, plan.pages_per_row, device=torch.device(device), moves=moves)
    address = tables.tables.data_ptr()
    live: list[tuple[Any, np.ndarray]] = []
    changed = shared = 0
    for _ in range(steps):
        if live and choices.chance(40):
            pass  # the same requests run on
        elif live and (len(live) == 5 or choices.chance(40)):
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
        sent = tables.sent(changes)
        if choices.chance(5):
            continue  # the launch has failed
        tables.apply(sent)
        if live:
            kvs = [kv for kv, _ in live]
            batch = cache.rows.batch(kvs)
            lengths = np.array([cache.rows.allocated(kv) for kv in kvs])
            for group in range(2):
                expected = cache.rows.page_table(batch, lengths, group)
                on_host = tables.frames(group, batch.rows, expected.shape[1])
                found = tables.tables[group].cpu().numpy()[batch.rows]
                for row, pages in enumerate(-(-lengths // size)):
                    assert found[row, :pages].tolist() == expected[row, :pages].tolist()
                    assert on_host[row, :pages].tolist() == expected[row, :pages].tolist()
                if choices.chance(70):  # attention need not be computed in each step
                    shared += check_runs(tables, group, batch.rows, lengths, on_host, size)
    assert tables.tables.data_ptr() == address and not tables.tables[:, tables.pad_row].any()
    statistics = cache.statistics()
    assert statistics.duplicate_pages > steps // 100 and statistics.evicted_pages > steps // 100
    assert cache.rows.page_table_changes().frames.shape == (2, 0) and changed > steps // 3
    assert shared > steps // 20


def decodes_of(lengths: np.ndarray, frames: np.ndarray, size: int, table: StepTable | None) -> PagedBatch:
    """One new token of each sequence, after which they have these lengths."""
    count, contexts = len(lengths), np.maximum(lengths, 1).astype(np.int32)
    starts, slots = np.arange(count + 1, dtype=np.int32), np.zeros(count, dtype=np.int32)
    return PagedBatch(
        query_starts=starts, context_lens=contexts, frames=frames, slots=slots, page_size=size, table=table
    )


def check_runs(
    tables: DevicePageTables, group: int, rows: Any, lengths: np.ndarray, frames: np.ndarray, size: int
) -> int:
    """The runs that are kept from step to step are those that a search finds; how many there are."""
    table = tables.step(group, rows)
    full = (lengths - 1) // size
    batch = decodes_of(lengths, frames, size, table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.kernels.page_arrays.MIN_SHARED_TOKENS", 1)
        found = batch.shared_runs(full, "all")
        wanted = list(shared_runs(frames, full, size))
    assert [(members.tolist(), *ends) for members, *ends in found] == [
        (members.tolist(), *ends) for members, *ends in wanted
    ]
    return len(found)


@pytest.mark.parametrize("count", [1, 256, 700])
def test_entries_that_a_kernel_sets_are_those_of_torch(count: int) -> None:
    check_entries(count)


def check_entries(count: int) -> None:
    """And no other is touched."""
    moves = moves_of("cpu", "triton")
    rng = np.random.default_rng(count)
    mine = torch.from_numpy(rng.integers(0, 999, (3, 40, 50), dtype=np.int32))
    theirs = mine.clone()
    places = rng.choice(2000, count, replace=False)
    changes = torch.from_numpy(np.concatenate((places[None], rng.integers(0, 999, (3, count)))).astype(np.int32))
    moves.set_entries(mine, changes)
    TORCH.set_entries(theirs, changes)
    assert torch.equal(mine, theirs)


def test_decode_steps_compare_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forty steps, those look for what requests share in which a prompt is computed, or a request begins or ends."""
    searches: list[int] = []
    real = page_arrays.shared_runs
    monkeypatch.setattr(page_arrays, "shared_runs", lambda *given: searches.append(0) or real(*given))
    size, prompt = 4, np.arange(1, 600, dtype=np.int32)
    plan = small_plan(800, size, context=700, max_requests=5)
    cache = KVCache(plan, page_tables=True)
    tables = DevicePageTables(
        1, plan.max_requests, plan.pages_per_row, device=torch.device("cpu"), moves=cast(Moves, Apart())
    )
    kvs: list[Any] = []
    for at in range(44):
        if at in (0, 1, 2, 20):
            kv = cache.begin(prompt)
            cache.extend([kv], [len(prompt) - kv.num_cached])
            cache.commit(kv, prompt)
            kvs.append(kv)
        elif at == 30:
            cache.finish(kvs.pop(0), prompt)
        else:
            cache.extend(kvs, [1] * len(kvs))
        tables.apply(tables.sent(cache.rows.page_table_changes()))
        batch, lengths = cache.rows.batch(kvs), np.array([cache.rows.allocated(kv) for kv in kvs])
        frames, table = tables.frames(0, batch.rows, -(-int(lengths.max()) // size)), tables.step(0, batch.rows)
        found = decodes_of(lengths, frames, size, table).shared_runs((lengths - 1) // size, "all")
        assert len(found) == (len(kvs) > 1)
    assert len(searches) <= 10


@pytest.mark.parametrize("moves", [TORCH, Apart()], ids=["torch", "apart"])
def test_a_model_of_states_alone_has_no_tables(moves: Any) -> None:
    tables = DevicePageTables(0, 3, 4, device=torch.device("cpu"), moves=moves)
    nothing = PageTableChanges(np.empty(0, np.int32), np.empty((0, 0), np.int32))
    some = PageTableChanges(np.array([1, 5], np.int32), np.empty((0, 2), np.int32))
    for changes in (nothing, some):
        tables.apply(tables.sent(changes))
    assert tables.tables.shape == (0, 4, 4)

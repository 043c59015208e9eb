"""Copies between tiers beside the steps of a device: the same bytes, and no race, whatever stream the steps run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quire.cache.request_kv import RequestKV
from quire.engine.core import EngineCore
from quire.engine.device.frame_staging import ComputeStream, FrameStaging, StagedCopy
from quire.engine.device.runner import LaunchedForward
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.moves import TORCH, Moves, Pieces
from quire.memory import pinned
from quire.memory.frame_copies import FrameCopies
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.memory.record import HEADER_BYTES
from quire.models.hf import LoadedModel
from quire.scheduler.step import Step
from quire.spec.group import GroupSpec
from quire.spec.ids import Ids
from quire.spec.layout import DType, Field, PageLayout
from quire.tiers.executor import TransferExecutor
from quire.tiers.mover import ThreadMover
from quire.tiers.transfer import Lane, Transfer, Units
from quire.upload import to_device
from tests.changes import DEVICE, TIERS, slow_unless_changed
from tests.engine.running import run
from tests.engine.test_fake_cuda import on_device, ours, watched
from tests.engine.tiered import GREEDY, OTHERS, PROMPTS, Case, case_of, small
from tests.fake_cuda import FakeCuda, FakeStream
from tests.memory.test_frame_copies import FRAMES, fill, ids, odd_layouts, orders

CUDA = torch.device("cuda")


class Interpreted:
    """Gathers and scatters of Triton kernels, by the interpreter, on the numbers of the device in Python."""

    def __init__(self) -> None:
        pytest.importorskip("triton")
        self._moves = AttentionBackend("triton").moves

    def gather(self, pieces: Pieces, rows: torch.Tensor, records: torch.Tensor) -> None:
        self._moves.gather(*_inner(pieces, rows, records))

    def scatter(self, pieces: Pieces, rows: torch.Tensor, records: torch.Tensor) -> None:
        self._moves.scatter(*_inner(pieces, rows, records))


def _inner(pieces: Pieces, *tensors: Any) -> Any:
    own = Pieces([(place, vars(part)["inner"]) for place, part in pieces.parts], pieces.record_words)
    return own, *(tensor.inner for tensor in tensors)


@slow_unless_changed(*DEVICE, *TIERS)
@settings(max_examples=40, deadline=None)
@given(odd_layouts(), orders(), st.booleans(), st.booleans())
def test_staged_frames_are_the_same_bytes(
    layout: PageLayout, order: tuple[list[int], list[int]], one_by_one: bool, sliced: bool
) -> None:
    check_staged(TORCH, layout, order, one_by_one=one_by_one, sliced=sliced)


@slow_unless_changed("src/quire/kernels/", *TIERS)
@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(odd_layouts(), orders(), st.booleans())
def test_kernels_stage_the_same_bytes(layout: PageLayout, order: tuple[list[int], list[int]], one_by_one: bool) -> None:
    check_staged(cast(Moves, Interpreted()), layout, order, one_by_one=one_by_one, sliced=False)


def check_staged(
    moves: Moves,
    layout: PageLayout,
    order: tuple[list[int], list[int]],
    *,
    one_by_one: bool,
    sliced: bool,
) -> None:
    """There and back, in batches of one and of all, from memory that was registered in many slices or in one, beside
    what an engine on the CPU writes."""
    device, records, group = ids(order[0]), ids(order[1]), GroupSpec(name="g", layout=layout)
    with (
        FakeCuda().installed() as cuda,
        patch.object(pinned, "_SLICE", 1 if sliced else 1 << 30),
    ):
        plain = Pool(layout, FRAMES, device="cpu")
        fill(plain, np.random.default_rng(1))
        pools = [Pool(layout, FRAMES, device=CUDA) for _ in range(2)]
        for (_, tensor), (_, source) in zip(pools[0].tensors, plain.tensors, strict=True):
            tensor.copy_(source)
        with (
            closing(HostPool([group], [FRAMES])) as expected,
            closing(HostPool([group], [FRAMES], pinned=True)) as host,
        ):
            FrameCopies([plain], expected).to_host(0, device, records)
            staging = FrameStaging(ComputeStream(CUDA, moves))
            for pool in pools:
                copies = FrameCopies([pool], host, staging.frames, queues=True)
                frames: Any = copies._copies[0]
                frames._batch = 1 if one_by_one else frames._batch
                if pool is pools[0]:
                    copies.to_host(0, device, records)
                    end = HEADER_BYTES + layout.bytes_per_frame
                    found, wanted = (pool.rows(0)[order[1], HEADER_BYTES:end] for pool in (host, expected))
                    assert np.array_equal(found, wanted)
                else:
                    queued = copies.to_device(0, device, records)
                    assert queued is not None
                    queued.wait()
        for (_, tensor), (_, source) in zip(pools[1].tensors, plain.tensors, strict=True):
            there = tensor.inner.view(torch.uint8)
            assert torch.equal(there[:, order[0]], source.view(torch.uint8)[:, order[0]])
            others = sorted({*range(FRAMES + 1)} - {*order[0]})
            assert not there[:, others].any()
        assert cuda.noted == []


@contextmanager
def handing_on(cuda: FakeCuda) -> Iterator[None]:
    """Threads of movers know the device. What a thread has waited for is known to another one only from the moment at
    which it hands a transfer on: submitted, arrived, checked or ended."""
    races, known = cuda.races, {}
    real = {name: getattr(Transfer, name) for name in ("advance", "arrived", "end", "wait")}
    submit, finished, threads = ThreadMover.submit, ThreadMover.finished, ThreadMover._run
    ready = RequestKV.is_ready.fget

    def handed(transfer: Transfer) -> dict[int, int]:
        return known.setdefault(id(transfer), (transfer, {}))[1]

    def wrapped(name: str, *, gives: bool, takes: bool) -> Any:
        def call(transfer: Transfer, *args: Any) -> Any:
            if takes:
                races.join_host(handed(transfer))
            if name == "wait" and not transfer.done and not transfer._has_arrived:
                cuda.note("the host waits for a load")
            if gives:
                handed(transfer).update(races.host)
            found = real[name](transfer, *args)
            if takes:
                races.join_host(handed(transfer))
            return found

        return call

    def submits(mover: ThreadMover, transfer: Transfer) -> bool:
        handed(transfer).update(races.host)
        return submit(mover, transfer)

    def finishes(mover: ThreadMover) -> list[Transfer]:
        ended = finished(mover)
        for transfer in ended:
            races.join_host(handed(transfer))
        return ended

    def is_ready(kv: RequestKV) -> bool:
        for transfer in kv.loads:
            if transfer.done:  # it says so when the mover has waited
                races.join_host(handed(transfer))
        return ready(kv)

    def runs(mover: ThreadMover, channel: Any) -> None:
        with cuda.entered():
            threads(mover, channel)

    changes = {
        "advance": wrapped("advance", gives=False, takes=True),
        "arrived": wrapped("arrived", gives=True, takes=False),
        "end": wrapped("end", gives=True, takes=False),
        "wait": wrapped("wait", gives=False, takes=True),
    }
    with (
        patch.multiple(Transfer, **changes),
        patch.multiple(ThreadMover, submit=submits, finished=finishes, _run=runs),
        patch.object(RequestKV, "is_ready", property(is_ready)),
    ):
        yield


def seals(cuda: FakeCuda) -> Any:
    """Seals and checks of records are accesses of the host."""
    seal, defects = FrameCopies.seal, FrameCopies.defects

    def noted(real: Any, *, writes: bool) -> Any:
        def call(copies: FrameCopies, group: int, host: Ids, keys: Any) -> Any:
            for frame in host.tolist():
                row = torch.from_numpy(copies.rows(group)[frame : frame + 1])
                cuda.races.by_host(row, "a check of the host", writes=writes)
            return real(copies, group, host, keys)

        return call

    return patch.multiple(FrameCopies, seal=noted(seal, writes=True), defects=noted(defects, writes=False))


def tiered_on(model: LoadedModel, cuda: FakeCuda, **settings: Any) -> EngineCore:
    """A starved engine with host memory, whose pools and records are watched."""
    core = small(model, **{"device": "cuda", "attention_backend": "torch", "host": 8.0, **settings})
    assert core.tiers is not None
    for group, pool in enumerate(core.pools):
        cuda.races.watch("frame", pool.rows)
        cuda.races.watch("record", torch.from_numpy(core.tiers.host.rows(group)))
    return core


def check_turns(core: EngineCore, case: Case) -> dict[str, Any]:
    """Prompts that push each other off the device and come back have their tokens; statistics of the engine, which is
    closed."""
    try:
        for prompts, expected in ((PROMPTS, case.expected), (OTHERS, case.others), (PROMPTS[1:3], case.expected[1:3])):
            assert run(core, prompts, GREEDY, str(len(prompts))) == expected
    finally:
        found = core.statistics()
        core.close()
    return found


def check_tiers(name: str = "llama_gqa", **settings: Any) -> None:
    """Prompts that push each other off the device and come back, on a stream that is not the default one."""
    case, cuda = case_of(name), FakeCuda()
    with cuda.installed(), handing_on(cuda), seals(cuda), torch.cuda.stream(FakeStream()), watched(cuda):
        core = tiered_on(on_device(name), cuda, **settings)
        found = check_turns(core, case)
    assert found["tiers"]["loaded_bytes"] > 0 and found["tiers"]["saved_bytes"] > 0
    assert cuda.races.accesses > 1000
    assert cuda.races.found == []
    assert ours(cuda) == []


@slow_unless_changed(*DEVICE, *TIERS, "src/quire/canary/")
@pytest.mark.parametrize("canary", ["off", "all"])
def test_engines_over_tiers_have_no_race(canary: str) -> None:
    """With a canary that reads each cached frame after each step, too."""
    check_tiers(canary=canary)


@contextmanager
def staged(cuda: FakeCuda) -> Iterator[tuple[ComputeStream, FrameCopies, Pool, HostPool]]:
    """A pool and records of six frames, watched, and copies between them beside a stream that is not the default."""
    layout = PageLayout(2, (Field(name="k", shape=(8,), dtype=DType.FLOAT32, layers=(0, 1)),))
    with cuda.installed(), torch.cuda.stream(FakeStream()):
        compute, pool = ComputeStream(CUDA), Pool(layout, 6, device=CUDA)
        with closing(HostPool([GroupSpec(name="g", layout=layout)], [6], pinned=True)) as host:
            cuda.races.watch("frame", pool.rows)
            cuda.races.watch("record", torch.from_numpy(host.rows(0)))
            yield compute, FrameCopies([pool], host, FrameStaging(compute).frames, queues=True), pool, host


def write(pool: Pool, frame: int, value: float) -> None:
    """As a step does."""
    pool.tensors[0][1].index_copy_(1, to_device(np.array([frame]), CUDA), torch.full((2, 1, 2, 8), value, device=CUDA))


def check_marks() -> None:
    """Copies follow what was launched before the mark, and only that."""
    for marks in (True, False):
        cuda = FakeCuda()
        with staged(cuda) as (compute, copies, pool, host):
            write(pool, 2, 1.0)
            if marks:
                compute.mark()
            write(pool, 3, 2.0)
            copies.to_host(0, ids([2]), ids([4]))
            assert (host.rows(0)[4, HEADER_BYTES : HEADER_BYTES + 128].view(np.float32) == 1.0).all()
        assert (cuda.races.found == []) is marks


def check_loads() -> None:
    """What is computed from a frame follows its load, whatever part of the frame it reads, and no load of another one;
    and the host follows a copy that failed."""
    for follows in (True, False):
        for part in range(2):  # layers
            cuda = FakeCuda()
            with staged(cuda) as (compute, copies, pool, host):
                first, second = (copies.to_device(0, ids([frame]), ids([frame])) for frame in (5, 6))
                assert isinstance(first, StagedCopy) and isinstance(second, StagedCopy)
                if follows:
                    first.order()
                pool.tensors[0][1][part].index_select(0, to_device(np.array([5]), CUDA))
                known = compute.stream.clock
                clocks = [each._copied.clock for each in (first, second)]
                waits = [all(known.get(at, 0) >= time for at, time in clock.items()) for clock in clocks]
                assert waits == [follows, False], "a step waits for its own loads alone"
            assert (cuda.races.found == []) is follows
    cuda = FakeCuda()
    with staged(cuda) as (_, copies, pool, host):
        with patch.object(Moves, "scatter", side_effect=MemoryError), pytest.raises(MemoryError):
            copies.to_device(0, ids([5, 6]), ids([1, 2]))
        cuda.races.by_host(torch.from_numpy(host.rows(0)[1:3]), "another load", writes=True)
    assert cuda.races.found == []


def check_queueing() -> None:
    """A load is checked when all its copies are queued: a step that reads it follows each, and the host waits for
    none."""
    cuda, keys = FakeCuda(), (bytes(range(32)), bytes(32))
    with staged(cuda) as (_, copies, pool, host):
        copies.to_host(0, ids([2, 3]), ids([4, 5]))
        copies.seal(0, ids([4, 5]), keys)
        load = Transfer(Lane.LOAD, [Units(0, ids([5, 6]), ids([4, 5]), keys)])
        load.pieces = TransferExecutor(copies, None, piece_bytes=1).run(load)
        while not load.checked:
            load.advance()
            assert not load.over
        assert load._has_arrived and len(load.queued) == 2
        with cuda.watched():
            load.wait()
        assert cuda.noted == []
        pool.tensors[0][1].index_select(1, to_device(np.array([5, 6]), CUDA))
        while not load.over:
            load.advance()
        load.end()
        assert load.is_whole
        cuda.races.by_host(torch.from_numpy(host.rows(0)[4:6]), "another save", writes=True)
    assert cuda.races.found == []


def check_moves() -> None:
    """A save follows drafts that were moved, for which the host does not wait."""
    cuda = FakeCuda()
    with cuda.installed(), handing_on(cuda), torch.cuda.stream(FakeStream()):
        core = tiered_on(on_device("llama_gqa"), cuda)
        try:
            launched: list[LaunchedForward] = []
            launch = core.runner.launch

            def noted(step: Step, previous: LaunchedForward | None) -> LaunchedForward:
                launched.append(launch(step, previous))
                return launched[-1]

            with patch.object(core.runner, "launch", noted):
                run(core, PROMPTS[:1], GREEDY)
            batch = launched[0].batches[0]
            assert isinstance(batch, PagedBatch)
            core.runner.move(launched[0], np.array([0]), np.array([1]))
            assert core.tiers is not None
            copies: Any = core.tiers.mover._executor._copies
            copies.to_host(0, batch.slots[1:2] // batch.page_size, ids([1]))
        finally:
            core.close()
    assert cuda.races.found == []


@pytest.mark.parametrize("check", [check_marks, check_loads, check_queueing, check_moves])
def test_what_copies_follow(check: Callable[[], None]) -> None:
    check()

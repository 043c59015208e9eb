"""Memory of a GPU that is mapped piece by piece, on a stand-in of CUDA's driver (`cuda_driver.c`) in host memory."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine import tiers
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.device import cuda_memory
from quire.engine.device.cuda_memory import CudaBacking, CudaDriver, CudaMapping, cuda_backing
from quire.engine.elastic import memory_of
from quire.engine.messages import EngineRequest, Later, MemoryReport, ResizeRequest
from quire.errors import PlanError, RefusedCombination
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.running import run
from tests.engine.test_elastic import engine, expected, params, prompts

UNIT, DEVICE, MIB = 1 << 16, 3, 1 << 20


class StandIn:
    """The library, and how much of its memory is free. Torch keeps `kept` bytes beside."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.kept = 0
        self.releases = 0
        self._library = ctypes.CDLL(self.path)
        self._library.stand_in_free.restype = ctypes.c_size_t

    def has(self, num_bytes: int) -> None:
        self._library.stand_in_has(ctypes.c_size_t(num_bytes))

    @property
    def free(self) -> int:
        return int(self._library.stand_in_free())

    def backing(self, num_bytes: int, _device: object = None) -> CudaBacking:
        return CudaBacking(num_bytes, CudaDriver(DEVICE, self.path), view, lambda: None, self.release)

    def release(self) -> None:
        self.has(self.free + self.kept)
        self.kept, self.releases = 0, self.releases + 1


def view(mapping: CudaMapping) -> torch.Tensor:
    """As torch makes a tensor of what has a `__cuda_array_interface__`: it keeps the mapping."""
    shape, (address, _) = mapping.__cuda_array_interface__["shape"], mapping.__cuda_array_interface__["data"]
    memory = (ctypes.c_ubyte * shape[0]).from_address(address)
    memory.mapping = mapping
    return torch.frombuffer(memory, dtype=torch.uint8)


@cache
def library() -> Path:
    """The stand-in, compiled against the header of the real one, which Triton brings."""
    spec, compiler = importlib.util.find_spec("triton"), shutil.which("gcc") or shutil.which("cc")
    if spec is None or spec.origin is None or compiler is None:
        pytest.skip("needs Triton, which has cuda.h, and a C compiler")
    headers = Path(spec.origin).parent / "backends" / "nvidia" / "include"
    if not (headers / "cuda.h").is_file():
        pytest.skip("this Triton has no cuda.h")
    found = Path(tempfile.mkdtemp()) / "libstand_in.so"
    atexit.register(shutil.rmtree, found.parent)
    source = Path(__file__).with_name("cuda_driver.c")
    subprocess.run([compiler, "-Werror", "-shared", "-fPIC", f"-I{headers}", "-o", found, source], check=True)
    return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[StandIn]:
    monkeypatch.setattr(cuda_memory, "PIECE", UNIT)
    found = StandIn(library())
    found.has(64 * MIB)
    yield found
    gc.collect()
    assert found.free == 64 * MIB or "core" in request.fixturenames, "memory was not given back"


def test_memory_is_given_back_and_comes_again_as_zeros(gpu: StandIn) -> None:
    backing = gpu.backing(10 * UNIT + 100)
    address = backing.tensor.data_ptr()
    assert not backing.tensor.any() and gpu.free == 64 * MIB - 11 * UNIT
    backing.tensor.fill_(7)
    backing.resize(3 * UNIT + 1)
    assert gpu.free == 64 * MIB - 4 * UNIT and bool(backing.tensor[: 3 * UNIT + 1].eq(7).all())
    backing.resize(8 * UNIT)
    assert bool(backing.tensor[: 3 * UNIT + 1].eq(7).all()) and not backing.tensor[3 * UNIT + 1 : 8 * UNIT].any()
    assert backing.tensor.data_ptr() == address, "kernels and graphs keep the address"
    backing.resize(0)
    assert gpu.free == 64 * MIB


def test_a_gpu_without_memory_changes_nothing(gpu: StandIn) -> None:
    backing = gpu.backing(6 * UNIT)
    backing.tensor.fill_(7)
    backing.resize(2 * UNIT)
    gpu.has(3 * UNIT)  # another process has the rest
    with pytest.raises(PlanError, match="the GPU has no memory left"):
        backing.resize(6 * UNIT)
    assert backing.num_bytes == 2 * UNIT and gpu.free == 3 * UNIT and bool(backing.tensor[: 2 * UNIT].eq(7).all())
    backing.resize(5 * UNIT)
    assert gpu.free == 0 and not backing.tensor[2 * UNIT : 5 * UNIT].any()
    gpu.has(64 * MIB - 5 * UNIT)


def test_memory_that_torch_keeps_is_given_back_for_a_growth(gpu: StandIn) -> None:
    backing = gpu.backing(6 * UNIT)
    backing.resize(2 * UNIT)
    gpu.has(3 * UNIT)
    gpu.kept = 64 * MIB - 5 * UNIT
    backing.resize(5 * UNIT)
    assert gpu.releases == 0, "there was enough"
    backing.resize(6 * UNIT)
    assert gpu.releases == 1 and gpu.free == 64 * MIB - 6 * UNIT and not backing.tensor[2 * UNIT :].any()
    backing.resize(UNIT)
    gpu.has(0)
    with pytest.raises(PlanError, match="no memory left"):
        backing.resize(6 * UNIT)
    assert gpu.releases == 2 and gpu.free == 0 and backing.num_bytes == UNIT
    gpu.has(64 * MIB - UNIT)


def test_zeros_are_there_before_another_stream_may_write(gpu: StandIn) -> None:
    """The last wait for the device follows them."""
    backing, seen = gpu.backing(4 * UNIT), []
    backing.tensor.fill_(7)
    backing.resize(2 * UNIT + 5)
    backing._mapping.settle = lambda: seen.append(bool(backing.tensor[2 * UNIT + 5 : 3 * UNIT].any()))
    backing.resize(4 * UNIT)
    assert seen == [True, False]
    backing._mapping.settle = lambda: None


def test_a_piece_that_cannot_be_unmapped_stays_known(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    backing = gpu.backing(4 * UNIT)
    with monkeypatch.context() as patch:
        patch.setattr(CudaDriver, "_call", failing)
        with pytest.raises(RuntimeError, match="failed with 700"):
            backing.resize(2 * UNIT)
    assert backing.num_bytes == 4 * UNIT
    backing.tensor.fill_(3)
    backing.resize(2 * UNIT)
    assert gpu.free == 64 * MIB - 2 * UNIT


def failing(_driver: CudaDriver, name: str, *_given: object) -> None:
    """A device that is broken."""
    raise RuntimeError(f"{name} of CUDA's driver failed with 700")


def test_the_host_says_nothing_of_a_gpu() -> None:
    with pytest.raises(RefusedCombination, match="--kv-pressure follows the memory of the host"):
        engine_config(elastic_gpu=True, kv_pressure=True, kv_memory="1MiB..4MiB")


def test_the_last_tensor_gives_the_memory_back(gpu: StandIn) -> None:
    backing = gpu.backing(4 * UNIT)
    rows = backing.tensor.view(4, UNIT)[2]
    del backing
    gc.collect()
    rows.fill_(3)
    assert gpu.free == 64 * MIB - 4 * UNIT
    del rows


def test_a_pool_that_does_not_fit_leaves_nothing(gpu: StandIn) -> None:
    gpu.has(3 * UNIT)
    with pytest.raises(PlanError, match="no memory left"):
        gpu.backing(4 * UNIT)
    gc.collect()
    assert gpu.free == 3 * UNIT
    gpu.has(64 * MIB)


def test_a_wrong_call_is_no_lack_of_memory(gpu: StandIn) -> None:
    with pytest.raises(RuntimeError, match="cuMemGetAllocationGranularity of CUDA's driver failed with 1"):
        CudaDriver(DEVICE + 1, gpu.path)


def test_another_device_is_refused() -> None:
    with pytest.raises(RefusedCombination, match="--elastic-gpu is for KV memory of a GPU") as caught:
        engine("quire-bundled", elastic_gpu=True)
    assert "leave it out" in caught.value.fix


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "CudaDriver", partial(CudaDriver, library="libcuda-that-is-not-there.so"))
    with pytest.raises(PlanError, match=r"could not be mapped on cuda:0: libcuda-that-is-not-there\.so") as caught:
        cuda_backing(MIB, torch.device("cuda:0"))
    assert "leave out --elastic-gpu" in caught.value.fix


@given(st.lists(st.tuples(st.integers(0, 12 * UNIT), st.integers(0, 14)), max_size=12))
def test_sizes_at_random_beside_a_plain_model(sizes: list[tuple[int, int]]) -> None:
    check_sizes(sizes)


def check_sizes(sizes: Sequence[tuple[int, int]]) -> None:
    """What is below each size stays, what comes again is zero, and no more is mapped than pieces of the size. Each is a
    number of bytes, and of pieces that the device has beside what is mapped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_memory, "PIECE", UNIT)
        gpu = StandIn(library())
        gpu.has(12 * UNIT)
        backing, model, mapped = gpu.backing(12 * UNIT), np.zeros(12 * UNIT, dtype=np.uint8), 12
        for at, (num_bytes, free) in enumerate(sizes, 1):
            gpu.has(free * UNIT)
            before, wanted = backing.num_bytes, -(-num_bytes // UNIT)
            if wanted - mapped > free:
                with pytest.raises(PlanError):
                    backing.resize(num_bytes)
                assert backing.num_bytes == before and gpu.free == free * UNIT
                continue
            backing.resize(num_bytes)
            assert gpu.free == (free + mapped - wanted) * UNIT
            mapped = wanted
            model[num_bytes:] = 0
            assert np.array_equal(backing.tensor[:num_bytes].numpy(), model[:num_bytes])
            backing.tensor[:num_bytes].fill_(at)
            model[:num_bytes] = at


def check_sizes_of(seed: int) -> None:
    """Sizes of one run of a mutant."""
    random = np.random.default_rng(seed)
    check_sizes([(int(random.integers(12 * UNIT)), int(random.integers(15))) for _ in range(12)])


# -- an engine


def settled(core: EngineCore, later: Later[MemoryReport]) -> MemoryReport:
    """What is answered once the size is reached."""
    while (found := later.poll(True)) is None:
        core.step()
    core.audit()
    return found


@pytest.fixture(params=[True, False], ids=["arena", "two rooms"])
def core(gpu: StandIn, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    monkeypatch.setattr(tiers, "cuda_backing", gpu.backing)
    found = engine("quire-bundled-window", elastic_gpu=True, arena=request.param, host_memory=8 * MIB)
    yield found
    found.close()


def test_an_engine_changes_its_size_and_draws_the_same_tokens(core: EngineCore, gpu: StandIn) -> None:
    whole, asked = gpu.free, core.memory().device
    for _ in range(2):
        assert run(core, prompts(), params()) == expected("quire-bundled-window")
        smaller = settled(core, core.resize(ResizeRequest(device_bytes=asked.least)))
        assert abs((gpu.free - whole) - (core.plan.pool_bytes - smaller.device.reached)) <= 2 * UNIT
        assert run(core, prompts(), params()) == expected("quire-bundled-window")
        settled(core, core.resize(ResizeRequest(device_bytes=asked.most)))
        assert gpu.free == whole
        settled(core, memory_of(core).release(0.0))
        assert gpu.free > 64 * MIB - 3 * UNIT
        settled(core, memory_of(core).resume(0.0))
        assert gpu.free == whole


def test_a_growth_for_which_the_gpu_has_no_memory_is_refused(core: EngineCore, gpu: StandIn) -> None:
    """Frames that were not there are not handed out, also where one of two groups could have had its memory. Nothing
    is evicted for it, and requests that run go on."""
    asked, whole = core.memory().device, gpu.free
    settled(core, core.resize(ResizeRequest(device_bytes=asked.least)))
    there = gpu.free
    assert run(core, prompts(), params()) == expected("quire-bundled-window")
    for at in range(4):
        prompt = np.array(prompts()[at], dtype=np.int32).tobytes()
        core.add(EngineRequest(request_id=f"runs-{at}", prompt=prompt, params=SamplingParams(max_tokens=40)))
    while core.scheduler.num_running < 4:
        core.step()
    resizing, sizes = core.cache.resizing, [pool.backing.num_bytes for pool in core.pools]
    before = (memory_of(core).report(), resizing.num_evicted, resizing.is_shrinking)
    lacks = len(core.pools[0].backing.tensor) - sizes[0]
    gpu.has(UNIT if core.plan.arena else lacks + UNIT)
    with pytest.raises(PlanError, match="the GPU has no memory left"):
        core.resize(ResizeRequest(device_bytes=asked.most, host_bytes=4 * MIB))
    assert before == (memory_of(core).report(), resizing.num_evicted, resizing.is_shrinking)
    assert sizes == [pool.backing.num_bytes for pool in core.pools]
    while core.has_work():
        core.step()
    assert run(core, prompts(), params()) == expected("quire-bundled-window")
    gpu.has(there)
    settled(core, core.resize(ResizeRequest(device_bytes=asked.most, host_bytes=4 * MIB)))
    assert gpu.free == whole

"""Decode steps as CUDA graphs, on a device in Python: the tokens of eager steps, whatever joins and leaves a batch."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from quire.engine.core import EngineCore
from quire.engine.device import device as engine_device
from quire.engine.device import graphs
from quire.engine.device.graphs import graph_sizes
from quire.engine.messages import EngineRequest
from quire.models.forward import RunningForward
from quire.plan.devices import GRAPH_BYTES, LEAST_GRAPHS, graph_bytes, sampling_bytes
from quire.scheduler.sampling_params import SamplingParams
from quire.upload import to_device
from tests.changes import TIERS, slow_unless_changed
from tests.emulated_attention import emulated_kernels
from tests.engine.running import core_for, run, shared_prompts
from tests.engine.test_fake_cuda import on_cpu, on_device, ours, watched
from tests.engine.test_frame_staging import check_turns, handing_on, seals, tiered_on
from tests.engine.tiered import GREEDY, case_of
from tests.fake_cuda import FakeCuda, FakeStream
from tests.tiny_models import VOCAB_SIZE

FAMILIES = {
    "llama_gqa": "full attention",
    "gemma2": "windows and caps",
    "llama4_text": "chunks",
    "deepseek_v2": "latents",
    "mamba2": "states",
    "bamba": "states beside attention",
}
FIRST = shared_prompts(3, shared=9, tails=(3, 1, 6, 2, 4), vocabulary=VOCAB_SIZE)
LATER = shared_prompts(4, shared=5, tails=(2, 7), vocabulary=VOCAB_SIZE)
FEW = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
GRAPHS = ("src/quire/engine/device/", "src/quire/kernels/", "src/quire/models/", "tests/engine/test_graphs.py")
SETTINGS = {"page_size": 4, "max_num_batched_tokens": 64, "max_running_requests": 6, "max_model_len": 48}


def params(at: int) -> SamplingParams:
    """Greedy or not, of other lengths, so that batches shrink one by one."""
    drawn: dict[str, Any] = {"temperature": 0} if at % 2 else {"seed": at, "top_k": 5, "logprobs": 1}
    return SamplingParams(**drawn, max_tokens=5 + 2 * at, ignore_eos=True)


def waves(core: EngineCore) -> dict[str, list[int]]:
    """The tokens of requests of which some join while others decode, and how many steps these take."""
    tokens: dict[str, list[int]] = {}

    def add(name: str, prompts: list[list[int]]) -> None:
        for at, prompt in enumerate(prompts):
            given = np.array(prompt, dtype=np.int32).tobytes()
            core.add(EngineRequest(request_id=f"{name}{at}", prompt=given, params=params(at)))
            tokens[f"{name}{at}"] = []

    add("first", FIRST)
    for turn in range(100):
        if turn == 6:
            add("later", LATER)
        if not core.has_work():
            break
        for output in core.step():
            assert not output.error, output.error
            tokens[output.request_id].extend(output.token_ids)
    core.audit()
    return tokens


def on_graphs(name: str, **settings: Any) -> EngineCore:
    settings = {**SETTINGS, "cuda_graph_max_bs": 4, **settings}
    return core_for(on_device(name), device="cuda", **settings)


def check_family(name: str) -> None:
    """Batches of 5, which is more than the largest graph, down to 1, and some that grow: the tokens of eager steps on
    a CPU; one copy to the device a step, no wait, and a replay for each decode step of 4 requests or fewer."""
    expected = waves(core_for(on_cpu(name), device="cpu", **SETTINGS))
    cuda = FakeCuda()
    with cuda.installed(), watched(cuda), emulated_kernels():
        core = on_graphs(name)
        for pool in core.pools:
            cuda.races.watch("frame", pool.rows)
        assert waves(core) == expected
        steps, found = (core.statistics()[name] for name in ("steps", "cuda_graphs"))
    assert found["sizes"] == [1, 2, 4] and not found["refused"] and found["captures"] == 1
    assert found["replays"] > 4 and found["pads"] > 0
    assert set(found["eager"]) == {"prompts", "more requests than the largest graph"}
    assert found["replays"] + sum(found["eager"].values()) == steps
    assert ours(cuda) == [] and cuda.races.found == []
    assert cuda.races.accesses > 100


@pytest.mark.parametrize(
    "name", [name if name == "llama_gqa" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_tokens_are_those_of_eager_steps(name: str) -> None:
    check_family(name)


def check_small(name: str = "llama_gqa", prompts: list[list[int]] = FIRST[:3], **settings: Any) -> None:
    """Batches of 3 down to 1 in one graph of 4: the tokens of eager steps."""
    many, settings = [params(at) for at in range(3)], {**SETTINGS, **settings}
    expected = run(core_for(on_cpu(name), device="cpu", **settings), prompts, many)
    cuda = FakeCuda()
    with (
        cuda.installed(),
        watched(cuda),
        emulated_kernels(),
        patch.object(graphs, "graph_sizes", lambda most: (4,)),
        patch.object(graphs, "graph_bytes", lambda *_: 1 << 28),  # the device in Python uses no memory twice
    ):
        core = on_graphs(name, **settings)
        for pool in core.pools:
            cuda.races.watch("frame", pool.rows)
        assert run(core, prompts, many) == expected
        found = core.statistics()["cuda_graphs"]
    assert found["replays"] > 4 and set(found["eager"]) == {"prompts"}, found
    assert ours(cuda) == [] and cuda.races.found == []


@slow_unless_changed(*GRAPHS)
@pytest.mark.parametrize("name", ["gemma2", "deepseek_v2", "bamba"])
def test_pads_change_no_tokens(name: str) -> None:
    check_small(name)


@pytest.mark.slow
def test_graphs_that_no_step_fits_are_dropped() -> None:
    """Arrays of compressed keys have sizes that follow contexts: after some steps none is tried, and it is said."""
    prompts = shared_prompts(3, shared=118, tails=(5, 9, 2), vocabulary=VOCAB_SIZE)
    settings, many = {**SETTINGS, "page_size": 128, "max_model_len": 256}, [params(at) for at in range(3)]
    expected = run(core_for(on_cpu("deepseek_v4"), device="cpu", **settings), prompts, many)
    cuda = FakeCuda()
    with (
        cuda.installed(),
        emulated_kernels(),
        patch.object(graphs, "graph_sizes", lambda most: (4,)),
        patch.object(graphs, "graph_bytes", lambda *_: 1 << 28),
        patch.object(graphs, "_MISFITS", 3),
    ):
        core = on_graphs("deepseek_v4", **settings)
        assert core.statistics()["cuda_graphs"]["sizes"] == [4]
        assert run(core, prompts, many) == expected
        found = core.statistics()["cuda_graphs"]
    assert found["sizes"] == [] and "have other shapes" in found["refused"]["4"] and found["replays"] == 0
    assert found["eager"]["arrays of other shapes"] == 3 and found["eager"]["no graph of this size"] > 0


@slow_unless_changed(*GRAPHS)
@pytest.mark.parametrize(
    "name", ["deepseek_v32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("minimax_m3", "glm_moe_dsa"))]
)
def test_models_that_select_are_eager(name: str) -> None:
    """Which rows select, and among how many tokens, follows from contexts; the tokens are those of a CPU all the same,
    and that there are no graphs is said and counted."""
    expected = waves(core_for(on_cpu(name), device="cpu", **SETTINGS))
    cuda = FakeCuda()
    with cuda.installed(), watched(cuda), emulated_kernels():
        core = on_graphs(name)
        assert waves(core) == expected
        steps, found = (core.statistics()[name] for name in ("steps", "cuda_graphs"))
    assert found["sizes"] == [] and found["replays"] == 0
    assert "compute what they derive from a batch on the device" in found["refused"]["4"], found["refused"]
    assert found["eager"]["no graph of this size"] > 4 and sum(found["eager"].values()) == steps
    assert ours(cuda) == []


def check_copies() -> None:
    """A replayed step sends all its arrays in one copy."""
    cuda = FakeCuda()
    with cuda.installed(), watched(cuda), emulated_kernels():
        core = on_graphs("llama_gqa", cuda_graph_max_bs=1)
        core.add(EngineRequest(request_id="a", prompt=np.arange(1, 9, dtype=np.int32).tobytes(), params=GREEDY))
        counts = []
        while core.has_work():
            before = cuda.num_copies, core.statistics()["cuda_graphs"]["replays"]
            core.step()
            if core.statistics()["cuda_graphs"]["replays"] > before[1]:
                counts.append(cuda.num_copies - before[0])
    assert len(counts) > 3 and set(counts) == {1}, counts


def test_a_replayed_step_is_one_copy() -> None:
    check_copies()


def check_weights() -> None:
    """Graphs follow weights that were replaced, in place or by other tensors."""
    cuda, prompts = FakeCuda(), FIRST[:1]
    with cuda.installed(), emulated_kernels(), patch.object(graphs, "graph_sizes", lambda most: (1,)):
        core = on_graphs("llama_gqa")
        before = run(core, prompts, FEW)
        weight = core.model.module.model.layers[0].mlp.down_proj.weight
        with torch.no_grad():
            weight.inner.mul_(-3.0)
        core.set_weights_epoch(1)
        in_place = run(core, prompts, FEW, "b")
        layer = core.model.module.model.layers[1].mlp.down_proj
        layer.weight = torch.nn.Parameter(layer.weight.detach() * -2.0, requires_grad=False)
        core.set_weights_epoch(2)
        del weight
        replaced = run(core, prompts, FEW, "c")
        assert core.statistics()["cuda_graphs"]["captures"] == 3
        eager = on_graphs("llama_gqa", disable_cuda_graph=True)
        assert eager.statistics()["cuda_graphs"] is None
        for layer, factor in ((eager.model.module.model.layers[0], -3.0), (eager.model.module.model.layers[1], -2.0)):
            layer.mlp.down_proj.weight.inner.mul_(factor)
        assert replaced == run(eager, prompts, FEW)
        assert len({str(before), str(in_place), str(replaced)}) == 3


@slow_unless_changed(*GRAPHS)
def test_graphs_are_captured_anew() -> None:
    check_weights()


def check_tiers() -> None:
    """Requests load pages while others are replayed: no race, on a stream that is not the default one."""
    case, cuda = case_of("llama_gqa"), FakeCuda()
    with (
        cuda.installed(),
        handing_on(cuda),
        seals(cuda),
        torch.cuda.stream(FakeStream()),
        watched(cuda),
        emulated_kernels(),
    ):
        core = tiered_on(on_device("llama_gqa"), cuda, attention_backend="auto", cuda_graph_max_bs=4)
        found = check_turns(core, case)
    assert found["tiers"]["loaded_bytes"] > 0 and found["cuda_graphs"]["replays"] > 5
    assert cuda.races.found == [] and ours(cuda) == []


@slow_unless_changed(*GRAPHS, *TIERS, "src/quire/canary/")
def test_replays_beside_tiers_have_no_race() -> None:
    check_tiers()


@contextmanager
def also(what: Callable[[RunningForward], object]) -> Iterator[None]:
    """Each call of a pass does something else first."""
    real = RunningForward.next_ordinal

    def then(forward: RunningForward) -> int:
        what(forward)
        return real(forward)

    with patch.object(RunningForward, "next_ordinal", then):
        yield


CUDA = torch.device("cuda")
REFUSED: dict[str, tuple[Callable[[RunningForward], object], str]] = {
    "a number of the device": (lambda forward: torch.ones(1, device=CUDA).item(), "reads the device"),
    "an array of the host": (lambda forward: to_device(np.arange(3), CUDA), "an array of the host, int64"),
    "memory that is not pinned": (lambda forward: torch.arange(3).to(CUDA), "not pinned"),
    "a wait that only a capture refuses": (lambda forward: torch.cuda.Event().synchronize(), "operation failed"),
    "what is computed of a batch": (
        lambda forward: forward.batches[0].derived("ones", lambda batch: torch.ones(batch.num_rows, device=CUDA)),
        "compute what they derive",
    ),
    "an array of another shape each time": (
        lambda forward: forward.batches[0].derived("growing", lambda batch: to_device(_growing(), CUDA)),
        "array ",
    ),
}
_lengths: list[int] = []


def _growing() -> Any:
    _lengths.append(0)
    return np.zeros(len(_lengths))


@slow_unless_changed(*GRAPHS)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_graph_cannot_follow_stays_eager(kind: str) -> None:
    """And is named. Steps stay on their stream, which a capture that has failed does not restore."""
    what, says = REFUSED[kind]
    cuda = FakeCuda()
    with cuda.installed(), emulated_kernels(), also(what):
        stream = torch.cuda.current_stream()
        core = on_graphs("llama_gqa", cuda_graph_max_bs=1)
        assert torch.cuda.current_stream() is stream and torch.cuda.get_sync_debug_mode() == 0
        found = core.statistics()["cuda_graphs"]
        assert found["sizes"] == [] and says in found["refused"]["1"], found
        run(core, FIRST[:1], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert core.statistics()["cuda_graphs"]["eager"] == {"prompts": 1, "no graph of this size": 2}


@slow_unless_changed(*GRAPHS)
def test_graphs_share_their_logits_and_their_stream() -> None:
    """Logits that are kept are memory that no other graph can use, and libraries keep memory for each stream. Torch's
    own stream of captures is of the current device, which need not be that of the model."""
    cuda = FakeCuda()
    with cuda.installed(), emulated_kernels():
        core = on_graphs("llama_gqa")
        assert core.device == torch.device("cuda", 0)
        assert core.runner.graphs is not None
        found = list(core.runner.graphs._graphs.values())
        assert sorted(len(each.logits) for each in found) == [1, 2, 4]
        assert len({each.logits.data_ptr() for each in found}) == 1
        streams = {each.graph.stream for each in found}
        assert len(streams) == 1 and streams.pop().device == core.model.device
        assert torch.cuda.current_stream() is torch.cuda.default_stream()


@slow_unless_changed(*GRAPHS)
@pytest.mark.parametrize("name", ["deepseek_v2", "llama4_text"])
def test_graphs_keep_no_tensors_of_eager_passes(name: str) -> None:
    """What layers derive from batches is kept with a graph, and with it all that it refers to."""
    with FakeCuda().installed(), emulated_kernels():
        core = on_graphs(name, cuda_graph_max_bs=1)
        assert core.runner.graphs is not None
        builds = [
            build
            for graph in core.runner.graphs._graphs.values()
            for known in filter(None, graph.asked)
            for build in known.values()
        ]
        held = [value for build in builds for value in inspect.getclosurevars(build).nonlocals.values()]
        assert len(builds) > 2 and not any(isinstance(value, torch.Tensor) for value in held)


@slow_unless_changed(*GRAPHS, "src/quire/plan/")
def test_memory_of_graphs_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools get what graphs leave; a graph that takes more than was planned is dropped."""
    assert [graph_bytes(most, 128_256) for most in (0, 1, 100)] == [0, LEAST_GRAPHS, 100 * GRAPH_BYTES]
    cuda = FakeCuda()
    with cuda.installed(), emulated_kernels():
        config = on_graphs("llama_gqa", cuda_graph_max_bs=2).config
        spec = on_cpu("llama_gqa").spec
        plans = {
            off: engine_device.plan_for(
                config.model_copy(update={"kv_memory": None, "disable_cuda_graph": off}),
                CUDA,
                spec,
            )
            for off in (False, True)
        }
        lines = [line for line in plans[False].ledger if line.name == "graphs"]
        assert [line.bytes for line in lines] == [LEAST_GRAPHS]
        assert not any(line.name == "graphs" for line in plans[True].ledger)
        free, draws = engine_device.free_bytes(CUDA), sampling_bytes(6, spec.vocab_size)
        assert [line.bytes for line in plans[True].ledger if line.name == "sampling"] == [draws] and draws > 0
        assert plans[False].kv_bytes + LEAST_GRAPHS + draws <= free
        gc.collect()
        taken = on_graphs("llama_gqa").statistics()["cuda_graphs"]["bytes"]
        gc.collect()
        monkeypatch.setattr(graphs, "graph_bytes", lambda *_: taken - 1)
        found = on_graphs("llama_gqa").statistics()["cuda_graphs"]
        assert found["sizes"] == [1, 2] and "are planned" in found["refused"]["4"], found
        assert 0 < found["bytes"] <= found["planned_bytes"] < taken


def test_sizes() -> None:
    assert graph_sizes(1) == (1,) and graph_sizes(6) == (1, 2, 4, 6) and graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(100) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100)
    for most in range(9, 700):
        sizes = graph_sizes(most)
        assert sizes[-1] == most
        for batch in range(9, most + 1):
            assert next(size for size in sizes if size >= batch) * 2 < 3 * batch


def test_engines_that_have_none() -> None:
    """On a CPU, with drafts, and where it was asked for."""
    core = core_for(on_cpu("llama_gqa"), device="cpu", **SETTINGS)
    assert core.statistics()["cuda_graphs"] is None
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    config = core.config.model_copy(update={"speculative_config": drafts})
    assert engine_device.largest_graph(config, CUDA) == 0
    on_torch = core.config.model_copy(update={"attention_backend": "torch"})
    assert engine_device.largest_graph(on_torch, CUDA) == 0
    assert engine_device.largest_graph(core.config, CUDA) == 6

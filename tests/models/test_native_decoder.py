"""Layers in one call of the library: bit by bit what they are one by one, in logits and in pages."""

from __future__ import annotations

import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import ModelCheckFailed
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.native.decoder import NativeLayers
from quire.kernels.native.library import native
from quire.kernels.native.products import NativeProduct
from quire.memory.pool import Pool
from quire.models import hf
from quire.models.forward import LAST_HIDDEN, RunningForward
from quire.models.hf import LoadedModel
from quire.models.linear import CpuLinear
from quire.spec.kv_format import KV_FORMATS
from tests.models.schedule import Schedule
from tests.models.test_trees import PROMPT, TREE, Text
from tests.tiny_models import VOCAB_SIZE, build_tiny

needs_library = pytest.mark.skipif(native().library is None, reason=native().reason)
pytestmark = needs_library
KINDS = ("llama_gqa", "llama_yarn", "qwen2", "qwen2_sliding", "qwen3", "mistral", "tied")


def loaded(kind: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    settings = {"tie_word_embeddings": True} if kind == "tied" else {}
    model = LoadedModel(build_tiny("llama_gqa" if kind == "tied" else kind, **settings).to(dtype), name=kind)
    assert model._decoder is not None and model._decoder.native.is_on
    return model


def bits(pools: list[Pool]) -> list[torch.Tensor]:
    return [tensor.contiguous().view(torch.uint8).clone() for pool in pools for _, tensor in pool.tensors]


def check_steps(model: LoadedModel) -> None:
    """All steps of the schedule, in one call of the library each, then layer by layer."""
    assert model._decoder is not None
    decoder, schedule, found = model._decoder.native, Schedule(), []
    before = decoder.num_steps
    for decoder.is_on in (True, False):
        frames = schedule.frames(model)
        logits = [schedule.run(model, frames, step) for step in schedule.steps]
        found.append([*logits, *bits([each.pool for each in frames])])
    decoder.is_on = True
    assert decoder.num_steps == before + len(schedule.steps)
    assert all(map(torch.equal, *found)) and not any(logits.isnan().any() for logits in found[0][: len(schedule.steps)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_is_layer_by_layer(kind: str, dtype: torch.dtype) -> None:
    check_steps(loaded(kind, dtype))


def check_kept_layers() -> None:
    """What layers return is kept as layer by layer, and logits are those of a model that keeps nothing."""
    model, schedule, found = loaded("llama_gqa"), Schedule(), []
    assert model._decoder is not None
    layers, (start, stop) = [0, model.num_layers - 1, LAST_HIDDEN], schedule.steps[0]["a"]
    tokens, positions = torch.from_numpy(schedule.tokens["a"][start:stop]), torch.arange(start, stop)
    plain = schedule.run(model, schedule.frames(model), schedule.steps[0])
    model.capture(layers)
    assert torch.equal(schedule.run(model, schedule.frames(model), schedule.steps[0]), plain)
    before = model._decoder.native.num_steps
    for model._decoder.native.is_on in (True, False):
        (group,) = schedule.frames(model)
        running = RunningForward([group.pool], [schedule._batch(group, schedule.steps[0])])
        logits = model.run(running, tokens, positions, positions[-1:])
        found.append([logits, *(running.captured([layer]) for layer in layers)])
    model._decoder.native.is_on = True
    assert model._decoder.native.num_steps == before + 1
    assert all(map(torch.equal, *found))
    own, last = found[0][1:3]
    assert own.shape == last.shape == (len(tokens), model.hidden_size) and not torch.equal(own, last)


def test_layers_whose_outputs_are_kept() -> None:
    check_kept_layers()


def check_tree() -> None:
    """Drafts that branch see what they follow."""
    model, rng = loaded("llama_gqa"), np.random.default_rng(3)
    assert model._decoder is not None
    tokens, found = rng.integers(0, VOCAB_SIZE - 1, PROMPT + len(TREE)).tolist(), []
    for model._decoder.native.is_on in (True, False):
        text = Text(model)
        text.run(tokens[:PROMPT], 0)
        found.append([text.run(tokens[PROMPT:], PROMPT, TREE), *bits(text.pools)])
    assert all(map(torch.equal, *found)) and model._decoder.native.num_steps > 1


def test_drafts_that_branch() -> None:
    check_tree()


def check_pools() -> None:
    """Each step is of its own pools, also where those of the step before live on."""
    model, schedule = loaded("llama_gqa"), Schedule()
    both = [schedule.frames(model) for _ in range(2)]
    first, second = ([schedule.run(model, frames, step) for step in schedule.steps] for frames in both)
    assert all(map(torch.equal, first, second))
    one, other = (bits([each.pool for each in frames]) for frames in both)
    assert all(map(torch.equal, one, other))


def test_each_step_is_of_its_own_pools() -> None:
    check_pools()


def test_threads_share_a_model() -> None:
    """Each with pools of its own, which come and go; the interpreter changes between threads as often as it can."""
    model, schedule = loaded("llama_gqa"), Schedule()
    wanted = [schedule.run(model, frames, step) for frames in [schedule.frames(model)] for step in schedule.steps]
    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(10):
            with ThreadPoolExecutor(2) as pool:
                both = pool.map(lambda frames: [schedule.run(model, frames, step) for step in schedule.steps],
                                [schedule.frames(model) for _ in range(2)])  # fmt: skip
                assert all(all(map(torch.equal, found, wanted)) for found in both)
    finally:
        sys.setswitchinterval(often)


def check_new_weights() -> None:
    """Weights that are replaced, together or one norm alone, are those of the next step."""
    model, other = loaded("qwen3"), build_tiny("qwen3", seed=5)
    check_steps(model)
    with torch.no_grad():
        for own, new in zip(model.module.parameters(), other.parameters(), strict=True):
            own.copy_(new)
    model.weights_changed()
    check_steps(model)
    schedule, norm = Schedule(), model.module.model.layers[1].self_attn.k_norm
    frames = schedule.frames(model)
    before = schedule.run(model, frames, schedule.steps[0])
    norm.weight = torch.nn.Parameter(norm.weight.detach() * -2)
    found = schedule.run(model, frames, schedule.steps[0])
    assert not torch.equal(before, found)
    old = norm.weight.detach()  # it stays: memory that is freed could get the new numbers
    norm.weight.data = old * -3  # the same parameter on other memory
    assert not torch.equal(found, schedule.run(model, frames, schedule.steps[0]))
    check_steps(model)
    assert model._decoder is not None
    decoder, steps = model._decoder.native, model._decoder.native.num_steps
    model.module.state_dict()  # which makes all layers plain
    schedule.run(model, frames, schedule.steps[0])
    assert decoder.num_steps == steps


def test_new_weights_are_computed_with_at_once() -> None:
    check_new_weights()


def run_once(model: LoadedModel, count: int, kv_dtype: str = "", backend: str = "native") -> int:
    """A prompt of so many tokens; how many steps were one call."""
    assert model._decoder is not None
    before, (group,) = model._decoder.native.num_steps, model.spec.groups(16, KV_FORMATS.get(kv_dtype))
    frames, own = np.arange(1, 9, dtype=np.int32)[None], AttentionBackend(backend)  # type: ignore[arg-type]
    batch = PagedBatch.of(frames, np.array([0]), np.array([count]), 16)
    batch.backend = own
    tokens = torch.arange(count)
    model.run(RunningForward([Pool(group.layout, 9)], [batch]), tokens, tokens, tokens[-1:])
    assert own.calls == {backend: model.num_layers}
    return model._decoder.native.num_steps - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prompt(dtype: torch.dtype) -> None:
    """More rows than a product computes at once: of each, the logits are those of layers one by one."""
    model, found = loaded("llama_gqa", dtype), []
    assert model._decoder is not None
    (group,), count = model.spec.groups(16), 500
    frames, draw = np.arange(1, 33, dtype=np.int32)[None], np.random.default_rng(0)
    tokens = torch.from_numpy(draw.integers(0, VOCAB_SIZE - 1, count))
    before = model._decoder.native.num_steps
    for model._decoder.native.is_on in (True, False):
        pool = Pool(group.layout, 32)
        batch = PagedBatch.of(frames, np.array([0]), np.array([count]), 16)
        positions = torch.arange(count)
        found.append([model.run(RunningForward([pool], [batch]), tokens, positions, positions), *bits([pool])])
    model._decoder.native.is_on = True
    assert all(map(torch.equal, *found))
    vectors = all(product.most_rows >= count for product in products_of(model))
    assert model._decoder.native.num_steps == before + vectors


def test_a_prompt_that_lacks_memory_is_an_error() -> None:
    """As for layers one by one: the engine ends the requests of that step, and goes on."""
    model, count = loaded("llama_gqa"), 200_000
    assert model._decoder is not None
    (group,) = model.spec.groups(16)
    pool = Pool(group.layout, 9)
    tokens = torch.arange(5)
    batch = PagedBatch.of(np.arange(1, 9, dtype=np.int32)[None], np.array([0]), np.array([5]), 16)
    model.run(RunningForward([pool], [batch]), tokens, tokens, tokens[-1:])
    layers = model._decoder.native._built[pool].layers
    assert layers is not None
    frames = np.ones((1, count // 16), dtype=np.int32)
    batch = PagedBatch.of(frames, np.array([0]), np.array([count]), 16)
    hidden, angles = torch.zeros(count, model.hidden_size), torch.zeros(count, 16)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (20 << 20), limits[1]))
    try:
        with pytest.raises(RuntimeError, match="memory"):
            layers.compute(hidden, angles, angles, [batch])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert run_once(model, 5) == 1


def products_of(model: LoadedModel) -> list[NativeProduct]:
    """Those of the layers."""
    found = [each._product.native for each in model.module.modules() if isinstance(each, CpuLinear) and each._product]
    return [each for each in found if each is not None]


def test_other_steps_go_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than products are as fast with, another kernel, encoded pages."""
    made = NativeProduct.__init__

    def limited(product: NativeProduct, *given: Any) -> None:
        made(product, *given)
        product.most_rows = 9

    monkeypatch.setattr(NativeProduct, "__init__", limited)
    model = loaded("llama_gqa")
    assert run_once(model, 9) == 1 and run_once(model, 10) == 0
    assert run_once(model, 5, backend="torch") == 0 and run_once(model, 5, "fp8_e4m3") == 0 and run_once(model, 5) == 1


def check_that_a_difference_shows() -> None:
    """A call that gives other numbers is not used, and the model is served all the same."""
    real = NativeLayers.compute

    def compute(layers: NativeLayers, hidden: torch.Tensor, *given: Any) -> None:
        real(layers, hidden, *given)
        hidden.neg_()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeLayers, "compute", compute)
        model = LoadedModel(build_tiny("llama_gqa"), name="tiny")
        assert model._decoder is not None and not model._decoder.native.is_on
        assert Schedule().largest_error(model, build_tiny("llama_gqa", attn_implementation="eager")) < 1e-4


def test_a_call_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    check_that_a_difference_shows()
    assert "one by one" in caplog.text

    def refuse(*_: Any, **__: Any) -> None:
        raise ModelCheckFailed("differs", fix="none")

    monkeypatch.setattr(hf, "check_forward", refuse)
    with pytest.raises(ModelCheckFailed):
        LoadedModel(build_tiny("llama_gqa"), name="tiny")

"""EAGLE heads: both public layouts are read, and what they compute on pages is what plain torch computes at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.errors import ModelLoadError, UnsupportedModel
from quire.kernels.batch import PagedBatch
from quire.kernels.native.decoder import NativeLayers
from quire.memory.pool import Pool
from quire.models.draft_head import LoadedHead, load_head
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel
from tests import tiny_heads
from tests.covering import covering
from tests.models.test_native_decoder import needs_library
from tests.tiny_heads import dense_choice, dense_head, head_settings, head_tensors, save_head
from tests.tiny_hybrids import build_hybrid
from tests.tiny_models import VOCAB_SIZE, build_tiny

IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = {"eagle_config": {IDS: [0, 1, 1]}}
KINDS = {"eagle": {}, "eagle3": {"states": 3, "draft_vocab": 100}}
UP = "midlayer.mlp.up_proj.weight"
LENGTH = 21
STEPS = ((0, 9), (9, 10), (10, 17), (17, 18), (18, LENGTH))


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return LoadedModel(build_tiny("llama_gqa"), name="target")


def saved(tmp_path, target, kind, *, prefix="midlayer.", changed=None, **settings):
    tensors = head_tensors(target.hidden_size, **KINDS[kind])
    tensors = {name: tensor for name, tensor in {**tensors, **(changed or {})}.items() if tensor is not None}
    config = head_settings(target.hidden_size, **({**LAYERS, **settings} if kind == "eagle3" else settings))
    return str(save_head(tmp_path / "head", config, tensors, prefix=prefix)), tensors


def paged(head: LoadedHead, tokens, features, page_size) -> torch.Tensor:
    """Features of all positions, in steps, on scattered frames that begin as NaN."""
    (group,) = head.spec.groups(page_size)
    num_frames = LENGTH // page_size + 1
    pool = Pool(group.layout, num_frames)
    for _, tensor in pool.tensors:
        tensor.fill_(float("nan"))
    frames = np.random.default_rng(1).permutation(num_frames).astype(np.int32)[None]
    found = []
    for start, stop in STEPS:
        batch = PagedBatch.of(frames, np.array([start]), np.array([stop]), page_size)
        running = RunningForward((pool,), (batch,))
        found.append(head.run(running, tokens[start:stop], features[start:stop], torch.arange(start, stop)))
    return torch.cat(found)


@covering(page_size=[1, 4, 16], prefix=["midlayer.", "layers.0.", "model.layers.0."], kind=KINDS)
def test_on_pages_it_computes_what_plain_torch_computes(tmp_path, target, kind, prefix, page_size):
    name, tensors = saved(tmp_path, target, kind, prefix=prefix)
    head = load_head(name, target, eagle3=kind == "eagle3")
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB_SIZE, (LENGTH,), generator=generator)
    features = torch.randn(LENGTH, target.hidden_size, generator=generator)
    found = paged(head, tokens, features, page_size)
    wanted = dense_head(tensors, target.module.get_input_embeddings()(tokens), features)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-4)
    choices = dense_choice(tensors, wanted, target.module.get_output_embeddings().weight)
    assert torch.equal(head.logits(found).argmax(-1), choices) and len(choices.unique()) > 2
    if kind == "eagle3":
        assert (choices % 2 == 1).all()  # the head knows every other token


def check_one_call(head: LoadedHead, target: LoadedModel) -> None:
    """Its layer, bit by bit: in one call, and by the functions that it has in common with other layers."""
    native = head._head.midlayer.forward.native
    assert native.is_on
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB_SIZE, (LENGTH,), generator=generator)
    features = torch.randn(LENGTH, target.hidden_size, generator=generator).to(target.module.dtype)
    before, kept, found = native.num_steps, features.clone(), []
    for native.is_on in (True, False):
        found.append(paged(head, tokens, features, 4))
    native.is_on = True
    assert native.num_steps == before + len(STEPS)
    assert torch.equal(*found) and not found[0].isnan().any()
    assert torch.equal(features, kept), "rows that others read were overwritten"


def check_head_in_one_call(kind: str, dtype: torch.dtype, folder: Path) -> None:
    target = LoadedModel(build_tiny("llama_gqa").to(dtype), name="target")
    check_one_call(load_head(saved(folder, target, kind)[0], target, eagle3=kind == "eagle3"), target)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_its_layer_is_one_call(tmp_path, kind, dtype):
    check_head_in_one_call(kind, dtype, tmp_path)


@needs_library
def test_a_call_that_differs_is_not_used(tmp_path, target, monkeypatch, caplog):
    real = NativeLayers.compute

    def compute(layers, hidden, *given):
        real(layers, hidden, *given)
        hidden.neg_()

    monkeypatch.setattr(NativeLayers, "compute", compute)
    head = load_head(saved(tmp_path, target, "eagle")[0], target, eagle3=False)
    assert not head._head.midlayer.forward.native.is_on and "one gives other numbers" in caplog.text


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_the_library_cannot_compute_is_not_offered_again(tmp_path, target, monkeypatch, caplog, kind):
    """The products of 48 outputs are none of its own. The layer is computed by functions on rows."""
    monkeypatch.setattr(tiny_heads, "WIDE", 48)
    folder, tensors = saved(tmp_path, target, kind)
    head = load_head(folder, target, eagle3=kind == "eagle3")
    native = head._head.midlayer.forward.native
    assert not native.is_on and not native.num_steps and not caplog.text
    tokens = torch.arange(LENGTH)
    features = torch.randn(LENGTH, target.hidden_size, generator=torch.Generator().manual_seed(5))
    wanted = dense_head(tensors, target.module.get_input_embeddings()(tokens), features)
    torch.testing.assert_close(paged(head, tokens, features, 4), wanted, atol=2e-5, rtol=2e-4)


def test_a_head_without_offsets_knows_the_first_tokens(tmp_path, target):
    name, _ = saved(tmp_path, target, "eagle3", changed={"d2t": None, "t2d": None})
    head = load_head(name, target, eagle3=True)
    rows = torch.randn(40, target.hidden_size)
    choices = head.logits(rows).argmax(-1)
    assert int(choices.max()) < 100 and (choices % 2 == 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_keeps_what_the_head_reads(tmp_path, kind):
    """What a paged pass keeps is what transformers returns as hidden states."""
    plain = build_tiny("llama_gqa")
    model = LoadedModel(build_tiny("llama_gqa"), name="target")
    name, tensors = saved(tmp_path, model, kind)
    for _ in range(2):  # the second one has nothing to add
        head = load_head(name, model, eagle3=kind == "eagle3")
    tokens = torch.arange(LENGTH)
    running = on_pages(model, tokens)
    with torch.no_grad():
        states = plain(tokens[None], output_hidden_states=True).hidden_states
        last = plain.model(tokens[None]).last_hidden_state[0]
    second = plain_second(plain, tokens)
    wanted = last if kind == "eagle" else torch.cat([states[1][0], second, second], -1) @ tensors["fc.weight"].T
    torch.testing.assert_close(head.features(running), wanted, atol=2e-5, rtol=2e-4)


def on_pages(model: LoadedModel, tokens) -> RunningForward:
    """A pass over a whole sequence."""
    (group,) = model.spec.groups(4)
    batch = PagedBatch.of(np.arange(6, dtype=np.int32)[None], np.array([0]), np.array([LENGTH]), 4)
    running = RunningForward((Pool(group.layout, 8),), (batch,))
    model.run(running, tokens, tokens, tokens)
    return running


def plain_second(plain, tokens) -> torch.Tensor:
    """The output of the second layer, before any norm."""
    found = []
    hook = plain.model.layers[1].register_forward_hook(lambda module, args, out: found.append(out))
    with torch.no_grad():
        plain(tokens[None])
    hook.remove()
    return found[0][0]


def test_layers_by_another_name(tmp_path):
    """Those of GPT-2."""
    model = LoadedModel(build_tiny("gpt2"), name="target")
    head = load_head(saved(tmp_path, model, "eagle3")[0], model, eagle3=True)
    tokens = torch.arange(LENGTH)
    with torch.no_grad():
        states = build_tiny("gpt2")(tokens[None], output_hidden_states=True).hidden_states
    wanted = torch.cat([states[layer + 1][0] for layer in head.layers], -1)
    torch.testing.assert_close(on_pages(model, tokens).captured(head.layers), wanted, atol=2e-5, rtol=2e-4)


def test_layers_with_several_streams_are_refused(tmp_path):
    target = LoadedModel(build_hybrid("gemma3n_text"), name="streams")
    path, _ = saved(tmp_path, target, "eagle3")
    for _ in range(2):  # the hooks are gone
        with pytest.raises(UnsupportedModel, match="several streams of hidden states"):
            load_head(path, target, eagle3=True)
    assert not any(layer._forward_hooks for layer in target.module.get_decoder().layers)


@pytest.mark.parametrize(
    ("kind", "changed", "settings", "reason"),
    [
        ("eagle", {"fc.weight": None}, {}, "has no 'fc.weight'"),
        ("eagle", {"layers.1.mlp.up_proj.weight": torch.zeros(2)}, {}, "has 2 layers"),
        ("eagle", {"fc.weight": torch.zeros(32, 64)}, {"hidden_size": 32}, "hidden size of 32, and the target of 64"),
        ("eagle", {}, {"model_type": "qwen3"}, "type 'qwen3'"),
        ("eagle", {}, {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ("eagle3", {"d2t": torch.full((100,), 400)}, {}, "drafts token 499"),
        ("eagle3", {"fc.weight": torch.zeros(64, 128)}, {}, "reads 2 states, and 3 layers"),
        ("eagle3", {"d2t": torch.full((100,), -101)}, {}, "drafts token -2"),
        ("eagle3", {"d2t": torch.full((100,), 2**63 - 1)}, {}, "drafts token -9,2"),
        ("eagle3", {}, {"eagle_config": {IDS: [0, 1, 99]}}, r"\[0, 1, 99\].* ids from 0 to 2"),
        ("eagle3", {}, {"eagle_config": {IDS: [0, -1, 1]}}, r"\[0, -1, 1\].* ids from 0 to 2"),
        ("eagle3", {}, {"eagle_config": {IDS: [0, True, 1]}}, "ids from 0 to 2"),
        ("eagle3", {}, {"eagle_config": {IDS: "011"}}, "ids from 0 to 2"),
        ("eagle3", {}, {"eagle_config": {}, IDS: [0, 1, 2]}, r"\[0, 1, 2\].* ids from 1 to 3"),
        ("eagle3", {}, {"eagle_config": None}, "reads the layers .* and the target has 3"),
        ("eagle3", {}, {"eagle_config": {"use_aux_hidden_state": False}}, "inner layers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, target, kind, changed, settings, reason):
    name, _ = saved(tmp_path, target, kind, changed=changed, **settings)
    with pytest.raises(UnsupportedModel, match=reason):
        load_head(name, target, eagle3=kind == "eagle3")


@pytest.mark.parametrize(
    ("changed", "settings", "reason"),
    [
        ({"midlayer.mlp.up_proj.weight": None}, {}, "lacks the tensor 'midlayer.mlp.up_proj.weight'"),
        ({"extra.weight": torch.zeros(2)}, {}, "besides those of a head, the tensor 'extra.weight'"),
        ({}, {"intermediate_size": 32}, r"'midlayer.mlp.*' of the head .* is \[64, 64\] of float32, and must be \[32"),
        ({"fc.weight": torch.zeros(32, 64)}, {}, r"'fc.weight' .* is \[32, 64\] .* of 64 rows"),
        ({"fc.weight": torch.zeros(64)}, {}, r"'fc.weight' .* is \[64\] of float32, and must be a matrix"),
        ({UP: torch.zeros(64, 64, dtype=torch.int8)}, {}, "is .* of int8, and must be .* of float32 or bfloat16"),
        ({UP: torch.zeros(64, 64).to(torch.float8_e4m3fn)}, {}, "is .* of float8_e4m3fn"),
    ],
)
def test_tensors_that_are_not_those_of_a_head(tmp_path, target, changed, settings, reason):
    name, _ = saved(tmp_path, target, "eagle", changed=changed, **settings)
    with pytest.raises(ModelLoadError, match=reason):
        load_head(name, target, eagle3=False)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"lm_head.weight": torch.tensor(1.0)}, r"'lm_head.weight' .* is \[\] of float32, and must be a matrix"),
        ({"lm_head.weight": torch.zeros(100, 32)}, r"'lm_head.weight' .* is \[100, 32\]"),
        ({"lm_head.weight": None}, r"'lm_head.weight'"),
        ({"norm.weight": torch.zeros(1)}, r"'norm.weight' .* is \[1\]"),
        ({"d2t": torch.zeros(100)}, r"'d2t' .* is \[100\] of float32, and must be \[100\] of int64 or int32"),
        ({"d2t": torch.zeros(99, dtype=torch.int64)}, r"'d2t' .* is \[99\]"),
        ({"d2t": -torch.arange(100)}, "'d2t' .* names a token twice"),
    ],
)
def test_tensors_of_eagle3(tmp_path, target, changed, reason):
    name, _ = saved(tmp_path, target, "eagle3", changed=changed)
    with pytest.raises(ModelLoadError, match=reason):
        load_head(name, target, eagle3=True)


def test_an_id_of_a_layer_has_two_meanings(tmp_path, target):
    """In `eagle_config` it is that of an output, as in SGLang; outside of that of an input, as in vLLM."""
    found = []
    for place, settings in enumerate(({"eagle_config": {IDS: [0, 1, 1]}}, {"eagle_config": None, IDS: [1, 2, 2]})):
        name, _ = saved(tmp_path / str(place), target, "eagle3", **settings)
        found.append(load_head(name, target, eagle3=True).layers)
    assert found == [(0, 1, 1)] * 2


def test_a_revision_of_the_hub(tmp_path, target, monkeypatch):
    """The configuration and the weights are those of the revision."""
    name, _ = saved(tmp_path, target, "eagle")
    config = json.loads((Path(name) / "config.json").read_text())
    asked = []
    monkeypatch.setattr(
        "quire.models.source.PreTrainedConfig.get_config_dict",
        lambda name, revision: (config, asked.append((name, revision))),
    )
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda repo, revision, **_: asked.append((repo, revision)) or name
    )
    load_head("owner/head", target, eagle3=False, revision="v2")
    assert asked == [("owner/head", "v2")] * 2


@covering(kind=KINDS, stored=[torch.bfloat16, torch.float32])
def test_in_half_precision(tmp_path, kind, stored):
    """A head computes in the dtype of its target, whatever its weights were stored in."""
    model = LoadedModel(build_tiny("llama_gqa").to(torch.bfloat16), name="target")
    tensors = {key: w.to(stored) if w.is_floating_point() else w for key, w in head_tensors(64, **KINDS[kind]).items()}
    name, _ = saved(tmp_path, model, kind, changed=tensors)
    head = load_head(name, model, eagle3=kind == "eagle3")
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB_SIZE, (LENGTH,), generator=generator)
    features = torch.randn(LENGTH, model.hidden_size, generator=generator).bfloat16()
    found = paged(head, tokens, features, 4)
    assert found.dtype == torch.bfloat16
    wide = {key: w.bfloat16().float() if w.is_floating_point() else w for key, w in tensors.items()}
    wanted = dense_head(wide, model.module.get_input_embeddings()(tokens).float(), features.float())
    torch.testing.assert_close(found.float(), wanted, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_method_is_named(tmp_path, target, kind):
    name, _ = saved(tmp_path, target, kind)
    with pytest.raises(UnsupportedModel, match=f"it is one of method {kind}"):
        load_head(name, target, eagle3=kind == "eagle")


def test_weights_of_another_format_are_refused(tmp_path, target):
    name, _ = saved(tmp_path, target, "eagle")
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors file"):
        load_head(name, target, eagle3=False)


def test_pages_of_another_head_are_not_found(tmp_path, target):
    """Its identity, with and without its weights."""
    heads = []
    for seed in (0, 0, 1):
        tensors = head_tensors(target.hidden_size, seed=seed)
        folder = save_head(tmp_path / str(len(heads)), head_settings(target.hidden_size), tensors)
        heads.append(load_head(str(folder), target, eagle3=False))
    exact = [head.identity(exact=True) for head in heads]
    assert exact[0] == exact[1] != exact[2] and len({head.identity() for head in heads}) == 3

"""Packed weights and fused layers against the plain model, and what makes them plain again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from quire.errors import ModelCheckFailed
from quire.kernels.hidden_states import RowFunctions, row_functions
from quire.kernels.native.library import native, use_native
from quire.models import decoder_layer, linear
from quire.models.forward import HIDDEN, RunningForward
from quire.models.hf import LoadedModel, load_model
from quire.models.linear import CpuLinear, Product, weight_bytes
from tests.models.schedule import Schedule
from tests.tiny_models import build_tiny, save_tiny

FUSED = {
    "llama_gqa": {},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
}
PLAIN = {"gelu": {"hidden_act": "gelu"}, "gemma": {"model_type": "gemma"}}


def tiny(**settings: Any) -> LoadedModel:
    return LoadedModel(build_tiny("llama_gqa", **settings), name="tiny")


def error(model: LoadedModel, **settings: Any) -> float:
    return float(Schedule().largest_error(model, build_tiny("llama_gqa", attn_implementation="eager", **settings)))


def packed(model: LoadedModel) -> list[bool]:
    return [product.packed is not None for product in model.packing.products]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", FUSED)
def test_fused_layers_equal_the_plain_model(kind: str, native: bool) -> None:
    """Layer by layer; test_native_decoder.py has them in one call."""
    use_native(native)
    try:
        model = tiny(**FUSED[kind])
    finally:
        use_native(True)
    if model._decoder is not None:
        model._decoder.native.is_on = False
    assert model.num_fused == model.num_layers and all(packed(model)) and model._decoder is not None
    assert error(model, **FUSED[kind]) < 1e-4
    model._decoder = None  # transformers' code around the same layers
    assert error(model, **FUSED[kind]) < 1e-4


def test_an_embedding_of_another_class_is_called() -> None:
    """It may have its table under another name."""

    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.inner(tokens)

    module = build_tiny("llama_gqa")
    module.model.embed_tokens = Wrapped(module.model.embed_tokens)
    assert LoadedModel(module, name="wrapped")._decoder is not None


def test_captured_layers_are_kept_of_a_fused_model() -> None:
    """Hooks of modules do not run in a fused decoder, which keeps them itself."""
    model, other, schedule = tiny(), build_tiny("llama_gqa", attn_implementation="eager"), Schedule()
    assert model._decoder is not None
    model.capture([0, 2])
    (group,), (start, stop) = schedule.frames(model), schedule.steps[0]["a"]
    running = RunningForward([group.pool], [schedule._batch(group, schedule.steps[0])])
    tokens, positions = torch.from_numpy(schedule.tokens["a"][start:stop]), torch.arange(start, stop)
    model.run(running, tokens, positions, positions)
    assert HIDDEN in running.shared, "nothing was kept"
    with torch.inference_mode():
        wanted = other.model(input_ids=tokens[None], output_hidden_states=True).hidden_states
    assert (running.captured([0]) - wanted[1][0]).abs().max() < 1e-4


def test_another_scale_of_logits_keeps_the_code_around_the_layers() -> None:
    """Also one that half precision would hide."""
    real = LlamaForCausalLM.forward

    def forward(own: LlamaForCausalLM, *args: Any, **given: Any) -> Any:
        found = real(own, *args, **given)
        found.logits = 30 * torch.tanh(found.logits / 30)
        return found

    capped = type("Capped", (LlamaForCausalLM,), {"forward": forward})
    model = build_tiny("llama_gqa")
    model.__class__ = capped
    found = LoadedModel(model, name="tiny")
    assert found.num_fused == found.num_layers and found._decoder is None


@pytest.mark.parametrize("kind", PLAIN)
def test_layers_with_another_formula_keep_their_own_code(kind: str) -> None:
    model = tiny(**PLAIN[kind])
    assert model.num_fused == 0 and all(packed(model))
    assert error(model, **PLAIN[kind]) < 1e-4


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu"])
def test_another_activation_shows_beside_large_rows(kind: str) -> None:
    """In bfloat16, where layers add little to what they are given."""
    module = build_tiny("llama_gqa", hidden_act=kind)
    with torch.no_grad():
        module.model.embed_tokens.weight.mul_(30)
    model = LoadedModel(module.to(torch.bfloat16), name="tiny", check=False)
    assert model.num_fused == (model.num_layers if kind == "silu" else 0)


def test_layers_that_share_an_input_are_one_product() -> None:
    model = tiny()
    assert [len(product.layers) for product in model.packing.products] == [3, 1, 2, 1] * model.num_layers + [1]


@pytest.mark.parametrize("tied", [True, False])
def test_the_plain_weight_is_freed(tied: bool) -> None:
    """What is counted is what is held: one copy, and for a tied output layer the embedding's as well."""
    model = tiny(tie_word_embeddings=tied)
    layers = [module for module in model.module.modules() if isinstance(module, CpuLinear)]
    held = [layer.__dict__["_parameters"]["weight"] is not None for layer in layers]
    assert sum(held) == tied
    plain = LoadedModel(build_tiny("llama_gqa", tie_word_embeddings=tied), name="tiny", pack=False)
    head = model.module.get_output_embeddings()._product.num_bytes  # type: ignore[union-attr]
    padding = model.packing.num_bytes - sum(layer.in_features * layer.out_features * 4 for layer in layers)
    assert 0 <= padding <= 0.1 * model.packing.num_bytes
    assert model._decoder is not None
    assert weight_bytes(model.module) == plain.weight_bytes + padding + head * tied
    assert model.weight_bytes == weight_bytes(model.module) + model._decoder.angles.num_bytes
    assert not plain.packing.products and plain.num_fused == 0


@pytest.mark.parametrize("tied", [True, False])
def test_new_weights_are_computed_with_at_once_and_packed_again(tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied)
    before = model.weights_fingerprint
    assert all(packed(model)), "a fingerprint leaves them packed"
    other = build_tiny("llama_gqa", seed=5, tie_word_embeddings=tied)
    with torch.no_grad():
        for own, new in zip(model.module.parameters(), other.parameters(), strict=True):
            own.copy_(new)
    assert error(model, seed=5, tie_word_embeddings=tied) < 1e-4
    model.weights_changed()
    assert all(packed(model)) and model.weights_fingerprint != before
    assert error(model, seed=5, tie_word_embeddings=tied) < 1e-4


def test_an_embedding_changed_alone_is_packed_again() -> None:
    settings = {"tie_word_embeddings": True}
    model, other = tiny(**settings), build_tiny("llama_gqa", attn_implementation="eager", **settings)
    with torch.no_grad():
        for embedding in (model.module.get_input_embeddings(), other.get_input_embeddings()):
            embedding.weight.mul_(-0.5)
    model.weights_changed()
    assert Schedule().largest_error(model, other) < 1e-4


def test_a_weight_that_is_read_is_plain_and_the_same() -> None:
    model, other = tiny(), build_tiny("llama_gqa")
    for (name, own), (_, new) in zip(model.module.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(own, new), name
    assert not any(packed(model))
    assert error(model) < 1e-4


@pytest.mark.parametrize("defect", ["order", "bias"])
def test_a_product_that_differs_stays_plain(defect: str) -> None:
    """A defect of packing is found layer by layer, and costs speed alone."""
    real = linear._packed_linear
    wrong = {
        "order": lambda *given: real(*given).flip(-1),
        "bias": lambda rows, weight, _, *rest: real(rows, weight, None, *rest),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_packed_linear", wrong[defect])
        model = tiny(attention_bias=True)
        assert not packed(model)[0] and any(packed(model)) == (defect == "bias")
        assert error(model, attention_bias=True) < 1e-4


def test_a_defect_that_both_proofs_miss_fails_the_check_at_load(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check compares with logits from before weights were packed."""
    folder = str(save_tiny("llama_gqa", tmp_path))
    monkeypatch.setattr(decoder_layer, "_is_same", lambda *_: True)
    monkeypatch.setattr(RowFunctions, "gated_silu", lambda _, pairs: torch.tanh(pairs.chunk(2, -1)[0]))
    monkeypatch.setattr(decoder_layer, "row_functions", lambda *_: RowFunctions())
    with pytest.raises(ModelCheckFailed, match="differs by"):
        load_model(folder)


def test_parts_of_one_product_follow_their_input() -> None:
    """Layers that are given different tensors get their own outputs."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, size) for size in (64, 128)]
    rows, others = torch.randn(3, 64), torch.randn(3, 64)
    with torch.no_grad():
        wanted = [layer(given) for given in (rows, others) for layer in layers]
        for layer in layers:
            layer.__class__ = CpuLinear
        assert Product(layers, frozenset()).pack()  # type: ignore[arg-type]
        first, second = layers
        found = [first(rows), second(rows), first(others), second(others)]
        again = [second(others), first(rows), first(rows)]
    for got, expected in zip([*found, *again], [*wanted, wanted[3], wanted[0], wanted[0]], strict=True):
        assert got.shape == expected.shape and torch.allclose(got, expected, atol=1e-5)


def assert_rounded_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the order of sums. That seldom changes a number in bfloat16; a rounding too few or too many does."""
    torch.testing.assert_close(found, wanted)
    assert found.dtype is torch.float32 or (found != wanted).float().mean() < 0.01


def test_products_have_few_numbers_of_rows() -> None:
    """oneDNN compiles code for each; the rows of each number are those of the plain product."""
    layer = torch.nn.Linear(64, 128)
    plain = layer.weight.detach().clone(), layer.bias.detach().clone()
    layer.__class__ = CpuLinear
    product = Product([layer], frozenset())  # type: ignore[list-item]
    assert product.pack() and (product.native is not None) == (native().library is not None)
    product.native = None  # which computes few rows
    real, computed = linear._packed_linear, []

    def packed(rows: torch.Tensor, *rest: Any) -> Any:
        computed.append(rows.numel() // 64)
        return real(rows, *rest)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(linear, "_packed_linear", packed)
        for count in (1, 32, 33, 34, 65, 127, 300):
            rows = torch.randn(count, 64)
            wanted = torch.nn.functional.linear(rows, *plain)
            for given in (rows, rows[None], rows.repeat(1, 2)[:, :64]):
                found = product.compute(given)
                assert found.shape == (*given.shape[:-1], 128)
                assert torch.allclose(found.reshape(count, 128), wanted, atol=1e-5)
    assert sorted(set(computed)) == [1, 32, 34, 68, 128, 304]
    numbers = [linear.padded_rows(count) for count in range(1, 2049)]
    assert len(set(numbers)) == 128
    assert all(count <= number <= count * 17 / 16 for count, number in enumerate(numbers, 1))


def test_a_native_product_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows have the product of many then; without a defect they have the library's."""
    layers = [torch.nn.Linear(64, 128) for _ in range(2)]
    rows, products = torch.randn(3, 64), []
    real = linear.NativeProduct.compute
    with torch.no_grad():
        wanted = [layer(rows) for layer in layers]
        for layer in layers:
            layer.__class__ = CpuLinear
            products.append(Product([layer], frozenset()))  # type: ignore[list-item]
            assert products[-1].pack()
            monkeypatch.setattr(linear.NativeProduct, "compute", lambda *given: real(*given).flip(-1))
        monkeypatch.undo()
        assert [product.native is not None for product in products] == [native().library is not None, False]
        for product, expected in zip(products, wanted, strict=True):
            assert torch.allclose(product.compute(rows), expected, atol=1e-5)
            product.unpack()
            assert product.native is None and torch.allclose(product.compute(rows), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_native_functions_round_as_torch_does(dtype: torch.dtype, count: int) -> None:
    """All rows, some of which several threads compute; also rows so small that epsilon matters."""
    plain, rows = RowFunctions(), row_functions(torch.device("cpu"), dtype)
    draw = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    for size in (1, 1e-3):
        first, added, weight = randn(1, count, 200) * size, randn(1, count, 200) * size, randn(200)
        for other in (added, None):
            for found, wanted in zip(
                *(each.add_rms_norm(first, other, weight, 1e-5) for each in (rows, plain)), strict=True
            ):
                assert_rounded_alike(found, wanted)
    cos, sin, norms = randn(count, 24), randn(count, 24), (randn(24), randn(24), 1e-6)
    for given in (norms, None):
        heads = randn(count, 7, 24)
        turned = heads.clone()
        plain.rotate(heads, 4, 6, cos, sin, given)
        rows.rotate(turned, 4, 6, cos, sin, given)
        assert_rounded_alike(turned, heads)
        part = torch.randn(count, 9, 24, generator=draw).to(dtype)[:, :7]  # of a wider product
        whole = part.contiguous()
        plain.rotate(whole, 4, 6, cos, sin, given)
        rows.rotate(part, 4, 6, cos, sin, given)
        assert_rounded_alike(part, whole)
    pairs = torch.cat((randn(1, count, 330) * 20, randn(1, count, 330)), -1)
    assert_rounded_alike(rows.gated_silu(pairs), plain.gated_silu(pairs))

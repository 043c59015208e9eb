"""Mistakes in packed weights, and in decoder layers that are computed in few calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from quire.kernels.hidden_states import RowFunctions
from quire.kernels.native.decoder import LayerParts
from quire.models import decoder_layer, linear, rotary
from quire.models.decoder_layer import FusedDecoder, FusedLayer
from quire.models.forward import Forward, RunningForward
from quire.models.hf import LoadedModel
from quire.models.linear import Packing, Product
from quire.models.native_decoder import NativeDecoder
from quire.models.rotary import Angles
from tests.mutants.mutants import Patch, mutant

# -- packed weights


@mutant("packing", "a layer gets a part of the product of another input")
def a_part_is_stale(patch: Patch) -> None:
    real = Product.part

    def part(product: Product, rows: Tensor, at: int) -> Tensor:
        return real(product, rows if product._input is None else product._input, at)

    patch.setattr(Product, "part", part)


@mutant("packing", "layers of one product get each other's outputs")
def parts_are_in_the_wrong_order(patch: Patch) -> None:
    real = Product.__init__

    def init(product: Product, layers: Sequence[Any], tied: frozenset[int]) -> None:
        real(product, layers, tied)
        for at, layer in enumerate(reversed(layers)):
            layer._part = at

    patch.setattr(Product, "__init__", init)


@mutant("packing", "the output of a layer with a bias lacks it")
def biases_are_not_packed(patch: Patch) -> None:
    real = linear._packed_linear
    patch.setattr(linear, "_packed_linear", lambda rows, weight, bias, *rest: real(rows, weight, None, *rest))


@mutant("packing", "oneDNN compiles products for each number of rows")
def every_number_of_rows_is_compiled(patch: Patch) -> None:
    patch.setattr(linear, "padded_rows", lambda count: count)


@mutant("packing", "a product that oneDNN computes wrongly is used")
def packed_products_are_not_compared(patch: Patch) -> None:
    patch.setattr(linear, "CLOSE", dict.fromkeys(linear.CLOSE, float("inf")))


@mutant("packing", "new weights are written to a copy, and the old ones are computed with")
def a_plain_weight_is_a_copy(patch: Patch) -> None:
    real = Product.unpack

    def unpack(product: Product) -> None:
        before = product.packed, product._bias
        real(product)
        product.packed, product._bias = before

    patch.setattr(Product, "unpack", unpack)


@mutant("packing", "the output layer of a model with tied embeddings keeps its old weight")
def tied_weights_are_freed(patch: Patch) -> None:
    real = Product.__init__

    def init(product: Product, layers: Sequence[Any], tied: frozenset[int]) -> None:
        real(product, layers, frozenset())

    patch.setattr(Product, "__init__", init)


@mutant("packing", "every weight is held twice")
def plain_weights_are_not_freed(patch: Patch) -> None:
    real = Product.__init__

    def init(product: Product, layers: Sequence[Any], tied: frozenset[int]) -> None:
        real(product, layers, tied)
        product.keeps_plain = True

    patch.setattr(Product, "__init__", init)


@mutant("packing", "after an update of an embedding, the tied output layer computes with the old one")
def tied_weights_are_packed_once(patch: Patch) -> None:
    real = Packing.pack
    patch.setattr(Packing, "pack", lambda packing, *, again=False: real(packing))


@mutant("packing", "layers of different inputs are one product")
def inputs_are_not_compared(patch: Patch) -> None:
    real = Packing.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[Packing], model: nn.Module, inputs: Sequence[tuple[Any, Tensor]]) -> Packing:
        by_width: dict[int, Tensor] = {}
        found: Packing = real(
            cls, model, [(layer, by_width.setdefault(rows.shape[-1], rows)) for layer, rows in inputs]
        )
        return found

    patch.setattr(Packing, "of", classmethod(of))


@mutant("packing", "memory of packed weights is in no sum, and pools take it a second time")
def packed_weights_are_not_counted(patch: Patch) -> None:
    patch.setattr(Product, "num_bytes", property(lambda product: 0))


# -- fused layers


class _WithoutResidual(RowFunctions):
    def add_rms_norm(self, rows: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, normed = super().add_rms_norm(rows, added, weight, eps)
        return total if added is None else added.clone(), normed


class _KeysAsTheyAre(RowFunctions):
    def rotate(self, heads: Tensor, first: int, count: int, cos: Tensor, sin: Tensor, norms: Any) -> None:
        super().rotate(heads, first, first, cos, sin, norms)


class _OneNorm(RowFunctions):
    def rotate(self, heads: Tensor, first: int, count: int, cos: Tensor, sin: Tensor, norms: Any) -> None:
        super().rotate(heads, first, count, cos, sin, None if norms is None else (norms[0], norms[0], norms[2]))


@mutant("fused layers", "the rows before the attention of a layer are not added after it")
def the_residual_is_dropped(patch: Patch) -> None:
    patch.setattr(decoder_layer, "row_functions", lambda *_: _WithoutResidual())


@mutant("fused layers", "keys are stored without their position")
def keys_are_not_rotated(patch: Patch) -> None:
    patch.setattr(decoder_layer, "row_functions", lambda *_: _KeysAsTheyAre())


@mutant("fused layers", "keys of models that normalise heads have the norm of queries")
def heads_have_one_norm(patch: Patch) -> None:
    patch.setattr(decoder_layer, "row_functions", lambda *_: _OneNorm())


@mutant("fused layers", "the norm before attention is that of the feed-forward network")
def norms_are_swapped(patch: Patch) -> None:
    real = FusedLayer.__init__

    def init(layer: FusedLayer, *given: Any) -> None:
        real(layer, *given)
        layer._first, layer._second = layer._second, layer._first

    patch.setattr(FusedLayer, "__init__", init)


@mutant("fused layers", "a layer with another activation is computed as if it had SiLU")
def a_dry_run_accepts_every_layer(patch: Patch) -> None:
    patch.setattr(decoder_layer, "_is_same", lambda *_: True)


@mutant("fused layers", "a cap or a scale of logits in the code of a model is left out")
def code_around_layers_is_not_compared(patch: Patch) -> None:
    patch.setattr(FusedDecoder, "of", classmethod(lambda cls, model, length, inputs: cls(model, length)))


@mutant("fused layers", "a step returns the logits of other rows")
def logits_are_those_of_the_rows_before(patch: Patch) -> None:
    real = FusedDecoder.__call__

    def call(decoder: FusedDecoder, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return real(decoder, tokens, positions, (rows - 1).clamp_min(0) if len(rows) < len(tokens) else rows)

    patch.setattr(FusedDecoder, "__call__", call)


@mutant("fused layers", "a model computes with transformers' code though all its layers are fused")
def nothing_runs_without_transformers(patch: Patch) -> None:
    patch.setattr(FusedDecoder, "of", classmethod(lambda *_: None))


@mutant("fused layers", "a draft head reads hidden states that were not kept")
def captured_layers_are_passed_over(patch: Patch) -> None:
    real = LoadedModel.run

    def run(model: LoadedModel, *given: Any) -> Tensor:
        captured, model._captured = model._captured, set()
        try:
            return real(model, *given)
        finally:
            model._captured = captured

    patch.setattr(LoadedModel, "run", run)


@mutant("angles", "rows behind a chunk have the angles of its first positions")
def positions_are_counted_from_the_first(patch: Patch) -> None:
    real = Angles.at
    patch.setattr(Angles, "at", lambda angles, positions, rows: real(angles, positions - positions[0], rows))


@mutant("angles", "angles that follow the longest sequence of a step are those of a short one")
def angles_of_a_batch_are_kept(patch: Patch) -> None:
    patch.setattr(rotary, "torch", SimpleNamespace(**vars(torch) | {"equal": lambda *_: True}))


@mutant("angles", "angles of a long context are in no sum, and have no bound")
def all_positions_are_kept(patch: Patch) -> None:
    patch.setattr(rotary, "min", lambda count, _: count, raising=False)


# -- layers in one call


@mutant("layers in one call", "a norm that was replaced alone is not that of the next step")
def replaced_weights_are_passed_over(patch: Patch) -> None:
    def has(layer: FusedLayer, parts: LayerParts) -> bool:
        return layer._heads_of.native is parts.products[0]

    patch.setattr(FusedLayer, "has", has)


@mutant("layers in one call", "a step writes and reads the pools of the step before")
def pools_are_not_compared(patch: Patch) -> None:
    real = NativeDecoder.run

    def run(decoder: NativeDecoder, forward: Forward, *given: Any, **more: Any) -> bool:
        before = next(iter(decoder._built.values()), None)
        if before and all(known() is not None for known in before.pools):  # no memory that was freed is written
            assert isinstance(forward, RunningForward)
            decoder._built[forward.pools[0]] = replace(before, pools=[ref(pool) for pool in forward.pools])
        return real(decoder, forward, *given, **more)

    patch.setattr(NativeDecoder, "run", run)


@mutant("layers in one call", "a call of all layers that gives other numbers serves requests")
def a_call_that_differs_is_used(patch: Patch) -> None:
    patch.setattr(LoadedModel, "_check", lambda model, plain: None)

"""FusedLayer and FusedDecoder: a decoder in few calls: products of packed weights, and functions on rows between them.

A layer is fused if its modules have the structure below and, on the inputs of one dry run, the fused layer gives its
attention the same queries, keys, values and options as the layer's own code, and returns the same; also where its
inputs are small, so that what it returns is mostly what it adds.

rows -> norm -> q, k, v -> (norms of heads) -> rotary -> attention -> o -> + -> norm -> gate, up -> SiLU -> down -> +
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from quire.kernels.hidden_states import row_functions
from quire.kernels.native.decoder import LayerParts, Norm
from quire.models.attention import OWN_ATTENTION, CallOptions, attend
from quire.models.forward import (
    LAST_HIDDEN,
    ProbingForward,
    current_forward,
    forward_pass,
    in_forward,
    keep_hidden,
)
from quire.models.hidden import ReadingLayer
from quire.models.linear import CLOSE, CpuLinear, Product
from quire.models.native_decoder import Layers, NativeDecoder
from quire.models.rotary import Angles

_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MODEL = {"model", "lm_head"}
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_POSITIONS = (0, 1, 2, 5, 11)
"""Positions of the dry run, besides the last ones of the context."""
_SMALL = 2.0**-6
"""Root mean square of small rows: what layers add to them is larger. Their squares are larger than usual epsilons."""


class FusedLayer:
    """The forward pass of one layer on the pools. Outside one its own code computes."""

    def __init__(self, layer: Any, options: CallOptions) -> None:
        attention = layer.self_attn
        self.own: Callable[..., Tensor] = layer.forward
        self._attention = attention
        self._options = replace(options, others={})  # which attention of a module's keys and values does not read
        self._first = None if isinstance(layer, ReadingLayer) else layer.input_layernorm
        self._second = layer.post_attention_layernorm
        self._head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self._norms = [self._second, *(self._head_norms or ())]
        self.native: NativeDecoder | None = None
        """What computes it in one call of its own, if no decoder calls it with others."""
        found = [
            module._product for module in (attention.q_proj, attention.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
        ]
        self._heads_of, self._out, self._pairs, self._down = self._products = tuple(found)
        held = self._norms if self._first is None else [self._first, *self._norms]
        self._held = [norm.__dict__["_parameters"] for norm in held]
        self._dim = attention.head_dim
        self._num_queries, self._num_keys = (size // self._dim for size in self._heads_of.sizes[:2])
        weight = self._second.weight
        self._rows = row_functions(weight.device, weight.dtype)
        self.backend = self._rows.backend

    def parts(self) -> LayerParts | None:
        """What the library computes the layer with; None if it cannot."""
        products = [each.native for each in self._products]
        found = tuple(product for product in products if product is not None)
        if self.backend != "native" or len(found) < len(products):
            return None
        return LayerParts(
            products=found,
            first=None if self._first is None else _norm_of(self._first),
            norms=tuple(map(_norm_of, self._norms)),
            terms=self._options,
            queries=self._num_queries,
            keys=self._num_keys,
            dim=self._dim,
        )

    def has(self, parts: LayerParts) -> bool:
        """Whether its weights are those of `parts`."""
        for product, found in zip(self._products, parts.products, strict=True):
            if product.native is not found:
                return False
        norms = parts.norms if parts.first is None else (parts.first, *parts.norms)
        for held, (weight, _) in zip(self._held, norms, strict=True):  # modules find them slowly
            if held["weight"].data_ptr() != weight.data_ptr():
                return False
        return True

    def __call__(self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **others: Any) -> Tensor:
        """Rows after the layer, `[1, T, hidden]`, of rows before it, and for a `ReadingLayer` of what its attention
        reads; `position_embeddings` are two `[1, T, dim]`."""
        if len(args) != (self._first is None) or position_embeddings is None or not in_forward():
            return self.own(hidden_states, *args, position_embeddings=position_embeddings, **others)
        rows = self._rows
        second, second_eps = self._second, self._second.variance_epsilon
        cos, sin = position_embeddings
        before = hidden_states.contiguous()
        read = args[0].contiguous() if args else None
        if self.native is not None:
            after = before.clone()
            if self.native.run(current_forward(), after[0], (cos[0], sin[0]), None if read is None else read[0]):
                return after
        if self._first is not None:
            _, read = rows.add_rms_norm(before, None, self._first.weight, self._first.variance_epsilon)
        assert read is not None
        heads = self._heads_of.compute(read).view(before.shape[1], -1, self._dim)
        queries, turned = self._num_queries, self._num_queries + self._num_keys
        norms = None
        if self._head_norms is not None:
            norms = (self._head_norms[0].weight, self._head_norms[1].weight, self._head_norms[0].variance_epsilon)
        rows.rotate(heads, queries, turned, cos[0], sin[0], norms)
        found = attend(self._attention, heads[:, :queries], heads[:, queries:turned], heads[:, turned:], self._options)
        out = self._out.compute(found.reshape(1, before.shape[1], -1))
        total, normed = rows.add_rms_norm(before, out, second.weight, second_eps)
        return total.add_(self._down.compute(rows.gated_silu(self._pairs.compute(normed))))


class FusedDecoder:
    """The forward pass of a whole model whose layers are all fused, and whose other modules have the usual structure:
    embedding, layers, norm, output layer. It costs a third of the Python of transformers' own code."""

    def __init__(self, model: Any, context_length: int) -> None:
        decoder = model.model
        self._embedding, self._norm = decoder.embed_tokens, decoder.norm
        self._is_table = type(self._embedding) is nn.Embedding and self._embedding.max_norm is None
        self._layers = [layer.forward for layer in decoder.layers]
        self._head: Product = model.lm_head._product
        weight = decoder.norm.weight
        self._rows = row_functions(weight.device, weight.dtype)
        self.native = NativeDecoder(self._layers)
        self.angles = Angles(decoder.rotary_emb, weight[None, None], context_length)

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any, context_length: int, inputs: dict[str, Any]) -> FusedDecoder | None:
        """For `model`, whose layers have been fused; None if the structure or, in a dry run, the logits differ."""
        children = dict(model.named_children())
        inner = dict(children["model"].named_children()) if set(children) == _MODEL else {}
        known, own = (inspect.unwrap(kind.forward).__code__ for kind in (LlamaForCausalLM, type(model)))
        if (known.co_code, known.co_names) != (own.co_code, own.co_names):  # no scale or cap of logits
            return None
        if set(inner) != _DECODER or not _are_one(model.lm_head) or not _is_rms_norm(inner["norm"]):
            return None
        if not all(isinstance(layer.forward, FusedLayer) for layer in inner["layers"]):
            return None
        found, tokens = cls(model, context_length), torch.arange(1, 6, device=model.device)
        positions = tokens * 3
        with forward_pass(ProbingForward()):
            wanted = model(input_ids=tokens[None], position_ids=positions[None], **inputs).logits[0]
            if inner["norm"].weight.dtype is not model.model.embed_tokens(tokens).dtype:
                return None
            rows = torch.tensor([0, 3], device=model.device)
            same = is_close(found(tokens, positions, rows), wanted[rows]) and is_close(
                found(tokens, positions, tokens - 1), wanted
            )
        return found if same else None

    def __call__(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Logits `[len(rows), vocabulary]` of ascending `rows` of the step's `tokens` `[T]` at `positions` `[T]`."""
        return self.logits(self.hidden(tokens, positions), rows)

    def hidden(self, tokens: Tensor, positions: Tensor, keeps: Layers = ()) -> Tensor:
        """What the last layer returns, `[T, hidden]`. The forward pass keeps what layers of `keeps` return."""
        if self._is_table:  # the module takes twice as long
            hidden: Tensor = embedding(tokens, self._embedding.__dict__["_parameters"]["weight"])[None]
        else:
            hidden = self._embedding(tokens)[None]
        angles = self.angles.at(positions, hidden)
        forward = current_forward()
        if self.native.run(forward, hidden[0], (angles[0][0], angles[1][0]), keeps=keeps):
            return hidden[0]
        for at, layer in enumerate(self._layers):
            hidden = layer(hidden, position_embeddings=angles)
            if at in keeps:
                keep_hidden(forward, at, hidden[0])
        return hidden[0]

    def logits(self, hidden: Tensor, rows: Tensor, keeps: Layers = ()) -> Tensor:
        """Logits `[len(rows), vocabulary]` of ascending `rows` of what the last layer has returned. With `LAST_HIDDEN`
        in `keeps` the forward pass keeps what the output layer would read of all rows."""
        if LAST_HIDDEN not in keeps:
            return self._head.compute(self.normed(hidden, rows))
        every = self._normed(hidden)
        keep_hidden(current_forward(), LAST_HIDDEN, every)
        return self._head.compute(_rows_of(every, rows))

    def normed(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """What the output layer reads, `[len(rows), hidden]`, of ascending `rows` of what the last layer returned."""
        return self._normed(_rows_of(hidden, rows))

    def _normed(self, hidden: Tensor) -> Tensor:
        _, normed = self._rows.add_rms_norm(hidden, None, self._norm.weight, self._norm.variance_epsilon)
        return normed


def _rows_of(every: Tensor, rows: Tensor) -> Tensor:
    """Ascending rows."""
    return every if rows.shape == every.shape[:1] else every.index_select(0, rows)


def _norm_of(norm: Any) -> Norm:
    return norm.weight.detach(), norm.variance_epsilon


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one layer was given in the dry run, and what it returned."""

    arguments: dict[str, Any]
    given: tuple[Tensor, ...]
    out: Tensor
    calls: list[tuple[Tensor, Tensor, Tensor, CallOptions]]


@torch.inference_mode()
def fuse_layers(model: nn.Module, context_length: int, run: Callable[[Tensor, Tensor], Any]) -> list[FusedLayer]:
    """Fuse the layers of `model` that can be, on its packed weights; `run` computes it on tokens at positions, both
    int64 `[1, T]`. Returns those that are fused now."""
    layers = [layer for layer in model.modules() if _has_structure(layer)]
    if not layers:
        return []
    positions = [*_POSITIONS, *range(max(context_length - 3, 12), context_length)]
    fused: list[FusedLayer] = []
    for layer, seen in zip(layers, _observe(layers, positions, run), strict=True):
        if seen is not None and _fits(layer, seen):
            candidate = FusedLayer(layer, seen.calls[0][3])
            if _is_same(candidate, seen):
                layer.forward = candidate
                fused.append(candidate)
    return fused


def _has_structure(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    if set(children) != _LAYER and not isinstance(layer, ReadingLayer):
        return False
    attention, mlp, norms = children["self_attn"], children["mlp"], [children[name] for name in _norm_names(layer)]
    own, parts = dict(attention.named_children()), dict(mlp.named_children())
    if set(own) - _HEAD_NORMS != _ATTENTION or len(set(own) & _HEAD_NORMS) == 1 or set(parts) - {"act_fn"} != _MLP:
        return False
    norms += [own[name] for name in _HEAD_NORMS & set(own)]
    return (
        all(map(_is_rms_norm, norms))
        and not hasattr(attention, OWN_ATTENTION)
        and isinstance(getattr(attention, "head_dim", None), int)
        and all(
            isinstance(linear, CpuLinear)
            for linear in [*(own[name] for name in _ATTENTION), *(parts[name] for name in _MLP)]
        )
        and _are_one(own["q_proj"], own["k_proj"], own["v_proj"])
        and _are_one(parts["gate_proj"], parts["up_proj"])
        and _are_one(own["o_proj"])
        and _are_one(parts["down_proj"])
    )


def _norm_names(layer: nn.Module) -> list[str]:
    """Its norms, but for those of heads and those that a `ReadingLayer` has for what it reads."""
    return ["post_attention_layernorm"] if isinstance(layer, ReadingLayer) else [n for n in _LAYER if "norm" in n]


def _is_rms_norm(norm: nn.Module) -> bool:
    return hasattr(norm, "variance_epsilon") and set(norm.__dict__["_parameters"]) == {"weight"}


def _are_one(*layers: Any) -> bool:
    """Whether these layers, in this order, are one product."""
    product: Product | None = layers[0]._product
    return product is not None and product.layers == layers


def _observe(layers: Sequence[Any], positions: list[int], run: Callable[[Tensor, Tensor], Any]) -> list[_Seen | None]:
    """What the own code of each layer does in a dry run; None for one that is called in another way."""
    probing, hooks = ProbingForward(), []
    found: list[_Seen | None] = [None] * len(layers)
    begun: list[int] = []

    def enter(module: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        begun.append(len(probing.attended))

    def leave(module: Any, args: tuple[Any, ...], arguments: dict[str, Any], out: Any) -> None:
        if len(args) == 1 + isinstance(module, ReadingLayer) and isinstance(out, Tensor):
            found[layers.index(module)] = _Seen(arguments, args, out, probing.attended[begun[-1] :])

    for layer in layers:
        hooks += [
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave, with_kwargs=True),
        ]
    device = layers[0].post_attention_layernorm.weight.device  # that of a linear layer makes it plain
    tokens = torch.arange(1, 1 + len(positions), device=device)[None]
    try:
        with forward_pass(probing):
            run(tokens, torch.tensor(positions, device=device)[None])
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _fits(layer: Any, seen: _Seen) -> bool:
    """Whether tensors have the shapes and dtypes that a fused layer reads without a check."""
    angles = seen.arguments.get("position_embeddings")
    if len(seen.calls) != 1 or not isinstance(angles, tuple) or len(angles) != 2:
        return False
    (query, key, value, options), rows, dim = seen.calls[0], seen.given[0], layer.self_attn.head_dim
    count, width = rows.shape[1:]
    sizes = [dim * tensor.shape[1] for tensor in (query, key, value)]
    norms = [(getattr(layer, name), width) for name in _norm_names(layer)]
    norms += [(getattr(layer.self_attn, name), dim) for name in _HEAD_NORMS if hasattr(layer.self_attn, name)]
    tensors = [*angles, *(norm.weight for norm, _ in norms), query, key, value]
    return (
        options.sinks is None
        and all(tensor.dtype is rows.dtype for tensor in (*tensors, *seen.given))
        and all(list(tensor.shape) == [1, count, dim] for tensor in angles)
        and all(list(norm.weight.shape) == [width] for norm, width in norms)
        and key.shape == value.shape
        and query.shape[2] == dim == key.shape[2]
        and layer.self_attn.q_proj._product.sizes == sizes
    )


def _is_same(candidate: FusedLayer, seen: _Seen) -> bool:
    """Whether the fused layer does what the layer's own code does."""
    small = tuple(map(_small, seen.given))
    ((*tensors, _),) = seen.calls
    wanted = [*tensors, seen.out], _outputs(candidate.own, small, seen)
    found = _outputs(candidate, seen.given, seen), _outputs(candidate, small, seen)
    return all(is_close(*each) for pair in zip(found, wanted, strict=True) for each in zip(*pair, strict=True))


def _small(rows: Tensor) -> Tensor:
    wide = rows.float()
    size = wide.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(_SMALL)
    return (wide * (_SMALL / size)).to(rows.dtype)


def _outputs(layer: Callable[..., Tensor], given: tuple[Tensor, ...], seen: _Seen) -> list[Tensor]:
    """Queries, keys, values and the output of a layer that is given these rows in place of those of the dry run."""
    probing = ProbingForward()
    with forward_pass(probing):
        out = layer(*given, **seen.arguments)
    ((*tensors, _),) = probing.attended
    return [*tensors, out]


def is_close(found: Tensor, wanted: Tensor) -> bool:
    """Whether rows are those of other functions, but for the rounding of their dtype."""
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    return bool((found.float() - wanted.float()).norm() <= CLOSE[wanted.dtype] * wanted.float().norm())

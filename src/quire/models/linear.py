"""Linear layers on the CPU: their weights packed once, and several layers of one input as one product.

States of a layer: packed (its plain weight is freed) and plain. Whatever reads or changes the parameters of a packed
layer, by name, through `parameters()` or as a state dict, makes it plain first, so that it is never stale. `Packing`
packs layers again after an update of weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quire.kernels.native.products import NativeProduct, native_products

_BARE = ("dt_proj", "kv_b_proj")
"""Linear layers whose weight other code multiplies itself: step sizes of Mamba 1, the expansion of latents."""

_ROWS = 64
"""Rows for which oneDNN lays out weights. For 1 to 2,048 rows it is within 7 % of their own layout (decision 044)."""

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest accepted difference of a packed product, relative to the norm of the plain one. A wrong row costs more."""

_MOST_PADDING = 0.01  # share of the bytes of a product


class CpuLinear(nn.Linear):
    """A linear layer whose weight may be packed, or wider than its inputs and outputs."""

    _product: Product | None = None
    _part = 0

    @property
    def _parameters(self) -> Any:
        self.unpack()
        return self.__dict__["_parameters"]

    @_parameters.setter
    def _parameters(self, found: Any) -> None:
        self.__dict__["_parameters"] = found

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """The plain weight."""
        return self._parameters["weight"]

    @property
    def bias(self) -> Any:  # type: ignore[override]
        """The plain bias, or None."""
        return self._parameters["bias"]

    def unpack(self) -> None:
        """Make it plain, and the layers of the same product too."""
        if self._product is not None:
            self._product.unpack()

    def forward(self, rows: Tensor) -> Tensor:
        """As of a plain layer."""
        product = self._product
        if product is not None and product.packed is not None:
            return product.part(rows, self._part)
        plain = self.__dict__["_parameters"]
        return _linear(rows, plain["weight"], plain["bias"])


class Product:
    """The product of one input with the weights of some layers, which are packed side by side."""

    def __init__(self, layers: Sequence[CpuLinear], tied: frozenset[int]) -> None:
        self.layers = tuple(layers)
        self.sizes = [layer.out_features for layer in layers]
        self.packed: Tensor | None = None
        self._bias: Tensor | None = None
        self.native: NativeProduct | None = None  # for up to its `most_rows`
        self.keeps_plain = not tied.isdisjoint(id(layer.weight) for layer in layers)
        self._input: Tensor | None = None  # the product's whose parts are not all fetched yet
        self._parts: list[Tensor | None] = []
        for at, layer in enumerate(layers):
            layer._product, layer._part = self, at

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, beside those of plain ones."""
        bias = 0 if self._bias is None else self._bias.nbytes
        return 0 if self.packed is None else int(torch.ops.mkldnn._nbytes(self.packed)) + bias

    def compute(self, rows: Tensor) -> Tensor:
        """Outputs of all layers side by side, `[..., sum(sizes)]`, of `rows` `[..., in]`."""
        if self.packed is None:
            return torch.cat([layer(rows) for layer in self.layers], -1)
        wide, count = self.packed.dtype, rows.numel() // rows.shape[-1]
        given = rows if rows.dtype is wide else rows.to(wide)
        if self.native is not None and count <= self.native.most_rows:
            out = self.native.compute(given.contiguous())
        else:
            padded = padded_rows(count)
            if padded != count:
                given, own = given.new_zeros(padded, rows.shape[-1]), given
                given[:count] = own.reshape(count, -1)
            out = _packed_linear(given, self.packed, self._bias, "none", [], "")
            if padded != count:
                out = out[:count].view(*rows.shape[:-1], -1)
        return out if rows.dtype is wide else out.to(rows.dtype)

    def part(self, rows: Tensor, at: int) -> Tensor:
        """The output of layer `at`. The product is computed once for layers that are given the same tensor."""
        if len(self.sizes) == 1:
            return self.compute(rows)
        found = self._parts[at] if self._input is rows else None
        if found is None:
            self._input, self._parts = rows, list(torch.split(self.compute(rows), self.sizes, -1))
            found = self._parts[at]
        self._parts[at] = None
        if not any(part is not None for part in self._parts):
            self._input = None
        assert found is not None
        return found

    @torch.no_grad()
    def pack(self) -> bool:
        """Pack the weights and free the plain ones. Returns False, and changes nothing, if that gives other outputs or
        takes more memory."""
        if self.packed is not None:
            return True
        plain = [(layer.weight.detach(), layer.bias) for layer in self.layers]
        weights = [weight for weight, _ in plain]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        if any(bias is not None for _, bias in plain):
            biases = [weight.new_zeros(len(weight)) if bias is None else bias.detach() for weight, bias in plain]
            self._bias = torch.cat(biases)
        rows = torch.randn(3, whole.shape[1], generator=torch.Generator().manual_seed(0)).to(whole.dtype)
        wanted = torch.cat([linear(rows, *each) for each in plain], -1).float()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(whole, _ROWS)
        padding = int(torch.ops.mkldnn._nbytes(self.packed)) - whole.nbytes
        if padding > _MOST_PADDING * whole.nbytes or not _is_close(self.compute(rows), wanted):
            self.packed = self._bias = None
            return False
        found = native_products(self.packed, self._bias, whole.shape[1], len(whole))
        self.native = next((each for each in found if _is_close(each.compute(rows), wanted)), None)
        if not self.keeps_plain:
            for layer in self.layers:
                layer.__dict__["_parameters"]["weight"] = None
        return True

    def unpack(self) -> None:
        """Give the layers their plain weights again."""
        if self.packed is None:
            return
        packed, self.packed, self.native, self._bias, self._input = self.packed, None, None, None, None
        if self.keeps_plain:
            return
        with torch.inference_mode(False), torch.no_grad():  # so that they can be changed
            for layer, weight in zip(self.layers, torch.split(packed.to_dense(), self.sizes), strict=True):
                own = weight if len(self.sizes) == 1 else weight.clone()
                layer.__dict__["_parameters"]["weight"] = nn.Parameter(own, requires_grad=False)


class Packing:
    """The products of the linear layers of a model. Weights that are shared with an embedding stay there as well."""

    def __init__(self, products: Sequence[Product] = ()) -> None:
        self.products = list(products)
        self.pack()

    @classmethod
    def of(cls, model: nn.Module, inputs: Sequence[tuple[CpuLinear, Tensor]]) -> Packing:
        """Pack the layers of `model`. `inputs` are those of one forward pass, in the order of the calls: layers that
        are called once, one behind the other, on the same tensor, are one product."""
        layers = [layer for name, layer in model.named_modules() if _is_packable(name, layer)]
        if not layers:
            return cls()
        uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
        tied = frozenset(weight for weight, count in uses.items() if count > 1)
        calls = Counter(id(layer) for layer, _ in inputs)
        groups: list[list[CpuLinear]] = []
        before: Tensor | None = None
        for layer, rows in inputs:
            alone = calls[id(layer)] > 1 or id(layer.weight) in tied or layer not in layers
            if not alone and rows is before and groups[-1][0].weight.dtype is layer.weight.dtype:
                groups[-1].append(layer)
            elif layer in layers and not any(layer is group[0] for group in groups):
                groups.append([layer])
            before = None if alone else rows
        known = {id(layer) for group in groups for layer in group}
        groups += [[layer] for layer in layers if id(layer) not in known]
        return cls([Product(group, tied) for group in groups])

    def pack(self, *, again: bool = False) -> None:
        """Pack what is plain. `again` packs also the rest of what has a plain weight: an embedding's was changed."""
        for product in self.products:
            if again and product.keeps_plain:
                product.unpack()
            product.pack()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """All layers are plain inside the block."""
        for product in self.products:
            product.unpack()
        try:
            yield
        finally:
            self.pack()

    @property
    def num_layers(self) -> int:
        """Linear layers whose weights are packed now."""
        return sum(len(product.layers) for product in self.products if product.packed is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all packed weights."""
        return sum(product.num_bytes for product in self.products)


def prepare_linears(model: nn.Module) -> int:
    """Make `model`'s linear layers on the CPU `CpuLinear`s, and convert the weights of those to float32 whose dtype the
    CPU has no products of. Returns how many it converted.

    Inputs and outputs keep their dtype, and results are those of the narrow product, which accumulates in float32 too.
    It is 5 to 10 times faster and uses twice the memory. Embeddings that share a weight with a layer keep their own
    copy.
    """
    widened = 0
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module.weight.device.type != "cpu" or name.endswith(_BARE[0]):
            continue
        if not native_on_cpu(module.weight.dtype):
            module.weight = nn.Parameter(module.weight.detach().float(), requires_grad=False)
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias.detach().float(), requires_grad=False)
            widened += 1
        module.__class__ = CpuLinear
    return widened


@contextmanager
def linear_inputs(model: nn.Module) -> Iterator[list[tuple[CpuLinear, Tensor]]]:
    """The calls of linear layers inside the block and their inputs, in order."""
    calls: list[tuple[CpuLinear, Tensor]] = []
    layers = [module for module in model.modules() if isinstance(module, CpuLinear)]
    hooks = [layer.register_forward_pre_hook(partial(_note, calls)) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def padded_rows(count: int) -> int:
    """Rows that a packed product of `count` rows computes: as many up to 32, then 16 numbers between powers of 2.

    oneDNN generates code for each number of rows of each product, which takes milliseconds, and keeps 1,024 of them.
    """
    step = max(1, (1 << (count - 1).bit_length()) >> 5)
    return -(-count // step) * step


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that `model` holds, packed or plain, each once, and of buffers that are stored with them."""
    plain: dict[int, int] = {}
    products: dict[int, Product] = {}
    for module in model.modules():
        stored = {
            name: found for name, found in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        held = [*module.__dict__["_parameters"].values(), *stored.values()]
        plain |= {id(found): found.nbytes for found in held if found is not None}
        if isinstance(module, CpuLinear) and module._product is not None:
            products[id(module._product)] = module._product
    return sum(plain.values()) + sum(product.num_bytes for product in products.values())


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    """Whether a product is that of plain weights, float32."""
    return bool((found.float() - wanted).norm() <= CLOSE[found.dtype] * wanted.norm())


def _packed_linear(*arguments: Any) -> Any:
    return torch.ops.mkldnn._linear_pointwise.default(*arguments)


def _is_packable(name: str, layer: nn.Module) -> bool:
    return (
        isinstance(layer, CpuLinear)
        and not name.endswith(_BARE)
        and layer.weight.dtype in CLOSE
        and torch._C._has_mkldnn
    )


def _note(calls: list[tuple[CpuLinear, Tensor]], layer: CpuLinear, inputs: tuple[Tensor, ...]) -> None:
    calls.append((layer, inputs[0]))


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if rows.dtype is weight.dtype:
        return linear(rows, weight, bias)
    return linear(rows.to(weight.dtype), weight, bias).to(rows.dtype)


@cache
def native_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for matrix products of `dtype`."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True

"""Bits per parameter: which modules a quantisation changes, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.spec.config_reader import ConfigReader

Bits = Callable[[str, Iterable[str]], float]
"""From a part and the names of its layer in the checkpoint to bits per parameter, with its share of scales."""

_CHECKPOINT_NAMES: Mapping[str, tuple[str, ...]] = {
    "attention": ("self_attn.q_proj", "attn.wq_b", "mixer.q_proj"),
    "attention_down": ("self_attn.kv_a_proj_with_mqa", "attn.fused_wqa_wkv"), "indexer": ("self_attn.indexer.wq_b",),
    "delta": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz", "self_attn.q_proj"),
    "mamba": ("mixer.in_proj", "mamba.in_proj"), "conv": ("conv.in_proj",),
    "mlp": ("mlp.down_proj", "ffn.down_proj", "feed_forward.down_proj", "mixer.down_proj"),
    "experts": ("mlp.experts.0.down_proj", "ffn.experts.0.down_proj", "feed_forward.experts.0.down_proj",
                "mixer.experts.0.down_proj", "block_sparse_moe.experts.0.w2"),
    "experts_beside": ("experts.0.down_proj", "moe.experts.0.down_proj"),
    "shared": ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj", "ffn.shared_experts.down_proj",
               "feed_forward.shared_expert.down_proj", "mixer.shared_experts.down_proj"),
}  # fmt: skip
"""Names of the matrices of each part in checkpoints. Others are never quantised: norms, routers, states."""

_ALGORITHMS = {
    "FP8": 8.0, "FP8_PB_WO": 8 + 2**-9, "FP8_PER_CHANNEL_PER_TOKEN": 8.0, "INT8_SQ": 8.0, "MXFP8": 8.25, "MXFP4": 4.25,
    "FBGEMM_FP8": 8.0, "NVFP4": 4.5, "NVFP4_AWQ": 4.5, "W4A16_NVFP4": 4.5, "W4A16_AWQ": 4.125, "W4A8_AWQ": 4.125,
}  # fmt: skip
"""Bits of one parameter with its share of the scales, by ModelOpt's `quant_algo`."""


class _Names:
    """Module names from a quantisation's lists: exact, with `*`, or "re:" and a regular expression."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._exact: set[str] = set()
        expressions = []
        for pattern in patterns:
            trimmed = re.sub(r"^((model|language_model|backbone|transformer)\.)+", "", pattern)
            if pattern.startswith("re:"):
                expressions.append(f"(?:{pattern.removeprefix('re:')})")
            elif "*" in pattern:
                expressions.append(re.escape(trimmed).replace(r"\*", ".*") + r"(\..*)?$")
            else:
                self._exact.add(trimmed)
        self._expression = re.compile("|".join(expressions) or "(?!)")

    def include(self, name: str) -> bool:
        """Whether the lists name this module, or one that contains it."""
        steps = name.split(".")
        runs = (".".join(steps[i:j]) for i in range(len(steps)) for j in range(i + 1, len(steps) + 1))
        return not self._exact.isdisjoint(runs) or any(self._expression.match(one) for one in (name, f"model.{name}"))


def read_bits(config: ConfigReader, plain: float) -> Bits:
    """The bits of one parameter of a part of the layer that the checkpoint stores under one of these roots."""
    rules = tuple(_rules(config, plain))

    def bits(part: str, roots: Iterable[str]) -> float:
        names = [f"{root}.{name}" for root in roots for name in _CHECKPOINT_NAMES.get(part, ())]
        return next((bits for named, bits in rules if any(map(named.include, names))), plain)

    return bits


def _rules(config: ConfigReader, plain: float) -> Iterable[tuple[_Names, float]]:
    """Bits per module; the first rule that names a module decides."""
    found: Mapping[str, Any] = config.get("quantization_config", "compression_config", "quantization", default={})
    method, algorithm = str(found.get("quant_method") or "").lower(), str(found.get("quant_algo") or "").upper()
    fields = ["modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "exclude_modules"]
    if method != "fp8":
        fields.append("ignore")  # beside fp8 it belongs to a second quantisation, and names the modules that stay fp8
    yield _Names(name for field in fields for name in found.get(field) or ()), plain
    layers = found.get("quantized_layers") or {}
    for name in sorted({str(how["quant_algo"]) for how in layers.values()}):
        yield _Names(layer for layer, how in layers.items() if how["quant_algo"] == name), _algorithm(config, name)
    if method == "fp8" and config.get("expert_dtype") == "fp4":
        yield _Names(["re:.*[.]experts[.]"]), _ALGORITHMS["MXFP4"]
    if method != "fp8" and found.get("config_groups"):
        for group in found["config_groups"].values():
            if group.get("weights"):
                targets = ["re:.*" if target == "Linear" else target for target in group["targets"]]
                yield _Names(targets), _group_bits(group["weights"])
    elif found and (method == "fp8" or algorithm != "MIXED_PRECISION"):
        yield _Names(["re:.*"]), _uniform_bits(config, found, method, algorithm)


def _uniform_bits(config: ConfigReader, found: Mapping[str, Any], method: str, algorithm: str) -> float:
    """Bits of one quantised parameter under a method that treats all of them alike."""
    if method == "fp8":
        block = found.get("weight_block_size")
        return 8 + (32 / int(block[0] * block[1]) if block else 0)
    if method in ("awq", "gptq"):
        bits, group = int(found.get("bits", found.get("w_bit", 4))), int(found.get("group_size") or 128)
        return bits + ((16 + bits) / group if group > 0 else 0)
    if method == "bitsandbytes":
        return 8 if not found.get("load_in_4bit") else 4.127 if found.get("bnb_4bit_use_double_quant") else 4.5
    return _algorithm(config, algorithm or method.upper())


def _algorithm(config: ConfigReader, name: str) -> float:
    if name.upper() not in _ALGORITHMS:
        raise config.unpriced(f"is quantised by '{name}'", "quantization_config")
    return _ALGORITHMS[name.upper()]


def _group_bits(weights: Mapping[str, Any]) -> float:
    """Bits of one parameter under a compressed-tensors scheme: 16-bit scales of integers, 8-bit ones of floats."""
    bits, group, block = int(weights["num_bits"]), int(weights.get("group_size") or 0), weights.get("block_structure")
    if block:
        return bits + 32 / int(block[0] * block[1])
    zero_point = bits if weights.get("symmetric") is False else 0
    return bits + ((8 if weights.get("type") == "float" else 16) + zero_point) / group if group > 0 else bits

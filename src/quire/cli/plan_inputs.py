"""From the words of a command line to a model's spec and the settings of its plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from quire.errors import InvalidInput, UnsupportedModel
from quire.models.registry import REFUSED
from quire.plan.advice import least_memory
from quire.plan.budget import format_bytes, parse_bytes, parse_tokens
from quire.plan.devices import Device, find_device
from quire.plan.mix import Mix, read_trace, uniform
from quire.plan.parallel import Parallelism
from quire.plan.plan import Plan, PlanSettings
from quire.plan.planner import make_plan
from quire.plan.reserve import Speculation
from quire.plan.source import read_model_config
from quire.spec.config_reader import ConfigReader
from quire.spec.layout import DType
from quire.spec.model import ModelSpec
from quire.spec.weights import WeightEstimate, read_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model as far as planning knows it. `weights` is None where they cannot be estimated."""

    name: str
    found: str
    spec: ModelSpec
    weights: WeightEstimate | None
    notes: tuple[str, ...] = ()

    def plan(self, settings: PlanSettings) -> Plan:
        """The plan for these settings."""
        return make_plan(self.spec, settings, self.weights)

    def plan_or_least(self, settings: PlanSettings) -> Plan:
        """The plan; without any budget, for the least KV memory in which what is asked for fits."""
        if settings.kv_memory is not None or settings.device is not None:
            return self._noted(self.plan(settings))
        if settings.context is None and settings.mix is None:
            settings = replace(settings, context=self.spec.context_length)  # what has to fit is also what is expected
        size = least_memory(settings, self.plan)
        if size is None:
            self.plan(replace(settings, kv_memory=2**50))  # raises with the reason, where there is one
            raise InvalidInput("no amount of memory fits what is asked for.", fix="lower the concurrency or context.")
        plan = self.plan(replace(settings, kv_memory=size))
        note = f"no budget was given, so this is the least KV memory that fits: {format_bytes(size)} per rank."
        return self._noted(replace(plan, notes=(note, *plan.notes)))

    def _noted(self, plan: Plan) -> Plan:
        settings = plan.settings
        later = settings.speculation is not None or settings.parallel != Parallelism()
        ahead = ("the engine of this version runs on one device and without speculation.",) if later else ()
        return replace(plan, notes=(*self.notes, *ahead, *plan.notes))


def planned_model(name: str, *, dtype: str | None = None, state_dtype: str | None = None) -> PlannedModel:
    """Read a model's configuration. Raises ModelLoadError, UnsupportedModel or InvalidInput."""
    config, found = read_model_config(name)
    reader = ConfigReader(config)
    notes: list[str] = []
    spec = ModelSpec.from_config(config, state_dtype=_dtype(state_dtype) if state_dtype else None)
    if dtype is not None:
        spec = replace(spec, dtype=_dtype(dtype))
    elif reader.get("dtype", "torch_dtype") is None:
        spec = replace(spec, dtype=DType.BFLOAT16)
        notes.append("the configuration names no dtype; bfloat16 is assumed (--dtype says otherwise).")
    weights: WeightEstimate | None
    try:
        weights = read_weights(reader)
    except UnsupportedModel as error:
        weights = None
        notes.append(f"the weights are not estimated: {error.message}")
    if not reader.is_known:
        notes.append(
            f"model type '{reader.kind}' is unknown, so this plan rests on the fields of its configuration alone."
        )
    notes += _declared(reader)
    notes += _served(config)
    return PlannedModel(name=name, found=found, spec=spec, weights=weights, notes=tuple(notes))


def _declared(reader: ConfigReader) -> list[str]:
    """What a checkpoint says of its cache that a plan does not follow by itself."""
    quantisation = reader.get("quantization_config", default={})
    scheme = quantisation.get("kv_cache_scheme") if isinstance(quantisation, Mapping) else None
    bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else None
    return [f"the checkpoint declares a cache of {bits} bits; --kv-dtype fp8 plans it."] if bits == 8 else []


def _served(config: Mapping[str, Any]) -> list[str]:
    """Whether this version's engine refuses the model whose pools are planned."""
    text = config.get("text_config")
    kinds = [str(part.get("model_type")) for part in (config, text) if isinstance(part, Mapping)]
    reasons = [REFUSED[kind] for kind in kinds if kind in REFUSED]
    return [f"this version plans this model and does not serve it, because it {reason}." for reason in reasons[:1]]


def plan_settings(words: Mapping[str, Any]) -> PlanSettings:
    """Settings from option names to values; what is absent or None is the planner's choice. Raises InvalidInput."""
    get = words.get
    fraction = get("mem_fraction_static")
    if fraction is not None and not 0 < fraction < 1:
        raise InvalidInput(f"--mem-fraction-static is {fraction}.", fix="give a share between 0 and 1, such as 0.85.")
    chosen: dict[str, Any] = {
        "kv_memory": _bytes(get("kv_memory")),
        "device": _device(get("gpu"), get("device_memory")),
        "mem_fraction_static": fraction,
        "weight_bytes": _bytes(get("weights")),
        "page_size": _at_least_one("page_size", get("page_size")),
        "context": _tokens(get("context")),
        "concurrency": _at_least_one("concurrency", get("concurrency")),
        "mix": _mix(get("input_tokens"), get("output_tokens"), get("trace")),
        "parallel": _parallel(words),
        "speculation": _speculation(words),
        "swa_full_tokens_ratio": _ratio(get("swa_full_tokens_ratio")),
        "mamba_full_memory_ratio": _ratio(get("mamba_full_memory_ratio")),
        "max_mamba_cache_size": _at_least_one("max_mamba_cache_size", get("max_mamba_cache_size")),
        "max_total_tokens": _at_least_one("max_total_tokens", get("max_total_tokens")),
    }
    for name in ("kv_dtype", "shares", "window_pool"):
        if get(name) is not None:
            chosen[name] = words[name]
    if get("chunk") is not None:
        chosen["chunk"] = _at_least_one("max_num_batched_tokens", get("chunk"))
    if chosen["mem_fraction_static"] is not None and chosen["device"] is None:
        raise InvalidInput("--mem-fraction-static is a share of a device.", fix="name one with --gpu.")
    return PlanSettings(**chosen)


def _dtype(name: str) -> DType:
    aliases = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
    name = aliases.get(name, name)
    if name not in ("float32", "float16", "bfloat16"):
        raise InvalidInput(f"'{name}' is not a dtype of a model.", fix="use float32, float16 or bfloat16.")
    return DType(name)


def _bytes(text: str | int | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _tokens(text: str | int | None) -> int | None:
    return None if text is None else parse_tokens(text)


def _at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise InvalidInput(f"--{name.replace('_', '-')} is {value}.", fix="give at least 1.")
    return value


def _device(gpu: str | None, memory: str | None) -> Device | None:
    if memory is not None:
        return Device(name=gpu or "device", memory=parse_bytes(memory))
    return find_device(gpu) if gpu is not None else None


def _mix(prompt: str | int | None, output: str | int | None, trace: Path | None) -> Mix | None:
    if trace is not None:
        if prompt is not None or output is not None:
            raise InvalidInput(
                "a trace has lengths of its own.", fix="give --trace, or --input-tokens and --output-tokens."
            )
        return read_trace(Path(trace))
    if prompt is None and output is None:
        return None
    length = sum(parse_tokens(part) for part in (prompt, output) if part is not None)
    return uniform(length, f"requests of {length:,} tokens")


def _parallel(words: Mapping[str, Any]) -> Parallelism:
    layers = words.get("pp_layers")
    try:
        counts = tuple(int(part) for part in str(layers).split(",")) if layers else ()
    except ValueError:
        raise InvalidInput(f"'{layers}' are not layer counts.", fix="write them as 20,20,24.") from None
    sizes = {name: words[name] for name in ("tp", "pp", "dp", "dcp") if words.get(name) is not None}
    if counts and "pp" not in sizes:
        sizes["pp"] = len(counts)
    return Parallelism(**sizes, pp_layers=counts)


def _speculation(words: Mapping[str, Any]) -> Speculation | None:
    steps, drafts = words.get("speculative_num_steps"), words.get("speculative_num_draft_tokens")
    others = [words.get(name) for name in ("speculative_topk", "speculative_draft_layers")]
    if steps is None and drafts is None:
        if any(other is not None for other in others):
            raise InvalidInput(
                "speculation needs its depth.", fix="give --speculative-num-steps or --speculative-num-draft-tokens."
            )
        return None
    topk, layers = others
    if steps is None and topk is not None and topk > 1:
        raise InvalidInput("a draft with branches needs its depth.", fix="give --speculative-num-steps.")
    depth = steps if steps is not None else max(1, (drafts or 2) - 1)
    return Speculation(
        num_steps=depth,
        topk=1 if topk is None else topk,
        num_draft_tokens=drafts if drafts is not None else depth + 1,
        num_layers=1 if layers is None else layers,
    )


def _ratio(value: float | None) -> Fraction | None:
    if value is None:
        return None
    if not math.isfinite(value):
        raise InvalidInput(f"a ratio of {value}.", fix="give a number above zero.")
    return Fraction(str(value))


_OPTION_NAMES = {"max_num_batched_tokens": "chunk", "prefix_caching": "shares"}
"""Settings whose option has another name."""

_READ_AS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("mem_fraction_static", "swa_full_tokens_ratio", "mamba_full_memory_ratio"), float),
    **dict.fromkeys(("page_size", "concurrency", "chunk", "max_mamba_cache_size", "max_total_tokens"), int),
    **dict.fromkeys(("tp", "pp", "dp", "dcp"), int),
    **dict.fromkeys(("speculative_num_steps", "speculative_topk"), int),
    **dict.fromkeys(("speculative_num_draft_tokens", "speculative_draft_layers"), int),
    **dict.fromkeys(("shares", "window_pool"), {"true": True, "false": False, "yes": True, "no": False}.__getitem__),
}


def with_settings(text: str, words: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A model's name and its settings: `words`, changed by what follows the name, as in `name,kv-dtype=fp8,tp=2`.

    A switch is written without its "no": `window-pool=false`. Raises InvalidInput.
    """
    name, *changes = text.split(",")
    found = dict(words)
    for change in changes:
        option, _, value = change.partition("=")
        option = option.strip().replace("-", "_")
        key = _OPTION_NAMES.get(option, option)
        if key not in found or not value:
            raise InvalidInput(
                f"'{change}' in '{text}' is no setting.",
                fix="write a long option without its dashes: tp=2, kv-dtype=fp8, window-pool=false.",
            )
        try:
            found[key] = _READ_AS.get(key, str)(value)
        except (ValueError, KeyError):
            raise InvalidInput(f"'{value}' is no value of {option}.", fix="write a number, or true or false.") from None
    return name, found

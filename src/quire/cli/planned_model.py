"""PlannedModel: a model by name, as planning has it without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.engine.config import SHORT_DTYPES
from quire.errors import InvalidInput, UnsupportedModel
from quire.models.registry import REFUSED
from quire.plan.advice import least_memory
from quire.plan.budget import format_bytes
from quire.plan.parallel import Parallelism
from quire.plan.plan import Plan
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.plan.source import read_model_config
from quire.plan.speculation import head_spec, refuse_mtp, with_draft_model
from quire.spec.config_reader import ConfigReader
from quire.spec.layout import DType
from quire.spec.model import ModelSpec
from quire.spec.weights import WeightEstimate, read_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """What planning has of a model. `weights` is None if they cannot be estimated."""

    name: str
    config: Mapping[str, Any]
    found: str
    spec: ModelSpec
    weights: WeightEstimate | None
    notes: tuple[str, ...] = ()

    def with_draft(self, settings: PlanSettings) -> tuple[PlannedModel, PlanSettings]:
        """The model and the settings with the layers and weights of a draft model, if there is one. A note says if the
        engine refuses the model's own prediction layers. Raises what `planned_model` raises, and UnsupportedModel for a
        draft that cannot draft for this model."""
        speculation, spec = settings.speculative_config, self.spec
        if speculation is not None and speculation.method == "mtp":
            try:
                refuse_mtp(self.config, self.name)
            except UnsupportedModel as error:
                note = f"the engine of this version does not draft with mtp here: {error.message}"
                return replace(self, notes=(*self.notes, note)), settings
        if speculation is None or speculation.model is None:
            return self, settings
        draft = planned_model(speculation.model, revision=speculation.revision)
        if draft.weights is not None:
            settings = settings.changed(draft_weight_bytes=draft.weights.bytes_on_rank(settings.parallel.tp))
        of_draft = draft.spec if speculation.method == "draft_model" else head_spec(draft.config, spec)
        spec, settings = with_draft_model(spec, settings, of_draft)
        return replace(self, spec=spec), settings

    def plan(self, settings: PlanSettings) -> Plan:
        """The plan for these settings."""
        return make_plan(self.spec, settings, self.weights)

    def plan_or_least(self, settings: PlanSettings) -> Plan:
        """The plan; without any budget, for the least KV memory in which the requested load fits."""
        if settings.kv_memory is not None or settings.rank_device is not None:
            return self._noted(self.plan(settings))
        if settings.max_model_len is None and settings.mix is None:
            # The required load is also the expected one.
            settings = settings.changed(max_model_len=self.spec.context_length)
        size = least_memory(settings, self.plan)
        if size is None:
            self.plan(settings.changed(kv_memory=2**50))  # raises with the reason, where there is one
            raise InvalidInput("no amount of memory fits what is asked for.", fix="lower the concurrency or context.")
        plan = self.plan(settings.changed(kv_memory=size))
        note = f"no budget was given, so this is the least KV memory that fits: {format_bytes(size)} per rank."
        return self._noted(replace(plan, notes=(note, *plan.notes)))

    def _noted(self, plan: Plan) -> Plan:
        notes = list(self.notes)
        if plan.settings.parallel != Parallelism():
            notes.append("the engine of this version runs on one device.")
        return replace(plan, notes=(*notes, *plan.notes))


def planned_model(name: str, *, dtype: str | None = None, revision: str | None = None) -> PlannedModel:
    """Read a model's configuration. Raises ModelLoadError, UnsupportedModel or InvalidInput."""
    config, found = read_model_config(name, revision)
    reader = ConfigReader(config)
    notes: list[str] = []
    spec = ModelSpec.from_config(config)
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
    return PlannedModel(name=name, config=config, found=found, spec=spec, weights=weights, notes=tuple(notes))


def _declared(reader: ConfigReader) -> list[str]:
    """Notes on settings of a checkpoint's cache that a plan does not apply by itself."""
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


def _dtype(name: str) -> DType:
    name = SHORT_DTYPES.get(name, name)
    if name not in ("float32", "float16", "bfloat16"):
        raise InvalidInput(f"'{name}' is not a dtype of a model.", fix="use float32, float16 or bfloat16.")
    return DType(name)

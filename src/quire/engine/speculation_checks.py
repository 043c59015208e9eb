"""Checks of a draft before weights are read, as far as configurations say. Nothing here loads torch."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.config import EngineConfig
from quire.engine.planning import plan_settings
from quire.errors import InvalidInput, UnsupportedModel
from quire.models.registry import refuse_unsupported
from quire.plan.source import model_folder, read_model_config
from quire.plan.speculation import (
    captured_layers,
    check_head,
    configured_draft,
    prediction_tensors,
    refuse_mtp,
    with_draft_model,
)
from quire.spec.config_reader import NUM_LAYERS, ConfigReader
from quire.spec.model import ModelSpec


def check_draft(config: EngineConfig) -> None:
    """Refuse a draft that cannot draft for the model, as far as the configurations of both say. The load checks the
    rest. Raises ModelLoadError if one cannot be read, and UnsupportedModel."""
    speculation = config.speculative_config
    if speculation is not None and speculation.method == "mtp":
        _check_prediction_layer(config)
    if speculation is None or speculation.model is None:
        return
    name, is_model = speculation.model, speculation.method == "draft_model"
    given = read_model_config(name, speculation.revision)[0]
    if is_model:
        refuse_unsupported(given, name)
    try:
        target = ModelSpec.from_config(read_model_config(config.model, config.revision)[0])
        (draft,) = configured_draft(speculation, target)
    except (InvalidInput, UnsupportedModel):  # transformers may know what the configuration leaves out
        return
    if not is_model:
        check_head(name, given, target.hidden_size)
        if speculation.method == "eagle3":
            captured_layers(name, given, len(target.layers))
    settings = plan_settings(config)
    if "dynamic" in str(given.get("rope_parameters") or given.get("rope_scaling")):  # this rope grows with the length
        draft = replace(draft, context_length=max(draft.context_length, settings.max_model_len or 0))
    with_draft_model(target, settings, draft)


def _check_prediction_layer(config: EngineConfig) -> None:
    """Refuse a model without a prediction layer. The tensors of a folder are looked up by name."""
    from safetensors import SafetensorError, safe_open  # only this method needs it

    given, folder = read_model_config(config.model, config.revision)[0], model_folder(config.model)
    refuse_mtp(given, config.model)
    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        try:
            with safe_open(path, framework="np") as file:
                names += file.keys()
        except (SafetensorError, OSError):  # the load says more of it
            return
    if names:
        prediction_tensors(names, ConfigReader(given).size(*NUM_LAYERS), config.model)

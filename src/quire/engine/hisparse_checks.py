"""Checks of latents in host memory before weights are read, as far as configurations say. Nothing here loads torch."""

from __future__ import annotations

from quire.engine.config import EngineConfig
from quire.engine.planning import plan_settings
from quire.errors import InvalidInput, UnsupportedModel
from quire.plan.hisparse import refuse_hisparse
from quire.plan.source import read_model_config
from quire.spec.model import ModelSpec


def check_latents(config: EngineConfig) -> None:
    """Refuse latents that cannot be in host memory. Raises ModelLoadError if the configuration of the model cannot be
    read, UnsupportedModel and InvalidInput."""
    if config.hisparse is None:
        return
    found = read_model_config(config.model, config.revision)[0]
    try:
        spec = ModelSpec.from_config(found)
    except (InvalidInput, UnsupportedModel):  # transformers may know what the configuration leaves out
        return
    refuse_hisparse(spec, plan_settings(config))

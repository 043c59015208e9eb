"""What a token costs more for each one before it, for an eviction that keeps what is expensive to compute."""

from __future__ import annotations

from quire.engine.config import EngineConfig
from quire.errors import UnsupportedModel
from quire.models.hf import LoadedModel
from quire.plan.step_cost import growth_of
from quire.spec.config_reader import ConfigReader
from quire.spec.weights import active_parameters, read_weights


def cost_growth(config: EngineConfig, model: LoadedModel) -> float:
    """As `CostModel.growth`, by the floating-point operations of a model; 0 with `eviction_worth` tokens. A model whose
    experts are not described uses all of its parameters for each token."""
    if config.eviction_worth == "tokens":
        return 0.0
    try:
        reader = ConfigReader(model.config)
        active = active_parameters(reader, read_weights(reader))
    except UnsupportedModel:
        active = model.num_parameters
    return growth_of(model.spec, active)

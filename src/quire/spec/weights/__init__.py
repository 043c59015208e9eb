"""How many bytes a model's weights take, estimated from its configuration: modules, parameters, bits."""

from __future__ import annotations

from quire.spec.weights.estimate import LayerWeights, Part, WeightEstimate
from quire.spec.weights.read import read_weights

__all__ = ["LayerWeights", "Part", "WeightEstimate", "read_weights"]

"""What the estimate of weights asks of a configuration beside sizes, and how it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.errors import UnsupportedModel
from quire.spec.config_reader import ConfigReader


def unpriced(config: ConfigReader, what: str, name: str) -> UnsupportedModel:
    """The refusal of a model whose size this field makes unknown."""
    return UnsupportedModel(
        f"{config.architecture} {what} (configuration field '{name}'), so its weights cannot be estimated.",
        fix="give the bytes of the weights; the checkpoint's files add up to them.",
    )


def entry(config: ConfigReader, name: str, index: int) -> Any:
    """What a list with an entry per layer has for layer `index`; None where there is no such list."""
    found = config.get(name)
    if not isinstance(found, Sequence) or isinstance(found, str):
        return None
    if index >= len(found):
        raise unpriced(config, f"names {len(found)} layers and has more", name)
    return found[index]

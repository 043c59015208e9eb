"""The models that come with the package, by name: one of plain layers, two hybrids, and one for agents."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_MODELS = Path(__file__).resolve().parents[1] / "models"

BUNDLED_MODELS = {
    "quire-bundled": _MODELS / "bundled",
    "quire-bundled-window": _MODELS / "bundled_window",
    "quire-bundled-recurrent": _MODELS / "bundled_recurrent",
    "quire-bundled-agent": _MODELS / "bundled_agent",
}
"""Name to folder. These names have precedence over a folder or a hub id of the same name."""

BUNDLED_HEADS = {"quire-bundled-eagle": _MODELS / "bundled_eagle"}
"""Folders of heads that draft for a bundled model; they are no models."""

DEFAULT_MODEL = "quire-bundled"


@cache
def bundled_name(model: str) -> str | None:
    """The name of the bundled model in the folder `model`; None for another folder."""
    return next((name for name, folder in BUNDLED_MODELS.items() if folder == Path(model)), None)

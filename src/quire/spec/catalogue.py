"""Well-known open-weight models, so that a plan needs no download: short name, hub id and configuration.

`catalogue.json` has, for each model, the fields of its Hugging Face `config.json` that determine the sizes of its cache
and its weights, under their published names and with their published values. It has no tokenizer, rope or training
fields. Three things differ from the files: the language model's part of a wrapper is at the top level; the element type
is always called `torch_dtype`; and it, `tie_word_embeddings` and the context length are present even if a file omits
them. For a quantised checkpoint `quantization_config` says how many bits the weights take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.spec.bundled import BUNDLED_MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One model. `name` is short and lower case; `hub` is its Hugging Face id; `config` is read-only."""

    name: str
    hub: str
    config: Mapping[str, Any]


_MODELS = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))

CATALOGUE: Mapping[str, CatalogueModel] = MappingProxyType(
    {name: CatalogueModel(name=name, **fields) for name, fields in _MODELS.items()}
)
"""Every model, by short name."""

_BY_HUB: Mapping[str, CatalogueModel] = {model.hub.lower(): model for model in CATALOGUE.values()}


def catalogue_model(name: str) -> CatalogueModel | None:
    """The model with this short name or hub id, in any case; None if the catalogue has neither."""
    wanted = name.strip().lower()
    return CATALOGUE.get(wanted) or _BY_HUB.get(wanted)


def close_names(name: str) -> list[str]:
    """Up to three short names, or bundled models, similar to `name`, the closest first."""
    import difflib  # only a mistake needs it

    return difflib.get_close_matches(name.strip().lower(), [*CATALOGUE, *BUNDLED_MODELS], n=3)

"""Tiny random models that were made for embeddings or scores, as they are on disk."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from tests.tiny_models import _SIZES, ARCHITECTURES, draw_weights

TYPES = "sentence_transformers.models."


def _save(kind: Any, architecture: str, folder: Path, more: dict[str, Any]) -> Path:
    config = AutoConfig.for_model(**{**_SIZES, **ARCHITECTURES[architecture], **more})
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = kind.from_config(config)
        draw_weights(model, 0)
        model.save_pretrained(folder)
    finally:
        transformers_logging.enable_progress_bar()
    return folder


def save_embedder(architecture: str, folder: Path, *, normalises: bool = True, **more: Any) -> Path:
    """A folder of sentence-transformers around a decoder without an output layer; `more` are of config.json."""
    _save(AutoModel, architecture, folder, more)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalises else [])]
    found = [{"idx": i, "name": str(i), "path": path, "type": TYPES + kind} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(found))
    set_mode(folder, "lasttoken")
    return folder


def set_mode(folder: Path, mode: str) -> None:
    """How the folder pools."""
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64} | modes))


def save_scorer(architecture: str, folder: Path, **more: Any) -> Path:
    """A checkpoint for sequence classification with one label."""
    return _save(AutoModelForSequenceClassification, architecture, folder, {"num_labels": 1} | more)

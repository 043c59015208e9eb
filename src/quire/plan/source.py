"""Where a model's configuration comes from: the built-in catalogue, a file, a folder, or the hub."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.errors import ModelLoadError
from quire.spec.bundled import BUNDLED_HEADS, BUNDLED_MODELS, DEFAULT_MODEL
from quire.spec.catalogue import CATALOGUE, catalogue_model, close_names

QUANTISATION = "hf_quant_config.json"
"""The file beside config.json in which NVIDIA's tools may name a quantisation."""

_TIMEOUT_S = 5
_BUNDLED = BUNDLED_MODELS | BUNDLED_HEADS
_TOKENIZER_FILES = ("*token*", "tekken*", "vocab.*", "merges.txt", "*.model", "*.tiktoken")


def read_model_config(name: str, revision: str | None = None) -> tuple[Mapping[str, Any], str]:
    """The contents of a `config.json`, and where it was found, for messages. `revision` is that of the hub.

    `name` is a bundled model, a folder with a `config.json`, a name or hub id in the catalogue, a JSON file, or a hub
    id, in that order. Raises ModelLoadError, with similar names, if it is none of these or cannot be read.
    """
    path = _BUNDLED.get(name) or Path(name).expanduser()
    known = catalogue_model(name) if revision is None else None
    if known is not None and not (path / "config.json").is_file():
        return known.config, f"catalogue: {known.hub}"
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelLoadError(f"the folder '{name}' has no config.json.", fix="pass a folder that has one.")
    if path.is_file():
        beside = path.parent / QUANTISATION
        return with_quantisation(read_json(path), read_json(beside) if beside.is_file() else None), str(path)
    if _names_a_path(name) or name.endswith(".json"):
        raise ModelLoadError(f"there is no file or folder '{name}'.", fix="pass a config.json, or its folder.")
    if name.count("/") != 1:
        close = close_names(name)
        raise ModelLoadError(
            f"'{name}' is not in the catalogue of {len(CATALOGUE)} models, and no file or folder.",
            fix=(f"use {' or '.join(close)}, or " if close else "")
            + "pass a config.json, its folder or a hub id 'owner/model'; `quire plan --list` names the catalogue, and "
            f"{DEFAULT_MODEL} needs no download.",
        )
    return read_json(_download(name, revision)), f"hub: {name}"


def model_folder(name: str) -> Path | None:
    """The folder of a model to load: a bundled one's, or that of a path; None for a hub name.

    Raises ModelLoadError if there is no such folder.
    """
    path = _BUNDLED.get(name) or Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelLoadError(
            f"'{name}' is a file; a model is a folder with config.json and *.safetensors files.",
            fix=f"pass the folder, '{path.parent}'.",
        )
    if _names_a_path(name) or name.count("/") > 1:
        raise ModelLoadError(
            f"there is no folder '{name}'.", fix="check the path; a hub name has the form 'owner/model'."
        )
    return None


def check_tokenizer(folder: Path) -> None:
    """Raise ModelLoadError, with the remedy, if a model's folder has no file of a tokenizer."""
    if not any(found for pattern in _TOKENIZER_FILES for found in folder.glob(pattern)):
        raise ModelLoadError(
            f"the folder '{folder}' has no tokenizer.",
            fix="name one with --tokenizer, or send token ids to a server with --skip-tokenizer-init.",
        )


def _names_a_path(name: str) -> bool:
    """Whether this can be no hub id. A folder that has a config.json is no owner of models."""
    folder, slash, _ = name.rpartition("/")
    return (
        name.startswith((".", "/", "~")) or not name.strip() or bool(slash and (Path(folder) / "config.json").is_file())
    )


def with_quantisation(config: Mapping[str, Any], beside: Any) -> Mapping[str, Any]:
    """The configuration, with the quantisation of `beside`, the contents of `QUANTISATION`, if it names none itself."""
    if "quantization_config" in config or not isinstance(beside, Mapping):
        return config
    return {**config, "quantization_config": beside.get("quantization")}


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file. Raises ModelLoadError if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelLoadError(
            f"{path} cannot be read: {error or type(error).__name__}.", fix="restore the file from the original."
        ) from error
    if not isinstance(found, Mapping):
        raise ModelLoadError(
            f"{path} holds a JSON {type(found).__name__}, not an object.", fix="restore the file from the original."
        )
    return found


def _download(name: str, revision: str | None) -> Path:
    """The configuration's file in the hub's cache, fetched if it is not there."""
    import huggingface_hub as hub  # importing it takes longer than planning

    try:
        cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        _reach(hub.constants.ENDPOINT)
        return Path(hub.hf_hub_download(name, "config.json", revision=revision, etag_timeout=_TIMEOUT_S))
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        close = close_names(name.rpartition("/")[2])
        raise ModelLoadError(
            f"config.json of '{name}' cannot be fetched from the hub: {first_line}",
            fix="check the name and the network, log in for a gated model, or pass a local config.json"
            + (f"; the catalogue has {', '.join(close)}." if close else "."),
        ) from error


def _reach(endpoint: str) -> None:
    """Raise OSError if the hub cannot be reached: its own client would retry for half a minute."""
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not os.environ.keys() & {"HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"}:
        socket.create_connection((parts.hostname or "", port), timeout=_TIMEOUT_S).close()

"""ModelSource: a folder or hub name, its configuration, and the errors of reading either. No weights are read here."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from quire.errors import ModelLoadError, QuireError
from quire.plan.source import model_folder, read_json


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model or tokenizer is read from. `local`: a folder, so the network is not used. `revision` is that of the
    hub, None for its main branch."""

    name: str
    local: bool
    revision: str | None = None

    @classmethod
    def find(cls, name: str, revision: str | None = None) -> ModelSource:
        """The source `name` means: a bundled model, a folder, or a hub name. Raises what `model_folder` raises."""
        folder = model_folder(name)
        return cls(name, False, revision) if folder is None else cls(str(folder), True)

    def read_config(self) -> dict[str, Any]:
        """The contents of config.json, unchanged."""
        if self.local:
            path = Path(self.name) / "config.json"
            if not path.is_file():
                raise ModelLoadError(
                    f"'{self.name}' has no config.json.", fix="pass the folder that holds config.json and the weights."
                )
            return dict(read_json(path))
        with reading(self, "config.json"), quiet():
            found, _ = PreTrainedConfig.get_config_dict(self.name, revision=self.revision)
        if not found:
            raise ModelLoadError(f"'{self.name}' has no config.json.", fix="name a repository that holds a model.")
        return dict(found)

    def read_beside(self, name: str) -> Any:
        """The contents of a JSON file beside config.json; None if there is none."""
        with reading(self, name):
            if self.local:
                path = Path(self.name) / name
                return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
            import huggingface_hub as hub  # only a name of the hub needs it

            try:
                found = hub.hf_hub_download(self.name, name, revision=self.revision)
            except (hub.errors.EntryNotFoundError, hub.errors.LocalEntryNotFoundError):
                return None
            return json.loads(Path(found).read_text(encoding="utf-8"))

    def weight_files(self) -> list[Path]:
        """The safetensors files, of the hub after they are fetched. Raises ModelLoadError if there is none."""
        if self.local:
            folder = Path(self.name)
        else:
            import huggingface_hub as hub  # only a name of the hub needs it

            patterns = ["*.safetensors"]
            folder = Path(hub.snapshot_download(self.name, revision=self.revision, allow_patterns=patterns))
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelLoadError(
                f"'{self.name}' has no *.safetensors file.",
                fix="convert its weights; files of other formats may run code.",
            )
        return files


@contextmanager
def reading(source: ModelSource, what: str) -> Iterator[None]:
    """Turn any error while reading `what` from `source` into a ModelLoadError that names both."""
    try:
        yield
    except QuireError:
        raise
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, ImportError):
            said, fix = "needs a package that is not installed", "install it."
        elif source.local:
            said, fix = "cannot be read", "copy the model again; a partly written or edited file is the usual cause."
        else:
            said = "cannot be fetched from the hub"
            fix = "check the name and the network, log in for a gated model, or pass a local folder."
        raise ModelLoadError(f"{what} of '{source.name}' {said}: {first_line}", fix=fix) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses progress bars, log lines and warnings of transformers inside; its settings are restored after."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()

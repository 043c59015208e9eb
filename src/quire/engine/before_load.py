"""Checks of a model before its weights are read, which may take minutes. Nothing here loads torch."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec

from quire.engine.config import EngineConfig
from quire.engine.hisparse_checks import check_latents
from quire.engine.planning import configured_plan
from quire.engine.speculation_checks import check_draft
from quire.errors import InvalidInput, ModelLoadError, UnsupportedModel
from quire.plan.plan import Plan
from quire.plan.source import check_tokenizer, model_folder, read_model_config
from quire.spec.catalogue import catalogue_model


def check_model(config: EngineConfig) -> Plan | None:
    """Refuse a model that does not exist, one without a tokenizer, and KV memory that holds no page.

    Refuses a draft as `check_draft` does. Returns the plan of the engine if its KV memory is given and the
    configuration suffices; otherwise the load determines it. Raises ModelLoadError, UnsupportedModel or PlanError.
    """
    folder = model_folder(config.model)
    known = catalogue_model(config.model)
    if folder is None and known is not None and known.hub != config.model:
        raise ModelLoadError(
            f"'{config.model}' is a name for `quire plan`, which needs no weights.",
            fix=f"name the model '{known.hub}'.",
        )
    if folder is not None and config.tokenizer is None and not config.skip_tokenizer_init:
        check_tokenizer(folder)
    found = read_model_config(config.model, config.revision)[0]
    check_features(config)
    if config.kv_memory is None:
        return None
    with suppress(InvalidInput, UnsupportedModel):
        plan = configured_plan(config, found, config.kv_memory)
        plan.memory.check_numbers()
        return plan
    return None


def check_features(config: EngineConfig) -> None:
    """Refuse what `check_draft` and `check_latents` refuse, and raise what they raise; and events without pyzmq."""
    check_draft(config)
    check_latents(config)
    if config.kv_events is not None and find_spec("zmq") is None:
        raise InvalidInput(
            "events of the cache (--kv-events, --router events) need pyzmq.", fix="pip install 'quire-kv[events]'."
        )

"""What the pages of a host pool of SGLang are of, and what cannot be told apart."""

from __future__ import annotations

from typing import Any

import sglang
from sglang.srt.runtime_context import get_lora, get_model, get_serving

from quire.connectors.sglang.pool_pages import PoolPages
from quire.connectors.weights import LOADED_FROM_FILES, weights_identity
from quire.errors import InvalidInput, RefusedCombination
from quire.tiers.scope_facts import Facts

_SERVED = ("kv_cache_dtype", "quantization", "json_model_override_args")  # options of a server


def weights_of(own: str) -> str:
    """The identity of the weights: the user's own, or that of the model that this process serves. Raises InvalidInput
    if there is none."""
    model = _served()
    if own:
        return own
    if model is None or model.load_format not in LOADED_FROM_FILES:
        raise InvalidInput(
            "SGLang's keys do not name the weights, so pages of other weights would be read.",
            fix='add "weights": "NAME" to --hicache-storage-backend-extra-config.',
        )
    return weights_identity(model.model_path, model.revision, getattr(model, "download_dir", None))


def weight_version() -> str:
    """The name that the last update of weights in this process gave them, or its server at start."""
    return "" if _served() is None else str(get_serving().weight_version)


def facts_of(config: Any, pages: PoolPages, weights: str) -> Facts:
    """The facts of a pool's pages. Raises RefusedCombination if they do not tell what the bytes are."""
    model = _served()
    served = {} if model is None else {name: str(getattr(model, name, None)) for name in _SERVED}
    if pages.flat_bytes and "uint8" in str(pages.facts["dtype"]) and "kv_cache_dtype" not in served:
        raise RefusedCombination(
            f"the element type of SGLang's pool '{pages.facts['pool']}' is not known: it has raw bytes.",
            fix="serve with another --kv-cache-dtype.",
        )
    return {
        "engine": "sglang",
        "version": sglang.__version__,
        "model": str(config.model_name or "unnamed"),
        "weights": weights,
        "scales": weights_identity(scales) if (scales := getattr(model, "quantization_param_path", None)) else "",
        "weight_version": weight_version(),
        "model_dtype": str(getattr(model, "dtype", None)),  # not that of the pool, which may be of 8 bits
        "rank": _rank(config, pages),
        **pages.facts,
        **served,
    }


def check_server(config: Any, *, adapters: bool) -> None:
    """Raises RefusedCombination for a server whose keys do not tell pages apart, or whose shards are not stored."""
    if not adapters and _served() is not None and get_lora().lora_paths:
        raise RefusedCombination(
            "SGLang identifies the adapters of --lora-paths by name and path, so their pages outlive their weights.",
            fix='add "adapters": true to the JSON if new weights of an adapter always get a new name or path.',
        )
    if config.dcp_size > 1:
        raise RefusedCombination(
            f"pages of {config.dcp_size} decode-context shards cannot be stored.", fix="serve without --dcp-size."
        )
    if config.should_split_heads:
        raise RefusedCombination(
            "records are not shared between sizes of tensor parallelism.", fix="remove 'tp_lcm_size' from the JSON."
        )


def _rank(config: Any, pages: PoolPages) -> str:
    """The shard that the pool's pages are of. Raises RefusedCombination for a pool that SGLang stores on one rank only
    although each has its own heads."""
    is_shared = config.is_mla_model and not pages.has_shards
    if config.is_mla_model and pages.has_heads and config.tp_size > 1:
        raise RefusedCombination(
            f"SGLang stores pool '{pages.facts['pool']}' on rank 0 only, and {config.tp_size} ranks have one each.",
            fix="serve this model without a draft model of another kind of attention, or with --tp-size 1.",
        )
    shards = [
        ("tp", 0 if is_shared else config.tp_rank, 1 if is_shared else config.tp_size),
        ("pp", config.pp_rank, config.pp_size),
        ("cp", config.attn_cp_rank, config.attn_cp_size),
    ]
    return " ".join(f"{name}{rank}/{size}" for name, rank, size in shards)


def _served() -> Any:
    """What the server of this process was told of its model; None outside of a server."""
    try:
        return get_model()
    except ValueError:
        return None

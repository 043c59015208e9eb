"""What the bytes of a chunk depend on besides its tokens: facts of vLLM's configuration."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from quire.connectors.identity import Identity, weights_identity
from quire.connectors.vllm.compat import hash_seed, version
from quire.errors import RefusedCombination

_NAMES = ("_name_or_path", "name_or_path", "transformers_version")  # of the model's configuration, not of its bytes


def identity_of(config: VllmConfig, spec: Any, row_bytes: int, *, weights: str, adapters: bool) -> Identity:
    """The identity of the records of an engine. `spec` is its `OffloadingSpec`. Raises RefusedCombination for what has
    none: random weights, and adapters, which vLLM names by their path, unless `adapters` says that a path is enough."""
    model, parallel, cache = config.model_config, spec.config.parallel, config.cache_config
    if config.lora_config is not None and not adapters:
        raise RefusedCombination(
            "vLLM identifies an adapter by its name and path, so its pages stay valid when its weights change.",
            fix='set "adapters": true in the tier if new weights of an adapter always have a new path.',
        )
    if not weights and config.load_config.load_format == "dummy":
        raise RefusedCombination(
            "load_format 'dummy' draws weights that no file identifies.", fix='name them: "weights": "NAME" in the tier.'
        )
    text = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NAMES}
    rope = str(text.get("rope_scaling") or text.get("rope_parameters"))
    groups = [(group.tokens_per_block, *group.layer_names) for group in spec.config.groups]
    draft = config.speculative_config
    return Identity(
        engine="vllm",
        model=_digest(text),
        weights=weights or weights_identity(model.model_weights or model.model, model.revision),
        dtype=f"{model.dtype} {cache.cache_dtype} {model.quantization}".replace("torch.", ""),
        page_size=max(group.tokens_per_block for group in spec.config.groups) * spec.blocks_per_chunk,
        layout=f"{spec.config.kv_cache_layout} {row_bytes} {_digest(groups)}",
        rank=f"tp={parallel.tp_size} pp={parallel.pp_size} pcp={parallel.pcp_size} dcp={parallel.dcp_size}",
        hash_seed=hash_seed(config),
        more={
            "version": version(),
            "device": current_platform.get_device_name(),
            "backend": str(config.attention_config.backend),
            "canonical": spec.config.canonical_layout,
            "replicated": spec.replicated_layout,
            "runner": bool(config.use_v2_model_runner),
            "draft": None if draft is None else str(draft.model),
            # These stretch positions by the longest context that the engine allows.
            "context": model.max_model_len if "longrope" in rope or "dynamic" in rope else None,
        },
    )


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]

"""What the bytes of a chunk depend on besides its tokens, from vLLM's configuration."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from quire.connectors.vllm.compat import hash_seed, version
from quire.connectors.weights import LOADED_FROM_FILES, weights_identity
from quire.errors import RefusedCombination
from quire.tiers.scope_facts import Facts

_NAMES = {"_name_or_path", "name_or_path", "transformers_version"}  # in a model's configuration, without effect on it
# Fields of the cache's configuration that are sizes, or say what is found, or are in other facts. New ones are facts.
_SIZES = {"gpu_memory_utilization", "num_gpu_blocks", "num_gpu_blocks_override", "num_cpu_blocks", "kv_offloading_size"}
_SIZES |= {"kv_offloading_backend", "kv_cache_memory_bytes", "kv_cache_size_tokens", "kv_cache_max_concurrency"}
_SIZES |= {"block_size", "user_specified_block_size", "_block_size_resolved", "effective_attention_block_size"}
_SIZES |= {"hash_block_size", "enable_prefix_caching", "prefix_caching_hash_algo", "prefix_match_unit"}
_SIZES |= {"prefix_cache_retention_interval", "cache_hit_alignment_tokens"}


def facts_of(config: VllmConfig, spec: Any, row_bytes: int, *, weights: str, adapters: bool) -> Facts:
    """The facts of an engine with this `OffloadingSpec`, whose chunks have `row_bytes`. `weights` is an identity of the
    user's own, or empty. Raises RefusedCombination for weights from elsewhere without one, for block hashes of this
    process alone, and for adapters, unless their paths identify them; InvalidInput for a model without files."""
    model, parallel, cache = config.model_config, spec.config.parallel, config.cache_config
    if config.lora_config is not None and not adapters:
        raise RefusedCombination(
            "vLLM identifies an adapter by its name or path, so its pages stay valid when its weights change.",
            fix='set "adapters": true in the tier if new weights of an adapter always get a new name and path.',
        )
    if not weights and (loaded := config.load_config.load_format) not in LOADED_FROM_FILES:
        raise RefusedCombination(
            f"load_format '{loaded}' has weights that no file of the model identifies.",
            fix='name them in the tier: "weights": "NAME".',
        )
    text = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NAMES}
    rope = str(text.get("rope_scaling") or text.get("rope_parameters"))
    groups = [(group.tokens_per_block, *group.layer_names) for group in spec.config.groups]
    return {
        "engine": "vllm",
        "version": version(),
        "model": f"{'+'.join(model.hf_config.architectures or ())} {_digest(text)}",
        "weights": weights
        or weights_identity(model.model_weights or model.model, model.revision, config.load_config.download_dir),
        "dtype": f"{model.dtype} {cache.cache_dtype} {model.quantization}".replace("torch.", ""),
        "page_size": " ".join(str(group.tokens_per_block * spec.blocks_per_chunk) for group in spec.config.groups),
        "rank": f"tp={parallel.tp_size} pp={parallel.pp_size} pcp={parallel.pcp_size} dcp={parallel.dcp_size}"
        f" interleave={getattr(config.parallel_config, 'cp_kv_cache_interleave_size', 1)}",
        "cache": _digest({each.name: getattr(cache, each.name) for each in fields(cache) if each.name not in _SIZES}),
        "layout": f"{spec.config.kv_cache_layout} {row_bytes} {_digest(groups)}",
        "host_layout": f"canonical={spec.config.canonical_layout} replicated={spec.replicated_layout}",
        "device": f"{current_platform.get_device_name()} {config.attention_config.backend or 'auto'}",
        "runner": 2 if config.use_v2_model_runner else 1,
        "draft": str(getattr(config.speculative_config, "model", "")),
        # These stretch positions by the longest context that the engine allows.
        "context": model.max_model_len if "longrope" in rope or "dynamic" in rope else 0,
        "hash": hash_seed(config),
    }


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=_plain).encode()).hexdigest()[:16]


def _plain(value: object) -> str:
    """What JSON has no form for; an address would be another in each process."""
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text

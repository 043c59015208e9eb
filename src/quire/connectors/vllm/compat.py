"""What differs between the versions of vLLM, and what all of them must have. Checked before a tier is opened."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob

from quire.errors import RefusedCombination

VERSIONS = ("0.29", "0.30", "0.31", "0.32")
_METHODS = {"lookup", "submit_store", "submit_load", "get_finished_jobs", "on_new_request", "drain_jobs"}
_FIELDS = {field.name for field in fields(TransferJob)}
_CHUNKS = "chunk_ids" if "chunk_ids" in _FIELDS else "block_ids"  # the name in 0.29


def version() -> str:
    """Major and minor version of vLLM."""
    return ".".join(vllm.__version__.split(".")[:2])


def check_version(*, may_be_untested: bool) -> None:
    """Raises RefusedCombination for a vLLM whose tiers have another interface, or which is not in `VERSIONS`."""
    others = (_METHODS ^ set(SecondaryTierManager.__abstractmethods__)) | ({"keys", "job_id", _CHUNKS} - _FIELDS)
    if others or (version() not in VERSIONS and not may_be_untested):
        raise RefusedCombination(
            f"this tier is for vLLM {VERSIONS[0]} to {VERSIONS[-1]}, and this is {vllm.__version__}"
            + (f", with other tiers: {', '.join(sorted(others))}." if others else "."),
            fix="use one of those, or a newer Quire"
            + ("." if others else ', or set "untested_vllm": true in the tier.'),
        )


def chunks_of(job: TransferJob) -> Any:
    """The rows of a job in the primary tier, int32 `[keys]`."""
    return getattr(job, _CHUNKS)


def engine_config() -> VllmConfig:
    """The configuration of the engine whose scheduler makes the tier: a tier gets a part of it, without the hash of
    blocks, the revision and overrides of the model. So it is taken from the call that makes the tier."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if isinstance(found, VllmConfig):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise RefusedCombination(
        f"vLLM {vllm.__version__} makes its tiers in a way in which the model's configuration is not found.",
        fix="use its OffloadingConnector with TieringOffloadingSpec, or a newer Quire.",
    )


def hash_seed(config: VllmConfig) -> str:
    """The algorithm of block hashes with its seed, equal in all processes. Raises RefusedCombination if each process
    has a seed of its own, so that it would never find what another has saved."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    algorithm = config.cache_config.prefix_caching_hash_algo
    make = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(make)
    if seed != resolve_none_hash_seed(make):
        raise RefusedCombination(
            f"prefix_caching_hash_algo '{algorithm}' draws a seed in each process, which finds nothing of others.",
            fix="use sha256 or sha256_cbor, or set PYTHONHASHSEED to the same number for all engines of the store.",
        )
    return f"{algorithm} {make(seed).hex()[:16]}"

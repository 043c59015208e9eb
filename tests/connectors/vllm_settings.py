"""Which facts differ when one setting of vLLM is another. Runs under vLLM's interpreter; prints JSON by setting."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from quire.connectors.vllm.facts import facts_of
from quire.errors import RefusedCombination
from quire.tiers.scope_facts import Facts, differences

CHANGED = {
    "mamba_cache_dtype": "float32",
    "mamba_ssm_cache_dtype": "bfloat16",
    "kv_cache_dtype_skip_layers": ["0"],
    "num_gpu_blocks": 7,
    "gpu_memory_utilization": 0.5,
}
LOADS = ("tensorizer", "ipc_cache", "dummy", "a_registered_one", "safetensors")


def facts(config: Any) -> Facts:
    parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1)
    groups = [SimpleNamespace(tokens_per_block=16, layer_names=("a",))]
    part = SimpleNamespace(parallel=parallel, groups=groups, kv_cache_layout="NHD", canonical_layout=False)
    spec = SimpleNamespace(config=part, blocks_per_chunk=1, replicated_layout=False)
    return facts_of(config, spec, 4096, weights="", adapters=False)


def main(model: str) -> None:
    config = EngineArgs(model=model, enforce_eager=True, max_model_len=512).create_engine_config()
    before, found = facts(config), {}
    for name, value in CHANGED.items():
        cache = config.cache_config
        known = {each.name: getattr(cache, each.name) for each in fields(cache)}
        if name in known:
            setattr(cache, name, value)
            found[name] = differences(before, facts(config))
            setattr(cache, name, known[name])
    config.parallel_config.cp_kv_cache_interleave_size = 4
    found["interleave"] = differences(before, facts(config))
    for name in LOADS:
        config.load_config.load_format = name
        try:
            found[name] = sorted(set(differences(before, facts(config))) - {"rank"})
        except RefusedCombination:
            found[name] = ["refused"]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

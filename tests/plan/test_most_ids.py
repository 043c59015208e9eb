"""What is numbered by 32 bits is refused where more would be needed: nothing wraps without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cache import KVCache
from quire.errors import PlanError
from quire.plan.budget import MOST_IDS
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.spec.catalogue import CATALOGUE
from quire.spec.model import ModelSpec
from quire.testing import small_plan

GIB = 2**30
MAMBA = {
    "model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 768, "intermediate_size": 1536,
    "num_hidden_layers": 24, "state_size": 16, "conv_kernel": 4, "time_step_rank": 48, "vocab_size": 50_280,
    "torch_dtype": "float32", "max_position_embeddings": 2**20,
}  # fmt: skip


def test_page_tables_of_many_long_rows_are_refused() -> None:
    spec = ModelSpec.from_config(CATALOGUE["llama-4-scout"].config)
    settings = PlanSettings(kv_memory=200 * GIB, max_running_requests=4096)
    with pytest.raises(PlanError, match=r"page tables of 4,096 requests of 655,361 pages have .*-requests"):
        make_plan(spec, settings).memory.check_numbers()
    plan = make_plan(spec, settings.changed(max_running_requests=2048)).memory
    plan.check_numbers()
    assert plan.max_requests * plan.pages_per_row < MOST_IDS


def test_pools_of_more_slots_than_numbers_are_refused() -> None:
    small_plan(2**27 - 1, 16, context=64).check_numbers()
    with pytest.raises(PlanError, match="hold 2,147,483,648 tokens"):
        KVCache(small_plan(2**27, 16, context=64))


def test_states_alone_have_page_ids_that_are_slots(tmp_path: Path) -> None:
    """Their tokens are those of mean requests: more than there are numbers, and few of them ever exist."""
    spec = ModelSpec.from_config(json.loads(json.dumps(MAMBA)))
    found = make_plan(spec, PlanSettings(kv_memory=40 * GIB, max_model_len=2**20))
    assert found.config.max_total_num_tokens > MOST_IDS
    assert found.memory.num_pages * found.page_size < MOST_IDS and found.largest_request == 2**20

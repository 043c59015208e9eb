"""Tenants beside drafts, windows and latents in host memory: tokens are those of transformers, and a floor is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.engine.messages import EngineRequest, ResizeRequest
from quire.plan.plan import size_within
from tests.changes import CORE, DEVICE, HISPARSE, slow_unless_changed
from tests.engine.apart import turn
from tests.engine.test_elastic_mix import MOST, NGRAM, elastic
from tests.engine.tiered import GREEDY, OTHERS, PROMPTS, case_of

TERMS = {"quiet": {"floor": "60%"}, "noisy": {"ceiling": "90%"}}
TOKENS = 420


@slow_unless_changed(*CORE, *DEVICE, *HISPARSE, "tests/engine/test_tenants")
@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v32"])
def test_a_quiet_tenant_keeps_its_pages_beside_drafts_and_latents_in_host_memory(name: str, tmp_path: Path) -> None:
    case, file = case_of(name), tmp_path / "tenants.json"
    file.write_text(json.dumps(TERMS))
    hisparse = {"hisparse": {"device_buffer_size": 16}} if name == "deepseek_v32" else {}
    core = elastic(case.model, tenants=file, speculative_config=NGRAM, **hisparse)
    core.resize(
        ResizeRequest(
            device_bytes=next(n for n in range(2**17, MOST, 2048) if size_within(core.capacity, n).num_tokens >= TOKENS)
        )
    )
    left, expected = core.cache.resizing.num_evicted, dict[str, list[int]]()
    found: dict[str, list[int]] = {}
    for number in range(8):
        quiet = ("quiet/", PROMPTS[number % len(PROMPTS)], case.expected[number % len(PROMPTS)])
        noisy = ((f"noisy/{number}", *each) for each in zip(OTHERS, case.others, strict=True))
        for at, (salt, prompt, tokens) in enumerate((quiet, *noisy)):
            ids = np.array(prompt, dtype=np.int32).tobytes()
            core.add(EngineRequest(request_id=f"{number}-{at}", prompt=ids, params=GREEDY, salt=salt))
            expected[f"{number}-{at}"] = tokens
        while core.has_work():
            for request, tokens in turn(core).items():
                found.setdefault(request, []).extend(tokens)
        core.audit()
    assert found == expected
    uses = {each.name: each.now for each in core.tenants()}
    assert uses["quiet"].lost_pages == 0 and uses["quiet"].hit_tokens > 0
    assert core.statistics()["speculation"]["draft_tokens"] > 0
    assert core.cache.resizing.num_evicted > left, "pages of the noisy tenant have left the device"
    core.close()

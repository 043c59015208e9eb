"""Published traces: what they hold, and what an infinite cache hits on them, against what is known of each."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from quire.sim.hit_bounds import HitBounds
from quire.sim.trace import Trace, open_trace
from tests.sim.tiny_traces import request, trace_of

SHARED = Path(__file__).parents[3] / "shared"
TRACES = SHARED / "data" / "traces"
CONVERSATION = "mooncake/conversation_trace.jsonl"
SYNTHETIC = "mooncake/synthetic_trace.jsonl"


@cache
def published(name: str, *, limit: int | None = None) -> Trace:
    if not (TRACES / name).exists():
        pytest.skip(f"shared/data/traces/{name} is not beside the repository")
    return open_trace(str(TRACES / name), limit=limit)


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens", "seconds"),
    [
        (CONVERSATION, 12_031, 144_793_823, 4_122_048, 3537),
        (SYNTHETIC, 3_993, 61_194_628, 595_432, 1022),
        ("lmcache_agent/taubench.jsonl.xz", 471, 312_134, 40_590, 181),
        ("lmcache_agent/miniswe.jsonl.xz", 402, 9_674_724, 182_981, 552),
        ("ragpulse", 7_106, 20_851_449, 2_012_676, 604_603),
        ("azure/AzureLLMInferenceTrace_code.csv", 8_819, 18_059_974, 245_896, 3436),
    ],
)
def test_all_of_it_is_read(name: str, requests: int, prompt_tokens: int, output_tokens: int, seconds: int) -> None:
    trace = published(name)
    assert (len(trace), trace.prompt_tokens, trace.output_tokens) == (requests, prompt_tokens, output_tokens)
    assert trace._planned[-1].arrival - trace._planned[0].arrival == pytest.approx(seconds, abs=1)
    for each in islice(trace, 20):
        assert len(each.prompt) and each.prompt.dtype == each.output.dtype == "int32"


@pytest.mark.parametrize(
    ("name", "page_size", "percent"),
    [
        ("lmcache_agent/taubench.jsonl.xz", 256, 69),
        ("lmcache_agent/miniswe.jsonl.xz", 256, 93),
        ("ragpulse", 16, 31.5),
    ],
)
def test_the_ideal_is_what_others_found(name: str, page_size: int, percent: float) -> None:
    found = HitBounds(published(name), page_size)
    assert found.ideal_hit_rate * 100 == pytest.approx(percent, abs=0.5)


@pytest.mark.parametrize("name", [CONVERSATION, SYNTHETIC])
@pytest.mark.parametrize("page_size", [16, 512])
def test_the_first_of_mooncake_hits_what_its_block_ids_say(name: str, page_size: int) -> None:
    found = HitBounds(published(name, limit=300), page_size)
    with (TRACES / name).open() as lines:
        assert found.ideal_hit_tokens == hit_by_block_ids([json.loads(line) for line in islice(lines, 300)], page_size)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "percent"), [(CONVERSATION, 37.4), (SYNTHETIC, 65.1)])
def test_all_of_mooncake(name: str, percent: float) -> None:
    trace = published(name)
    found = HitBounds(trace, 16)
    assert found.ideal_hit_rate * 100 == pytest.approx(percent, abs=0.05)
    pools = [found.working_set_tokens // parts for parts in (64, 16, 8, 4)]
    hits = [found.optimal_hit_tokens(pool) for pool in pools]
    assert hits == sorted(hits) and hits[-1] <= found.ideal_hit_tokens
    with (TRACES / name).open() as lines:
        assert found.ideal_hit_tokens == hit_by_block_ids([json.loads(line) for line in lines], 16)


def hit_by_block_ids(rows: list[dict[str, Any]], page_size: int) -> int:
    """Prompt tokens in whole pages of blocks seen before; no output is ever asked for again."""
    seen: set[int] = set()
    hits = 0
    for row in rows:
        length, blocks = row["input_length"], row["hash_ids"]
        known = next((at for at, block in enumerate(blocks) if block not in seen), len(blocks)) * 512
        hits += min(known, length - 1) // page_size * page_size
        seen.update(blocks)
    return hits


# -- a generated trace of another project, and its own count of what is ideal


def neutral_trace(requests: int) -> tuple[Any, list[Any]]:
    path = SHARED / "bench" / "trace.py"
    if not path.exists():
        pytest.skip("shared/bench/trace.py is not beside the repository")
    spec = importlib.util.spec_from_file_location("neutral_trace", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["neutral_trace"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, module.make_trace(1234, requests)


def ideal_of(turns: list[Any], page_size: int) -> HitBounds:
    trace = trace_of([request(number, turn.prompt, turn.output) for number, turn in enumerate(turns)])
    return HitBounds(trace, page_size)


@pytest.mark.parametrize("page_size", [16, 64])
def test_another_count_of_the_ideal_agrees(page_size: int) -> None:
    module, turns = neutral_trace(40)
    assert ideal_of(turns, page_size).ideal_hit_tokens == module.ideal_hit_tokens(turns, page_size) > 0


@pytest.mark.slow
def test_the_ideal_of_a_trace_that_others_were_measured_with() -> None:
    _, turns = neutral_trace(2000)
    found = [ideal_of(turns, page_size) for page_size in (16, 64)]
    assert [round(each.ideal_hit_rate, 4) for each in found] == [0.9028, 0.8953]
    assert found[0].prompt_tokens == 7_000_709

"""One architecture through the whole grid: page size, chunk, overlap, policies, pool size. Same tokens everywhere."""

from __future__ import annotations

from itertools import product

import pytest

from quire.models.hf import LoadedModel, load_model
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.pages import pages_for
from tests.changes import CORE, MODELS, slow_unless_changed
from tests.covering import covering
from tests.engine.running import core_for, generated, run, shared_prompts
from tests.tiny_models import VOCAB_SIZE, build_tiny, save_tiny

NEW_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
PROMPTS = shared_prompts(3, shared=70, tails=(3, 40, 11, 64, 1, 29), vocabulary=VOCAB_SIZE)
LONGEST = max(map(len, PROMPTS)) + NEW_TOKENS


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, list[list[int]]]:
    """A grouped-query Llama with a sliding-window sibling's worth of variety is not needed here: one will do."""
    folder = save_tiny("llama_gqa", tmp_path_factory.mktemp("grid"))
    reference = build_tiny("llama_gqa")
    return load_model(str(folder)), [generated(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]


FAST = ((1, 5, True), (1, 2048, False), (16, 5, False), (64, 2048, True), (3, 64, True), (256, 64, False))
GRID = {*product((1, 16, 64), (5, 2048), (False, True)), *FAST}


@pytest.mark.parametrize(
    ("page_size", "chunk", "overlap"),
    [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in sorted(GRID - {*FAST}))],
)
def test_grid(case: tuple[LoadedModel, list[list[int]]], page_size: int, chunk: int, overlap: bool) -> None:
    """Ample and starved pools, twice each."""
    model, expected = case
    settings = {"page_size": page_size, "max_num_batched_tokens": chunk, "overlap": overlap}
    for pages in (None, pages_for(LONGEST - 1, page_size) + 2):
        core = core_for(model, pages=pages, **settings)
        for turn in range(2):
            assert run(core, PROMPTS, GREEDY, f"t{turn}") == expected, (pages, turn)
        statistics = core.statistics()
        assert statistics["frames"]["full"]["private"] == 0
        if pages is None and page_size <= 64:
            assert statistics["hit_tokens"] > 0
        if pages is not None and page_size <= 16:  # larger pages leave too little cached to be in the way
            assert statistics["evicted_pages"] > 0


@slow_unless_changed(*CORE, *MODELS)
@covering(eviction=["lru", "lfu", "slru", "fifo", "mru", "filo", "priority"], policy=["fcfs", "lpm"])
def test_policies(case: tuple[LoadedModel, list[list[int]]], policy: str, eviction: str) -> None:
    """Whatever goes first or goes away first, the tokens are the same."""
    model, expected = case
    core = core_for(
        model, pages=pages_for(LONGEST, 8) + 6, page_size=8, policy=policy, eviction=eviction, max_running_requests=3
    )
    assert run(core, PROMPTS, GREEDY, "a") == expected
    assert run(core, PROMPTS[::-1], GREEDY, "b") == expected[::-1]
    assert core.statistics()["evicted_pages"] > 0


def test_prefix_caching_off(case: tuple[LoadedModel, list[list[int]]]) -> None:
    """Nothing is reused, nothing stays, nothing is different."""
    model, expected = case
    core = core_for(model, enable_prefix_caching=False)
    for turn in range(2):
        assert run(core, PROMPTS, GREEDY, f"t{turn}") == expected
    statistics = core.statistics()
    assert statistics["hit_tokens"] == statistics["cached_pages"] == 0
    assert statistics["frames"]["full"]["free"] == statistics["num_pages"]

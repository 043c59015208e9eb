"""An engine over host memory and a store: the same greedy tokens as `transformers`, cold, warm, and restarted.

Device pools hold little more than one request, so that what is cached goes through the tiers again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.pages import pages_for
from tests.engine.running import generated, run, shared_prompts, tiered_core
from tests.tiny_hybrids import build_hybrid
from tests.tiny_latents import SPARSE, build_latent
from tests.tiny_models import VOCAB_SIZE

NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
PROMPTS = shared_prompts(7, shared=37, tails=(3, 20, 11, 1, 29), vocabulary=VOCAB_SIZE)
OTHERS = shared_prompts(8, shared=21, tails=(30, 17, 2), vocabulary=VOCAB_SIZE)
LONGEST = max(map(len, PROMPTS)) + NEW_TOKENS
MODELS = {
    "llama_gqa": "keys and values of every token",
    "deepseek_v3": "latents",
    "deepseek_v32": "latents and an indexer's keys",
    "gemma3_text": "windows in a pool of their own",
    "mistral_all_slide": "windows only",
    "llama4_text": "chunks",
    "falcon_h1": "states and keys and values",
    "mamba2": "states only",
}

NAMES = sorted(MODELS)
OPEN: list[EngineCore] = []
Case = tuple[LoadedModel, list[list[int]], list[list[int]]]


def build(name: str) -> Any:
    return build_latent(name) if name in SPARSE else build_hybrid(name)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    """A loaded model, and what transformers generates with the same weights for `PROMPTS` and `OTHERS`."""
    reference = build(request.param)
    expected = [[generated(reference, prompt, NEW_TOKENS) for prompt in some] for some in (PROMPTS, OTHERS)]
    return LoadedModel(build(request.param), name=request.param), expected[0], expected[1]


def small(model: LoadedModel, page_size: int = 4, **settings: Any) -> EngineCore:
    """Room for little more than the longest request, one window, and five states."""
    kinds = [group.reach.kind for group in model.groups(page_size)]
    core = tiered_core(
        model,
        **{
            "num_tokens": (pages_for(LONGEST - 1, page_size) + 3) * page_size,
            "window_tokens": (pages_for(8, page_size) + 5) * page_size,
            "page_size": page_size,
            "max_num_batched_tokens": 17,
            "max_running_requests": 3,
            "max_mamba_cache_size": 5 if "state" in kinds else None,
            **settings,
        },
    )
    OPEN.append(core)
    return core


def at_rest(core: EngineCore) -> dict[str, Any]:
    """Wait for what moves, and check that nothing is held: the tiers' statistics."""
    assert core.tiers is not None and core.cache.tiers is not None
    while core.has_moves() or core.cache.tiers.moving:
        core.cache.wait_moves(1.0)
        core.cache.settle_moves()
    core.audit()
    tiers = core.cache.tiers
    assert not tiers.moving and not tiers.condemned and not tiers.num_bad
    assert core.cache.prefetcher is None or not core.cache.prefetcher.in_flight
    assert core.cache.tree.num_protected == 0
    for group, host in zip(core.cache.groups, tiers.hosts, strict=True):
        assert group.shelf is None or group.shelf.num_pinned == 0
        assert host.shelf is None or host.shelf.num_pinned == 0
    found = core.statistics()
    assert all(frames["private"] == frames["moving"] == 0 for frames in found["frames"].values())
    assert core.cache.num_free_pages == core.cache.pages.num_pages - found["cached_pages"] - core.cache.tree.num_below
    return dict(found["tiers"])


def closed(core: EngineCore) -> dict[str, Any]:
    """As `at_rest`, and close it."""
    found = at_rest(core)
    core.close()
    return found


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """An engine that is closed has no thread left; one of a test that failed ends here."""
    before = threading.active_count()
    yield
    left = [core for core in OPEN if core.tiers is not None]
    OPEN.clear()
    for core in left:
        assert core.tiers is not None
        core.tiers.mover.close()
        if core.tiers.store is not None:
            core.tiers.store.close()
    assert threading.active_count() <= before


HOST_GRID = (
    (1, 23, False, "write_through"),
    (16, 50, True, "write_back"),
    (64, 2048, False, "write_through_selective"),
    (4, 17, True, "write_through"),
)
"""Page size, tokens of a step, overlap, when a page is saved."""


def check_through_the_host(case: Case, page_size: int, chunk: int, overlap: bool, write: str) -> None:
    """Turns of prompts that push each other off the device; then all come back from the host."""
    model, expected, others = case
    core = small(
        model, page_size=page_size, max_num_batched_tokens=chunk, overlap=overlap, write_policy=write, host=8.0
    )
    for turn in range(3):
        assert run(core, PROMPTS, GREEDY, f"p{turn}") == expected, turn
        assert run(core, OTHERS, GREEDY, f"o{turn}") == others, turn
    found = closed(core)
    assert found["failed_moves"] == 0 and not found["defects"]
    assert found["saved_bytes"] > 0
    if page_size < 64:  # of larger pages nothing has to go
        assert found["loaded_bytes"] > 0 and found["host_hit_tokens"] > 0


def test_through_the_host(case: Case) -> None:
    """One point of the grid for each model; all points for all models are among the long tests."""
    check_through_the_host(case, *HOST_GRID[NAMES.index(case[0].name) % len(HOST_GRID)])


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "chunk", "overlap", "write"), HOST_GRID)
def test_through_the_host_everywhere(case: Case, page_size: int, chunk: int, overlap: bool, write: str) -> None:
    check_through_the_host(case, page_size, chunk, overlap, write)


STORE_GRID = (
    (1, False, "write_through", "wait_complete"),
    (4, False, "write_through_selective", "wait_complete"),
    (4, True, "write_back", "wait_complete"),
    (16, True, "write_through", "wait_complete"),
    (4, False, "write_through", "break_even"),
    (4, True, "write_through", "timeout"),
    (4, True, "write_through", "best_effort"),
)
"""Page size, overlap, when a page is saved, how long a request waits for what is stored."""


def check_restarted(case: Case, folder: Path, page_size: int, overlap: bool, write: str, prefetch: str) -> None:
    """What one engine has stored, the next one begins on."""
    model, expected, others = case
    settings = {"page_size": page_size, "overlap": overlap, "storage": str(folder / "kv"), "write_policy": write}
    first = small(model, **settings, prefetch=prefetch)
    for turn in range(2):
        assert run(first, PROMPTS, GREEDY, f"p{turn}") == expected
        assert run(first, OTHERS, GREEDY, f"o{turn}") == others
    stored = closed(first)
    assert stored["archived_bytes"] > 0 and stored["failed_moves"] == 0 and not stored["defects"]
    again = small(model, **settings, prefetch=prefetch)
    assert run(again, PROMPTS, GREEDY, "again") == expected
    assert run(again, OTHERS, GREEDY, "others") == others
    found = closed(again)
    assert found["failed_moves"] == 0 and not found["defects"]
    if prefetch == "wait_complete":
        assert found["fetched_bytes"] > 0 and found["loaded_bytes"] > 0 and found["storage_hit_tokens"] > 0


def test_restarted_on_a_store(case: Case, tmp_path: Path) -> None:
    """One point of the grid for each model."""
    check_restarted(case, tmp_path, *STORE_GRID[NAMES.index(case[0].name) % len(STORE_GRID)])


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "overlap", "write", "prefetch"), STORE_GRID)
def test_restarted_on_a_store_everywhere(
    case: Case, page_size: int, overlap: bool, write: str, prefetch: str, tmp_path: Path
) -> None:
    check_restarted(case, tmp_path, page_size, overlap, write, prefetch)


def test_requests_with_a_common_beginning_wait_for_one_that_reads_it(tmp_path: Path) -> None:
    """After a restart, none of five requests computes what is stored of the prefix that they share."""
    model = LoadedModel(build("llama_gqa"), name="llama_gqa")
    settings = {"page_size": 4, "storage": str(tmp_path / "kv"), "max_running_requests": 5, "num_tokens": 512}
    first = small(model, **settings)
    expected = run(first, PROMPTS, GREEDY)
    closed(first)
    again = small(model, **settings)
    assert run(again, PROMPTS, GREEDY) == expected
    assert again.statistics()["hit_tokens"] == sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    assert closed(again)["storage_hit_tokens"] > 0

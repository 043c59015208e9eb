"""An engine over host memory and a store: the same greedy tokens as `transformers`, cold, warm, and restarted.

Device pools hold little more than one request, so that what is cached goes through the tiers again and again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import InvalidInput
from quire.models.hf import LoadedModel
from quire.testing.stores.dict_store import DictStore
from tests.changes import TIERS, in_turns
from tests.covering import few
from tests.engine.running import run
from tests.engine.tiered import GREEDY, PROMPTS, Case, build, case_of, closed, small

pytestmark = pytest.mark.usefixtures("threads_end")

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


@pytest.fixture(scope="module", params=in_turns(few(NAMES, 5), 2, *TIERS))
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


HOST_GRID = (
    (1, 23, False, "write_through"),
    (16, 50, True, "write_back"),
    (64, 2048, False, "write_through_selective"),
    (4, 17, True, "write_through"),
)
"""Page size, tokens of a step, overlap, when a page is saved."""


def check_through_the_host(case: Case, page_size: int, chunk: int, overlap: bool, write: str) -> None:
    """Turns of prompts that push each other off the device; then all come back from the host."""
    core = small(
        case.model, page_size=page_size, max_num_batched_tokens=chunk, overlap=overlap, write_policy=write, host=8.0
    )
    for turn in range(3):
        case.check(core, turn)
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
    settings = {"page_size": page_size, "overlap": overlap, "storage": str(folder / "kv"), "write_policy": write}
    first = small(case.model, **settings, prefetch=prefetch)
    for turn in range(2):
        case.check(first, turn)
    stored = closed(first)
    assert stored["archived_bytes"] > 0 and stored["failed_moves"] == 0 and not stored["defects"]
    again = small(case.model, **settings, prefetch=prefetch)
    case.check(again)
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


def test_records_that_the_store_does_not_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stay empty without a word: values of servers have a limit, which a state may exceed."""

    class Limited(DictStore):
        largest_record = 100

    monkeypatch.setattr("quire.engine.tier_storage.open_store", lambda *_, **__: Limited())
    with pytest.raises(InvalidInput, match="takes none above 100"):
        small(case_of("llama_gqa").model, storage="valkey://127.0.0.1")

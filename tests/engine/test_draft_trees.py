"""Trees of draft models and heads: the same tokens, and no page without what the draft computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
from msgspec.structs import replace

from quire.counters import plain
from quire.errors import UnsupportedModel
from quire.models.hf import LoadedModel
from quire.spec.pages import pages_for
from quire.spec.speculation import SpeculativeConfig, get_alloc_reserve_per_decode
from tests.changes import DRAFTS, slow_unless_changed
from tests.covering import covering, few
from tests.engine import test_draft_head, test_draft_model
from tests.engine.running import core_for, run, tight_core
from tests.engine.test_draft_head import bigram_target, head_for, rigged_head
from tests.engine.test_draft_model import BOUNDS, PAGES, PARAMS, check_some_right, tiny_target, undrafted, ungoverned
from tests.engine.test_hybrid_tokens import GREEDY, PROMPTS, case_of
from tests.engine.test_rejection import noisy
from tests.tiny_models import build_tiny

TREES = {2: {"num_steps": 4, "topk": 2, "num_draft_tokens": 7}, 4: {"num_steps": 3, "topk": 4, "num_draft_tokens": 10}}
KINDS = ("draft_model", "eagle", "eagle3")


def drafted(kind: str, folder: Path) -> tuple[LoadedModel, Any]:
    """A target and a draft for it that is often right."""
    if kind == "draft_model":
        return tiny_target(), LoadedModel(noisy(build_tiny("llama_gqa"), 0.1), name="noisy", check=False)
    if kind == "eagle3":
        return tiny_target(), head_for(tiny_target(), kind, folder)
    bigrams = bigram_target()
    head = rigged_head(bigrams, folder)
    noisy(head._head, 0.1)
    return bigrams, head


def check_trees(kind: str) -> None:
    """Drafts that are often right, in pages that each step fills, and in larger ones."""
    with TemporaryDirectory() as folder:
        models = (kind, *drafted(kind, Path(folder)))
        check_the_same_tokens(*models, 4, (1, 16))
        check_pages_are_complete(*models, 4)


def config_of(kind: str, topk: int) -> dict[str, Any]:
    return {"method": kind, "model": "draft", **TREES[topk]}


@cache
def models_of(kind: str) -> tuple[str, LoadedModel, Any]:
    return (kind, *drafted(kind, Path(mkdtemp())))


@pytest.fixture(params=few(KINDS, 2))
def models(request: pytest.FixtureRequest) -> tuple[str, LoadedModel, Any]:
    return models_of(request.param)


def check_the_same_tokens(kind: str, target: LoadedModel, draft: Any, topk: int, pages: Sequence[int] = PAGES) -> None:
    """Cold, warm, behind prompts in chunks. A tree depends on no page, so as many drafts are right with every size:
    rows of large pages are computed when a tree grows, those of small ones after each step, and then moved."""
    found = []
    for page_size in pages:
        settings = {"speculative_config": config_of(kind, topk), "max_num_batched_tokens": 80, **BOUNDS}
        core = core_for(target, page_size=page_size, draft=draft, **settings)
        ungoverned(core)
        for params in ("greedy", "seeded"):
            for turn in ("cold", "warm"):
                assert run(core, PROMPTS, PARAMS[params], turn) == undrafted(target, page_size, params)
        check_some_right(core)
        assert core.speculator is not None
        found.append(plain(core.speculator.counted()))
    assert all(each == found[0] for each in found)
    assert found[0]["accepted_tokens_per_position"][1] > 0 and found[0]["draft_tokens"] > 5 * found[0]["drafts"]


@slow_unless_changed(*DRAFTS)
@covering(2, kind=KINDS, topk=[4, 2])
def test_the_same_tokens(kind: str, topk: int) -> None:
    check_the_same_tokens(*models_of(kind), topk, (1, 16) if topk == 4 else (4, 64))


@pytest.mark.slow
@pytest.mark.parametrize("topk", TREES)
def test_the_same_tokens_everywhere(models: tuple[str, LoadedModel, Any], topk: int) -> None:
    check_the_same_tokens(*models, topk, PAGES if models[0] != "eagle3" else (1, 16))


def check_pages_are_complete(kind: str, target: LoadedModel, draft: Any, page_size: int) -> None:
    """Each has what the draft computes of its tokens, whether steps draft or not."""
    config = config_of(kind, 4)
    if kind == "draft_model":
        test_draft_model.check_pages_are_complete(target, page_size, config)
    else:
        for governed in (False, True):
            test_draft_head.check_pages_are_complete(target, draft, config, page_size, governed=governed)


@slow_unless_changed(*DRAFTS)
@covering(kind=KINDS, page_size=[4, 1, 16])
def test_cached_pages_are_complete(kind: str, page_size: int) -> None:
    check_pages_are_complete(*models_of(kind), page_size)


def test_starved(models: tuple[str, LoadedModel, Any]) -> None:
    """Preempted with drafts, and evicted between."""
    kind, target, draft = models
    page_size = 4
    expected = undrafted(target, page_size, "seeded")
    settings = {"speculative_config": config_of(kind, 2), "max_num_batched_tokens": 17, "max_running_requests": 3}
    core = tight_core(target, num_tokens=180, page_size=page_size, draft=draft, **settings)
    ungoverned(core)
    for turn in range(2):
        assert run(core, PROMPTS, PARAMS["seeded"], f"turn{turn}") == expected
    found = core.statistics()
    assert found["evicted_pages"] > 0 and found["hit_tokens"] > 0
    check_some_right(core)


@slow_unless_changed(*DRAFTS)
@covering(page_size=PAGES, kind=KINDS)
def test_the_longest_request_in_a_pool_of_its_size(kind: str, page_size: int) -> None:
    """The rows of each tree are in what the plan reserves, to the last token."""
    kind, target, draft = models_of(kind)
    speculation = SpeculativeConfig.parse(config_of(kind, 4))
    reserve = get_alloc_reserve_per_decode(speculation, page_size)
    pages = pages_for(len(PROMPTS[0]) + 40 + reserve, page_size)
    settings = {"speculative_config": speculation, "max_running_requests": 2}
    core = core_for(target, draft=draft, pages=pages, page_size=page_size, **settings)
    params = replace(PARAMS["greedy"], max_tokens=core.plan.largest_request - len(PROMPTS[0]))
    expected = run(core_for(target, page_size=page_size, **BOUNDS), PROMPTS[:1], params)
    ungoverned(core)
    assert run(core, PROMPTS[:1], params) == expected
    assert core.speculator is not None
    found = plain(core.speculator.counted())
    assert found["drafts"] >= core.statistics()["steps"] - 2  # all but that of the prompt, and that of the last token


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_targets_with_states_are_refused(models: tuple[str, LoadedModel, Any], name: str) -> None:
    kind, _, draft = models
    if kind == "draft_model":
        with pytest.raises(UnsupportedModel, match="drafts that branch cannot be verified on the group"):
            core_for(case_of(name)[0], draft=draft, speculative_config=config_of(kind, 2), **BOUNDS)


@slow_unless_changed(*DRAFTS)
def test_a_target_with_windows(models: tuple[str, LoadedModel, Any]) -> None:
    """Beside pages of windows and of latents."""
    kind, _, draft = models
    if kind == "draft_model":
        for name in ("gemma3_text", "deepseek_v3"):
            target, expected = case_of(name)
            core = core_for(target, draft=draft, speculative_config=config_of(kind, 4), page_size=4, **BOUNDS)
            ungoverned(core)
            for turn in ("cold", "warm"):
                assert run(core, PROMPTS, GREEDY, turn) == expected
            check_some_right(core, accepted=False)

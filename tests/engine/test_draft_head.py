"""EAGLE heads on the pages of their targets: the same tokens, a rigged head whose drafts are all right, and no page
without what the head has computed."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from quire.engine.core import EngineCore
from quire.engine.device.device import plan_for
from quire.models.draft_head import LoadedHead, load_head
from quire.models.hf import LoadedModel
from quire.spec.events import Namespace
from quire.spec.ids import Tier
from tests.changes import DRAFTS, TIERS, slow_unless_changed
from tests.covering import covering
from tests.engine.running import core_for, run, tight_core
from tests.engine.test_draft_model import (
    BOUNDS,
    PAGES,
    PARAMS,
    STEPS,
    Sometimes,
    check_right,
    check_some_right,
    check_tiers,
    tiny_target,
    undrafted,
    ungoverned,
)
from tests.engine.test_hybrid_tokens import GREEDY, PROMPTS, case_of
from tests.tiny_heads import head_settings, head_tensors, save_head
from tests.tiny_models import build_tiny

KINDS: dict[str, dict[str, Any]] = {"eagle": {}, "eagle3": {"states": 3, "draft_vocab": 100}}


def config_of(kind: str) -> dict[str, Any]:
    model = {} if kind == "mtp" else {"model": "head"}
    return {"method": kind, "num_speculative_tokens": STEPS, **model}


def head_for(target: LoadedModel, kind: str, folder: Path, tensors: dict[str, Any] | None = None) -> LoadedHead:
    settings = head_settings(target.hidden_size, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 1]})
    found = tensors or head_tensors(target.hidden_size, **KINDS[kind])
    return load_head(str(save_head(folder, settings, found)), target, eagle3=kind == "eagle3")


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_target()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def head(kind: str, target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedHead:
    return head_for(target, kind, tmp_path_factory.mktemp(kind))


def bigram_target() -> LoadedModel:
    """Its layers add nothing: the next token follows from the last one alone."""
    model = build_tiny("llama_gqa")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            if name == "model.norm.weight":
                weight.fill_(1.0)
    return LoadedModel(model, name="bigrams", check=False)


def rigged_head(bigrams: LoadedModel, folder: Path) -> LoadedHead:
    """It passes the embedding on: what its target computes, but for the norm, which changes no order."""
    hidden = bigrams.hidden_size
    tensors = head_tensors(hidden)
    tensors["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), -1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"midlayer.{name}.weight"].zero_()
    return head_for(bigrams, "eagle", folder, tensors)


@pytest.fixture(scope="module")
def bigrams() -> LoadedModel:
    return bigram_target()


@pytest.fixture(scope="module")
def rigged(bigrams: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedHead:
    return rigged_head(bigrams, tmp_path_factory.mktemp("rigged"))


def check_always_right(bigrams: LoadedModel, rigged: LoadedHead, page_size: int) -> None:
    """Cold, warm, and behind prompts in chunks."""
    expected = undrafted(bigrams, page_size, "greedy")
    settings = {"draft": rigged, "speculative_config": config_of("eagle"), "max_num_batched_tokens": 23}
    core = core_for(bigrams, page_size=page_size, **settings, **BOUNDS)
    ungoverned(core)
    for turn in ("cold", "warm"):
        assert run(core, PROMPTS, PARAMS["greedy"], turn) == expected
    check_right(core)


@slow_unless_changed(*DRAFTS)
@pytest.mark.parametrize("page_size", PAGES)
def test_a_rigged_head_is_always_right(bigrams: LoadedModel, rigged: LoadedHead, page_size: int) -> None:
    check_always_right(bigrams, rigged, page_size)


@covering(1, page_size=PAGES, params=sorted(PARAMS))
def test_the_same_tokens(target: LoadedModel, head: LoadedHead, kind: str, page_size: int, params: str) -> None:
    """Of random heads few drafts are right."""
    expected = undrafted(target, page_size, params)
    core = core_for(target, page_size=page_size, draft=head, speculative_config=config_of(kind), **BOUNDS)
    ungoverned(core)
    for turn in ("cold", "warm"):
        assert run(core, PROMPTS, PARAMS[params], turn) == expected
    check_some_right(core, accepted=False)


@slow_unless_changed(*DRAFTS)
@covering(name=["gemma3_text", "falcon_h1", "qwen3_next", "deepseek_v3", "llama4_text"], kind=KINDS)
def test_targets_of_other_kinds(name: str, kind: str, tmp_path: Path) -> None:
    """Windows, chunks, states and latents beside the pages that the head shares."""
    model, expected = case_of(name)
    settings = {"draft": head_for(model, kind, tmp_path), "speculative_config": config_of(kind), "page_size": 4}
    core = core_for(model, **settings, **BOUNDS)
    ungoverned(core)
    for turn in ("cold", "warm"):
        assert run(core, PROMPTS, GREEDY, turn) == expected
    check_some_right(core, accepted=False)


def keys_of(core: EngineCore, tokens: list[int]) -> torch.Tensor:
    """Cached keys of the head, `[T, kv_heads * dim]`, of the tokens that a match finds."""
    pages = core.cache.tree.match(Namespace(), np.array(tokens, dtype=np.int32)).pages
    frames = core.cache.parts.frames.of(Tier.DEVICE, 0).frame[pages]
    drafts = len(core.model.spec.calls)
    for field, tensor in core.pools[0].tensors:
        if field.name == "k" and drafts in field.layers:
            found = tensor[field.layers.index(drafts), frames]
            return found.reshape(found.shape[0] * found.shape[1], -1)
    raise AssertionError("the head keeps no keys")


def check_pages_are_complete(
    target: LoadedModel, head: LoadedHead, config: dict[str, Any], page_size: int, *, governed: bool
) -> None:
    """The head's keys of each cached page are those that a prompt of all these tokens leaves."""
    settings = {"draft": head, "speculative_config": config}
    core = core_for(target, page_size=page_size, max_num_batched_tokens=23, **settings, **BOUNDS)
    assert core.speculator is not None
    core.speculator._governor = Sometimes() if governed else None  # type: ignore[assignment]
    prompt = PROMPTS[0]
    (output,) = run(core, [prompt], PARAMS["greedy"])
    assert core.speculator.counted().drafts > 0
    tokens = [*prompt, *output]
    found = keys_of(core, tokens)
    assert len(found) >= (len(tokens) - 1) // page_size * page_size
    whole = core_for(target, page_size=page_size, **settings, **BOUNDS)
    run(whole, [[*tokens, 0]], PARAMS["greedy"])
    least = min(len(found), len(tokens) - 1)
    assert least > len(prompt)
    torch.testing.assert_close(found[:least], keys_of(whole, tokens)[:least], atol=1e-4, rtol=1e-4)


def check_heads(page_size: int) -> None:
    """A random head fills the pages, and a rigged one is right."""
    with TemporaryDirectory() as folder:
        target, bigrams = tiny_target(), bigram_target()
        head = head_for(target, "eagle", Path(folder, "random"))
        check_pages_are_complete(target, head, config_of("eagle"), page_size, governed=False)
        check_always_right(bigrams, rigged_head(bigrams, Path(folder, "rigged")), page_size)


@slow_unless_changed(*DRAFTS)
@covering(page_size=[1, 4, 16], governed=[False, True])
def test_cached_pages_are_complete(
    target: LoadedModel, head: LoadedHead, kind: str, page_size: int, governed: bool
) -> None:
    """Whether steps draft or not."""
    check_pages_are_complete(target, head, config_of(kind), page_size, governed=governed)


@slow_unless_changed(*DRAFTS)
def test_starved(target: LoadedModel, head: LoadedHead, kind: str) -> None:
    """Preempted with drafts, and evicted between."""
    expected = undrafted(target, 4, "seeded")
    core = tight_core(
        target,
        num_tokens=132,
        page_size=4,
        draft=head,
        max_num_batched_tokens=17,
        max_running_requests=3,
        speculative_config=config_of(kind),
    )
    ungoverned(core)
    for turn in range(2):
        assert run(core, PROMPTS, PARAMS["seeded"], f"turn{turn}") == expected
    found = core.statistics()
    assert found["preemptions"] > 0 and found["evicted_pages"] > 0 and found["hit_tokens"] > 0


@slow_unless_changed(*DRAFTS, *TIERS)
def test_tiers_move_both(bigrams: LoadedModel, rigged: LoadedHead) -> None:
    check_tiers(bigrams, rigged, config_of("eagle"), PARAMS["greedy"], 4)


@slow_unless_changed(*DRAFTS)
def test_as_much_is_reused_as_without(target: LoadedModel, head: LoadedHead, kind: str) -> None:
    """Conversations that go on: hits are those of an engine without drafts."""
    hits = []
    for more in ({}, {"draft": head, "speculative_config": config_of(kind)}):
        core = core_for(target, page_size=4, **BOUNDS, **more)
        prompts = PROMPTS
        for turn in range(3):
            outputs = run(core, prompts, PARAMS["greedy"], f"turn{turn}")
            prompts = [[*prompt, *output, 7, 8, 9] for prompt, output in zip(prompts, outputs, strict=True)]
        hits.append(core.statistics()["hit_tokens"])
    assert hits[1] >= 0.99 * hits[0] > 0


@pytest.mark.parametrize("page_size", PAGES)
def test_its_features_are_planned(target: LoadedModel, head: LoadedHead, kind: str, page_size: int) -> None:
    """What is kept between steps is what the plan says, and comes out of memory whose size nobody gave."""
    settings = {"draft": head, "speculative_config": config_of(kind), "page_size": page_size}
    core = core_for(target, **settings)
    vectors = page_size + STEPS + 1 + 1  # a page, the drafts with the token before them, and one
    expected = 2 * core.plan.max_requests * vectors * target.hidden_size * 4
    assert core.plan.feature_bytes == expected == core.capacity.memory.feature_bytes
    config = core.config.model_copy(update={"kv_memory": None, "max_running_requests": 4096})
    assert core.draft is not None
    with patch("quire.engine.device.device.free_bytes", return_value=2**28):
        plan = plan_for(config, core.device, core.model.spec, core.draft.spec)
    assert plan.kv_bytes + plan.memory.feature_bytes == 2**28

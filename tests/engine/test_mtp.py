"""Prediction layers on the pages of their targets: the same tokens, drafts that transformers' own layer makes, and a
rigged layer whose drafts are all right."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from quire.client.llm import LLM
from quire.engine.core import EngineCore
from quire.errors import UnsupportedModel
from quire.models.draft_head import LoadedHead
from quire.models.hf import LoadedModel, load_model
from quire.models.mtp import load_mtp
from quire.spec.kv_format import plain_format
from quire.speculative.drafter import Drafting, Drafts
from tests.changes import DRAFTS, TIERS, slow_unless_changed
from tests.covering import covering
from tests.engine.running import core_for, run, tight_core
from tests.engine.test_draft_head import check_pages_are_complete
from tests.engine.test_draft_model import BOUNDS, PARAMS, STEPS, check_right, check_some_right, check_tiers, ungoverned
from tests.engine.test_hybrid_tokens import PROMPTS
from tests.engine.test_rejection import noisy
from tests.tiny_mtp import PREDICTING, build_predicting, save_predicting

MTP = {"method": "mtp", "num_speculative_tokens": STEPS}
TREE = {"method": "mtp", "num_steps": 3, "topk": 4, "num_draft_tokens": 10}
NAMES = sorted(PREDICTING)
SHORT = ("deepseek_v3", "qwen3_5_text")
BRANCHING = ("deepseek_v3", "glm4_moe", "mellum")


@cache
def case_of(name: str) -> tuple[LoadedModel, LoadedHead]:
    """A target and its layer, as they are loaded from a checkpoint."""
    with TemporaryDirectory() as folder:
        target = load_model(save_predicting(Path(folder), name, *build_predicting(name)))
        return target, load_mtp(target)


def rigged(folder: Path, name: str) -> str:
    """A checkpoint whose next token follows from the last one alone, and its layer knows it: no layer adds anything,
    and the prediction layer passes the embedding on."""
    model, mtp = build_predicting(name)
    with torch.no_grad():
        for part in (model, mtp.layers):
            for key, weight in part.named_parameters():
                if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                    weight.zero_()
        norm, layer = model.model.norm.weight, mtp.layers[0]
        for weight in (norm, layer.enorm.weight, layer.post_norm.weight):
            weight.copy_(norm)
        layer.enorm.weight.fill_(0.0 if name.startswith("qwen") else 1.0)  # where the norm adds one to its weight
        hidden = len(norm)
        layer.eh_proj.weight.copy_(torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), -1))
    return save_predicting(folder, name, model, mtp)


@covering(1, name=NAMES, page_size=[1, 16])
def test_the_same_tokens(name: str, page_size: int) -> None:
    """Of random layers few drafts are right. Cold, warm, and behind prompts in chunks."""
    target, head = case_of(name)
    plain = core_for(target, page_size=page_size, **BOUNDS)
    settings = {"draft": head, "speculative_config": MTP, "max_num_batched_tokens": 23}
    core = core_for(target, page_size=page_size, **settings, **BOUNDS)
    ungoverned(core)
    for params in ("greedy", "seeded"):
        assert run(core, PROMPTS, PARAMS[params], params) == run(plain, PROMPTS, PARAMS[params], params)
    assert core.statistics()["hit_tokens"] > 0
    check_some_right(core, accepted=False)


@slow_unless_changed(*DRAFTS)
@covering(1, name=BRANCHING, page_size=[1, 4, 16])
def test_trees(tmp_path: Path, name: str, page_size: int) -> None:
    """Of a layer that is often right: rows that were right are moved down, those of the layer too."""
    target = load_model(rigged(tmp_path, name))
    head = load_mtp(target)
    noisy(head._head, 0.1)
    plain = core_for(target, page_size=page_size, **BOUNDS)
    settings = {"draft": head, "speculative_config": TREE, "max_num_batched_tokens": 80}
    core = core_for(target, page_size=page_size, **settings, **BOUNDS)
    ungoverned(core)
    for params in ("greedy", "seeded"):
        expected = run(plain, PROMPTS, PARAMS[params], params)
        for turn in ("cold", "warm"):
            assert run(core, PROMPTS, PARAMS[params], turn) == expected
    check_some_right(core)
    assert core.speculator is not None
    assert core.speculator.counted().accepted_tokens_per_position[1] > 0


def test_trees_on_a_model_with_states_are_refused() -> None:
    target, head = case_of("qwen3_next")
    with pytest.raises(UnsupportedModel, match="drafts that branch cannot be verified on the group 'state'"):
        core_for(target, page_size=16, draft=head, speculative_config=TREE, **BOUNDS)


@slow_unless_changed(*DRAFTS)
@covering(page_size=[1, 4], governed=[False, True])
def test_cached_pages_of_trees_are_complete(page_size: int, governed: bool) -> None:
    check_pages_are_complete(*case_of("mellum"), TREE, page_size, governed=governed)


@slow_unless_changed(*DRAFTS)
@covering(2, name=NAMES, page_size=[1, 16])
def test_a_rigged_layer_is_always_right(tmp_path: Path, name: str, page_size: int) -> None:
    """Loaded by the engine itself, from the checkpoint of its target."""
    target = load_model(rigged(tmp_path, name))
    expected = run(core_for(target, page_size=page_size, **BOUNDS), PROMPTS, PARAMS["greedy"])
    core = core_for(target, page_size=page_size, speculative_config=MTP, max_num_batched_tokens=23, **BOUNDS)
    ungoverned(core)
    for turn in ("cold", "warm"):
        assert run(core, PROMPTS, PARAMS["greedy"], turn) == expected
    check_right(core)


def chain_of(model: Any, mtp: MtpModel, tokens: list[int], depth: int) -> list[int]:
    """The likeliest drafts behind these tokens, by transformers' model and layer, computed from the beginning."""
    hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
    following, found = tokens[1:], []
    for _ in range(depth):
        embeddings = model.get_input_embeddings()(torch.tensor([following]))
        positions = torch.arange(1, 1 + len(following))[None]
        cache = MtpCache(config=model.config.get_mtp_config())
        last: Tensor = mtp.forward_layer(0, hidden, positions, cache, inputs_embeds=embeddings)[:, -1:]
        found.append(int(mtp._project_to_logits(last).argmax()))
        hidden, following = torch.cat((hidden, last), 1), [*following, found[-1]]
    return found


def check_drafts(name: str) -> None:
    """Every draft of greedy requests, cold and behind cached pages."""
    target, head = case_of(name)
    core = core_for(target, page_size=4, draft=head, speculative_config=MTP, max_num_batched_tokens=23, **BOUNDS)
    ungoverned(core)
    assert core.speculator is not None
    drafter, proposed = core.speculator.drafter, []
    propose = drafter.propose

    def noted(drafting: Drafting) -> Drafts:
        texts = [
            drafting.tokens[row, :known].tolist()
            for row, known in zip(drafting.batch.rows, drafting.known, strict=True)
        ]
        drafts = propose(drafting)
        proposed.extend((t, d[:n].tolist()) for t, d, n in zip(texts, drafts.tokens, drafts.counts, strict=True) if n)
        return drafts

    drafter.propose = noted  # type: ignore[method-assign]
    for turn in ("cold", "warm"):
        run(core, PROMPTS[:2], PARAMS["greedy"], turn)
    assert core.statistics()["hit_tokens"] > 0 and len(proposed) > 40
    model, mtp = build_predicting(name)
    with torch.no_grad():
        for tokens, drafts in proposed[::7]:
            assert drafts == chain_of(model, mtp, tokens, len(drafts))
    assert len({tuple(drafts) for _, drafts in proposed}) > 10


@slow_unless_changed(*DRAFTS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in NAMES]
)
def test_drafts_are_those_of_transformers(name: str) -> None:
    check_drafts(name)


@slow_unless_changed(*DRAFTS)
@covering(page_size=[1, 16], governed=[False, True])
def test_cached_pages_are_complete(page_size: int, governed: bool) -> None:
    """Whether steps draft or not."""
    check_pages_are_complete(*case_of("glm4_moe"), MTP, page_size, governed=governed)


@pytest.mark.slow
def test_starved() -> None:
    """Preempted with drafts, and evicted between."""
    target, head = case_of("deepseek_v3")
    expected = run(core_for(target, page_size=4, **BOUNDS), PROMPTS, PARAMS["seeded"])
    core = tight_core(
        target,
        num_tokens=132,
        page_size=4,
        draft=head,
        max_num_batched_tokens=17,
        max_running_requests=3,
        speculative_config=MTP,
    )
    ungoverned(core)
    for turn in range(2):
        assert run(core, PROMPTS, PARAMS["seeded"], f"turn{turn}") == expected
    assert core.statistics()["preemptions"] > 0


@slow_unless_changed(*DRAFTS, *TIERS)
def test_tiers_move_both(tmp_path: Path) -> None:
    """Latents of the model and of its layer."""
    target = load_model(rigged(tmp_path, "deepseek_v3"))
    check_tiers(target, load_mtp(target), MTP, PARAMS["greedy"], 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_the_layer_too(name: str) -> None:
    """The plan of the engine, and the one of the configuration alone, which the engine checks before it loads."""
    target, head = case_of(name)
    core = core_for(target, page_size=4, draft=head, speculative_config=MTP, **BOUNDS)
    plain = core_for(target, page_size=4, **BOUNDS)
    [call], kept = head.spec.layers[0], plain_format(target.spec.dtype)
    own = sum(int(np.prod(part.shape)) * 4 for part in call.parts(kept, target.spec.dtype))
    assert core.plan.groups[0].layout.bytes_per_frame - plain.plan.groups[0].layout.bytes_per_frame == 4 * own


@slow_unless_changed(*DRAFTS)
def test_from_python(tmp_path: Path) -> None:
    """By the names of vLLM, without a path: the layer is that of the model."""
    folder = rigged(tmp_path, "deepseek_v3")
    settings: dict[str, Any] = {"model": folder, "skip_tokenizer_init": True, "max_model_len": 128, "kv_memory": "8MiB"}
    given = {"method": "deepseek_mtp", "num_speculative_tokens": 2}
    llm = LLM(speculative_config=given, **settings)
    (output,) = llm.generate([[5, 6, 7]], PARAMS["greedy"])
    found = llm.statistics()["speculation"]
    assert len(output.outputs[0].token_ids) == PARAMS["greedy"].max_tokens and found["draft_tokens"] > 0
    assert isinstance(llm.engine, EngineCore) and isinstance(llm.engine.draft, LoadedHead)

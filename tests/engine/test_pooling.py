"""Embeddings and scores equal transformers' own, whatever is cached, chunked, overlapped or evicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from quire.client.llm import LLM
from quire.client.pooled import POOLED
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, TokenOutput
from quire.errors import InvalidInput, UnsupportedModel
from quire.models.hf import LoadedModel, load_model
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.pooling import Pooling, Vectors
from tests.engine.running import core_for, shared_prompts
from tests.engine.test_prompt_logprobs import outputs_of
from tests.tiny_models import VOCAB_SIZE, save_tiny
from tests.tiny_pooling import save_embedder, save_scorer, set_mode

PROMPTS = shared_prompts(5, shared=37, tails=(3, 20, 11, 1, 27), vocabulary=VOCAB_SIZE)
DIFFERENCE = 2e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str, kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        return save_embedder(name, folder) if kind == "embedder" else save_scorer(name, folder)

    return made


@torch.inference_mode()
def wanted_of(folder: Path, kind: str, prompts: Sequence[Sequence[int]]) -> Vectors:
    """By transformers: the last hidden states, or the logits."""
    model = (AutoModel if kind == "embedder" else AutoModelForSequenceClassification).from_pretrained(folder)
    outs = [model(torch.tensor([prompt])) for prompt in prompts]
    found = [out.last_hidden_state[0, -1] if kind == "embedder" else out.logits[0] for out in outs]
    return torch.stack(found).float().numpy()


def pooled(core: EngineCore, prompts: Sequence[Sequence[int]], name: str = "r", **more: Any) -> Vectors:
    """What the engine reports of each, once and before the token."""
    found = outputs_of(core, prompts, [POOLED] * len(prompts), name, **more)
    for outputs in found.values():
        assert [each.pooled is not None for each in outputs if not each.explanation] == [True, False]
    reported = [next(each.pooled for each in outputs if each.pooled) for outputs in found.values()]
    return np.array([np.frombuffer(each, dtype=np.float32) for each in reported])


def asking(name: str, prompt: Sequence[int]) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=np.array(prompt, dtype=np.int32).tobytes(), params=POOLED)


@cache
def loaded(folder: Path, *, pack: bool = True) -> LoadedModel:
    return load_model(str(folder), pack=pack)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3", "embedder"), ("gemma2", "embedder"), ("gpt2", "embedder"), ("qwen3", "scorer"), ("llama_gqa", "scorer")],
)
def test_cold_and_warm(folders: Any, name: str, kind: str, pack: bool) -> None:
    """All at once, in chunks of prompts, with overlap; then from the cache, also the whole prompt of some."""
    folder = folders(name, kind)
    wanted = wanted_of(folder, kind, PROMPTS)
    for overlap, chunk in ((False, 2048), (True, 23)):
        bounds = {"max_model_len": 128, "max_running_requests": 8}
        core = core_for(loaded(folder, pack=pack), page_size=4, max_num_batched_tokens=chunk, overlap=overlap, **bounds)
        for turn in ("cold", "warm", "again"):
            np.testing.assert_allclose(pooled(core, PROMPTS, turn), wanted, atol=DIFFERENCE)
        statistics = core.statistics()
        assert statistics["hit_tokens"] > 2 * 37 * len(PROMPTS) and statistics["running_requests"] == 0


def test_after_an_eviction(folders: Any) -> None:
    folder = folders("qwen3", "embedder")
    core = core_for(loaded(folder), pages=6, page_size=16)
    wanted = wanted_of(folder, "embedder", PROMPTS)
    for at in (1, 1, 4, 2, 1):
        np.testing.assert_allclose(pooled(core, [PROMPTS[at]], f"{at}")[0], wanted[at], atol=DIFFERENCE)
        pooled(core, [list(range(1, 80))], "other")
    assert core.statistics()["evicted_pages"] > 0


@pytest.mark.parametrize("at", [0, 3, 5])
def test_put_back_in_the_middle_of_a_prompt(folders: Any, at: int) -> None:
    folder = folders("qwen3", "embedder")
    core = core_for(loaded(folder), page_size=4, max_num_batched_tokens=10, overlap=True)
    [prompt] = shared_prompts(3, shared=1, tails=(60,), vocabulary=VOCAB_SIZE)
    core.add(asking("r", prompt))
    outputs: list[TokenOutput] = []
    for step in count():
        if not core.has_work():
            break
        outputs += core.step()
        if step == at:
            [request] = core.scheduler.requests
            core.scheduler._preempt(request)
    [found] = [each.pooled for each in outputs if each.pooled is not None]
    [wanted] = wanted_of(folder, "embedder", [prompt])
    np.testing.assert_allclose(np.frombuffer(found, dtype=np.float32), wanted, atol=DIFFERENCE)
    assert core.statistics()["preemptions"] == 1


def test_another_prompt_by_the_name_of_one_that_was_aborted(folders: Any) -> None:
    """While the step of the first one's last token is in flight."""
    folder = folders("qwen3", "embedder")
    core = core_for(loaded(folder), page_size=4, overlap=True)
    core.add(asking("r", PROMPTS[0]))
    assert not any(each.pooled for each in core.step())
    core.abort("r")
    core.add(asking("r", PROMPTS[1]))
    [found] = [each.pooled for _ in range(4) for each in core.step() if each.pooled is not None]
    [wanted] = wanted_of(folder, "embedder", PROMPTS[1:2])
    np.testing.assert_allclose(np.frombuffer(found, dtype=np.float32), wanted, atol=DIFFERENCE)


def test_salts_share_nothing(folders: Any) -> None:
    core = core_for(loaded(folders("qwen3", "embedder")), page_size=4)
    pooled(core, PROMPTS[:1], "a", salt="one")
    pooled(core, PROMPTS[:1], "b", salt="two")
    assert core.statistics()["hit_tokens"] == 0


def test_a_checkpoint_without_an_output_layer_holds_none(folders: Any) -> None:
    """Its weights are those that transformers loads, and the embeddings stand for the layer."""
    model = loaded(folders("qwen3", "embedder"), pack=False)
    assert model.weight_bytes == sum(4 * each.numel() for each in AutoModel.from_pretrained(model.name).parameters())
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight


def test_text_is_refused_by_name(folders: Any) -> None:
    for kind, gives in (("embedder", "embeddings"), ("scorer", "scores")):
        core = core_for(loaded(folders("qwen3", kind)))
        with pytest.raises(UnsupportedModel, match=f"was made for {gives}, and generates no text"):
            outputs_of(core, PROMPTS[:1], [SamplingParams()])
        with pytest.raises(InvalidInput, match="session"):
            outputs_of(core, PROMPTS[:1], [POOLED], session_id="s")
        assert core.statistics()["refused_requests"] == 2 and not core.has_work()


def test_embeddings_of_a_model_of_text_are_refused(tmp_path: Path) -> None:
    core = core_for(load_model(str(save_tiny("qwen3", tmp_path))))
    with pytest.raises(UnsupportedModel, match="generates text"):
        outputs_of(core, PROMPTS[:1], [POOLED])
    assert "pooling" not in core.facts


@pytest.mark.parametrize("normalises", [True, False])
def test_in_python(tmp_path: Path, normalises: bool) -> None:
    folder = save_embedder("qwen3", tmp_path, normalises=normalises, matryoshka_dimensions=[16, 32])
    wanted = wanted_of(folder, "embedder", PROMPTS)
    settings = {"kv_memory": "1MiB", "skip_tokenizer_init": True, "show_plan": False}
    with LLM(str(folder), **settings) as llm:
        for dimensions in (None, 32, 64):
            found = llm.embed(PROMPTS, dimensions=dimensions)
            expected = wanted[:, :dimensions]
            if normalises:
                expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
            np.testing.assert_allclose(found, expected, atol=DIFFERENCE)
        assert llm.statistics()["hit_tokens"] > 0
        with pytest.raises(InvalidInput, match=r"dimensions is 20.*64, and may have 16, 32"):
            llm.embed(PROMPTS, dimensions=20)
        with pytest.raises(UnsupportedModel, match="generates no text"):
            llm.generate([PROMPTS[0]])


def test_scores_of_embeddings_and_of_pairs() -> None:
    pairs = [("a", "b"), ("a", "c"), ("b", "b")]
    embeds = Pooling(gives="embeddings", size=2)
    assert embeds.prompts(pairs) == ["a", "b", "c"]
    found = embeds.scores(pairs, np.array([[1, 0], [2, 2], [0, 3]], dtype=np.float32))
    np.testing.assert_allclose(found, [0.5**0.5, 0, 1], atol=1e-6)
    scores = Pooling(gives="scores", size=1, has_sigmoid=True)
    assert scores.prompts(pairs) == ["ab", "ac", "bb"]
    logits = np.array([[0], [-200], [2]], dtype=np.float32)
    np.testing.assert_allclose(scores.scores(pairs, logits), [0.5, 0, 0.880797], atol=1e-6)
    np.testing.assert_allclose(scores.scores(pairs, logits, activation=False), [0, -200, 2])


class TestRefused:
    """What a folder says that would be computed wrongly."""

    def refusal(self, folder: Path) -> str:
        with pytest.raises(UnsupportedModel) as caught:
            load_model(str(folder))
        return str(caught.value)

    def test_another_mode(self, tmp_path: Path) -> None:
        set_mode(save_embedder("qwen3", tmp_path), "mean_tokens")
        assert "pools by mean_tokens" in self.refusal(tmp_path)

    def test_another_module(self, tmp_path: Path) -> None:
        path = save_embedder("qwen3", tmp_path) / "modules.json"
        path.write_text(path.read_text().replace("Normalize", "Dense"))
        assert "Transformer, Pooling, Dense" in self.refusal(tmp_path)

    def test_both_directions(self, tmp_path: Path) -> None:
        save_embedder("qwen3", tmp_path, is_causal=False)
        assert "in both directions" in self.refusal(tmp_path)

    def test_several_labels(self, tmp_path: Path) -> None:
        save_scorer("qwen3", tmp_path, num_labels=3)
        assert "has 3 labels" in self.refusal(tmp_path)

    def test_another_activation(self, tmp_path: Path) -> None:
        activation = {"activation_fn": "torch.nn.modules.activation.Tanh"}
        save_scorer("qwen3", tmp_path, sentence_transformers=activation)
        assert "by Tanh" in self.refusal(tmp_path)

    def test_modules_without_pooling_say_nothing(self, tmp_path: Path) -> None:
        """Such as those of a reranker that reads logits."""
        save_tiny("qwen3", tmp_path)
        (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Transformer"}, {"type": "a.LogitScore"}]))
        assert load_model(str(tmp_path)).pooler is None

"""Prediction layers: read from checkpoints as they are published, and on pages they compute what transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache

from quire.engine.before_load import check_model
from quire.engine.config import engine_config
from quire.errors import InvalidInput, ModelLoadError, QuireError, UnsupportedModel
from quire.kernels.batch import PagedBatch
from quire.memory.pool import Pool
from quire.models.draft_head import LoadedHead
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel, load_model
from quire.models.mtp import load_mtp
from tests.tiny_models import VOCAB_SIZE, save_tiny
from tests.tiny_mtp import PREDICTING, build_predicting, save_predicting

LENGTH = 21
STEPS = ((0, 9), (9, 10), (10, 17), (17, 18), (18, LENGTH))
CONFIG = {"method": "mtp", "num_speculative_tokens": 3}


def loaded(folder: Path, name: str, **more: Any) -> tuple[LoadedModel, LoadedHead]:
    target = load_model(save_predicting(folder, name, *build_predicting(name), **more))
    return target, load_mtp(target)


def on_pages(head: LoadedHead, following: torch.Tensor, features: torch.Tensor, page_size: int) -> torch.Tensor:
    """Features of all positions, in steps, on scattered frames that begin as NaN."""
    (group,) = head.spec.groups(page_size)
    num_frames = LENGTH // page_size + 1
    pool = Pool(group.layout, num_frames)
    for _, tensor in pool.tensors:
        tensor.fill_(float("nan"))
    frames = np.random.default_rng(1).permutation(num_frames).astype(np.int32)[None]
    found = []
    for start, stop in STEPS:
        batch = PagedBatch.of(frames, np.array([start]), np.array([stop]), page_size)
        running = RunningForward((pool,), (batch,))
        found.append(head.run(running, following[start:stop], features[start:stop], torch.arange(start, stop)))
    return torch.cat(found)


@pytest.mark.parametrize("name", PREDICTING)
def test_on_pages_it_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    """The layer's outputs and its draft, from the hidden states of transformers' own forward pass."""
    plain, mtp = build_predicting(name)
    _, head = loaded(tmp_path, name)
    tokens = torch.randint(VOCAB_SIZE, (1, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        hidden = plain(tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, LENGTH + 1)[None]
        cache = MtpCache(config=plain.config.get_mtp_config())
        embeddings = plain.get_input_embeddings()(tokens[:, 1:])
        expected = mtp.forward_layer(0, hidden, positions, cache, inputs_embeds=embeddings)[0]
        cache = MtpCache(config=plain.config.get_mtp_config())
        draft, logits, _ = mtp(tokens[:, 1:], hidden, None, positions, cache)
    for page_size in (1, 4, 16):
        found = on_pages(head, tokens[0, 1:], hidden[0], page_size)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)
        torch.testing.assert_close(head.logits(found[-1:]), logits[0], atol=2e-4, rtol=2e-4)
        assert int(head.logits(found[-1:]).argmax()) == int(draft)


@pytest.mark.parametrize("name", PREDICTING)
def test_it_is_planned_as_it_is_loaded(tmp_path: Path, name: str) -> None:
    """The layer of the configuration stores what the loaded one stores, and weighs as much without the embeddings."""
    target, head = loaded(tmp_path, name)
    _, mtp = build_predicting(name)
    assert all(layer == head.spec.layers[0] for layer in target.spec.drafts)
    assert head.weight_bytes == sum(each.nbytes for each in mtp.layers.state_dict().values())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model.layers.3.eh_proj.weight": None}, r"lacks 'layers\.0\.eh_proj\.weight'"),
        ({"model.layers.3.eh_proj.weight": torch.zeros(64, 64)}, r"is \[64, 64\], and must be \[64, 128\]"),
        ({"model.layers.3.self_attn.q_proj.scale": torch.zeros(4)}, "q_proj.scale', which is not computed"),
        ({"model.layers.3.mlp.experts.1.down_proj.weight": torch.zeros(64, 31)}, "down_proj' cannot be made"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        loaded(tmp_path, "glm4_moe", changed=changed)


def test_a_checkpoint_with_the_layer_passes_the_check_before_it_is_loaded(tmp_path: Path) -> None:
    folder = save_predicting(tmp_path, "qwen3_next", *build_predicting("qwen3_next"))
    check_model(engine_config(model=folder, speculative_config=CONFIG, skip_tokenizer_init=True))


def test_the_layer_of_a_model_inside_of_a_wrapper_is_read(tmp_path: Path) -> None:
    """Qwen3.5 as it is published: the language model is a part of another, and its layer is not."""
    model, mtp = build_predicting("qwen3_5_text")
    folder = save_predicting(tmp_path, "qwen3_5_text", model, mtp)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {key.replace("model.", "model.language_model."): tensor for key, tensor in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    check_model(engine_config(model=folder, speculative_config=CONFIG, skip_tokenizer_init=True))
    found, wanted = load_mtp(load_model(folder))._head.state_dict(), mtp.layers[0].state_dict()
    assert all(torch.equal(found[f"layer.{key}"], tensor) for key, tensor in wanted.items())


def test_of_several_layers_the_first_is_read(tmp_path: Path) -> None:
    both = build_predicting("glm4_moe", num_nextn_predict_layers=2)
    others = {"model.layers.4.eh_proj.weight": torch.zeros(2), "model.layers.4.enorm.weight": torch.zeros(2)}
    target = load_model(save_predicting(tmp_path, "glm4_moe", *both, changed=others))
    assert len(target.spec.drafts) == 2 and len(load_mtp(target).spec.layers) == 1


def test_copies_of_what_the_model_has_are_skipped(tmp_path: Path) -> None:
    copies = {f"model.layers.3.{name}.weight": torch.zeros(2) for name in ("embed_tokens", "shared_head.head")}
    loaded(tmp_path, "deepseek_v3", changed=copies)


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    model, _ = build_predicting("glm4_moe")
    model.save_pretrained(tmp_path)
    target = load_model(str(tmp_path))
    with pytest.raises(ModelLoadError, match="no weights of a prediction layer"):
        check_model(engine_config(model=target.name, speculative_config=CONFIG, skip_tokenizer_init=True))
    with pytest.raises(ModelLoadError, match=r"no weights of a prediction layer.*'mtp\.\*' or 'model\.layers\.3\.\*'"):
        load_mtp(target)


def test_a_layer_of_another_kind_than_the_last_is_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention"]
    both = build_predicting("qwen3_next", num_hidden_layers=2, layer_types=kinds)
    target = load_model(save_predicting(tmp_path, "qwen3_next", *both))
    with pytest.raises(UnsupportedModel, match="the model's last layer is no attention"):
        load_mtp(target)


def test_a_type_without_prediction_layers_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = str(save_tiny("llama_gqa", tmp_path))
    target = load_model(folder)
    with pytest.raises(UnsupportedModel, match="of type 'llama', of which transformers computes no prediction layers"):
        check_model(engine_config(model=folder, speculative_config=CONFIG, skip_tokenizer_init=True))
    with pytest.raises(UnsupportedModel, match="llama"):
        load_mtp(target)


def test_another_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="mtp"):
        engine_config(speculative_config=json.dumps(CONFIG | {"model": "another"}))


def test_a_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    target = load_model(save_predicting(tmp_path, "glm4_moe", *build_predicting("glm4_moe")))
    (tmp_path / "more.safetensors").write_bytes(b"\x00" * 16)
    with pytest.raises(QuireError, match="prediction layer"):
        load_mtp(target)

"""Every architecture: logits of a mixed, paged, chunked schedule equal those of the plain model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.errors import ModelCheckFailed
from quire.kernels.fields import PagedField
from quire.memory.pool import Pool
from quire.models import attention
from quire.models.hf import load_model
from tests.changes import MODELS, in_turns
from tests.covering import covering
from tests.models.schedule import Schedule
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, build_tiny, save_tiny


@pytest.mark.parametrize("architecture", in_turns(ARCHITECTURES, 3, *MODELS))
def test_mixed_schedule_equals_the_plain_model(architecture, tmp_path):
    model = load_model(str(save_tiny(architecture, tmp_path)))
    reference = build_tiny(architecture, attn_implementation="eager")
    assert Schedule().largest_error(model, reference) < 1e-4


@covering(architecture=["llama_gqa", "gemma2", "gpt_oss", "qwen3_moe"], dtype=["bfloat16", "float16"])
def test_half_precision_passes_its_check(architecture, dtype, tmp_path):
    model = load_model(str(save_tiny(architecture, tmp_path)), dtype=dtype)
    assert str(model.spec.dtype) == dtype


@pytest.mark.parametrize("architecture", ["llama_gqa", "opt"])
def test_only_the_asked_rows_get_logits(architecture, tmp_path):
    model = load_model(str(save_tiny(architecture, tmp_path)))
    schedule = Schedule()
    frames = schedule.frames(model)
    step, asked = {"a": (0, 20), "b": (0, 9)}, torch.tensor([19, 28])
    everything = schedule.run(model, frames, step)
    logits = schedule.run(model, frames, step, asked)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, everything[asked], atol=1e-5)
    assert schedule.run(model, frames, step, asked[:0]).shape == (0, VOCAB_SIZE)


BREAKS = {
    "scale": ("llama_gqa", lambda terms: replace(terms, scale=terms.scale * 1.2)),
    "window": ("mistral", lambda terms: replace(terms, window=0)),
    "wrong window": ("mistral", lambda terms: replace(terms, window=terms.window + 1)),
    "softcap": ("gemma2", lambda terms: replace(terms, softcap=None)),
    "sinks": ("gpt_oss", lambda terms: replace(terms, sinks=None)),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_the_check_at_load_notices(broken, tmp_path, monkeypatch):
    architecture, change = BREAKS[broken]
    folder = str(save_tiny(architecture, tmp_path))
    original = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *given: original(*given[:-1], change(given[-1])))
    with pytest.raises(ModelCheckFailed, match="differs by"):
        load_model(folder)


def test_the_check_notices_unwritten_keys(tmp_path, monkeypatch):
    folder = str(save_tiny("llama_gqa", tmp_path))
    monkeypatch.setattr(PagedField, "write", lambda stored, slots, rows: rows)
    with pytest.raises(ModelCheckFailed, match="never written"):
        load_model(folder)


def test_the_check_notices_layers_that_share_a_pool(tmp_path, monkeypatch):
    folder = str(save_tiny("diffllama", tmp_path))
    original = Pool.layer
    monkeypatch.setattr(Pool, "layer", lambda pool, name, ordinal: original(pool, name, ordinal // 2))
    with pytest.raises(ModelCheckFailed, match="differs by"):
        load_model(folder)

"""Every architecture: logits of a mixed, paged, chunked schedule equal those of the plain model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import ModelCheckFailed
from quire.kernels.attention import PagedBatch
from quire.kernels.stored import StoredRows
from quire.memory.pool import Pool
from quire.models import attention
from quire.models.hf import LoadedModel, load_model
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, build_tiny, save_tiny

PAGE_SIZE = 4
LENGTHS = {"a": 32, "b": 29, "c": 30}
SHARED = 8
"""Tokens that c has in common with a; it starts after them, on a's frames."""
STEPS = (
    {"a": (0, 20)},
    {"a": (20, 21), "b": (0, 11)},
    {"c": (8, 15), "a": (21, 26), "b": (11, 27)},
    {"c": (15, 28), "b": (27, 28), "a": (26, 31)},
    {"a": (31, 32), "b": (28, 29), "c": (28, 29)},
    {"c": (29, 30)},
)


class Schedule:
    """Token sequences, their scattered frames, and the run of all steps on a NaN-filled pool."""

    def __init__(self) -> None:
        generator = np.random.default_rng(7)
        self.tokens = {name: generator.integers(0, VOCAB_SIZE - 1, length) for name, length in LENGTHS.items()}
        self.tokens["c"][:SHARED] = self.tokens["a"][:SHARED]
        order = iter(generator.permutation(np.arange(1, 40)).tolist())
        self.frames = {name: np.array([next(order) for _ in range(8)]) for name in LENGTHS}
        self.frames["c"][: SHARED // PAGE_SIZE] = self.frames["a"][: SHARED // PAGE_SIZE]

    def largest_error(self, model: LoadedModel, reference: torch.nn.Module) -> float:
        with torch.inference_mode():
            plain = {n: reference(torch.from_numpy(t)[None], use_cache=False).logits[0] for n, t in self.tokens.items()}
        (group,) = model.groups(PAGE_SIZE)
        pool = Pool(group.layout, 40)
        for field in group.layout.fields:
            for layer in field.layers:
                pool.layer(field.name, layer).fill_(torch.nan)
        errors = []
        for step in STEPS:
            logits = self.run(model, pool, step)
            wanted = torch.cat([plain[name][start:stop] for name, (start, stop) in step.items()])
            errors.append(float((logits - wanted.float()).abs().max()))
        return max(errors, key=lambda error: (np.isnan(error), error))

    def run(
        self,
        model: LoadedModel,
        pool: Pool,
        step: dict[str, tuple[int, int]],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the given rows of one step, of all by default."""
        counts = [stop - start for start, stop in step.values()]
        slots = []
        for name, (start, stop) in step.items():
            positions = np.arange(start, stop)
            slots.append(self.frames[name][positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE)
        batch = PagedBatch(
            query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            context_lens=np.array([stop for _, stop in step.values()], dtype=np.int32),
            frames=np.stack([self.frames[name] for name in step]).astype(np.int32),
            slots=np.concatenate(slots).astype(np.int32),
            page_size=PAGE_SIZE,
        )
        ids = np.concatenate([self.tokens[name][start:stop] for name, (start, stop) in step.items()])
        positions = np.concatenate([np.arange(start, stop) for start, stop in step.values()])
        rows = torch.arange(len(ids)) if rows is None else rows
        return model.forward(torch.from_numpy(ids), torch.from_numpy(positions), [batch], [pool], rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_schedule_equals_the_plain_model(architecture, tmp_path):
    model = load_model(str(save_tiny(architecture, tmp_path)))
    reference = build_tiny(architecture, attn_implementation="eager")
    assert Schedule().largest_error(model, reference) < 1e-4


@pytest.mark.parametrize("architecture", ["llama_gqa", "gemma2", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_its_check(architecture, dtype, tmp_path):
    model = load_model(str(save_tiny(architecture, tmp_path)), dtype=dtype)
    assert str(model.spec.dtype) == dtype


@pytest.mark.parametrize("architecture", ["llama_gqa", "opt"])
def test_only_the_asked_rows_get_logits(architecture, tmp_path):
    model = load_model(str(save_tiny(architecture, tmp_path)))
    schedule, pool = Schedule(), Pool(model.groups(PAGE_SIZE)[0].layout, 40)
    step, asked = {"a": (0, 20), "b": (0, 9)}, torch.tensor([19, 28])
    everything = schedule.run(model, pool, step)
    logits = schedule.run(model, pool, step, asked)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, everything[asked], atol=1e-5)
    assert schedule.run(model, pool, step, asked[:0]).shape == (0, VOCAB_SIZE)


BREAKS = {
    "scale": ("llama_gqa", lambda options: {**options, "scale": options["scale"] * 1.2}),
    "window": ("mistral", lambda options: {**options, "window": 0}),
    "wrong window": ("mistral", lambda options: {**options, "window": options["window"] + 1}),
    "softcap": ("gemma2", lambda options: {**options, "softcap": None}),
    "sinks": ("gpt_oss", lambda options: {**options, "sinks": None}),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_the_check_at_load_notices(broken, tmp_path, monkeypatch):
    architecture, change = BREAKS[broken]
    folder = str(save_tiny(architecture, tmp_path))
    original = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *tensors, **options: original(*tensors, **change(options)))
    with pytest.raises(ModelCheckFailed, match="differs by"):
        load_model(folder)


def test_the_check_notices_unwritten_keys(tmp_path, monkeypatch):
    folder = str(save_tiny("llama_gqa", tmp_path))
    monkeypatch.setattr(StoredRows, "write", lambda stored, slots, rows: rows)
    with pytest.raises(ModelCheckFailed, match="never written"):
        load_model(folder)


def test_the_check_notices_layers_that_share_a_pool(tmp_path, monkeypatch):
    folder = str(save_tiny("diffllama", tmp_path))
    original = Pool.layer
    monkeypatch.setattr(Pool, "layer", lambda pool, name, ordinal: original(pool, name, ordinal // 2))
    with pytest.raises(ModelCheckFailed, match="differs by"):
        load_model(folder)

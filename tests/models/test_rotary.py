"""Rotary embeddings that would look at the batch: fixed per deployment, whatever else runs beside a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.models import rotary
from quire.models.hf import load_model
from quire.models.rotary import Angles
from tests.models.schedule import Schedule
from tests.tiny_models import build_tiny, save_tiny

_FACTORS: dict[str, Any] = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 24,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, **_FACTORS}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama_gqa", {"rope_parameters": DYNAMIC, "max_position_embeddings": 24}),
    "longrope": ("phi3_longrope", {}),
    "dynamic for some layers": (
        "gemma3_text",
        {
            "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": PLAIN},
            "max_position_embeddings": 24,
        },
    ),
    "longrope for some layers": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {**LONG, "factor": 4.0}, "sliding_attention": PLAIN}},
    ),
    "longrope with another scale": (
        "llama_gqa",
        {
            "model_type": "phimoe",
            "num_local_experts": 4,
            "rope_parameters": {**LONG, "short_mscale": 1.1, "long_mscale": 1.8},
        },
    ),
}
"""Each with another set of angles from 25 tokens on."""


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory) -> tuple[str, Any]:
    """A folder, and a function that makes the plain model."""
    architecture, settings = MODELS[request.param]
    folder = save_tiny(architecture, tmp_path_factory.mktemp("rotary"), **settings)
    return str(folder), lambda: build_tiny(architecture, attn_implementation="eager", **settings)


@torch.inference_mode()
def plain_logits(reference, tokens: np.ndarray) -> torch.Tensor:
    return reference(torch.from_numpy(tokens)[None], use_cache=False).logits[0]


def test_a_sequence_of_the_longest_length_is_that_of_transformers(case):
    """In chunks, beside others, with its last token at the length the deployment is for."""
    folder, reference = case
    schedule = Schedule()
    longest = len(schedule.tokens["a"])
    model = load_model(folder, max_length=longest)
    frames, wanted = schedule.frames(model), plain_logits(reference(), schedule.tokens["a"])
    for step in schedule.steps:
        logits = schedule.run(model, frames, step)
        before = 0
        for name, (start, stop) in step.items():
            if name == "a":
                assert (logits[before : before + stop - start] - wanted[start:stop]).abs().max() < 1e-4
            before += stop - start


def test_a_deployment_for_short_sequences_has_the_short_angles(case):
    folder, reference = case
    tokens = np.arange(20)
    short, long = load_model(folder, max_length=24), load_model(folder, max_length=48)
    wanted = plain_logits(reference(), tokens)
    assert torch.allclose(short.plain_logits(torch.from_numpy(tokens)), wanted, atol=1e-4)
    assert not torch.allclose(long.plain_logits(torch.from_numpy(tokens)), wanted, atol=1e-2)


def test_an_output_does_not_depend_on_its_neighbours(case):
    folder, _ = case
    model = load_model(folder, max_length=48)
    schedule = Schedule()
    alone = schedule.run(model, schedule.frames(model), {"b": (0, 11)})
    frames = schedule.frames(model)
    schedule.run(model, frames, {"a": (0, 31)})
    together = schedule.run(model, frames, {"a": (31, 32), "b": (0, 11)})
    assert (alone - together[1:]).abs().max() < 1e-5


def test_a_dynamic_model_may_be_deployed_beyond_its_positions(tmp_path):
    architecture, settings = MODELS["dynamic"]
    folder = str(save_tiny(architecture, tmp_path, **settings))
    assert load_model(folder).spec.context_length == 24
    assert load_model(folder, max_length=100).spec.context_length == 100


class _OfTheBatch(torch.nn.Module):
    """Angles that follow the longest position of the batch from `longest` on."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest

    def forward(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stretched = (positions[..., None] + 1) / (1 + (positions.max() >= self.longest)) * torch.tensor([1.0, 0.5])
        return stretched.cos().to(rows.dtype), stretched.sin().to(rows.dtype)


def check_angles(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 20) -> int:
    """Those of the module bit by bit, of positions that are kept and of others, alone and together. How many are."""
    monkeypatch.setattr(rotary, "_KEPT", most)
    model = build_tiny(kind).to(dtype)
    module, rows = model.model.rotary_emb, torch.zeros(1, 1, 4, dtype=dtype)
    angles = Angles(module, rows, 100)
    for positions in ([0], [7], [99], [3, 98, 3], list(range(100))):
        given = torch.tensor(positions)
        for found, wanted in zip(angles.at(given, rows), module(rows, given[None]), strict=True):
            assert found.dtype is dtype and torch.equal(found, wanted)
    return angles.num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama_gqa", "llama_yarn", "qwen3"])
def test_angles_are_kept_by_position(kind, dtype, monkeypatch):
    assert check_angles(kind, dtype, monkeypatch) == 100 * 2 * build_tiny(kind).config.head_dim * dtype.itemsize


def test_few_positions_are_kept_of_a_long_context(monkeypatch):
    assert 0 < check_angles("llama_gqa", torch.float32, monkeypatch, 4000) <= 4000


@pytest.mark.parametrize("longest", [1, 50, 99])
def test_angles_of_a_batch_are_not_kept(longest):
    module, rows = _OfTheBatch(longest), torch.zeros(1, 1, 4)
    angles = Angles(module, rows, 100)
    assert angles.num_bytes == 0
    for positions in ([0, 3], [0, 99]):
        given = torch.tensor(positions)
        assert all(map(torch.equal, angles.at(given, rows), module(rows, given[None])))
    assert Angles(_OfTheBatch(100), rows, 100).num_bytes > 0

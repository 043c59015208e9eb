"""The engine's steps go on with the plan of attention of the step before."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.kernels.planner import AttentionPlanner, _CachedPlan
from quire.models.hf import load_model
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.running import core_for, run, shared_prompts
from tests.tiny_models import VOCAB_SIZE, save_tiny


def test_a_decode_step_keeps_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than sixty steps, few make segments: those in which prompts are computed or a request ends."""
    asked, made = [], []
    plan, assemble = AttentionPlanner.plan, _CachedPlan._assembled
    monkeypatch.setattr(AttentionPlanner, "plan", lambda *args, **named: asked.append(0) or plan(*args, **named))
    monkeypatch.setattr(_CachedPlan, "_assembled", lambda *args: made.append(0) or assemble(*args))
    model = load_model(str(save_tiny("llama", tmp_path)))
    core = core_for(model, page_size=16, max_num_batched_tokens=512, attention_backend="torch")
    prompts = shared_prompts(7, shared=37, tails=(3, 20, 11), vocabulary=VOCAB_SIZE)
    run(core, prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), "one")

    assert len(asked) >= 60
    assert len(made) <= 10

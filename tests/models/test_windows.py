"""Windows, chunks and shared layers in groups of their own: what no row can reach any more is overwritten.

What the engine generates with them is compared in tests/engine/test_hybrid_tokens.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.models.forward import RunningForward
from quire.models.hf import load_model
from quire.spec.group import ReachSpec
from tests.changes import MODELS, unless_changed
from tests.covering import covering
from tests.models import schedule
from tests.models.schedule import STEPS, Schedule, long_steps
from tests.tiny_hybrids import HYBRIDS, WINDOWED, build_hybrid
from tests.tiny_models import save_tiny
from tests.verified_models import VERIFIED

pytestmark = unless_changed(__name__, *MODELS)


def changes(name: str, window: int) -> dict[str, Any]:
    """What gives a family this window. Llama 4 scales queries from the fourth token on."""
    if name == "llama4_text":
        return {"attention_chunk_size": window, "floor_scale": 4, "attn_scale": 0.5}
    if name == "mimo_v2_flash":  # counts the tokens before the query
        return {"sliding_window": window - 1, "sliding_window_size": window - 1, "attention_chunk_size": window - 1}
    return {"sliding_window": window}


ROUNDING = 1e-3
"""Matrix products differ between processors: rounding is worth 2.4e-4 for Gemma 4 on some, a key more 4 to 12."""


def loaded_pair(name: str, window: int, folder) -> tuple[Any, Any]:
    """The model on pools, and the same by itself."""
    settings = {**HYBRIDS[name], **changes(name, window)}
    model = load_model(str(save_tiny("llama_gqa", folder, **settings)))
    return model, build_hybrid(name, attn_implementation="eager", **changes(name, window))


@covering(name=WINDOWED, window=[15, 16, 17, 64])
def test_windows_around_a_page(name, window, tmp_path):
    model, reference = loaded_pair(name, window, tmp_path)
    reach = {group.reach for group in model.spec.groups(16)} - {ReachSpec()}
    assert reach == {ReachSpec("chunk" if name == "llama4_text" else "window", window)}
    assert Schedule(long_steps(150), page_size=16).largest_error(model, reference) < ROUNDING


@covering(
    sizes=[(1, 2), (1, 4), (64, 63), (64, 64), (64, 65), (64, 256)], name=["gemma3n_text", "gpt_oss", "llama4_text"]
)
def test_windows_around_smaller_and_larger_pages(name, sizes, tmp_path):
    page_size, window = sizes
    model, reference = loaded_pair(name, window, tmp_path)
    steps = STEPS if page_size == 1 else long_steps(320)
    assert Schedule(steps, page_size=page_size).largest_error(model, reference) < ROUNDING


def test_every_type_is_listed():
    assert {HYBRIDS[name]["model_type"] for name in WINDOWED} <= VERIFIED


@pytest.mark.parametrize("name", ["mistral_all_slide", "llama4_text"])
def test_a_page_that_is_overwritten_too_soon_is_noticed(name, tmp_path, monkeypatch):
    model, reference = loaded_pair(name, 16, tmp_path)
    original = schedule.first_read
    monkeypatch.setattr(schedule, "first_read", lambda reach, position: original(reach, position) + 4)
    assert np.isnan(Schedule().largest_error(model, reference))


def test_the_table_of_another_group_is_noticed(tmp_path, monkeypatch):
    model, reference = loaded_pair("gemma3_text", 8, tmp_path)
    original = RunningForward.rows

    def of_the_first_group(forward, name, ordinal):
        return original(forward, name, ordinal)[0], forward._groups[0][1]

    monkeypatch.setattr(RunningForward, "rows", of_the_first_group)
    assert not Schedule().largest_error(model, reference) < 1


@pytest.mark.parametrize(("name", "kept"), [("gemma3n_text", 4), ("gemma4_text_shared", 4), ("gemma4_text", 12)])
def test_sharing_layers_are_no_calls_of_their_own(name, kept, tmp_path):
    model = load_model(str(save_tiny("llama_gqa", tmp_path, **HYBRIDS[name])))
    assert len(model.discover()) == len(model.spec.calls) == kept

"""Kept tokens of transformers are those of the same weights, configuration and prompt, and of nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.engine import expected
from tests.engine.running import generated
from tests.engine.test_same_tokens import NEW_TOKENS, PROMPTS
from tests.tiny_models import build_tiny


def test_what_is_kept_is_not_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = build_tiny("llama_gqa"), []
    monkeypatch.setattr(expected, "kept", dict)
    tokens = generated(model, PROMPTS[0], NEW_TOKENS)
    monkeypatch.setattr(expected, "kept", lambda: {expected._key(model, PROMPTS[0], NEW_TOKENS): tokens})
    monkeypatch.setattr(type(model), "generate", lambda *_, **__: runs.append(1))
    assert generated(model, PROMPTS[0], NEW_TOKENS) == tokens and not runs


def test_recomputed_tokens_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny("llama_gqa")
    monkeypatch.setattr(expected, "kept", lambda: {expected._key(model, [1, 2], 3): [4, 5, 6]})
    assert expected.expected_tokens(model, [1, 2], 3, lambda: [4, 5, 6], recomputes=True) == [4, 5, 6]
    assert expected.expected_tokens(model, [1, 2], 3, lambda: [7, 5, 6], recomputes=False) == [4, 5, 6]
    with pytest.raises(AssertionError, match="other tokens"):
        expected.expected_tokens(model, [1, 2], 3, lambda: [7, 5, 6], recomputes=True)


def test_keys_follow_weights_configuration_and_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny("llama_gqa")
    keys = [expected._key(model, [1, 2], 3), expected._key(model, [1, 3], 3), expected._key(model, [1, 2], 4)]
    keys.append(expected._key(build_tiny("llama_gqa", rope_theta=5_000.0), [1, 2], 3))
    monkeypatch.setattr("transformers.__version__", "0")
    keys.append(expected._key(model, [1, 2], 3))
    monkeypatch.undo()
    assert expected._key(build_tiny("llama_gqa"), [1, 2], 3) == keys[0], "a seed gives the same weights"
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    keys.append(expected._key(model, [1, 2], 3))
    assert len(set(keys)) == len(keys)

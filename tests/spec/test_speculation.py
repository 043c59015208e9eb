"""SpeculativeConfig: read from the names of vLLM and SGLang, and what is refused."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from quire.errors import InvalidInput
from quire.spec.speculation import METHODS, SpeculativeConfig

NGRAM = SpeculativeConfig(method="ngram", num_steps=4, num_draft_tokens=5)
EAGLE = SpeculativeConfig(method="eagle", model="org/head", num_steps=5, topk=4, num_draft_tokens=8)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram", "num_speculative_tokens": 4}, NGRAM),
        ({"method": "ngram", "num-steps": 4}, NGRAM),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5, "speculative_num_steps": None}, NGRAM),
        (
            {"method": "ngram", "num_steps": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            replace(NGRAM, prompt_lookup_min=2, prompt_lookup_max=4),
        ),
        (
            {"method": "ngram", "num_steps": 4, "prompt_lookup_max": 3},
            replace(NGRAM, prompt_lookup_min=3, prompt_lookup_max=3),
        ),
        (
            {
                "speculative_algorithm": "EAGLE",
                "speculative_draft_model_path": "org/head",
                "speculative_draft_model_revision": "v2",
                "speculative_num_steps": 5,
                "speculative_eagle_topk": 4,
                "speculative_num_draft_tokens": 8,
            },
            replace(EAGLE, revision="v2"),
        ),
        (
            {"speculative_algorithm": "STANDALONE", "model": "small", "num_steps": 2},
            SpeculativeConfig(method="draft_model", model="small", num_steps=2, num_draft_tokens=3),
        ),
        (
            {"method": "deepseek_mtp", "num_speculative_tokens": 1, "num_layers": 2},
            SpeculativeConfig(method="mtp", num_steps=1, num_draft_tokens=2, num_layers=2),
        ),
    ],
)
def test_names_of_both_engines_are_read(given: dict[str, Any], expected: SpeculativeConfig) -> None:
    assert SpeculativeConfig.parse(given) == expected
    assert SpeculativeConfig.parse(json.dumps(given)) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "ngram", "num_steps": 4, "revision": "v2"}, "no revision of it"),
        ("{", "not JSON"),
        ("[1]", "this is a list"),
        ({"num_steps": 3}, "without a method"),
        ({"method": "medusa", "num_steps": 3}, "'medusa' is not a method.*ngram, draft_model"),
        ({"method": "ngram"}, "needs its depth.*num_speculative_tokens"),
        ({"method": "ngram", "num_steps": 0}, "num_steps 0"),
        ({"method": "ngram", "num_steps": True}, "not a whole number"),
        ({"method": "ngram", "num_steps": "3"}, "not a whole number"),
        ({"method": 3, "num_steps": 3}, "not text"),
        ({"method": "ngram", "num_steps": 3, "num_speculative_tokens": 3}, "given twice"),
        ({"method": "ngram", "num_steps": 3, "num_draft_tokens": 3}, "a chain of 3 drafts and 3 tokens.*4"),
        ({"method": "ngram", "num_steps": 3, "topk": 2}, "two numbers"),
        ({"method": "ngram", "num_steps": 3, "model": "small"}, "without a model"),
        ({"method": "mtp", "num_steps": 3, "model": "small"}, "mtp drafts without a model"),
        ({"method": "eagle3", "num_steps": 3}, "eagle3 without a model"),
        ({"method": "mtp", "num_steps": 3, "prompt_lookup_max": 3}, "looks up no n-grams"),
        ({"method": "ngram", "num_steps": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "at least 4 and at most"),
        ({"method": "ngram", "num_spec_tokens": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "mtp", "num_steps": 3, "draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size.*leave it"),
        (
            {"method": "ngram", "num_steps": 3, "rejection_sample_method": "block"},
            "'block'.*use one of strict, standard",
        ),
        ({"method": "mtp", "num_steps": 3, "num_layers": 1001}, "1,001 draft layers"),
    ],
)
def test_what_is_refused_says_what_to_give(given: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        SpeculativeConfig.parse(given)


def test_a_configuration_is_frozen_and_n_grams_have_no_layers() -> None:
    with pytest.raises(FrozenInstanceError):
        NGRAM.topk = 2  # type: ignore[misc]
    assert {method: replace(EAGLE, method=method, num_layers=1).num_layers for method in METHODS} == {
        "ngram": 0,
        "draft_model": 1,
        "eagle": 1,
        "eagle3": 1,
        "mtp": 1,
    }

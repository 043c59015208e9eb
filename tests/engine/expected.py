"""Tokens that `transformers` generates, kept in expected_tokens.json by version, configuration, weights and prompt.

What is not there is generated. `make test-all` generates all of them anew, and fails where they differ.

    python -m tests.engine.expected         generate and keep those of the tests of token equality
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import transformers

from quire.models.fingerprint import fingerprint_weights

KEPT = Path(__file__).with_name("expected_tokens.json")
RECOMPUTES = os.environ.get("QUIRE_RECOMPUTE_TOKENS") == "1"

_used: dict[str, list[int]] = {}


@cache
def kept() -> dict[str, list[int]]:
    """By the key of a generation, its tokens."""
    found: dict[str, list[int]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return found


def expected_tokens(
    model: Any,
    prompt: Sequence[int],
    num_tokens: int,
    generate: Callable[[], list[int]],
    *,
    recomputes: bool = RECOMPUTES,
) -> list[int]:
    """The tokens that `generate` returns for this model and prompt, which are generated only if they are not kept or if
    it `recomputes`."""
    key = _key(model, prompt, num_tokens)
    found = kept().get(key)
    if found is None or recomputes:
        generated = generate()
        assert found in (None, generated), "transformers generates other tokens than those that are kept"
        found = generated
    _used[key] = found
    return list(found)


def _key(model: Any, prompt: Sequence[int], num_tokens: int) -> str:
    parts = (
        transformers.__version__,
        type(model).__name__,
        model.config._attn_implementation,
        model.config.to_json_string(),
        fingerprint_weights(model.state_dict()).hex(),
        list(map(int, prompt)),
        num_tokens,
    )
    return sha256(repr(parts).encode()).hexdigest()[:20]


def main() -> None:
    """Generate and keep the tokens of all models that tests of token equality load."""
    from tests.engine import expected, test_hybrid_tokens, test_same_tokens

    for name in test_same_tokens.NAMES:
        test_same_tokens.case_of(name)
    for name in test_hybrid_tokens.SERVED:
        test_hybrid_tokens.case_of(name)
    used = expected._used  # this module is another one when it is run
    rows = (f'"{key}": {json.dumps(used[key])}' for key in sorted(used))
    KEPT.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()

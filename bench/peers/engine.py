"""What an engine is to the benchmarks: three calls, start, run and counters, and what it says about itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Protocol


def token_bytes(folder: Path, dtype: str) -> int:
    """Of the keys and values of one token of the Llama in `folder`."""
    config = json.loads((folder / "config.json").read_text())
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    numbers = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim
    return int(numbers * {"float32": 4, "bfloat16": 2}[dtype])


class Engine(Protocol):
    """What is measured."""

    package: ClassVar[str]
    """Imported before anything else, so that processes can do so side by side."""
    sampling: dict[str, Any] = {"temperature": 0}  # noqa: RUF012 - replaced, never changed
    """How tokens are drawn, where an engine can be asked for something else."""

    def start(
        self, *, folder: str, dtype: str, threads: int, kv_bytes: int, max_model_len: int, max_requests: int
    ) -> None:
        """Load the model."""

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Exactly `new` tokens for each prompt, drawn by `sampling`."""

    def counters(self) -> dict[str, int]:
        """Counters that only grow, of what was reused."""
        return {}

    def about(self) -> dict[str, str]:
        """Versions of programs that are no Python packages."""
        return {}

"""Quire's stores beneath vLLM: a secondary tier of its `TieringOffloadingSpec`. vLLM imports this, in its process."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`QuireTier`, imported when vLLM asks for it: its module needs vLLM."""
    if name == "QuireTier":
        from quire.connectors.vllm.tier import QuireTier

        return QuireTier
    raise AttributeError(name)

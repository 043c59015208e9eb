"""The box that `quire serve` shows when it is ready."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quire.cli.serve import _ready_panel, start_summary
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from tests.tiny_latents import save_latent


def shown(settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What is said of a start with these settings, as data and as text."""
    config = engine_config(**settings)
    core = EngineCore(config)
    engine: Any = SimpleNamespace(last_statistics=core.statistics())
    running: Any = SimpleNamespace(engine=engine, url="http://host", model_name="tiny")
    summary = start_summary(config, running)
    core.close()
    console = Console(width=100)
    with console.capture() as found:
        console.print(_ready_panel(summary))
    return summary, found.get()


def test_it_shows_hot_buffers(tmp_path: Path) -> None:
    model = save_latent("deepseek_v32", tmp_path)
    _, text = shown({"model": model, "hisparse": {"device_buffer_size": 12}, "kv_memory": "1MiB"})
    assert "requests of 12 tokens, of which a step reads 8; latents take" in text


@pytest.mark.parametrize("method", [None, "ngram"])
def test_it_names_the_method_of_drafting(method: str | None) -> None:
    speculation = {"method": method, "num_speculative_tokens": 4} if method else None
    summary, text = shown({"speculative_config": speculation, "kv_memory": "4MiB"})
    assert ("ngram, up to 4 draft tokens a step" in text) is ("Speculation" in text) is (method is not None)
    assert (summary["speculation"] or {}).get("method") == method

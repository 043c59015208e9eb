"""The box that `quire serve` shows when it is ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quire.cli.serve import _ready_panel, start_summary
from quire.engine.config import engine_config
from quire.engine.core import EngineCore


@pytest.mark.parametrize("method", [None, "ngram"])
def test_it_names_the_method_of_drafting(method: str | None) -> None:
    speculation = {"method": method, "num_speculative_tokens": 4} if method else None
    config = engine_config(speculative_config=speculation, kv_memory="4MiB")
    core = EngineCore(config)
    engine: Any = SimpleNamespace(start_statistics=core.statistics())
    running: Any = SimpleNamespace(engine=engine, url="http://host", model_name="tiny")
    summary = start_summary(config, running)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(_ready_panel(summary))
    assert (
        ("ngram, up to 4 draft tokens a step" in shown.get()) is ("Speculation" in shown.get()) is (method is not None)
    )
    assert (summary["speculation"] or {}).get("method") == method

"""`quire serve`."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.engine.config import EngineConfig
from quire.serve.config import ServerConfig

if TYPE_CHECKING:
    from quire.serve.server import Running


def serve(engine: EngineConfig, server: ServerConfig, *, as_json: bool) -> None:
    """Serve a model over HTTP, as OpenAI's API.

    [dim]Example:[/dim] quire serve Qwen/Qwen3-0.6B --kv-memory 2GiB

    [dim]Example:[/dim] quire serve --host-memory 8GiB --storage /var/cache/quire --storage-size 100GiB
    """
    from quire.engine.before_load import check_model

    check_model(engine)  # before the imports that take seconds
    from quire.engine.lean_imports import without_torch
    from quire.engine.process import LOG_FORMAT
    from quire.plan.budget import format_bytes
    from quire.serve.server import serve as run

    logging.basicConfig(level=server.log_level.upper(), format=LOG_FORMAT)
    console = Console(stderr=True)
    loading = console.status(f"Loading {engine.model_name} ...")
    if not as_json:
        loading.start()

    def on_progress(done: int, total: int) -> None:
        loading.update(f"Touching host memory: {format_bytes(done)} of {format_bytes(total)} ...")

    def on_ready(running: Running) -> None:
        loading.stop()
        summary = start_summary(engine, running)
        if as_json:
            print(json.dumps(summary), flush=True)
        else:
            console.print(_panel(summary))

    try:
        with without_torch():
            exit_code = run(engine, server, on_ready=on_ready, on_progress=on_progress)
    finally:
        loading.stop()
    if exit_code:  # a signal during the start: a thread may still load the tokenizer, and would be waited for
        sys.stderr.flush()
        os._exit(exit_code)


def start_summary(config: EngineConfig, running: Running) -> dict[str, Any]:
    """What the server resolved its settings to."""
    statistics = running.engine.start_statistics
    plan = statistics["plan"]
    return {
        "url": running.url,
        "model": running.model_name,
        "architecture": statistics["architecture"],
        "dtype": statistics["dtype"],
        "device": statistics["device"],
        "kv_dtype": plan["kv_dtype"],
        "kv_bytes": statistics["kv_bytes"],
        "num_pages": statistics["num_pages"],
        "page_size": statistics["page_size"],
        "tokens_that_fit": plan["max_total_num_tokens"],
        "bytes_per_token": statistics["bytes_per_token"],
        "context": statistics["context"],
        "largest_request": statistics["largest_request"],
        "max_running_requests": statistics["max_running_requests"],
        "policy": config.policy,
        "eviction": config.eviction,
        "prefix_caching": config.enable_prefix_caching,
        "tiers": (statistics["tiers"] or {}).get("resolved"),
        "plan": plan,
    }


def _panel(summary: dict[str, Any]) -> Panel:
    from quire.cli.plan_table import ledger_table, summary_table
    from quire.engine.tier_report import tier_rows

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("Model", f"{summary['model']} ({summary['architecture']}, {summary['dtype']}, {summary['device']})")
    sharing = "on" if summary["prefix_caching"] else "off"
    table.add_row("Sharing", f"{sharing}; eviction {summary['eviction']}; scheduling {summary['policy']}")
    tiers = summary["tiers"]
    for name, text in tier_rows(tiers) if tiers else ():
        table.add_row(name, Text(text))
    table.add_row("Listening", f"{summary['url']}/v1  (also /health, /metrics, /docs)")
    plan = summary["plan"]
    return Panel(
        Group(ledger_table(plan), Text(""), summary_table(plan), table, *_warnings(plan), *_notes(tiers)),
        title="[bold]Quire is ready[/bold]",
        title_align="left",
        border_style="green",
        expand=False,
    )


def _warnings(plan: dict[str, Any]) -> list[Text]:
    """What an operator should know before the first request."""
    if plan["fits"]:
        return []
    text = (
        f"No request of the whole context of {plan['context']:,} tokens fits, so `quire plan` says 'does not fit'; the "
        f"largest is {plan['largest_request']:,} tokens. Use --max-model-len {plan['largest_request']}, or raise "
        "--kv-memory."
    )
    return [Text(text, style="bold yellow")]


def _notes(tiers: dict[str, Any] | None) -> list[Text]:
    """What was chosen for the operator, and what will bring little."""
    return [Text(f"Note: {note}", style="dim") for note in tiers["notes"]] if tiers else []

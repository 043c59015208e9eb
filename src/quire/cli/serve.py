"""`quire serve`."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from quire.cli.report import Terminal, named_rows, panel
from quire.engine.config import EngineConfig
from quire.garbage import kept_imports
from quire.serve.config import ServerConfig

if TYPE_CHECKING:
    from quire.serve.server import Running


def serve(engine: EngineConfig, server: ServerConfig, *, as_json: bool) -> None:
    """Serve a model over HTTP, as OpenAI's and Anthropic's APIs.

    [dim]Example:[/dim] quire serve Qwen/Qwen3-0.6B --kv-memory 2GiB

    [dim]Example:[/dim] quire serve --host-memory 8GiB --storage /var/cache/quire --storage-size 100GiB
    """
    from quire.engine.before_load import check_model

    check_model(engine)  # before the imports that take seconds
    with kept_imports():
        from quire.client.process import LOG_FORMAT
        from quire.engine.lean_imports import without_torch
        from quire.plan.budget import format_bytes
        from quire.serve.server import serve as run

    logging.basicConfig(level=server.log_level.upper(), format=LOG_FORMAT)
    console = Terminal(stderr=True)
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
            console.print(_ready_panel(summary))

    try:
        with without_torch():
            exit_code = run(engine, server, on_ready=on_ready, on_progress=on_progress)
    finally:
        loading.stop()
    if exit_code:  # a signal during the start: a thread may still load the tokenizer, and would be waited for
        sys.stderr.flush()
        os._exit(exit_code)


def start_summary(config: EngineConfig, running: Running) -> dict[str, Any]:
    """The resolved settings of the server."""
    statistics = running.engine.last_statistics
    plan = statistics["plan"]
    same = (
        "architecture", "dtype", "device", "kv_bytes", "num_pages", "page_size", "bytes_per_token", "context",
        "largest_request", "max_running_requests",
    )  # fmt: skip
    return {
        "url": running.url,
        "model": running.model_name,
        **{name: statistics[name] for name in same},
        "kv_dtype": plan["kv_dtype"],
        "tokens_that_fit": plan["max_total_num_tokens"],
        "policy": config.policy,
        "eviction": config.eviction,
        "prefix_caching": config.enable_prefix_caching,
        "kv_events": (statistics["kv_events"] or {}).get("addresses"),
        "role": config.role,
        "transfer": {
            **{name: (statistics["transfer"] or {}).get(name) for name in ("connector", "address")},
            "name": config.transfer_name,
            "prefill_peers": config.prefill_peers.split(",") if config.prefill_peers else [],
        },
        "tiers": (statistics["tiers"] or {}).get("resolved"),
        "speculation": plan["speculation"],
        "attention": statistics["attention"]["backend"],
        "plan": plan,
    }


def _role(summary: dict[str, Any]) -> str:
    transfer = summary["transfer"]
    name = f" ({transfer['name']})" if transfer["name"] else ""
    where = f"; computes prompts for engines that connect to {transfer['address']}" if transfer["address"] else ""
    peers = f"; has prompts computed by {', '.join(transfer['prefill_peers'])}" if transfer["prefill_peers"] else ""
    if summary["role"] == "decode" and not peers:
        peers = "; computes its prompts until PUT /v1/cache/peers names engines that do"
    return f"{summary['role']}{name}; pages go over {transfer['connector']}{where}{peers}"


def _ready_panel(summary: dict[str, Any]) -> Panel:
    from quire.cli.plan_table import ledger_table, summary_table
    from quire.engine.tier_report import tier_rows

    plan, tiers = summary["plan"], summary["tiers"]
    sharing = "on" if summary["prefix_caching"] else "off"
    drafts = summary["speculation"]
    drafting = f"{drafts['method']}, up to {drafts['draft_tokens']:,} draft tokens a step" if drafts else ""
    rows = [
        ("Model", f"{summary['model']} ({summary['architecture']}, {summary['dtype']}, {summary['device']})"),
        ("Sharing", f"{sharing}; eviction {summary['eviction']}; scheduling {summary['policy']}"),
        ("Attention", summary["attention"]),
        *([("Speculation", drafting)] if drafting else ()),
        *(tier_rows(tiers) if tiers else ()),
        *([("Role", _role(summary))] if summary["role"] else ()),
        ("Listening", f"{summary['url']}/v1  (also /health, /metrics)"),
        ("Page", f"{summary['url']}/  (what the cache does, in a browser)"),
    ]
    parts: list[RenderableType] = [ledger_table(plan), "", summary_table(plan), named_rows(rows)]
    if not plan["fits"]:
        largest = plan["largest_request"]
        text = (
            f"No request of the whole context of {plan['context']:,} tokens fits, so `quire plan` says 'does not fit'; "
            f"the largest is {largest:,} tokens. Use --max-model-len {largest}, or raise --kv-memory."
        )
        parts.append(Text(text, style="bold yellow"))
    if tiers:
        parts += [Text(f"Note: {note}", style="dim") for note in tiers["notes"]]
    return panel(Group(*parts), "Quire is ready", "green")

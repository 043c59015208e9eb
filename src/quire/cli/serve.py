"""`quire serve`."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.cli.options import (
    CheckpointOption,
    DebugOption,
    DeviceOption,
    DtypeOption,
    EvictionOption,
    ExplainOption,
    HostMemoryOption,
    JsonOption,
    KvDtypeOption,
    KvMemoryOption,
    LoadOption,
    MambaRatioOption,
    MambaSizeOption,
    MaxBatchedOption,
    MaxModelLenOption,
    MaxRunningOption,
    ModelOption,
    PageSizeOption,
    PolicyOption,
    PrefetchOption,
    PrefetchSecondsOption,
    PrefixCachingOption,
    RetainShareOption,
    StorageOption,
    StorageSizeOption,
    SwaRatioOption,
    ThreadsOption,
    TokenizerOption,
    WeightsEpochOption,
    WritePolicyOption,
    make_config,
)
from quire.cli.report import reported

if TYPE_CHECKING:
    from quire.engine.config import EngineConfig
    from quire.serve.server import Running, ServerConfig

SERVER = "Server"
API_KEY = "QUIRE_API_KEY"

_SERVERS_OWN = {"host", "port", "api_key", "drain", "stall_after", "as_json", "debug"}
_SETTINGS = {
    "max_running": "max_running_requests",
    "max_batched": "max_num_batched_tokens",
    "prefix_caching": "enable_prefix_caching",
}
"""Options whose setting has another name."""


def serve(
    model: ModelOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535, rich_help_panel=SERVER)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=API_KEY, help="Key that clients of /v1 must send.", show_envvar=True, rich_help_panel=SERVER
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name for clients.", rich_help_panel=SERVER)
    ] = None,
    drain: Annotated[
        float, typer.Option(help="Seconds that open requests get to finish at the end.", min=0, rich_help_panel=SERVER)
    ] = 30.0,
    stall_after: Annotated[
        float,
        typer.Option(help="Seconds without progress after which /health fails.", min=0.1, rich_help_panel=SERVER),
    ] = 120.0,
    tokenizer: TokenizerOption = None,
    skip_tokenizer_init: Annotated[bool, typer.Option(help="Token ids in, token ids out.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    max_model_len: MaxModelLenOption = None,
    page_size: PageSizeOption = None,
    kv_dtype: KvDtypeOption = None,
    kv_memory: KvMemoryOption = None,
    eviction: EvictionOption = None,
    prefix_caching: PrefixCachingOption = True,
    explain: ExplainOption = True,
    weights_epoch: WeightsEpochOption = None,
    retain_share: RetainShareOption = None,
    swa_full_tokens_ratio: SwaRatioOption = None,
    mamba_full_memory_ratio: MambaRatioOption = None,
    max_mamba_cache_size: MambaSizeOption = None,
    checkpoint_interval: CheckpointOption = None,
    host_memory: HostMemoryOption = None,
    storage: StorageOption = None,
    storage_size: StorageSizeOption = None,
    write_policy: WritePolicyOption = None,
    load: LoadOption = None,
    prefetch: PrefetchOption = None,
    prefetch_seconds: PrefetchSecondsOption = None,
    max_running: MaxRunningOption = None,
    max_batched: MaxBatchedOption = None,
    policy: PolicyOption = None,
    threads: ThreadsOption = None,
    seed: Annotated[int, typer.Option(help="Seed of requests that have none.")] = 0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's API.

    [dim]Example:[/dim] quire serve --model Qwen/Qwen3-0.6B --kv-memory 2GiB

    [dim]Example:[/dim] quire serve --host-memory 8GiB --storage /var/cache/quire --storage-size 100GiB
    """
    options = dict(locals())  # an option that is not the server's own is a setting of the engine
    with reported(as_json=as_json, debug=debug):
        config = make_config(**{_SETTINGS.get(name, name): options[name] for name in options.keys() - _SERVERS_OWN})
        from quire.serve.server import ServerConfig

        logging.basicConfig(
            level=logging.DEBUG if debug else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
        )
        if api_key is None:
            api_key = os.environ.get(API_KEY)  # set and empty: an option's envvar would take that for "not given"
        _run(
            config,
            ServerConfig(host=host, port=port, api_key=api_key, drain_s=drain, stall_after_s=stall_after),
            as_json,
        )


def _run(config: EngineConfig, server: ServerConfig, as_json: bool) -> None:
    """Serve until told to stop, and say when requests are answered from now on."""
    from quire.plan.budget import format_bytes
    from quire.serve.server import serve as run

    console = Console(stderr=True)
    loading = console.status(f"Loading {config.model_name} ...")
    if not as_json:
        loading.start()

    def on_progress(done: int, total: int) -> None:
        loading.update(f"Touching host memory: {format_bytes(done)} of {format_bytes(total)} ...")

    def on_ready(running: Running) -> None:
        loading.stop()
        summary = start_summary(config, running)
        if as_json:
            print(json.dumps(summary), flush=True)
        else:
            console.print(_panel(summary))

    try:
        run(config, server, on_ready=on_ready, on_progress=on_progress)
    finally:
        loading.stop()


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
    text = f"No request of the whole context fits; the largest is {plan['largest_request']:,} tokens."
    return [Text(text, style="bold yellow")]


def _notes(tiers: dict[str, Any] | None) -> list[Text]:
    """What was chosen for the operator, and what will bring little."""
    return [Text(f"Note: {note}", style="dim") for note in tiers["notes"]] if tiers else []

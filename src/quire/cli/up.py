"""`quire up`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console

from quire.cli.report import panel, plain_table
from quire.cluster.config import ClusterConfig
from quire.serve.config import ServerConfig


def up(cluster: ClusterConfig, server: ServerConfig, *, as_json: bool) -> None:
    """Serve a model from several engines on this machine, some of which compute prompts for the others.

    One OpenAI endpoint is in front of them. With --json, it prints a line for each process when all are ready.

    [dim]Example:[/dim] quire up --prefill 1 --decode 2 --kv-memory 1GiB

    [dim]Example:[/dim] quire up --prefill 0 --decode 2 Qwen/Qwen3-0.6B
    """
    from quire.engine.before_load import check_model

    check_model(cluster)  # before the processes, each of which would refuse it
    from quire.client.process import LOG_FORMAT
    from quire.cluster.cluster import run_cluster

    logging.basicConfig(level=server.log_level.upper(), format=LOG_FORMAT)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs each request, with health checks
    console = Console(stderr=True)
    count = cluster.prefill + cluster.decode
    starting = console.status(f"Starting {count} engine{'s' if count > 1 else ''} of {cluster.model_name} ...")
    if not as_json:
        starting.start()

    def on_ready(rows: Sequence[Mapping[str, Any]]) -> None:
        starting.stop()
        if as_json:
            for row in rows:
                print(json.dumps(row), flush=True)
        else:
            shown = [(row["name"], str(row["pid"]), row["url"]) for row in rows]
            table = plain_table(("process", "pid", "address"), shown, left=("process", "address"))
            console.print(panel(table, f"{cluster.model_name} is ready", "green"))

    def tell(name: str, line: str) -> None:
        print(f"{name} | {line}", file=sys.stderr, flush=True)

    try:
        exit_code = run_cluster(cluster, server, on_ready=on_ready, tell=tell)
    finally:
        starting.stop()
    if exit_code:
        raise typer.Exit(exit_code)

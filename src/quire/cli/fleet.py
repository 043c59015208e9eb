"""`quire up` and `quire fleet`: several processes that serve one model."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import typer

from quire.cli.report import Terminal, panel, plain_table
from quire.fleet.config import FleetConfig, RayConfig
from quire.routing.config import ClusterConfig, MembersConfig, OnReady
from quire.serve.config import ServerConfig

Run = Callable[[OnReady, Callable[[str], None]], int]
"""Runs all until the end. It calls the first when all are ready, and the second with what a start waits for. Returns
the exit code."""


def up(cluster: ClusterConfig, server: ServerConfig, *, as_json: bool) -> None:
    """Serve a model from several engines on this machine, some of which compute prompts for the others.

    One OpenAI endpoint is in front of them. With --json, it prints a line for each process when all are ready.

    [dim]Example:[/dim] quire up --prefill 1 --decode 2 --kv-memory 1GiB

    [dim]Example:[/dim] quire up --prefill 0 --decode 2 Qwen/Qwen3-0.6B
    """

    def run(on_ready: OnReady, _: Callable[[str], None]) -> int:
        from quire.cluster.cluster import run_cluster

        logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs each request, with health checks
        return run_cluster(cluster, server, on_ready=on_ready, tell=tell)

    def tell(name: str, line: str) -> None:
        print(f"{name} | {line}", file=sys.stderr, flush=True)

    count = cluster.prefill + cluster.decode
    _run(run, cluster, server, f"Starting {count} engine{'s' if count > 1 else ''} of", as_json=as_json)


def fleet(fleet: FleetConfig, server: ServerConfig, ray: RayConfig, *, as_json: bool) -> None:
    """Serve a model from engines on one machine or many, which Ray Serve starts, replaces and counts.

    One OpenAI endpoint is in front of them. With --json, it prints a line for each process when all are ready.

    [dim]Example:[/dim] quire fleet --replicas 2 --kv-memory 1GiB

    [dim]Example:[/dim] quire fleet --address auto --max-replicas 8 --num-gpus 1 Qwen/Qwen3-0.6B

    [dim]Example:[/dim] quire fleet --prefill 1 --replicas 2 --host 0.0.0.0 --yaml
    """
    if ray.yaml:
        from quire.fleet.deployments import as_yaml

        print(as_yaml(fleet, server), end="")
        return
    from quire.fleet.run import check_ray, run_fleet

    check_ray()

    def run(on_ready: OnReady, on_progress: Callable[[str], None]) -> int:
        return run_fleet(fleet, server, ray, on_ready=on_ready, on_progress=on_progress)

    _run(run, fleet, server, "Starting Ray for", as_json=as_json)


def _run(run: Run, members: MembersConfig, server: ServerConfig, starting: str, *, as_json: bool) -> None:
    """Run it. The terminal says what goes on, and then which processes there are."""
    from quire.client.process import LOG_FORMAT
    from quire.engine.before_load import check_model

    check_model(members)  # before the processes, each of which would refuse it
    logging.basicConfig(level=server.log_level.upper(), format=LOG_FORMAT)
    console = Terminal(stderr=True)
    status = console.status(f"{starting} {members.model_name} ...")
    if not as_json:
        status.start()

    def on_ready(rows: list[dict[str, Any]]) -> None:
        status.stop()
        if as_json:
            for row in rows:
                print(json.dumps(row), flush=True)
            return
        shown = [(row["name"], str(row["pid"]), row["url"]) for row in rows]
        table = plain_table(("process", "pid", "address"), shown, left=("process", "address"))
        console.print(panel(table, f"{members.model_name} is ready", "green"))

    def on_progress(what: str) -> None:
        status.update(f"Starting {members.model_name}: {what} ...")

    try:
        exit_code = run(on_ready, on_progress)
    finally:
        status.stop()
    sys.stdout.flush()
    if exit_code:
        raise typer.Exit(exit_code)

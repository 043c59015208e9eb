"""`quire fleet`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import typer

from quire.cli.report import Terminal, show_processes
from quire.fleet.config import FleetConfig, RayConfig
from quire.serve.config import ServerConfig


def fleet(fleet: FleetConfig, server: ServerConfig, ray: RayConfig, *, as_json: bool) -> None:
    """Serve a model from engines on one machine or many, which Ray Serve starts, replaces and counts.

    One OpenAI endpoint is in front of them. With --json, it prints a line for each process when all are ready.

    [dim]Example:[/dim] quire fleet --replicas 2 --kv-memory 1GiB

    [dim]Example:[/dim] quire fleet --address auto --max-replicas 8 --num-gpus 1 Qwen/Qwen3-0.6B

    [dim]Example:[/dim] quire fleet --prefill 1 --replicas 2 --host 0.0.0.0 --yaml
    """
    from quire.engine.before_load import check_model
    from quire.fleet.deployments import as_yaml

    if ray.yaml:
        print(as_yaml(fleet, server), end="")
        return
    from quire.client.process import LOG_FORMAT
    from quire.fleet.run import check_ray, run_fleet

    check_ray()
    check_model(fleet)  # before the processes, each of which would refuse it
    logging.basicConfig(level=server.log_level.upper(), format=LOG_FORMAT)
    console = Terminal(stderr=True)
    starting = console.status(f"Starting Ray for {fleet.model_name} ...")
    if not as_json:
        starting.start()

    def on_progress(what: str) -> None:
        starting.update(f"Starting {fleet.model_name}: {what} ...")

    def on_ready(rows: Sequence[dict[str, Any]]) -> None:
        starting.stop()
        show_processes(rows, fleet.model_name, console, as_json=as_json)

    try:
        exit_code = run_fleet(fleet, server, ray, on_ready=on_ready, on_progress=on_progress)
    finally:
        starting.stop()
    sys.stdout.flush()
    if exit_code:
        raise typer.Exit(exit_code)

"""`quire store`: look into a store of pages, check it, shrink it, and measure it."""

from __future__ import annotations

import typer

from quire.cli.command import command
from quire.cli.store_bench import bench
from quire.cli.store_gc import gc
from quire.cli.store_inspect import inspect
from quire.cli.store_verify import verify

store_app = typer.Typer(
    name="store",
    help="Look into a store of pages, check it, shrink it, and measure it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for body in (inspect, verify, gc, bench):
    command(store_app)(body)

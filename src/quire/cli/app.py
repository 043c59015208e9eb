"""The `quire` command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quire import __version__
from quire.cli.command import command
from quire.cli.doctor import doctor
from quire.cli.explain import explain
from quire.cli.fleet import fleet, up
from quire.cli.generate import generate
from quire.cli.plan import plan
from quire.cli.replay import replay
from quire.cli.serve import serve
from quire.cli.server import audit, memory
from quire.cli.store import gc, inspect, verify
from quire.cli.store_scopes import explain as explain_store
from quire.cli.top import top

_SHOWN: dict[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(name="quire", **_SHOWN)
store = typer.Typer(name="store", help="Look into a store of pages, check it, explain it, and shrink it.", **_SHOWN)
command(app, positional="model")(serve)
command(app, positional="model")(up)
command(app, positional="model")(fleet)
command(app)(generate)
command(app, positional="planned")(plan)
for body in (replay, explain, audit, doctor, top, memory):
    command(app)(body)
for part in (inspect, verify, gc, explain_store):
    command(store)(part)
app.add_typer(store)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve language models from a paged, prefix-shared KV cache.

    [bold]quire serve[/bold] serves the model that comes with Quire.

    Exit codes: 0 done, 1 a defect, 2 bad input or does not fit, 3 a combination that is refused, 4 a fault was found.
    """

"""The `quire` command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quire import __version__
from quire.cli.command import command

_SHOWN: dict[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_MODULES = {
    "serve": "serve", "up": "fleet", "fleet": "fleet", "generate": "generate", "plan": "plan", "replay": "replay",
    "explain": "explain", "audit": "server", "doctor": "doctor", "top": "top", "memory": "server",
}  # fmt: skip
"""The module of each command."""
_OF_STORES = {"inspect": "store", "verify": "store", "gc": "store", "explain": "store_scopes"}
_POSITIONAL = {"serve": "model", "up": "model", "fleet": "model", "plan": "planned"}
"""The setting that a command also takes without its option."""


class _Commands(MutableMapping[str, Any]):
    """Commands by name. A command's module is imported when the command is used: all of them take 0.2 s of CPU."""

    def __init__(self, modules: Mapping[str, str], made: Mapping[str, Any]) -> None:
        self._modules, self._made = modules, dict(made)

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            alone = typer.Typer(add_completion=False, **_SHOWN)
            body = getattr(import_module(f"quire.cli.{self._modules[name]}"), name)
            command(alone, positional=_POSITIONAL.get(name, ""))(body)
            self._made[name] = typer.main.get_command(alone)
        return self._made[name]

    def __setitem__(self, name: str, made: Any) -> None:
        self._made[name] = made

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._modules, *self._made)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Root(TyperGroup):
    """The command."""

    modules = _MODULES

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.commands = _Commands(self.modules, self.commands)


class _Stores(_Root):
    """The commands that look into stores."""

    modules = _OF_STORES


app = typer.Typer(name="quire", cls=_Root, **_SHOWN)
store = typer.Typer(
    name="store", cls=_Stores, help="Look into a store of pages, check it, explain it, and shrink it.", **_SHOWN
)
app.add_typer(store)


def make_commands() -> None:
    """Make all commands: one file may hold the settings of each."""
    for modules in (_MODULES, _OF_STORES):
        list(_Commands(modules, {}).values())


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

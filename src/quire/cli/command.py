"""How a command is made from settings: its options are their fields, and its body is called with them.

A setting comes from the command line, else from a variable `QUIRE_NAME` where its model has those, else from the file
of `--config`, else it is the default.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from quire.cli.report import PageOutput, Report, reported
from quire.errors import InvalidInput
from quire.settings.setting import (
    Settings,
    choices_of,
    default_of,
    group_of,
    help_of,
    kind_of,
    metavar_of,
    names_of,
    option_names,
    own_names,
    refuse_foreign,
    shown_of,
    variable_of,
)

Body = Callable[..., Report | None]

_OWN = {
    "config_file": Annotated[
        str | None,
        typer.Option("--config", help="Settings from a YAML or TOML file; options and QUIRE_... variables win over it.",
                     metavar="FILE"),
    ],
    "as_json": Annotated[bool, typer.Option("--json", help="Print JSON for machines.")],
    "debug": Annotated[bool, typer.Option("--debug", hidden=True, help="Show tracebacks.")],
}  # fmt: skip
"""Options that every command has."""

_MODELS: set[type[Settings]] = set()
"""The settings of all commands that were made."""

_SERVICE_LINK = re.compile("(tcp|udp|sctp)://")
"""What Kubernetes writes to QUIRE_PORT where a Service is named quire: tcp://10.0.0.1:8000."""


def command(app: typer.Typer, *, positional: str = "", **options: Any) -> Callable[[Body], Body]:
    """Add a command to `app`: a function of settings, one parameter for each model, which returns its report. A command
    that prints by itself returns None, and takes `as_json`.

    If two models have a setting of the same name, it belongs to the first. `positional` is a setting that may also be
    given without its option. The function's docstring is the command's help.
    """

    def register(body: Body) -> Body:
        hints = get_type_hints(body)
        models = [kind for kind in hints.values() if isinstance(kind, type) and issubclass(kind, Settings)]
        parameters = list(_parameters(models, positional))
        _MODELS.update(models)

        def run(**words: Any) -> None:
            as_json, debug, path = (words.pop(name) for name in ("as_json", "debug", "config_file"))
            with reported(as_json=as_json, debug=debug):
                given = {name: value for name, value in words.items() if value is not None and value != []}
                value = given.pop("positional", None)
                if value is not None and given.setdefault(positional, value) != value:
                    raise InvalidInput(f"the {positional} is given twice.", fix=f"leave out --{positional}.")
                if debug and any("log_level" in model.model_fields for model in models):
                    given["log_level"] = "debug"
                more = {"as_json": as_json} if "as_json" in hints else {}
                settings = _settings(models, given, path)
                report = body(*settings, **more)
                if report is not None:
                    for file in [each.html for each in settings if isinstance(each, PageOutput) and each.html]:
                        from quire.cli.report_page import write_page

                        write_page(report, file, body.__name__)
                    report.print(as_json=as_json)

        run.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(body.__doc__ or ""))  # lines are as wide as the terminal
        run.__name__ = body.__name__
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(cls=_command_class(models), **options)(run)
        return body

    return register


def _fields(models: Sequence[type[Settings]]) -> Iterator[tuple[type[Settings], str]]:
    """Each model with those of its settings whose names and options no earlier model has."""
    seen: set[str] = set()
    for model in models:
        names = {field: {field, *option_names(model, field)[:1]} for field in model.model_fields}
        yield from ((model, field) for field in names if seen.isdisjoint(names[field]))
        seen.update(*names.values())


def _settings(models: Sequence[type[Settings]], options: Mapping[str, Any], path: str | None) -> list[Settings]:
    """The settings of each model, from the command line, the environment and a file. Raises InvalidInput."""
    in_file = _in_file(models, path) if path is not None else {}
    in_environment = _in_environment(models)
    for model in models:  # a variable is for all commands and servers: one without effect here is ignored
        while idle := model.idle({**in_file, **in_environment, **options}).keys() & in_environment.keys():
            in_environment = {field: value for field, value in in_environment.items() if field not in idle}
    given = {**in_file, **in_environment, **options}
    found = []
    for model in models:
        own = {field: given[field] for one, field in _fields(models) if one is model and field in given}
        spelled = partial(_spelled, model, options=options, in_environment=in_environment)
        found.append(model.read(own, spelled))
    return found


def _in_file(models: Sequence[type[Settings]], path: str) -> dict[str, Any]:
    """The settings in a file, which may hold those of all commands."""
    from quire.cli.app import make_commands

    make_commands()
    elsewhere = {name for model in _MODELS for field in model.model_fields for name in names_of(model, field)}
    return own_names(models, read_file(Path(path)), path, elsewhere)


def _in_environment(models: Sequence[type[Settings]]) -> dict[str, str]:
    """The settings from environment variables. An empty variable counts as unset, except for a secret, whose model
    refuses it."""
    found = {}
    for model, field in _fields(models):
        value = os.environ.get(variable_of(field)) if model.ENVIRONMENT else None
        if value is None or (not value and not shown_of(model, field)["secret"]):
            continue
        if field == "port" and _SERVICE_LINK.match(value):
            about = "it has the form that Kubernetes gives it for a Service of that name"
            typer.echo(f"QUIRE_PORT={value} is ignored: {about}.", err=True)
            continue
        found[field] = value
    return found


def _spelled(
    model: type[Settings], field: str, *, options: Mapping[str, Any], in_environment: Mapping[str, Any]
) -> str:
    """A setting's name as the user wrote it."""
    if field in options and not shown_of(model, field)["argument"]:
        names = [each.partition("/")[0] for each in option_names(model, field)]
        typed = {word.partition("=")[0] for word in sys.argv}
        return next((name for name in names if name in typed), names[0])
    return variable_of(field) if field in in_environment and field not in options else field


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML or TOML file. Raises InvalidInput."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            found = tomllib.loads(text)
        else:
            import yaml

            found = yaml.safe_load(text) or {}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"the file '{path}' cannot be read: {error}.", fix="give a YAML or TOML file.") from error
    except Exception as error:  # yaml's own errors, whose base is Exception
        mark = getattr(error, "problem_mark", None)  # its message quotes the line, which may hold a secret
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise InvalidInput(
            f"the file '{path}' is no YAML{where}.", fix="write lines such as `page_size: 16`."
        ) from None
    if not isinstance(found, dict):
        raise InvalidInput(f"the file '{path}' holds no settings.", fix="write lines such as `page_size: 16`.")
    return found


def _parameters(models: Sequence[type[Settings]], positional: str) -> Iterator[Parameter]:
    """The parameters of a command, from which typer makes its options."""
    fields = list(_fields(models))
    for model, field in fields:
        shown = shown_of(model, field)
        if shown["argument"] or field == positional:
            name = "positional" if field == positional else field
            text, metavar = help_of(model.model_fields[field]), shown["metavar"] or field.upper()
            argument = typer.Argument(help=text, metavar=metavar, show_default=False)
            required = model.model_fields[field].is_required()
            default = Parameter.empty if required else None
            yield _parameter(name, str if required else str | None, argument, default)
    for model, field in fields:
        if option_names(model, field) and not shown_of(model, field)["argument"]:
            yield _option(model, field)
    for name, kind in _OWN.items():
        yield Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=None if name == "config_file" else False)


def _option(model: type[Settings], field: str) -> Parameter:
    info = model.model_fields[field]
    default = default_of(model, field)
    names = option_names(model, field)
    about = help_of(info) + (f" (default: {default})" if default else "")
    about += f" Also {', '.join(other.partition('/')[0] for other in names[1:])}." if names[1:] else ""
    more: dict[str, Any] = {"help": about, "rich_help_panel": group_of(model, field), "show_default": False}
    kind = kind_of(info)
    if kind is bool:
        return _parameter(field, bool | None, typer.Option(*names, **more), None)
    if choices := choices_of(info):
        more["autocompletion"] = lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]
    plain = kind if get_origin(kind) is tuple else list[str] if get_origin(kind) is list else str
    if get_origin(kind) is not tuple:
        more["metavar"] = metavar_of(model, field)
    return _parameter(field, plain | None, typer.Option(*names, **more), None)


def _parameter(name: str, kind: Any, shown: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, shown], default=default)


def _command_class(models: Sequence[type[Settings]]) -> type[TyperCommand]:
    """A command that suggests an option in place of another server's."""

    class Command(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            for parameter in self.params:  # the text names the others; the process ends after its help
                parameter.opts, parameter.secondary_opts = parameter.opts[:1], parameter.secondary_opts[:1]
            super().format_help(ctx, formatter)

        def parse_args(self, ctx: Any, args: list[str]) -> Any:
            given = list(args)  # the parser empties it
            try:
                return super().parse_args(ctx, args)
            except Exception as error:
                name = getattr(error, "option_name", None)  # click's NoSuchOption, wherever typer has it from
                with reported(as_json="--json" in given):
                    refuse_foreign(models, str(name).removeprefix("--").replace("-", "_"))
                raise

    return Command

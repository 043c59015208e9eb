"""Declares a setting once: a field with help, a group and other names.

Commands, files, environment variables and the reference table derive from it. Nothing here loads numpy or torch.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from quire.errors import InvalidInput
from quire.plan.budget import parse_bytes, parse_tokens

logger = logging.getLogger(__name__)

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
"""Bytes, also as text: `8GiB`."""

Tokens = Annotated[int, BeforeValidator(parse_tokens)]
"""A number of tokens, also as text: `32k`."""

_METAVARS = {int: "N", float: "NUMBER", Path: "PATH"}


def setting(
    default: Any,
    about: str,
    *,
    group: str = "Options",
    option: str | None = "",
    aliases: Sequence[str] = (),
    otherwise: str = "",
    metavar: str = "",
    argument: bool = False,
    secret: bool = False,
    **bounds: Any,
) -> Any:
    """The field of a setting.

    `about` is a sentence in which `{choices}` lists the valid words. `option` is the option's name if it differs from
    the field's, None for a setting without one; `aliases` are further options. `otherwise` says what a default of None
    means. No message quotes the value of a `secret` one. `bounds` are pydantic's.
    """
    shown: dict[str, Any] = {
        "group": group,
        "option": option,
        "aliases": list(aliases),
        "otherwise": otherwise,
        "metavar": metavar,
        "argument": argument,
        "secret": secret,
    }
    return Field(default, description=about, json_schema_extra=shown, **bounds)


class Settings(BaseModel):
    """Settings of one part, frozen. `read` checks them and raises InvalidInput for bad ones.

    `FOREIGN` are names of other servers' options that this server lacks: what they are, and what to use instead. With
    `ENVIRONMENT`, each setting is also read from a variable `QUIRE_NAME`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    FOREIGN: ClassVar[Mapping[str, tuple[str, str]]] = {}
    ENVIRONMENT: ClassVar[bool] = False

    @classmethod
    def read(cls, given: Mapping[str, Any], spelled: Callable[[str], str] = str) -> Self:
        """The settings from names, or aliases, to values. `spelled` is how a message writes a name."""
        values = own_names([cls], given)
        try:
            return cls(**values)
        except ValidationError as error:
            raise _refusal(cls, error, spelled) from error

    @classmethod
    def idle(cls, given: Mapping[str, Any]) -> dict[str, str]:
        """The given settings that have no effect beside the others, each with what it needs."""
        del given
        return {}


def own_names(
    models: Sequence[type[Settings]], given: Mapping[str, Any], where: str = "settings", elsewhere: Collection[str] = ()
) -> dict[str, Any]:
    """What was given, by names of fields. Names that only other models have, `elsewhere`, are skipped, and logged.

    Raises InvalidInput for a name that is unknown, foreign or given twice.
    """
    known = {
        name: field for model in reversed(models) for field in model.model_fields for name in names_of(model, field)
    }
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            refuse_foreign(models, name)
            if name in elsewhere:
                logger.warning("%s: '%s' is a setting of another command, and is skipped", where, key)
                continue
            near = get_close_matches(name, known, 1)
            fix = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(sorted(set(known.values())))}."
            raise InvalidInput(f"{where}: '{key}' is not a setting.", fix=fix)
        if known[name] in found:
            raise InvalidInput(f"{where}: '{known[name]}' is given twice, once as '{key}'.", fix="give it once.")
        found[known[name]] = value
    return found


def refuse_foreign(models: Sequence[type[Settings]], name: str) -> None:
    """Raise InvalidInput, with what to use instead, if `name` is an option of other servers."""
    for model in models:
        if name in model.FOREIGN:
            what, fix = model.FOREIGN[name]
            raise InvalidInput(what, fix=fix)


def names_of(model: type[Settings], field: str) -> list[str]:
    """The names of a setting outside the command line: its own, and those of its options."""
    long = (part for names in option_names(model, field) for part in names.split("/")[:1] if part.startswith("--"))
    return list(dict.fromkeys((field, *(part[2:].replace("-", "_") for part in long))))


def option_names(model: type[Settings], field: str) -> list[str]:
    """The option of a setting, as click declares it: `--name`, or `--name/--no-name` for a switch; then its aliases."""
    shown = shown_of(model, field)
    if shown["option"] is None:
        return []
    option = shown["option"] or f"--{field.replace('_', '-')}"
    if not shown["option"] and kind_of(model.model_fields[field]) is bool:
        option = f"{option}/--no-{option[2:]}"
    return [option, *shown["aliases"]]


def shown_of(model: type[Settings], field: str) -> dict[str, Any]:
    """The arguments of `setting` for a field."""
    extra = model.model_fields[field].json_schema_extra
    assert isinstance(extra, dict), f"{field} is not declared with `setting`"
    return extra


def kind_of(field: FieldInfo) -> Any:
    """The type of a field, without None and without the rules of `Annotated`."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    optional = type(None) in get_args(field.annotation)
    kind = kinds[0] if optional and len(kinds) == 1 else field.annotation
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def choices_of(field: FieldInfo) -> list[str]:
    """The valid words of a field; empty if other values are valid too."""
    kind = kind_of(field)
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return [choice.value for choice in kind] if isinstance(kind, type) and issubclass(kind, enum.StrEnum) else []


def metavar_of(model: type[Settings], field: str) -> str:
    """The placeholder of a setting's value in a command's help."""
    found = model.model_fields[field]
    inner = [kind for kind in get_args(found.annotation) if get_origin(kind) is Annotated]
    rules = [*found.metadata, *(rule for kind in inner for rule in kind.__metadata__)]
    parsers = [rule.func for rule in rules if isinstance(rule, BeforeValidator)]
    by_parser = {parse_bytes: "SIZE", parse_tokens: "TOKENS"}
    named = next((by_parser[parser] for parser in parsers if parser in by_parser), "")
    return str(shown_of(model, field)["metavar"]) or named or _METAVARS.get(kind_of(found), "TEXT")


def variable_of(field: str) -> str:
    """The environment variable of a setting."""
    return f"QUIRE_{field.upper()}"


def environment_of(settings: Settings) -> dict[str, str]:
    """What was set, as environment variables that give another process the same settings."""
    given = {field: getattr(settings, field) for field in settings.model_fields_set}
    return {variable_of(field): _as_text(value) for field, value in given.items() if value is not None}


def _as_text(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        pairs = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return json.dumps({field.name: part for field, part in pairs if part != field.default})
    return str(value)


def help_of(field: FieldInfo) -> str:
    """A setting's sentence, with its choices."""
    return (field.description or "").replace("{choices}", ", ".join(choices_of(field)))


def default_of(model: type[Settings], field: str) -> str:
    """The value that is used if a setting is not given; empty if there is nothing to say."""
    default = model.model_fields[field].default
    if model.model_fields[field].is_required() or default is None or default == [] or default is False:
        return str(shown_of(model, field)["otherwise"])
    return str(shown_of(model, field)["otherwise"] or ("on" if default is True else default))


def _refusal(model: type[Settings], error: ValidationError, spelled: Callable[[str], str]) -> InvalidInput:
    """The first cause that has its own message, else each setting with its value and the valid ones."""
    details = error.errors()
    for detail in details:
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, InvalidInput):
            name = f"{spelled(str(detail['loc'][0]))}: " if detail["loc"] else ""
            return type(cause)(f"{name}{cause.message}", fix=cause.fix)
    lines = {f"{spelled(str(detail['loc'][0]))}: {detail['msg']}{_got(model, detail)}": None for detail in details}
    return InvalidInput("; ".join(lines), fix="correct the settings named.")


def _got(model: type[Settings], detail: Mapping[str, Any]) -> str:
    """The refused value, without secrets in it."""
    from quire.tiers.stores.registry import without_secrets  # only a refusal needs it

    field = str(detail["loc"][0])
    if field in model.model_fields and shown_of(model, field)["secret"]:
        return ""
    return f" (got {without_secrets(repr(detail['input']))})"

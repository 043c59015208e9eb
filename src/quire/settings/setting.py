"""Declares a setting once: a field with a type, a default, bounds, help, a group and other names.

Commands, files, environment variables, messages and the reference table derive from it. Nothing here loads numpy or
torch.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from quire.errors import InvalidInput

logger = logging.getLogger(__name__)

_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TOKENS = {"": 1, "K": 2**10, "M": 2**20}
_NUMBER = re.compile(r"\s*((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Bytes of a size such as `8GiB`, `512 MiB`, `1.5G` (binary), `2GB` (decimal) or a plain number.

    Raises InvalidInput for anything else, and for zero.
    """
    return _parse(text, _BYTES, "a size", "write a number and a unit, such as 8GiB or 512MiB.")


def format_bytes(size: int) -> str:
    """`size` in the largest binary unit in which it is at least one: `1.50 GiB`, `640 B`."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def exact_bytes(size: int) -> str:
    """`size` in the unit in which it is shortest, as input for `parse_bytes`: `20MiB`, `1001B`."""
    units = ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
    whole = (f"{size // _BYTES[unit.upper()]}{unit}" for unit in units if size % _BYTES[unit.upper()] == 0)
    return min(whole, key=len)


def parse_tokens(text: str | int) -> int:
    """Tokens of a count such as `32768`, `32k` (32,768) or `1m` (1,048,576). Raises InvalidInput for anything else."""
    return _parse(text, _TOKENS, "a number of tokens", "write a number such as 32768 or 32k.")


def parse_speed(text: str | int) -> int:
    """Bytes per second of a speed such as `10GB/s`. Raises InvalidInput."""
    size, per, second = str(text).replace(" ", "").partition("/")
    if per and second != "s":
        raise InvalidInput(f"'{text}' is no speed.", fix="write it as 10GB/s.")
    return parse_bytes(size)


def _parse(text: str | int, units: Mapping[str, int], what: str, fix: str) -> int:
    if isinstance(text, int) and not isinstance(text, bool):
        found = text
    else:
        match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
        if not match or match[2].upper() not in units:
            raise InvalidInput(f"{text!r} is not {what}.", fix=fix)
        found = int(Fraction(match[1].replace(",", "")) * units[match[2].upper()])
    if found <= 0:
        raise InvalidInput(f"{what} must be above zero, got '{text}'.", fix=fix)
    return found


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
"""Bytes, also as text: `8GiB`."""

Tokens = Annotated[int, BeforeValidator(parse_tokens)]
"""A number of tokens, also as text: `32k`."""

Speed = Annotated[int, BeforeValidator(parse_speed)]
"""Bytes per second, also as text: `10GB/s`."""

_METAVARS = {int: "N", float: "NUMBER", Path: "PATH"}


def setting(
    default: Any,
    about: str,
    *,
    group: str = "",
    option: str | None = "",
    aliases: Sequence[str] = (),
    otherwise: str = "",
    metavar: str = "",
    argument: bool = False,
    secret: bool = False,
    needs: str = "",
    **bounds: Any,
) -> Any:
    """The field of a setting.

    `about` is a sentence in which `{choices}` lists the valid words. `group` is that of its class if it is not given.
    `option` is the option's name if it differs from
    the field's, None for a setting without one; `aliases` are further options. `otherwise` says what a default of None
    means. No message quotes the value of a `secret` one. `needs` says without what it has no effect. `bounds` are
    pydantic's.
    """
    shown: dict[str, Any] = {
        "group": group,
        "option": option,
        "aliases": list(aliases),
        "otherwise": otherwise,
        "metavar": metavar,
        "argument": argument,
        "secret": secret,
        "needs": needs,
    }
    return Field(default, description=about, json_schema_extra=shown, **bounds)


class Settings(BaseModel):
    """Settings of one part, frozen. Bad ones raise InvalidInput. Classes of them may be combined.

    `FOREIGN` are names of other servers' options that this server lacks: what they are, and what to use instead. With
    `ENVIRONMENT`, each setting is also read from a variable `QUIRE_NAME`. Settings that are `CHOSEN` follow from
    others, and have no option. Those that a class declares are in its own `GROUP`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        hide_input_in_errors=True,
        defer_build=True,
        allow_inf_nan=False,
    )

    FOREIGN: ClassVar[Mapping[str, tuple[str, str]]] = {}
    ENVIRONMENT: ClassVar[bool] = False
    CHOSEN: ClassVar[frozenset[str]] = frozenset()
    GROUP: ClassVar[str] = "Options"

    def __init__(self, spelled: Callable[[str], str] = str, /, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise _refusal(type(self), error, spelled) from error

    @classmethod
    def read(cls, given: Mapping[str, Any], spelled: Callable[[str], str] = str) -> Self:
        """The settings from names, or aliases, to values. `spelled` is how a message writes a name."""
        return cls(spelled, **own_names([cls], given))

    def shared(self, other: type[Settings]) -> dict[str, Any]:
        """The values that were given of settings that `other` has too, as its arguments."""
        return {name: getattr(self, name) for name in self.model_fields_set & other.model_fields.keys()}

    def changed(self, **values: Any) -> Self:
        """These settings with other values, which are not checked."""
        return self.model_copy(update=values)

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
    if shown["option"] is None or field in model.CHOSEN:
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


def group_of(model: type[Settings], field: str) -> str:
    """The group of a setting: its own, else that of the class that declares it."""
    owner = next(each for each in model.__mro__ if field in get_annotations(each))
    return str(shown_of(model, field)["group"] or owner.__dict__.get("GROUP", Settings.GROUP))


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
    by_parser = {parse_bytes: "SIZE", parse_tokens: "TOKENS", parse_speed: "SPEED"}
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


def without_secrets(url: str) -> str:
    """A store's URL without user, password and options; a directory unchanged. Everything before the last @ is removed,
    since a password may be quoted wrongly."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}://{re.split('[?#]', rest.rpartition('@')[2])[0]}" if mark else url


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
    field = str(detail["loc"][0])
    if field in model.model_fields and shown_of(model, field)["secret"]:
        return ""
    return f" (got {without_secrets(repr(detail['input']))})"

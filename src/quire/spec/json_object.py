"""Settings in a JSON object, as text or as a mapping."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.errors import InvalidInput

Kind = tuple[tuple[type, ...], str]
"""The types of a value, and how a message names them."""

TEXT: Kind = ((str,), "text")
WHOLE: Kind = ((int,), "a whole number")
SWITCH: Kind = ((bool,), "true or false")
NUMBER: Kind = ((int, float), "a number")


def read_fields(
    given: str | Mapping[str, Any],
    what: str,
    kinds: Mapping[str, Kind],
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    refused: Mapping[str, str] = MappingProxyType({}),
    fix: str,
) -> dict[str, Any]:
    """The values in `given` by the names of fields, which `kinds` has; a null counts as absent.

    `names` are other names of fields, `refused` those that are known and have no place here, with the fix. Raises
    InvalidInput, which names `what`, for no object (then with `fix`), for a name that is refused or unknown, for two
    names of one field, and for a value of another type.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{what} is not JSON: {error}.", fix=fix) from error
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{what} is an object, and this is a {type(given).__name__}.", fix=fix)
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name in refused:
            raise InvalidInput(f"'{key}' is not a setting of {what} here.", fix=refused[name])
        field = names.get(name, name)
        if field not in kinds:
            import difflib  # only a mistake needs it

            near = difflib.get_close_matches(name, [*kinds, *names], 1)
            fix = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(kinds)}."
            raise InvalidInput(f"'{key}' is not a setting of {what}.", fix=fix)
        if value is None:
            continue
        if field in found:
            raise InvalidInput(
                f"{field} is given twice, by this name or others of it; once as '{key}'.", fix="give it once."
            )
        types, kind = kinds[field]
        if type(value) not in types:
            raise InvalidInput(f"'{key}' is {value!r}, not {kind}.", fix=f"give {kind}.")
        found[field] = value
    return found

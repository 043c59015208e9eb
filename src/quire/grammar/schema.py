"""Which keywords a JSON schema may have: llguidance enforces these, and accepts unknown ones in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.errors import InvalidInput
from quire.spec.grammar import NOTES

MOST_DEPTH = 100
"""Schemas in each other."""

MOST_OPTIONAL = 400
"""Properties of one object that it may lack: with about 500 a matcher has too many ways to go on."""

_OF_SCHEMA = frozenset(("additionalProperties", "additionalItems", "items"))
_OF_LIST = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_OF_NAMES = frozenset(("$defs", "definitions", "patternProperties", "properties"))
_ENFORCED = frozenset((
    "$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength", "maxProperties",
    "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "required", "type",
))  # fmt: skip
_YEAR, _OF_FOUR = "(000[1-9]|00[1-9].|0[1-9]..|[1-9]...)", "(0[48]|[2468][048]|[13579][26])"
_DAY = f"({_YEAR}-((0[13-9]|1[0-2])-..|02-([01].|2[0-8]))|(..{_OF_FOUR}|{_OF_FOUR}00)-02-29)"
_NARROWER = {"date": f"^{_DAY}$", "date-time": f"^{_DAY}.{{7}}[0-5]", "time": "^.{6}[0-5]"}
"""What llguidance's formats lack: days that are none, the year 0, and seconds 60, which are right on few days."""
KEYWORDS = _OF_SCHEMA | _OF_LIST | _OF_NAMES | _ENFORCED | NOTES


def check_schema(schema: Any) -> None:
    """Raise InvalidInput for the first keyword that is not supported, with its path, and for schemas that are no object
    or are too deep. Formats of dates and times get a pattern beside them, in place."""
    waiting = [("#", schema, 1)]
    while waiting:
        path, found, depth = waiting.pop()
        if isinstance(found, bool):
            continue
        if not isinstance(found, dict):
            raise InvalidInput(f"the JSON schema must have an object at {path}, got a {type(found).__name__}.")
        if depth > MOST_DEPTH:
            raise InvalidInput(f"the JSON schema has more than {MOST_DEPTH} levels at {path[:200]}.", fix="flatten it.")
        if depth > 1 and "$ref" in found and not found.keys().isdisjoint(("$id", "id")):
            what = "for which drafts of JSON Schema have two meanings"
            raise InvalidInput(
                f"the JSON schema has an '$id' beside a '$ref' at {path[:200]}, {what}.", fix="leave it out."
            )
        for keyword in ("required", "enum"):
            if not isinstance(found.get(keyword, []), list):
                raise InvalidInput(f"the JSON schema must have a list at {path[:200]}/{keyword}.")
        narrower = _NARROWER.get(found["format"]) if isinstance(found.get("format"), str) else None
        for keyword in found:
            if keyword not in KEYWORDS and (not str(keyword).startswith("x-") or keyword == "x-guidance"):
                raise InvalidInput(
                    f"the JSON schema has the keyword '{str(keyword)[:60]}' at {path[:200]}, which is not supported.",
                    fix="leave it out, or say the same by supported keywords.",
                )
        waiting += [(f"{path}/{name}", inner, depth + 1) for name, inner in _inner(path, found)]
        if narrower:
            found["allOf"] = [*found.get("allOf", ()), {"pattern": narrower}]


def _inner(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, with where they are in it."""
    for keyword in schema:
        found = schema[keyword]
        if keyword in _OF_NAMES:
            if not isinstance(found, Mapping):
                raise InvalidInput(f"the JSON schema must have an object at {path}/{keyword}.")
            required = schema.get("required")
            optional = len(found) - (len(required) if isinstance(required, list) else 0)
            if keyword == "properties" and optional > MOST_OPTIONAL:
                raise InvalidInput(
                    f"the JSON schema has {optional:,} properties at {path[:200]} that are not required, and may have "
                    f"{MOST_OPTIONAL}.",
                    fix="require some, or nest them.",
                )
            yield from ((f"{keyword}/{name}", inner) for name, inner in found.items())
        elif keyword in _OF_LIST or (keyword == "items" and isinstance(found, list)):
            if not isinstance(found, list):
                raise InvalidInput(f"the JSON schema must have a list at {path}/{keyword}.")
            yield from ((f"{keyword}/{place}", inner) for place, inner in enumerate(found))
        elif keyword in _OF_SCHEMA:
            yield keyword, found

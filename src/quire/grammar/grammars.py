"""What makes a `Grammar`: each function checks what it is given and raises InvalidInput, before anything compiles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.errors import InvalidInput
from quire.spec.grammar import NOTES, Grammar

MOST_CHARACTERS = 1 << 17
"""Characters of a schema, a regular expression or a grammar."""

MOST_TRANSLATED = 1 << 13
"""Characters of a grammar in llama.cpp's syntax: its translation, in Python, takes some 8 us for each."""

MOST_CHOICES = 1024


def json_schema(schema: Mapping[str, Any] | str | bool) -> Grammar:
    """JSON that this schema allows, with at most a space, or a new line and its indentation, between two tokens.

    `schema` is an object, or its JSON. Raises InvalidInput for a keyword that is not supported, and says where it is.
    """
    if isinstance(schema, str):
        _check_size("the JSON schema", schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"the JSON schema is not JSON: {error}.") from None
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the JSON schema has what JSON cannot have: {error}.") from None
    _check_size("the JSON schema", text)
    if schema is False:
        raise InvalidInput("the JSON schema is false, which allows nothing.")
    checked = {} if schema is True else json.loads(text)
    check_schema(checked)
    return Grammar("json", json.dumps(checked, ensure_ascii=False))


def json_object() -> Grammar:
    """A JSON object."""
    return Grammar("json", '{"type": "object"}')


def regex(pattern: str) -> Grammar:
    """Text that matches as a whole."""
    return _grammar("regex", "the regular expression", pattern)


def lark(text: str) -> Grammar:
    """Text that a grammar in Lark's syntax allows, as llguidance reads it: it begins at the rule `start`."""
    return _grammar("lark", "the grammar", text)


def ebnf(text: str) -> Grammar:
    """As `lark`, of a grammar in Lark's syntax or in that of llama.cpp (GBNF), which begins at the rule `root`."""
    _check_size("the grammar", text)
    if "::=" in text and len(text) > MOST_TRANSLATED:
        raise InvalidInput(
            f"the grammar has {len(text):,} characters, and may have {MOST_TRANSLATED:,} in llama.cpp's syntax.",
            fix="write it in Lark's.",
        )
    return Grammar("ebnf", text)


def choice(texts: Sequence[str]) -> Grammar:
    """One of these texts."""
    if not texts or len(texts) > MOST_CHOICES or not all(isinstance(text, str) and text for text in texts):
        raise InvalidInput(f"choice must be a list of 1 to {MOST_CHOICES:,} texts that are not empty.")
    return lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def _grammar(kind: Any, what: str, text: str) -> Grammar:
    _check_size(what, text)
    return Grammar(kind, text)


def _check_size(what: str, text: str) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidInput(f"{what} must be text that is not empty.")
    if len(text) > MOST_CHARACTERS:
        raise InvalidInput(f"{what} has {len(text):,} characters, and may have {MOST_CHARACTERS:,}.", fix="shorten it.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} must be text without lone surrogates.") from None


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

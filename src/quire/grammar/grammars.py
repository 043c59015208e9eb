"""What makes a `Grammar`: each function checks what it is given and raises InvalidInput, before anything compiles."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidInput
from quire.grammar.schema import check_schema
from quire.spec.grammar import Grammar

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

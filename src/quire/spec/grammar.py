"""Grammar: which texts a sequence may be. `quire.grammar` makes them, and masks what is drawn."""

from __future__ import annotations

from typing import Literal

import msgspec

WHITE_SPACE = r"(\x20|\r?\n[\x20\x09]{0,24})?"
"""Between two tokens of JSON: a space, or a new line and its indentation. Without a limit a model may write no end."""

NOTES = frozenset((
    "$anchor", "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema", "default",
    "deprecated", "description", "discriminator", "example", "examples", "id", "readOnly", "title", "writeOnly",
))  # fmt: skip
"""Keywords of a JSON schema that allow and forbid nothing."""


class Grammar(msgspec.Struct, frozen=True):
    """`text` is a JSON schema, a regular expression of the whole output, or a grammar: in Lark's syntax, or for "ebnf"
    perhaps in llama.cpp's."""

    kind: Literal["json", "regex", "lark", "ebnf"]
    text: str

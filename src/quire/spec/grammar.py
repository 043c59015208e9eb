"""Grammar: which texts a sequence may be. `quire.grammar` makes them, and masks what is drawn."""

from __future__ import annotations

from typing import Literal

import msgspec

WHITE_SPACE = r"(\x20|\r?\n[\x20\x09]{0,24})?"
"""Between two tokens of JSON: a space, or a new line and its indentation. Without a limit a model may write no end."""


class Grammar(msgspec.Struct, frozen=True):
    """`text` is a JSON schema, a regular expression of the whole output, or a grammar: in Lark's syntax, or for "ebnf"
    perhaps in llama.cpp's."""

    kind: Literal["json", "regex", "lark", "ebnf"]
    text: str

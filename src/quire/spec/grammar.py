"""Grammar: which texts a sequence may be. `quire.grammar` makes them, and masks what is drawn."""

from __future__ import annotations

from typing import Literal

import msgspec


class Grammar(msgspec.Struct, frozen=True):
    """`text` is a JSON schema, a regular expression of the whole output, or a grammar in Lark's syntax."""

    kind: Literal["json", "regex", "lark"]
    text: str

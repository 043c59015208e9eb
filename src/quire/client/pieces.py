"""Token ids of pieces of prompts, so that a conversation's next turn tokenises only what is new.

The tokenizers library takes added tokens out of a text first, and works on what lies between two of them by itself. So
a text that is cut before each of them has the token ids of its pieces, one after the other.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from quire.spec.ids import Ids

_FLAGS = ("lstrip", "rstrip", "single_word")
"""With one of them, what an added token is depends on the text beside it."""


class Cut(NamedTuple):
    """Where the pieces of a text begin, in characters, and the key of each."""

    starts: list[int]
    keys: list[bytes]


class Cutter:
    """Cuts texts at the added tokens of one tokenizer."""

    def __init__(self, content: str) -> None:
        """`content` is the tokenizer's JSON, of the tokenizers library."""
        added = [token for token in json.loads(content)["added_tokens"] if not token["normalized"]]
        self._ends = {token["content"] for token in added if not any(token[flag] for flag in _FLAGS)}
        self._ids = np.array([token["id"] for token in added if token["content"] in self._ends], dtype=np.int32)
        longest_first = sorted((token["content"] for token in added), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def cut(self, text: str, salt: str) -> Cut:
        """The pieces of `text`; their keys are of this salt only."""
        starts = [found.start() for found in self._added.finditer(text) if found[0] in self._ends]
        if not starts or starts[0]:
            starts.insert(0, 0)
        namespace = blake2b(salt.encode(), digest_size=16).digest()
        texts = (text[start:end].encode() for start, end in zip(starts, [*starts[1:], len(text)], strict=True))
        return Cut(starts, [blake2b(piece, key=namespace, digest_size=16).digest() for piece in texts])

    def split(self, ids: Ids) -> list[Ids]:
        """Token ids of pieces that follow each other, each by itself."""
        at = np.flatnonzero(np.isin(ids, self._ids))
        return np.split(ids, at[at > 0])


_TOKENS_OF_PIECE = 64
"""Tokens whose ids have as many bytes as what is kept beside the ids of one piece: its key and its array."""


class KnownPieces:
    """Token ids of pieces by key, the least recently used of which go first."""

    def __init__(self, most_tokens: int) -> None:
        """Together they have at most so many tokens; each piece counts as 64 more than it has."""
        self._most_tokens = most_tokens
        self._num_tokens = 0
        self._kept: OrderedDict[bytes, Ids] = OrderedDict()

    def leading(self, keys: list[bytes]) -> list[Ids]:
        """Token ids of as many of the first pieces as are known."""
        found = []
        for key in keys:
            if (ids := self._kept.get(key)) is None:
                break
            self._kept.move_to_end(key)
            found.append(ids)
        return found

    def keep(self, keys: list[bytes], pieces: list[Ids]) -> None:
        """Keep these, which are then the most recently used."""
        for key, ids in zip(keys, pieces, strict=True):
            if key not in self._kept:
                self._num_tokens += len(ids) + _TOKENS_OF_PIECE
                self._kept[key] = ids.copy()  # not a view of the whole prompt
        while self._num_tokens > self._most_tokens:
            self._num_tokens -= len(self._kept.popitem(last=False)[1]) + _TOKENS_OF_PIECE

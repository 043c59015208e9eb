"""Tokens as raw int32 bytes: what edges of the tree are made of."""

from __future__ import annotations

import numpy as np

TOKEN_BYTES = 4


def common_pages(data: bytes, at: int, key: bytes, unit: int) -> int:
    """How many of the first bytes of `key` equal `data[at:]`, in whole units; the first unit is known to."""
    if data.startswith(key, at):
        return len(key)
    length = min(len(key), (len(data) - at) // unit * unit)
    left = np.frombuffer(data, dtype=np.int32, count=length // TOKEN_BYTES, offset=at)
    right = np.frombuffer(key, dtype=np.int32, count=length // TOKEN_BYTES)
    differs = left != right
    first = int(differs.argmax())
    if not differs[first]:
        return length
    return first * TOKEN_BYTES // unit * unit

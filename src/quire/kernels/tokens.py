"""Tokens: the keys and values that attention reads, by slot, however many fields of a pool they are stored in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.stored import StoredRows
from quire.kernels.workspace import Workspace

_workspace = Workspace()


class Tokens(Protocol):
    """Keys `[n, kv_heads, key_dim]` and values `[n, kv_heads, value_dim]` of n slots, valid until the next call."""

    def read(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Those of consecutive slots."""

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Those of slots `index` int64 `[n]`."""


class StoredTokens:
    """Keys and values stored as such."""

    __slots__ = ("_keys", "_values")

    def __init__(self, keys: StoredRows, values: StoredRows) -> None:
        self._keys = keys
        self._values = values

    def read(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """In place where they are stored in `dtype`."""
        return self._keys.read(start, stop, dtype), self._values.read(start, stop, dtype)

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """In scratch memory."""
        return self._keys.gather(index, dtype, "key"), self._values.gather(index, dtype, "value")


class TokensOfHead:
    """One head of several: keys and values `[n, 1, dim]`."""

    __slots__ = ("_head", "_tokens")

    def __init__(self, tokens: Tokens, head: int) -> None:
        self._tokens = tokens
        self._head = slice(head, head + 1)

    def read(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A part of what `tokens` reads."""
        key, value = self._tokens.read(start, stop, dtype)
        return key[:, self._head], value[:, self._head]

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A part of what `tokens` gathers."""
        key, value = self._tokens.gather(index, dtype)
        return key[:, self._head], value[:, self._head]


class JoinedTokens:
    """One head whose key is a row of two fields side by side, `[n, 1, a + b]`, and whose value is the key itself.

    Latent attention reads the first field only as a value: of an output, the rest is cut off. That costs less than a
    second read, and equal widths are what fused kernels want.
    """

    __slots__ = ("_first", "_second")

    def __init__(self, first: StoredRows, second: StoredRows) -> None:
        self._first = first
        self._second = second

    def read(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A copy in scratch memory."""
        return _joined(self._first.read(start, stop, dtype), self._second.read(start, stop, dtype))

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A copy in scratch memory."""
        return _joined(self._first.gather(index, dtype, "first"), self._second.gather(index, dtype, "second"))


def _joined(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    joined = _workspace.take("joined", first.dtype, first.device, first.shape[0], first.shape[1] + second.shape[1])
    row = torch.cat((first, second), dim=-1, out=joined).unsqueeze(1)
    return row, row

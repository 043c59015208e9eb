"""Engines whose latents are in host memory, on the tiny models with sparse attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.core import EngineCore
from quire.models import sparse
from quire.models.attention import CallOptions
from quire.models.hf import LoadedModel
from quire.models.latent import LatentAttention
from quire.models.sparse import _SparseAttention
from tests.engine.running import core_for

TOP_K = 8


def hosted_core(model: LoadedModel, buffer_size: int, **settings: Any) -> EngineCore:
    """As `core_for`, with hot buffers of that many tokens. Its user closes it."""
    hisparse = {"device_buffer_size": buffer_size}
    return core_for(model, **{"max_running_requests": 8, "hisparse": hisparse, **settings})


class HostedOracle:
    """What attention reads in one engine with latents in host memory, compared with what was written.

    `written` has, by call and slot of the host's frames, the row that was computed for the token there. Each row that
    reads must read exactly these rows, of all positions up to its own or of those that its indexer has selected. Hot
    buffers overwrite only tokens that no other unread token of the buffer was used before.
    """

    def __init__(self, core: EngineCore, patch: pytest.MonkeyPatch) -> None:
        assert core.latents is not None
        self.checked = 0
        """Tokens whose content was compared, in hot buffers."""
        self._hisparse = core.latents.coordinator
        self._written: dict[int, dict[int, Tensor]] = {}
        self._used: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}  # by slot: position, and step of last use
        self._step = 0
        self._watch_calls(patch)
        self._watch_buffers(patch)

    def _watch_calls(self, patch: pytest.MonkeyPatch) -> None:
        call, keep, attend = _SparseAttention.__call__, LatentAttention.keep, sparse.attend_selected
        wanted: list[Tensor] = []

        def new_keep(latent: LatentAttention, forward: Any, key: Tensor, value: Tensor, **others: Any) -> Any:
            kept = keep(latent, forward, key, value, **others)
            if self._is_own(forward):
                fields, batch = kept
                rows = fields.gather(batch.slots_on(key.device), key.dtype)[0][:, 0].clone()
                held = self._written.setdefault(forward.ordinal - 1, {})
                held.update(zip(batch.slots.tolist(), rows, strict=True))
            return kept

        def new_call(
            module: _SparseAttention, forward: Any, query: Tensor, key: Tensor, value: Tensor, options: CallOptions
        ) -> Tensor:
            ordinal = forward.ordinal if self._is_own(forward) else 0

            def new_attend(own: Tensor, reader: Any, slots: Tensor, hidden: Tensor, *more: Any) -> Any:
                if self._is_own(forward) and not reader._first.on_host:
                    wanted[:] = self._wanted(forward, ordinal, options, module._most)
                    assert len(wanted) == len(slots), "a row of one token does not read its buffer"
                    for expected, at, unseen in zip(wanted, slots, hidden, strict=True):
                        found = reader.gather(at[~unseen], expected.dtype)[0][:, 0]
                        assert len(found) == len(expected), "a row reads more tokens than it selects, or fewer"
                        assert torch.equal(_sorted(found), _sorted(expected)), "a row reads another token's latents"
                        self.checked += len(found)
                return attend(own, reader, slots, hidden, *more)

            patch.setattr(sparse, "attend_selected", new_attend)
            return call(module, forward, query, key, value, options)

        patch.setattr(LatentAttention, "keep", new_keep)
        patch.setattr(_SparseAttention, "__call__", new_call)

    def _is_own(self, forward: Any) -> bool:
        return getattr(forward, "hisparse", None) is self._hisparse

    def _wanted(self, forward: Any, ordinal: int, options: CallOptions, most: int) -> list[Tensor]:
        """The rows that each sequence with one new token must read."""
        batch = forward.rows("latent", ordinal)[1]
        found = []
        for at in np.flatnonzero(np.diff(batch.query_starts) == 1).tolist():
            context = int(batch.context_lens[at])
            positions = range(context)
            if context > most:
                selected = options.others["indices"][0, int(batch.query_starts[at])]
                positions = sorted(set(selected[selected >= 0].tolist()))
            size = batch.page_size
            held = self._written[ordinal]
            found.append(torch.stack([held[int(batch.frames[at, p // size]) * size + p % size] for p in positions]))
        return found

    def _watch_buffers(self, patch: pytest.MonkeyPatch) -> None:
        hot = self._hisparse.hot
        swap_in, clear = hot.swap_in, hot.clear

        def new_swap_in(index: int, rows: Any, positions: Any, newest: Any) -> Any:
            found = swap_in(index, rows, positions, newest)
            self._step += 1
            buffers = {row: self._used.setdefault((index, row), {}) for row in rows.tolist()}
            for row, wanted, slots in zip(rows.tolist(), positions, found.slots, strict=True):
                for position, slot in zip(wanted.tolist(), slots.tolist(), strict=True):
                    held = buffers[row].get(slot, (-1, 0))[0]
                    if position >= 0 and held == position:
                        buffers[row][slot] = (position, self._step)
            for row, position, slot in zip(*(a.tolist() for a in (found.row, found.position, found.slot)), strict=True):
                before = buffers[row].pop(slot, (-1, 0))[1]
                others = [used for held, used in buffers[row].values() if used < self._step]
                full = len(buffers[row]) == hot.buffer_size - 1
                assert before <= min(others, default=before) and (full or not before), "not the least recently used"
                buffers[row][slot] = (position, self._step)
            return found

        def new_clear(rows: Any) -> None:
            clear(rows)
            for index, row in list(self._used):
                if row in rows:
                    del self._used[index, row]

        patch.setattr(hot, "swap_in", new_swap_in)
        patch.setattr(hot, "clear", new_clear)


def _sorted(rows: Tensor) -> Tensor:
    """Rows in an order that depends on their content alone."""
    return rows[np.lexsort(rows.numpy().T[::-1]).copy()]

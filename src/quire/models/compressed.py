"""Compressed attention (DeepSeek-V4): a window of raw rows, and one compressed entry per block of tokens before it.

A compressor folds the inputs of a block (a value and a score per number and token) into one entry when the block is
complete; in overlapping blocks also those of the block before. Inputs that a later block needs stay in a ring, which
every page of the window has for itself, so that a request can resume after a page. An indexer folds keys of its own in
the same way and selects entries by them; without one, all entries are read.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention import attend_selected, attend_tile, merge_attention, paged_attention_lse
from quire.kernels.batch import PagedBatch
from quire.kernels.slots import Slots, flatten_ranges
from quire.kernels.tiles import SelectingRows, Tile, entry_slots, tiles_of
from quire.models.attention import OWN_ATTENTION, CallOptions
from quire.models.forward import Forward, RecordingForward, RunningForward, current_forward, in_forward
from quire.models.indexers import by_length
from quire.spec.layers import CompressedCall
from quire.upload import to_device

_SELECTION = "selection"
"""Key under which a forward pass shares the selection of an indexer with the attention of its layer."""


def install_compressors(model: torch.nn.Module) -> None:
    """Let the compressed attention modules of `model` store rows, entries and rings in the pools."""
    for module in model.modules():
        if hasattr(module, "compressor") and hasattr(module, "sliding_window") and hasattr(module, "sinks"):
            compressor: Any = module.compressor
            call = _call_of(module)
            setattr(module, OWN_ATTENTION, _CompressedAttention(call, compressor))
            if compressor is not None:
                compressor.forward = _Compressing(call, compressor)


def _call_of(module: Any) -> CompressedCall:
    """The stored widths of a module, from its own shapes."""
    compressor, rope_dim = module.compressor, int(module.config.qk_rope_head_dim)
    indexer = getattr(compressor, "indexer", None)
    return CompressedCall(
        nope_dim=int(module.head_dim) - rope_dim,
        rope_dim=rope_dim,
        window=int(module.sliding_window),
        ratio=0 if compressor is None else int(compressor.compress_rate),
        overlap=indexer is not None,
        index_dim=0 if indexer is None else int(indexer.head_dim),
    )


def _split(rows: Tensor, call: CompressedCall) -> tuple[Tensor, Tensor]:
    """The latents and the rotated part of `rows` `[n, nope_dim + rope_dim]`."""
    return rows[:, : call.nope_dim], rows[:, call.nope_dim :]


class _CompressedAttention:
    """Attention of one module over its window and over entries: all of them, or those that an indexer selected."""

    def __init__(self, call: CompressedCall, compressor: Any) -> None:
        self._call = call
        indexer = getattr(compressor, "indexer", None)
        self._most = sys.maxsize if indexer is None else int(indexer.index_topk)

    def __call__(self, forward: Forward, query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Tensor:
        """See `OwnAttention`. `key` and `value` are the same rows `[T, 1, dim]`, the rotated part last."""
        if isinstance(forward, RecordingForward):
            forward.note(self._call)
            return torch.zeros_like(query)
        call, ordinal = self._call, forward.next_ordinal()
        fields, batch = forward.latents(ordinal)
        fields.write(batch.places_on(query.device), *_split(key[:, 0], call))
        parts = [paged_attention_lse(query, fields, batch, replace(options, window=call.window))]
        if call.ratio:
            parts.append(self._attend_entries(forward, ordinal, query, options))
        return merge_attention(parts, options.sinks).to(query.dtype)

    def _attend_entries(
        self, forward: RunningForward, ordinal: int, query: Tensor, options: CallOptions
    ) -> tuple[Tensor, Tensor]:
        """Float32 output `[T, heads, dim]` over the entries, and log-sum-exp; zeros and -inf without any."""
        fields, batch = forward.latents(ordinal, "compressed_")
        device = query.device
        out = torch.zeros(query.shape, dtype=torch.float32, device=device)
        lse = torch.full(query.shape[:2], float("-inf"), device=device)
        tiles, selecting = batch.derived(("entries", self._call.ratio, self._most), partial(self._split, device))
        for tile in tiles:
            found = attend_tile(query[tile.rows], fields, tile.slots, ~tile.visible, options, batch.backend)
            out[tile.rows], lse[tile.rows] = found
        if selecting is not None:
            rows = selecting.rows
            entries: Tensor = forward.shared[_SELECTION][rows]
            slots = selecting.slots_of(entries.clamp_min(0))
            out[rows], lse[rows] = attend_selected(query[rows], fields, slots, entries < 0, options, batch.backend)
        return out, lse

    def _split(self, device: torch.device, batch: PagedBatch) -> tuple[list[Tile], SelectingRows | None]:
        """The rows that read all entries, and those that read selected ones."""
        ratio = self._call.ratio
        short, long = by_length(batch, self._most, ratio)
        return tiles_of(batch, short, ratio, device), SelectingRows(batch, long, ratio, device) if len(long) else None


class _Compressing:
    """A compressor of the model whose inputs and entries are in the pools, with its indexer, if it has one."""

    def __init__(self, call: CompressedCall, compressor: Any) -> None:
        self._call = call
        self._forward = compressor.forward
        self._folder = _Folder(compressor, call)
        indexer: Any = getattr(compressor, "indexer", None)
        self._selector = None if indexer is None else _Selector(call, indexer)

    def __call__(
        self, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, past_key_values: Any, layer_idx: int
    ) -> tuple[Tensor, Tensor | None]:
        """In place of the compressor's `forward`. With pools the model gets no entries: its attention reads them."""
        if not in_forward():
            found: tuple[Tensor, Tensor | None]
            found = self._forward(hidden_states, q_residual, position_ids, past_key_values, layer_idx)
            return found
        forward = current_forward()
        width = self._call.nope_dim + self._call.rope_dim
        if isinstance(forward, RunningForward):
            entries = self._folder.fold(forward, "compressor", hidden_states)
            passes = (forward, *forward.others)
            for running in passes:
                self._store(running, forward.ordinal, entries)
            if self._selector is not None:
                selection = self._selector.select(forward, hidden_states, q_residual, position_ids)
                for running in passes:
                    running.shared[_SELECTION] = selection
        return hidden_states.new_zeros(1, 1, 0, width), None

    def _store(self, forward: RunningForward, ordinal: int, entries: Tensor) -> None:
        """Store new entries for the next attention call."""
        fields, batch = forward.latents(ordinal, "compressed_")
        fields.write(_new_entries(batch, self._call, entries.device), *_split(entries, self._call))


class _Selector:
    """An indexer of the model that folds its keys in the pools and selects entries by them."""

    def __init__(self, call: CompressedCall, indexer: Any) -> None:
        self._call = call
        self._indexer = indexer
        self._folder = _Folder(indexer, call)
        self._most = int(indexer.index_topk)

    def select(self, forward: RunningForward, hidden: Tensor, q_residual: Tensor, position_ids: Tensor) -> Tensor:
        """The entries that each row selects, int64 `[T, n]`, -1 for none. Its new keys are stored first."""
        indexer, ratio, device = self._indexer, self._call.ratio, hidden.device
        keys = self._folder.fold(forward, "index_compressor", hidden)
        stored, batch = forward.rows("index_k", forward.ordinal)
        stored.write(_new_entries(batch, self._call, device), keys)
        tiles = batch.derived(
            ("selecting", ratio, self._most),
            lambda batch: tiles_of(batch, by_length(batch, self._most, ratio)[1], ratio, device),
        )
        selection = torch.full((hidden.shape[1], self._most if tiles else 0), -1, dtype=torch.int64, device=device)
        if not tiles:
            return selection
        query = indexer.q_b_proj(q_residual).view(1, hidden.shape[1], -1, indexer.head_dim).transpose(1, 2)
        query = self._folder.rotate(query, hidden, position_ids).transpose(1, 2)[0]
        for tile in tiles:
            found = stored.gather(tile.slots, hidden.dtype, "index_k").view(len(tile.rows), tile.width, -1)
            scores = indexer.scorer(query[tile.rows], found, hidden[0][tile.rows])
            scores = scores.masked_fill(~tile.visible, float("-inf"))
            chosen = scores.topk(min(self._most, tile.width), dim=-1).indices
            seen = tile.visible.gather(-1, chosen)
            selection[tile.rows, : chosen.shape[-1]] = chosen.masked_fill(~seen, -1)
        return selection


class _Folder:
    """Folds the inputs of blocks that a step completes, and stores the inputs that later blocks need in rings."""

    def __init__(self, module: Any, call: CompressedCall) -> None:
        self._module = module
        self._call = call
        self._width = int(module.head_dim)
        self._apply_rotary = sys.modules[type(module).__module__].__dict__["apply_rotary_pos_emb"]

    def rotate(self, rows: Tensor, like: Tensor, position_ids: Tensor) -> Tensor:
        """`rows` `[1, heads, T, dim]` rotated to `position_ids` `[1, T]` as entries are; `like` is of their dtype."""
        module = self._module
        cos, sin = module.rotary_emb(like, position_ids=position_ids, layer_type=module.rope_layer_type)
        rotated: Tensor = self._apply_rotary(rows, cos, sin)
        return rotated

    def fold(self, forward: RunningForward, name: str, hidden: Tensor) -> Tensor:
        """The entries `[blocks, dim]` of the blocks that the rows `hidden` `[1, T, ...]` complete, in their order."""
        module, device = self._module, hidden.device
        stored, batch = forward.per_page(name, forward.ordinal)
        ring = stored.shape[1]  # rows; `stored` is [frames, rows, 2 * width of an input]
        plan = batch.derived(("folding", self._call, ring), lambda batch: _Folding(batch, self._call, ring, device))
        values, scores = module.kv_proj(hidden)[0], module.gate_proj(hidden)[0]
        inputs = torch.cat((values, scores), dim=-1).to(stored.dtype)
        blocks = torch.where(plan.is_new.unsqueeze(-1), inputs[plan.new], stored[plan.kept])
        stored[plan.stored] = inputs[plan.stored_rows]
        return self._folded(blocks.to(hidden.dtype), plan)

    def _folded(self, blocks: Tensor, plan: _Folding) -> Tensor:
        """`blocks` `[blocks, span, 2 * width of an input]`, values and then scores."""
        values, scores = blocks.chunk(2, dim=-1)
        bias = self._module.position_bias
        if self._call.overlap:  # the first half of each input of the block before, the second of the block itself
            ratio, width = self._call.ratio, self._width
            scores = scores + torch.cat((bias, bias))
            values = torch.cat((values[:, :ratio, :width], values[:, ratio:, width:]), dim=1)
            scores = torch.cat((scores[:, :ratio, :width], scores[:, ratio:, width:]), dim=1)
            absent = plan.absent.unsqueeze(-1)  # inputs before the first block
            values, scores = values.masked_fill(absent, 0), scores.masked_fill(absent, float("-inf"))
        else:
            scores = scores + bias
        weights = scores.softmax(dim=1, dtype=torch.float32).to(values.dtype)
        entries = self._module.kv_norm((values * weights).sum(dim=1))
        return self.rotate(entries[None, None], entries, plan.positions.unsqueeze(0))[0, 0]


class _Folding:
    """Which blocks a step completes, where their inputs are, and which new inputs go to the rings."""

    def __init__(self, batch: PagedBatch, call: CompressedCall, ring: int, device: torch.device) -> None:
        """`ring` rows hold the last inputs of a page, that of position p in row `p % ring`."""
        ratio, span = call.ratio, call.ratio * (2 if call.overlap else 1)
        starts, stops = batch.spans()
        owners, blocks = _completed(batch, ratio)
        tokens = (blocks[:, None] + 1) * ratio + np.arange(-span, 0)  # [blocks, span] positions
        is_new, absent = tokens >= starts[owners][:, None], tokens < 0
        firsts = batch.query_starts[:-1].astype(np.int64) - starts  # flat row of a position, less the position
        frames = batch.frames[owners[:, None], np.maximum(tokens, 0) // batch.page_size].astype(np.int64)
        kept = np.where(is_new | absent, 0, frames * ring + tokens % ring)
        # The last of the new inputs that share a row of a ring stays.
        everyone = np.repeat(np.arange(len(starts)), stops - starts)
        positions = flatten_ranges(starts, stops)
        page_ends = (positions // batch.page_size + 1) * batch.page_size
        stays = positions + ring >= np.minimum(page_ends, stops[everyone])
        everyone, positions = everyone[stays], positions[stays]
        slots = batch.frames[everyone, positions // batch.page_size].astype(np.int64) * ring + positions % ring
        self.is_new, self.absent = to_device(is_new, device), to_device(absent, device)
        self.new = to_device(np.where(is_new, firsts[owners][:, None] + tokens, 0), device)
        self.kept = _entries_of(kept, ring, device)
        self.positions = to_device(blocks * ratio, device)
        self.stored_rows = to_device(firsts[everyone] + positions, device)
        self.stored = _entries_of(slots, ring, device)


def _entries_of(slots: Slots, ring: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frames, and rows in their rings."""
    frames, rows = np.divmod(slots, ring)
    return to_device(frames, device), to_device(rows, device)


def _completed(batch: PagedBatch, ratio: int) -> tuple[Slots, Slots]:
    """(sequence, block) of every block that a step completes."""
    batch.refuse_trees("compressed attention")
    starts, stops = batch.spans()
    counts = stops // ratio - starts // ratio
    return np.repeat(np.arange(len(starts)), counts), flatten_ranges(starts // ratio, stops // ratio)


def _new_entries(batch: PagedBatch, call: CompressedCall, device: torch.device) -> Tensor:
    """Slots of the entries that a step completes, int64, in the order in which they are folded."""
    return batch.derived(
        ("completed", call.ratio),
        lambda batch: to_device(entry_slots(batch, *_completed(batch, call.ratio), call.ratio), device),
    )

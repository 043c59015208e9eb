"""The quality of a model whose rows read selected pages (hisparse with page_bounds), against full attention on a text.

    python -m bench.sparse.page_selection TEXT
    python -m bench.sparse.page_selection TEXT --model Qwen/Qwen3-0.6B --top-k 512,1024,2048 --page-size 16,64

Each row from half of the context on reads what a row that decodes would read there: the pages that `PageBounds.select`
selects in each layer. `newest` reads the newest `top_k` tokens instead, as a window does. Perplexity is that of the
next tokens of these rows; `same token` is the share of rows whose most likely token is that of full attention. The text
is cut in parts of the context's length, up to `--parts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AttentionInterface

from quire.kernels.batch import PagedBatch
from quire.kernels.page_bounds import PageBounds
from quire.models.attention import IMPLEMENTATION
from quire.models.hf import LoadedModel, load_model
from quire.models.tokenizer import load_tokenizer
from quire.spec.bundled import DEFAULT_MODEL

_NAME = "quire-page-selection"
NEWEST = 0  # in place of a page size: the newest tokens


class _Reading:
    """Which tokens rows read: pages of `page_size` of at most `top_k` tokens; all of them with a `top_k` of 0."""

    def __init__(self, top_k: int, page_size: int, first: int) -> None:
        self.top_k, self.page_size, self.first = top_k, page_size, first

    def seen(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """Bool `[T, T]` for `query` `[T, heads, dim]` and `key` `[T, kv_heads, dim]`."""
        length = len(query)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if not self.top_k:
            return seen
        if self.page_size == NEWEST:
            selected = seen & ~seen.tril(-self.top_k)
        else:
            selected = self._selected(query, key, scale)
        seen[self.first :] = selected[self.first :]
        return seen

    def _selected(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        length = len(query)
        pages = -(-length // self.page_size)
        frames = np.arange(1, pages + 1, dtype=np.int32)[None]
        bounds = PageBounds(*(key.new_empty(pages + 1, *key.shape[1:]) for _ in range(2)))
        bounds.write(PagedBatch.of(frames, np.array([0]), np.array([length]), self.page_size), key)
        # The page of a row's own token, whose bounds have later keys here, is read in any case and competes with none.
        stops = np.arange(1, length + 1)
        rows = PagedBatch.of(frames.repeat(length, axis=0), stops - 1, stops, self.page_size)
        positions = bounds.select(query, rows, self.top_k // self.page_size, scale)
        seen = torch.zeros(length, length + 1, dtype=torch.bool)
        return seen.scatter_(1, positions.where(positions >= 0, length), True)[:, :length]


_reading: list[_Reading] = []


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
    if sliding_window:
        seen &= ~seen.tril(-sliding_window)
    else:
        seen = _reading[-1].seen(query[0].transpose(0, 1), key[0].transpose(0, 1), scaling)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register(_NAME, _attention)


@contextmanager
def _as_reading(model: LoadedModel, reading: _Reading) -> Iterator[None]:
    _reading.append(reading)
    model.module.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)
        _reading.pop()


@torch.inference_mode()
def logits_of(model: LoadedModel, tokens: Tensor, reading: _Reading) -> Tensor:
    """Log-probabilities float32 `[rows, vocab]` of the rows from `reading.first` on, but the last."""
    with _as_reading(model, reading):
        positions = torch.arange(len(tokens)).unsqueeze(0)
        found = model.module(input_ids=tokens.unsqueeze(0), position_ids=positions, use_cache=False)
    logits: Tensor = found.logits[0, reading.first : -1].float()
    return logits.log_softmax(-1)


def main(
    text: Path,
    model: str = DEFAULT_MODEL,
    top_k: Annotated[str, typer.Option(help="Tokens that a row reads, several with commas.")] = "64,128,256,512",
    page_size: Annotated[str, typer.Option(help="Tokens of a page, several with commas.")] = "4,16,64",
    parts: int = 8,
) -> None:
    """Print a table in Markdown."""
    loaded = load_model(model, dtype="float32")
    length = loaded.spec.context_length
    ids = torch.tensor(load_tokenizer(model).encode(text.read_text()), dtype=torch.int64)
    cuts = ids[: len(ids) // length * length].view(-1, length)[:parts]
    if not len(cuts):
        raise typer.BadParameter(f"the text has {len(ids):,} tokens, fewer than the context of {length:,}.")
    first = length // 2
    full = [logits_of(loaded, cut, _Reading(0, 0, first)) for cut in cuts]

    def show(name: str, size: str, found: list[Tensor]) -> None:
        nexts = [cut[first + 1 :].unsqueeze(1) for cut in cuts]
        loss = -torch.cat([one.gather(1, at) for one, at in zip(found, nexts, strict=True)]).mean()
        pairs = list(zip(found, full, strict=True))
        same = torch.cat([one.argmax(1) == other.argmax(1) for one, other in pairs]).float().mean()
        lost = torch.cat([(other.exp() * (other - one)).sum(1) for one, other in pairs]).mean()
        print(f"| {name} | {size} | {loss.exp():.3f} | {same:.1%} | {lost:.4f} |")

    print(f"{model}, {len(cuts)} parts of {length:,} tokens, rows from {first:,} on\n")
    print("| top_k | page | perplexity | same token | KL divergence |\n|---|---|---|---|---|")
    show("all", "", full)
    for most in map(int, top_k.split(",")):
        for size in [*map(int, page_size.split(",")), NEWEST]:
            found = [logits_of(loaded, cut, _Reading(most, size, first)) for cut in cuts]
            show(f"{most:,}", str(size) if size else "newest", found)


if __name__ == "__main__":
    typer.run(main)

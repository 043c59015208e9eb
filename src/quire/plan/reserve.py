"""Tokens that decoding needs beyond the existing ones: the only place that says how far a step may run ahead."""

from __future__ import annotations

from quire.spec.pages import pages_for
from quire.spec.speculation import SpeculativeConfig

_ROW_MARGIN = 4  # tokens of a row that any step may write beyond the context


def get_alloc_len_per_decode(speculation: SpeculativeConfig | None, page_size: int) -> int:
    """Tokens that one decode step of one request may write, at worst.

    Without speculation 1. Draft layers that follow a tree (`topk` above 1) on pages may start each branch in the middle
    of a page, so a branch has whole pages: `ceil((page_size - 1 + num_steps) / page_size)` of them. Drafts that write
    nothing, for example from n-grams, do not. Source: the report on the reserve of a decode step. `page_size` is the
    allocator's, times the ranks that share a page in decode-context parallelism.
    """
    if speculation is None:
        return 1
    steps, topk = speculation.num_steps, speculation.topk
    if page_size == 1 or topk == 1 or not speculation.num_layers:
        return max(steps * topk, speculation.num_draft_tokens)
    branch = pages_for(page_size - 1 + steps, page_size) * page_size
    return max(branch * topk, speculation.num_draft_tokens)


def get_alloc_reserve_per_decode(speculation: SpeculativeConfig | None, page_size: int) -> int:
    """Tokens that a decoding request holds beyond its settled ones: those of two steps.

    The next step is launched before the last one's verification is known, so both must have room.
    """
    return 2 * get_alloc_len_per_decode(speculation, page_size)


def get_kept_features(speculation: SpeculativeConfig, page_size: int) -> int:
    """Last positions of a running request whose features a draft head keeps: a page that is not full, and the
    tokens that a step verifies."""
    return page_size + speculation.num_draft_tokens + 1


def get_req_to_token_extra_context_len(speculation: SpeculativeConfig | None, page_size: int) -> int:
    """Tokens by which a request's row of pages is longer than the context.

    With speculation on pages the reserve is rounded up to a whole page, and the row has room for all of it. On pages of
    one token it has room for the verified tokens; a reserve beyond that is cut at the end of the row.
    """
    extra = _ROW_MARGIN + (speculation.num_draft_tokens if speculation is not None else 0)
    if speculation is not None and page_size > 1:
        extra = max(extra, get_alloc_reserve_per_decode(speculation, page_size) + page_size - 1)
    return extra

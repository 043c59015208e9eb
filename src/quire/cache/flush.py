"""Flush: what is cached of a namespace, or at all, is forgotten on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.prefix.flush import flush_namespace, nodes_below
from quire.spec.events import Namespace

if TYPE_CHECKING:
    from quire.cache.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """What a flush did, in tokens. `held_tokens` are in use by running requests and stay until they are flushed again;
    `num_retentions` are no longer kept."""

    flushed_tokens: int
    held_tokens: int
    num_retentions: int


def flush(cache: KVCache, namespace: Namespace | None, *, num_retentions: int = 0) -> Flushed:
    """Forget what is cached of a namespace, or of all, and held by nobody. `num_retentions` were let go of before."""
    if namespace is None:
        flushed, held = cache.clear(), cache.tree.num_pages
    else:
        pages = flush_namespace(cache.tree, namespace)
        cache._give_back(pages)
        root = cache.tree.root(namespace)
        flushed, held = len(pages), sum(node.num_pages for node in nodes_below(root)) if root is not None else 0
    cache.num_changes += 1
    size = cache.page_size
    return Flushed(flushed_tokens=flushed * size, held_tokens=held * size, num_retentions=num_retentions)

"""clear: what nothing holds leaves a cache, and all its tiers."""

from __future__ import annotations

import numpy as np

from quire.cache import KVCache
from quire.offload import offload_of
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Ids


def clear(cache: KVCache) -> int:
    """Forget everything cached that nothing holds, in all tiers; returns the number of pages.

    What requests and transfers hold stays cached, and what is kept for callers: `Offloading.flush` ends all of it. What
    stays is stored again when it is used again.
    """
    offload = offload_of(cache)
    if offload.tiers is not None:
        offload.tiers.delete_stored(None)
        offload.tiers.archiver.store_is_empty()
    offload._cancel(None)
    pages = clear_tree(cache.tree)
    cache.parts.free(pages)
    return len(pages)


def clear_tree(tree: RadixCache) -> Ids:
    """Forget all pages that no lease holds, and all evicted edges; returns the pages."""
    pages = np.concatenate((tree.evict(tree.num_pages), tree.evict_lower(tree.num_below, _stays).removed))
    tree.evicted.clear()
    if not tree.num_pages and not tree.num_below:
        tree.names.cleared()
    return pages


def _stays(pages: Ids) -> None:
    raise AssertionError("pages that should be forgotten stay in the tree")

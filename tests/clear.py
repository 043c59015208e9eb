"""clear: what nothing holds leaves a cache, and all its tiers."""

from __future__ import annotations

from quire.cache import KVCache
from quire.offload import offload_of


def clear(cache: KVCache) -> int:
    """Forget everything cached that nothing holds, in all tiers; returns the number of pages.

    What requests hold stays cached, and what is kept for callers: `Offloading.flush` ends both.
    """
    offload = offload_of(cache)
    if offload.tiers is not None:
        offload.tiers.delete_stored(None)
    offload._cancel(None)
    pages = cache.tree.clear()
    cache.parts.free(pages)
    return len(pages)

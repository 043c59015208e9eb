"""Flush: delete the cached pages of a namespace, or all of them, in every tier. No prompt matches them afterwards:

on the device, on the host     pages are free at once, or when the running requests that hold them end
in the store                   records are deleted after pending writes (`quire.offload.deletion`)
in transfers                   pages are dropped when they arrive
in running requests            pages that they still compute are never shared
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quire.cache import KVCache
from quire.cache.groups import NO_PAGES
from quire.errors import StoreError
from quire.offload.deletion import Stored
from quire.offload.offloading import offload_of
from quire.prefix.hashing import layout_identity
from quire.spec.events import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """Result of a flush. Running requests still use `held_tokens`; no other request finds them. `num_retentions` have
    ended. `storage` is the state of the flushed records."""

    flushed_tokens: int
    held_tokens: int
    num_retentions: int
    storage: Stored = Stored.NONE


def flush(cache: KVCache, namespace: Namespace | None) -> Flushed:
    """Delete the cached pages and retentions of a namespace, or of all (None), in every tier. The store deletes later:
    see `flushed`."""
    tiers = offload_of(cache).tiers
    if tiers is not None:
        tiers.delete_stored(namespace)
    return _delete(cache, namespace)


def flushed(cache: KVCache, done: Flushed, namespace: Namespace | None, *, waits: bool) -> Flushed | None:
    """The result `done` with the state in the store. None: the caller `waits`, and the state may change soon.

    Raises StoreError when the store has not hidden the records: other engines still find them.
    """
    tiers = offload_of(cache).tiers
    if tiers is None or not tiers.settings.stores:
        return done
    state, is_tried = tiers.deletion.flushed(namespace)
    if waits and (is_tried or state is Stored.HELD):
        return None
    if state is Stored.HELD:
        raise StoreError(
            "what was flushed is forgotten here and not in storage, which does not answer. This engine does not look "
            "at it, and goes on trying; others find it, and so does this one after a restart.",
            fix="look at the store, and flush again when it answers.",
        )
    return replace(done, storage=state)


def change_model(cache: KVCache, model_identity: bytes) -> Flushed:
    """Delete all cached pages, and name new ones after another model, or other weights of the same model.

    Call it after the weights change and before a step is launched. The store keeps records of the old weights for
    engines that still have them; this cache does not look them up any more.
    """
    done = _delete(cache, None)
    cache.tree.names.rename(
        layout_identity(model_identity, [group.layout.fingerprint() for group in cache.plan.groups])
    )
    tiers = offload_of(cache).tiers
    return replace(done, storage=Stored.KEPT if tiers is not None and tiers.settings.stores else Stored.NONE)


def _delete(cache: KVCache, namespace: Namespace | None) -> Flushed:
    tree, offload = cache.tree, offload_of(cache)
    num_retentions = offload.retention.release_all(namespace)
    for kv in cache.rows.live.values():
        if namespace in (None, kv.namespace):
            kv.shares = False
    offload.cancel(namespace)
    flushed = [tree.flush(space) for space in list(tree.roots) if namespace in (None, space)]
    pages = np.concatenate([NO_PAGES, *(pages for pages, _ in flushed)])
    cache.parts.give_back(pages)
    if namespace is None:
        tree.evicted.clear()
        tree.names.cleared()
    cache.parts.changed()
    size = cache.page_size
    held = sum(num_held for _, num_held in flushed)
    return Flushed(flushed_tokens=len(pages) * size, held_tokens=held * size, num_retentions=num_retentions)

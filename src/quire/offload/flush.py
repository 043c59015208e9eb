"""Flush: what is cached of a namespace, or at all, is forgotten on request, in all tiers. Then no prompt matches it:

    on the device, on the host     pages that are not held are free; those that running requests hold are theirs alone
                                   from now on, and free when they end
    in storage                     deleted behind whatever was being written (`quire.offload.deletion`)
    on its way between tiers       counts for nothing when it arrives
    still to be computed           what requests that run already compute is theirs alone, too

The same is done when the weights are replaced, but that what is stored stays for engines that have the old ones: under
another identity its keys are never asked for.
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
    """What a flush did, in tokens. `held_tokens` are in use by running requests, and found by no other;
    `num_retentions` are no longer kept; `storage` is what has become of what was stored."""

    flushed_tokens: int
    held_tokens: int
    num_retentions: int
    storage: Stored = Stored.NONE


def flush(cache: KVCache, namespace: Namespace | None) -> Flushed:
    """Forget what is cached of a namespace, or of all, in every tier, and what was to be kept of it. The store is asked
    to; `flushed` says when it has."""
    tiers = offload_of(cache).tiers
    if tiers is not None:
        tiers.forget_stored(namespace)
    return _forget(cache, namespace)


def flushed(cache: KVCache, done: Flushed, namespace: Namespace | None, *, waits: bool) -> Flushed | None:
    """What a flush did, with what has become of it in storage. None: that may be more soon, and the caller `waits`.

    Raises StoreError where the store did not even take note of it, so that it would be found again after a restart.
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
    """What is cached from now on is of another model, or of other weights of this one, and nothing else is found.

    No step may be launched between the change of the weights and this. What is stored of the old ones stays where it
    is, under names that this cache does not ask for any more.
    """
    done = _forget(cache, None)
    cache.tree.names.rename(
        layout_identity(model_identity, [group.layout.fingerprint() for group in cache.plan.groups])
    )
    tiers = offload_of(cache).tiers
    return replace(done, storage=Stored.KEPT if tiers is not None and tiers.settings.stores else Stored.NONE)


def _forget(cache: KVCache, namespace: Namespace | None) -> Flushed:
    tree, offload = cache.tree, offload_of(cache)
    num_retentions = offload.retention.forget(namespace)
    for kv in cache.rows.live.values():
        if namespace in (None, kv.namespace):
            kv.shares = False
    offload.abandon(namespace)
    flushed = [tree.flush(space) for space in list(tree.roots) if namespace in (None, space)]
    pages = np.concatenate([NO_PAGES, *(gone for gone, _ in flushed)])
    cache.parts.give_back(pages)
    if namespace is None:
        tree.ghosts.clear()
        tree.names.cleared()
    cache.parts.changed()
    size = cache.page_size
    held = sum(num_held for _, num_held in flushed)
    return Flushed(flushed_tokens=len(pages) * size, held_tokens=held * size, num_retentions=num_retentions)

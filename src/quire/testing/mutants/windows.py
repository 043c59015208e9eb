"""Mistakes with groups of which a request reads a part that moves along."""

from __future__ import annotations

from dataclasses import replace

from quire.cache.kv_cache import KVCache
from quire.testing.mutants import field
from quire.testing.mutants.registry import Patch, mutant


@mutant("cache", field.EVICTED)
def a_hit_outlives_its_window(patch: Patch) -> None:
    """A hit taken before its window was dropped is begun on."""
    real = KVCache.is_current
    patch.setattr(KVCache, "is_current", lambda self, hit: real(self, replace(hit, num_dropped=self._num_dropped)))

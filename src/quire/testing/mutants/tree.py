"""Mistakes of the prefix tree: pins, matching, views, events."""

from __future__ import annotations

from quire.prefix import radix_cache
from quire.spec.events import Namespace
from quire.testing.mutants import field
from quire.testing.mutants.registry import Patch, mutant


@mutant("cache", field.KEY)
def hashes_ignore_the_namespace(patch: Patch) -> None:
    """Two tenants' pages have one hash, and a router sends a prompt to pages that it may not read."""
    real = radix_cache.namespace_seed
    patch.setattr(radix_cache, "namespace_seed", lambda namespace, identity=b"": real(Namespace(), identity))

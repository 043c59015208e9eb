"""Offload: the policies that move a cache's pages between tiers, prefetch, and retain prefixes for callers."""

from quire.offload.offloading import Offloading, Offloads, offload_of

__all__ = ["Offloading", "Offloads", "offload_of"]

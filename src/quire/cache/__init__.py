"""The cache: the only interface to pages, frames, sharing and eviction for the layers above."""

from quire.cache.kv_cache import KVCache
from quire.cache.request_kv import PrefixHit, RequestKV
from quire.cache.running import RunningBatch

__all__ = ["KVCache", "PrefixHit", "RequestKV", "RunningBatch"]

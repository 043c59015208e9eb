"""SGLang: Quire's stores beneath its HiCache. The class loads on first use, for it needs SGLang.

--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
  "backend_name": "quire", "module_path": "quire.connectors.sglang", "class_name": "QuireHiCache",
  "interface_v1": 1, "store": "/var/cache/quire", "store_size": "100GiB"}'
"""

from __future__ import annotations

from typing import Any

__all__ = ["QuireHiCache"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    from quire.connectors.sglang.hicache import QuireHiCache

    return QuireHiCache

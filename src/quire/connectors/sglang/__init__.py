"""SGLang: Quire's stores beneath its HiCache. SGLang imports this, in its process.

--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
  "backend_name": "quire", "module_path": "quire.connectors.sglang", "class_name": "QuireHiCache",
  "interface_v1": 1, "store": "/var/cache/quire", "store_size": "100GiB"}'
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`QuireHiCache`, imported when SGLang asks for it: its module needs SGLang."""
    if name == "QuireHiCache":
        from quire.connectors.sglang.hicache import QuireHiCache

        return QuireHiCache
    raise AttributeError(name)

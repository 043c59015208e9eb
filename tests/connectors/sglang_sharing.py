"""SGLang's own controller in a process of its own, on a store that other engines use too.

PEER/bin/python -m tests.connectors.sglang_sharing STORE saves|loads
"""

from __future__ import annotations

import sys

from bench.peers.hicache_sglang import Shape

from tests.connectors.sglang_harness import EXTRA, fetch, opened, store


def main(url: str, does: str) -> None:
    with opened(Shape(), {**EXTRA, "store": url}) as cache:
        pages = store(cache)
        if does == "loads":
            assert fetch(cache) == pages
            assert sum(pool.records.counts["present"] for pool in cache.backend._pools.values()) == len(pages)


if __name__ == "__main__":
    main(*sys.argv[1:])

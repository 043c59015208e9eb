"""What events of the cache cost the thread that stores and removes pages: CPU microseconds a page.

    python -m bench.bookkeeping.events

Each row stores all pages in runs of one length, then evicts them, in a tree without events, in one whose events are
made and forgotten, and in one whose events are published. Rows take turns; a figure is the median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from bench.harness import SEED, machine, new_parser, save, shuffled

from quire.observe.kv_batch import KvBatches
from quire.observe.kv_publisher import KvPublisher
from quire.prefix.evict import eviction_policy
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace

PAGE = 16
WAYS = ("without", "made", "published")
_NONE = np.empty(0, dtype=np.int32)
_FLUSH_EVERY = 16  # events, as those of a step


def measure(way: str, run: int, total: int) -> tuple[float, float]:
    """Microseconds a page, to store and to evict."""
    tree, namespace = RadixCache(PAGE, eviction_policy("lru")), Namespace()
    flush: Callable[[], object] = bool
    with ExitStack() as stack:
        if way == "made":
            tree.names.follow(lambda _: None)
        if way == "published":
            batches = KvBatches(PAGE, tree.names.seed)
            publisher = KvPublisher(batches, "tcp://127.0.0.1:0", None, lambda: None)
            stack.callback(publisher.close)
            tree.names.follow(publisher.append)
            flush = publisher.flush
        random = np.random.default_rng(0)
        prompts = random.integers(0, 30_000, (total // run, run * PAGE)).astype(np.int32)
        pages = np.arange(run, dtype=np.int32)
        began = time.thread_time()
        for at, prompt in enumerate(prompts):
            lease = tree.lease(tree.match(namespace, _NONE))
            tree.insert(lease, prompt, pages)
            tree.release(lease)
            if at % _FLUSH_EVERY == 0:
                flush()
        stored = time.thread_time()
        for at in range(len(prompts)):
            tree.evict(run)
            if at % _FLUSH_EVERY == 0:
                flush()
        evicted = time.thread_time()
    assert not tree.num_pages
    return (stored - began) / total * 1e6, (evicted - stored) / total * 1e6


def main() -> None:
    """Measure, show and write."""
    parser = new_parser("Measure what events of the cache cost.")
    options = parser.parse_args()
    total, rounds = (256, 1) if options.toy else (16_384, 7)
    rows = []
    for run in (1, 4, 64):
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for turn in range(rounds):
            for way in shuffled(WAYS, SEED, turn):
                found[way].append(measure(way, run, total))
        for way, taken in found.items():
            store, evict = (statistics.median(each) for each in zip(*taken, strict=True))
            rows.append({"pages": run, "events": way, "store_us": round(store, 2), "evict_us": round(evict, 2)})
            print(f"{run:3} pages a run, {way:10} store {store:6.2f} us a page, evict {evict:6.2f}")
    save(options.json, {**machine(), "rows": rows})


if __name__ == "__main__":
    main()

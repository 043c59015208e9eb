"""A process that starts writers of a directory.

A job has `path`, `seed` and `turns`. `die_at` is ["statement", n]: SIGKILL before the n-th statement of the index,
["write", n]: in the middle of the n-th write of a slab, ["time", seconds]: after that time, or null.
"""

from __future__ import annotations

import os
import random
from typing import Any

from quire.testing.contracts.records import make_key, make_record, read, write
from quire.tiers.store import Answer
from quire.tiers.stores.directory import DirectoryStore
from tests.forked import Say, die, die_in, serve

NUM_KEYS = 40
SIZES = (64, 3000, 4096, 9000, 40_000)
CAPACITY = 512 << 10


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def work(job: dict[str, Any], say: Say) -> None:
    """Write, read and remove at random. Raises AssertionError at a wrong byte."""
    rng = random.Random(job["seed"])
    store = DirectoryStore(job["path"], CAPACITY, slab_bytes=96 << 10, busy_seconds=20)
    where, when = job["die_at"] or ("", 0)
    if where == "time":
        die_in(say, when)
    elif where:
        arrange_death(store, where, int(when))
    counts = {"stored": 0, "hits": 0}
    for _ in range(job["turns"]):
        numbers = [rng.randrange(NUM_KEYS) for _ in range(rng.randrange(1, 6))]
        keys = [make_key(number) for number in numbers]
        if rng.random() < 0.5:
            answers = write(store, keys, [make_record(number, size_of(number)) for number in numbers])
            counts["stored"] += answers.count(Answer.HIT)
        elif rng.random() < 0.9:
            for number, key in zip(numbers, keys, strict=True):
                found = read(store, key, size_of(number))
                assert found is None or found == make_record(number, size_of(number)), f"wrong bytes of {number}"
                counts["hits"] += found is not None
        elif rng.random() < 0.6:
            store.remove(keys[:3])
        else:
            store.compact()
    store.close()
    say(counts)


def arrange_death(store: DirectoryStore, where: str, left: int) -> None:
    """This process will be killed at one of the next statements or writes of the store."""
    if where == "statement":

        def count(statement: str) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                die()

        store._index._writer.set_trace_callback(count)
    else:
        assert where == "write"
        really = os.pwritev

        def torn(file: int, vector: list[Any], offset: int) -> int:
            nonlocal left
            left -= 1
            if left <= 0:
                really(file, [memoryview(vector[0])[:4096]], offset)
                die()
            return really(file, vector, offset)

        os.pwritev = torn


if __name__ == "__main__":
    serve(work)

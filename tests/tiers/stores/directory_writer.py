"""A process that starts writers of a directory: each is forked, works for a while, and is killed or ends well.

Reads a line of JSON for each writer, `{"path", "seed", "turns", "die_at"}`, and answers with a line when it has ended.
`die_at` is ["statement", n]: SIGKILL before the n-th statement of the index, ["write", n]: in the middle of the n-th
write of a slab, ["time", seconds]: after that time, or null.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from quire.testing.contracts.records import make_key, make_record, read, write
from quire.tiers.store import Answer
from quire.tiers.stores.directory import DirectoryStore

NUM_KEYS = 40
SIZES = (64, 3000, 4096, 9000, 40_000)
CAPACITY = 512 << 10


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def work(path: str, seed: int, turns: int, die_at: tuple[str, float] | None) -> dict[str, int]:
    """Write, read and remove at random. Raises AssertionError at a wrong byte."""
    rng = random.Random(seed)
    store = DirectoryStore(path, CAPACITY, slab_bytes=96 << 10, busy_seconds=20)
    if die_at is not None:
        arrange_death(store, *die_at)
    counts = {"stored": 0, "hits": 0}
    for _ in range(turns):
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
        else:
            store.remove(keys[:1])
    store.close()
    return counts


def arrange_death(store: DirectoryStore, where: str, when: float) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    left = when
    if where == "time":
        threading.Timer(when, die).start()
    elif where == "statement":

        def count(statement: str) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                die()

        store._index._writer.set_trace_callback(count)
    else:
        really = os.pwritev

        def torn(file: int, vector: list[Any], offset: int) -> int:
            nonlocal left
            left -= 1
            if left <= 0:
                really(file, [memoryview(vector[0])[:4096]], offset)
                die()
            return really(file, vector, offset)

        os.pwritev = torn


def main() -> None:
    for line in sys.stdin:
        told = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            counts = work(told["path"], told["seed"], told["turns"], told["die_at"])
            os.write(writing, json.dumps(counts).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(json.dumps({"killed": killed, "status": status, "counts": json.loads(said or "null")}), flush=True)


if __name__ == "__main__":
    main()

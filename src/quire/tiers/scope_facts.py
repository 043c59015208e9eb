"""What stores know of their scopes: a record beside the pages says in JSON which engine and model they belong to.

Scopes are hashes, so only this record says why two engines do not find each other's pages. One is for all scopes with
a prefix of 8 bytes, that is for one model, its weights and its layouts. Pages are found without it; it may be lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from quire.memory.record import HEADER_BYTES, RecordFormat
from quire.tiers.store import SCOPE_BYTES, SCOPE_PREFIX_BYTES, Answer, Record, Store, StoreKey, write_record

Facts: TypeAlias = Mapping[str, str | int]
"""Names and values: `engine`, `model`, `weights`, `dtype`, `page_size`, `rank` and what else bytes depend on."""

FACTS_BYTES = 4096
_PART = 0xFFFE  # no group has this number
_FORMAT = RecordFormat(_PART, bytes(16), FACTS_BYTES - HEADER_BYTES)


def facts_key(scope: bytes) -> StoreKey:
    """The key of the facts of a scope, or of all scopes with this prefix."""
    prefix = scope[:SCOPE_PREFIX_BYTES]
    return StoreKey(prefix.ljust(SCOPE_BYTES, b"\0"), hashlib.sha256(b"quire-facts-1" + prefix).digest(), _PART)


def is_facts(key: StoreKey) -> bool:
    """Whether a key is not of a page, but of facts."""
    return key.part == _PART


def facts_record(scope: bytes, facts: Facts) -> tuple[StoreKey, Record]:
    """The key and the record of the facts of a scope. Texts are cut where they have no room."""
    key, room = facts_key(scope), FACTS_BYTES - HEADER_BYTES
    for most in (room, 500, 100, 20):
        text = json.dumps({name: value[:most] if isinstance(value, str) else value for name, value in facts.items()})
        if len(text) <= room:
            break
    payload = text.encode()[:room].ljust(room)
    return key, (_FORMAT.header(key.page, (payload,)), payload)


def write_facts(store: Store, scope: bytes, facts: Facts) -> Answer:
    """Store the facts of a scope; HIT if they are there afterwards."""
    return write_record(store, *facts_record(scope, facts))


def read_facts(store: Store, scopes: Iterable[bytes]) -> dict[bytes, Facts]:
    """The facts of the scopes whose record is there and whole, by scope. Others are left out."""
    wanted = {scope: facts_key(scope) for scope in scopes}
    records = [bytearray(FACTS_BYTES) for _ in wanted]
    answers = store.get(list(wanted.values()), records)
    found: dict[bytes, Facts] = {}
    for (scope, key), record, answer in zip(wanted.items(), records, answers, strict=True):
        header, payload = record[:HEADER_BYTES], record[HEADER_BYTES:]
        if answer is Answer.HIT and not _FORMAT.defect(header, key.page, (payload,)):
            try:
                found[scope] = json.loads(payload)
            except ValueError:
                continue
    return found


def differences(facts: Facts, others: Facts) -> list[str]:
    """The names of values that differ, in the order of `facts`, then of `others`."""
    return [name for name in dict.fromkeys([*facts, *others]) if facts.get(name) != others.get(name)]

"""Mistakes of a store beneath other engines: bytes of another engine, and memory that is given back too soon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer

from quire.connectors import checked_store
from quire.connectors.checked_store import CheckedStore, ChunkKey, Job
from quire.memory.record import RecordFormat
from quire.prefix.hashing import layout_identity
from quire.tiers.store import Answer
from tests.mutants.mutants import Patch, mutant


@mutant("checked store", "an engine whose weights were replaced answers from the old ones")
def weights_are_not_in_the_scope(patch: Patch) -> None:
    real = layout_identity

    def identity(model: bytes, layouts: Sequence[str]) -> bytes:
        return real(
            model, [layout.replace('"w1"', "").replace('"w2"', "").replace('"other"', "") for layout in layouts]
        )

    patch.setattr(checked_store, "layout_identity", identity)


@mutant("checked store", "a flipped byte in a store is a wrong answer without an error")
def the_digest_is_not_compared(patch: Patch) -> None:
    real = RecordFormat.defect

    def defect(form: RecordFormat, header: Buffer, key: bytes, payload: Sequence[Buffer]) -> str:
        found = real(form, header, key, payload)
        return "" if found == "digest" else found

    patch.setattr(RecordFormat, "defect", defect)


@mutant("checked store", "a scope that was deleted in the store is still answered from")
def deleted_scopes_are_found(patch: Patch) -> None:
    def exists(store: CheckedStore, keys: Sequence[ChunkKey]) -> list[Answer]:
        return store.store.exists(store._keys(keys))

    patch.setattr(CheckedStore, "_exists", exists)


@mutant("checked store", "a load that hangs is given up, and writes later into memory of another prompt")
def running_loads_are_given_up(patch: Patch) -> None:
    real = Job.__init__

    def init(job: Job, *given: Any, is_free: bool) -> None:
        real(job, *given, is_free=True)

    patch.setattr(Job, "__init__", init)


@mutant("checked store", "a record of another size under a key can neither be read nor written, for ever")
def records_of_another_size_stay(patch: Patch) -> None:
    patch.setattr(CheckedStore, "_there", lambda store, names, places: [])

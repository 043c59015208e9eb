"""Mistakes of a store beneath other engines: bytes of another engine, and memory that is given back too soon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import Buffer

from quire.connectors import checked_store
from quire.connectors.checked_store import CheckedStore, ChunkKey
from quire.connectors.job import Job
from quire.memory.record import RecordFormat
from quire.prefix.hashing import layout_identity
from quire.testing.stores.dict_store import DictStore
from quire.tiers.store import Answer, Record, RecordViews
from quire.tiers.stores.directory import slab_files
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
    def exists(store: CheckedStore, job: Job, keys: Sequence[ChunkKey], _: Sequence[Record]) -> None:
        job.tell(dict(enumerate(store.store.exists(store._keys(keys)))))

    patch.setattr(CheckedStore, "_exists", exists)


@mutant("checked store", "a read that hangs writes later into memory of another prompt")
def late_reads_are_copied(patch: Patch) -> None:
    real = Job.fill

    def fill(job: Job, at: int, payload: RecordViews, content: memoryview) -> bool:
        if job.expired:
            payload.write(0, content)
        return real(job, at, payload, content)

    patch.setattr(Job, "fill", fill)


@mutant("checked store", "a save that hangs stores what the engine has changed since")
def late_saves_are_visible(patch: Patch) -> None:
    real = Job.tell
    patch.setattr(Job, "tell", lambda job, answers: real(job, answers) in (True, False))


@mutant("checked store", "a save that was sent too late is found, with what the engine wrote meanwhile")
def late_sends_stay(patch: Patch) -> None:
    patch.setattr(DictStore, "remove", lambda store, keys: 0)


@mutant("files that fail", "records are removed whose file a process could not open for a moment")
def what_cannot_be_opened_is_lost(patch: Patch) -> None:
    patch.setattr(slab_files, "_PASSES", set())


@mutant("checked store", "a store that goes on slowly is taken for one that hangs")
def progress_is_not_seen(patch: Patch) -> None:
    real = Job.tell

    def tell(job: Job, answers: Mapping[int, Answer]) -> bool:
        expires_at = job._expires_at
        found = real(job, answers)
        job._expires_at = expires_at
        return found

    patch.setattr(Job, "tell", tell)


@mutant("checked store", "a record of another size under a key can neither be read nor written, for ever")
def records_of_another_size_stay(patch: Patch) -> None:
    patch.setattr(CheckedStore, "_there", lambda store, names, places: [])

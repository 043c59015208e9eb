"""`quire store gc`: records that no engine will ask for, and what dead writers left."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from quire.cli.store_options import StoreUrl, opened, parse_seconds, scope_prefix, told
from quire.engine.setting import Bytes, Settings, setting
from quire.errors import InvalidInput, StoreError

if TYPE_CHECKING:
    from rich.status import Status

    from quire.tiers.store import Entry, Store, StoreKey

_BATCH = 500


class GcSettings(Settings):
    """Which records go."""

    keep: list[str] = setting(
        [], "Drop all scopes but this one, in hex or how it begins; given again for more.", metavar="SCOPE"
    )
    older_than: str | None = setting(None, "Drop what was not used for so long: 90s, 15m, 36h, 7d, 2w.", metavar="TIME")
    to_bytes: Bytes | None = setting(None, "Then drop what was used least lately, down to this size: 100GiB.")
    dry_run: bool = setting(False, "Say what would go, and drop nothing.", option="--dry-run")


def gc(url: StoreUrl, settings: GcSettings, *, as_json: bool) -> None:
    """Drop records by scope, age and size, what was flushed and is still there, and what dead writers had prepared.

    In a directory, what is left then moves together, and the disk has the rest back.

    [dim]Example:[/dim] quire store gc /var/cache/quire --older-than 7d --to-bytes 100GiB

    [dim]Example:[/dim] quire store gc /var/cache/quire --keep 3fa9 --dry-run
    """
    with opened(url.url) as store:
        from quire.tiers.stores.registry import without_secrets

        dry_run = settings.dry_run
        kept = tuple(scope_prefix(scope) for scope in settings.keep) or None
        seconds = None if settings.older_than is None else parse_seconds(settings.older_than)
        with Console(stderr=True, quiet=as_json).status("Looking for what can go ...") as status:
            entries, marks = _listed(told(store.entries(), status, "Looking for what can go"))
            doomed = choose(entries, kept, seconds, settings.to_bytes, tuple(marks.values()))
            before = _on_disk(store)
            removed = 0 if dry_run else _remove(store, doomed, status)
            if doomed and not removed and not dry_run:
                raise StoreError(
                    f"none of the {len(doomed):,} records that were to go could be removed, as when the disk is full.",
                    fix="free some MiB of the disk, or stop the engines and remove the directory: it fills again.",
                )
            reclaimed = 0 if dry_run else _reclaim(store)
            if not dry_run and removed >= len(doomed):  # what hides a flush goes when nothing is left to hide
                store.remove(list(marks))
            status.update("Giving room back to the disk ...")
            freed = max(0, before - _on_disk(store, compact=not dry_run))
        data = {
            "url": without_secrets(url.url),
            "dry_run": dry_run,
            "records": len(entries),
            "bytes": sum(entry.num_bytes for entry in entries),
            "chosen": len(doomed),
            "chosen_bytes": sum(entry.num_bytes for entry in doomed),
            "removed": removed,
            "reclaimed": reclaimed,
            "freed_bytes": freed,
        }
        if as_json:
            print(json.dumps(data))
        else:
            _print(data)


def _listed(entries: Iterable[Entry]) -> tuple[list[Entry], dict[StoreKey, bytes]]:
    """Records, and the marks of scopes that were flushed and are not gone yet."""
    from quire.tiers.tombstones import tombstone_scope

    records: list[Entry] = []
    marks: dict[StoreKey, bytes] = {}
    for entry in entries:
        scope = tombstone_scope(entry.key)
        if scope is None:
            records.append(entry)
        else:
            marks[entry.key] = scope
    return records, marks


def choose(
    entries: list[Entry],
    keep: tuple[str, ...] | None,
    older_than: float | None,
    to_bytes: int | None,
    flushed: tuple[bytes, ...] = (),
) -> list[Entry]:
    """Which records go: those of scopes that begin as one that was `flushed`, too. What is as old goes in the order in
    which it is listed. Raises InvalidInput for ages that the store does not know, and for a scope to keep that is not
    there."""
    scopes = {entry.key.scope.hex() for entry in entries}
    unknown = [scope for scope in keep or () if not any(each.startswith(scope) for each in scopes)]
    if unknown and scopes:
        raise InvalidInput(
            f"no scope here begins with '{unknown[0]}', so nothing would be kept for it.",
            fix="give scopes as `quire store inspect` shows them.",
        )
    if older_than is not None and any(entry.idle_seconds is None for entry in entries):
        raise InvalidInput("this store does not know when a record was last used.", fix="leave out --older-than.")
    doomed: list[Entry] = []
    left: list[Entry] = []
    for entry in entries:
        foreign = keep is not None and not entry.key.scope.hex().startswith(keep)
        old = older_than is not None and entry.idle_seconds is not None and entry.idle_seconds > older_than
        (doomed if foreign or old or entry.key.scope.startswith(flushed) else left).append(entry)
    if to_bytes is not None:
        total = sum(entry.num_bytes for entry in left)
        left.sort(key=lambda entry: -(entry.idle_seconds or 0.0))
        for entry in left:
            if total <= to_bytes:
                break
            total -= entry.num_bytes
            doomed.append(entry)
    return doomed


def _remove(store: Store, entries: list[Entry], status: Status) -> int:
    keys = [entry.key for entry in entries]
    removed = 0
    for start in range(0, len(keys), _BATCH):
        removed += store.remove(keys[start : start + _BATCH])
        status.update(f"Removing: {removed:,} of {len(keys):,} records ...")
    return removed


def _reclaim(store: Store) -> int:
    """What dead writers held; opening a directory has dropped that already."""
    from quire.tiers.stores.directory import DirectoryStore

    if not isinstance(store, DirectoryStore):
        return 0
    store.reclaim()
    return store.statistics["reclaimed"]


def _on_disk(store: Store, *, compact: bool = False) -> int:
    """Bytes of a directory's slabs, of which `compact` gives back what is not needed. A server's disk is its own."""
    from quire.tiers.stores.directory import DirectoryStore

    if not isinstance(store, DirectoryStore):
        return 0
    if compact:
        store.compact()
    return store.facts().slab_bytes


def _print(data: dict[str, Any]) -> None:
    from quire.plan.budget import counted, format_bytes

    console = Console(highlight=False)
    verb = "would go" if data["dry_run"] else "chosen"
    console.print(
        f"{counted(data['records'], 'record')}, {format_bytes(data['bytes'])}: {data['chosen']:,} {verb}, "
        f"{format_bytes(data['chosen_bytes'])}."
    )
    if not data["dry_run"]:
        console.print(
            f"[green]{data['removed']:,} removed[/green], and {data['reclaimed']:,} that dead writers had prepared; "
            f"the disk has {format_bytes(data['freed_bytes'])} of it back."
        )

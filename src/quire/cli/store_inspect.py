"""`quire store inspect`: what is in a store, by scope."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from quire.cli.store_options import StoreUrl, format_seconds, opened, told

if TYPE_CHECKING:
    from quire.tiers.store import Entry, Store


@dataclass(slots=True)
class _Scope:
    records: int = 0
    num_bytes: int = 0
    parts: int = 0
    flushed: bool = False
    newest_idle_seconds: float | None = None
    oldest_idle_seconds: float | None = None


def inspect(url: StoreUrl, *, as_json: bool) -> None:
    """Say what is in a store: records, bytes and ages by scope, and how much room is left.

    A scope stands for a model, its weights, its layouts, an adapter and a salt: what pages are kept apart by. Its first
    16 digits are the model's, and the same for all adapters and salts. What was flushed, and whose records are not all
    removed yet, is found by no engine any more; `gc` removes the rest. To look changes nothing, nor what goes next.

    [dim]Example:[/dim] quire store inspect /var/cache/quire

    [dim]Example:[/dim] quire store inspect valkey://cache:6379/0 --json
    """
    with opened(url.url) as store:
        with Console(stderr=True, quiet=as_json).status("Reading the index ...") as status:
            data = examine(url.url, store, told(store.entries(), status, "Reading the index"))
        if as_json:
            print(json.dumps(data))
        else:
            _print(data)


def examine(url: str, store: Store, entries: Iterable[Entry]) -> dict[str, Any]:
    """All findings, as plain values."""
    from quire.tiers.stores.registry import without_secrets
    from quire.tiers.tombstones import tombstone_scope

    scopes: dict[str, _Scope] = {}
    flushed: list[str] = []
    for entry in entries:
        mark = tombstone_scope(entry.key)
        if mark is not None:
            flushed.append(mark.hex())
            continue
        scope = scopes.setdefault(entry.key.scope.hex(), _Scope())
        scope.records += 1
        scope.num_bytes += entry.num_bytes
        scope.parts = max(scope.parts, entry.key.part + 1)
        idle = entry.idle_seconds
        if idle is not None:
            newest, oldest = scope.newest_idle_seconds, scope.oldest_idle_seconds
            scope.newest_idle_seconds = idle if newest is None else min(idle, newest)
            scope.oldest_idle_seconds = idle if oldest is None else max(idle, oldest)
    for name, scope in scopes.items():
        scope.flushed = name.startswith(tuple(flushed))
    by_bytes = sorted(scopes.items(), key=lambda item: -item[1].num_bytes)
    return {
        "url": without_secrets(url),
        "backend": type(store).__name__,
        "records": sum(scope.records for scope in scopes.values()),
        "bytes": sum(scope.num_bytes for scope in scopes.values()),
        "scopes": [{"scope": name, **_plain(scope)} for name, scope in by_bytes],
        "facts": _facts(store),
    }


def _plain(scope: _Scope) -> dict[str, Any]:
    found = asdict(scope)
    found["bytes"] = found.pop("num_bytes")
    return found


def _facts(store: Store) -> dict[str, Any] | None:
    from quire.tiers.stores.directory import DirectoryStore

    return asdict(store.facts()) if isinstance(store, DirectoryStore) else None


def _print(data: dict[str, Any]) -> None:
    from quire.plan.budget import counted, format_bytes

    console = Console(highlight=False)
    facts = data["facts"]
    console.print(f"[bold]{data['backend']}[/bold] {data['url']}: {counted(data['records'], 'record')}, ", end="")
    console.print(f"{format_bytes(data['bytes'])}")
    if facts is not None:
        how = "around the page cache (O_DIRECT)" if facts["direct"] else "through the page cache (no O_DIRECT here)"
        console.print(
            f"Capacity {format_bytes(facts['capacity'])}: {format_bytes(facts['slab_bytes'])} on the disk in "
            f"{facts['num_slabs']:,} slabs, {format_bytes(facts['free_bytes'])} free, and "
            f"{format_bytes(facts['index_bytes'])} of index beside it. The disk has "
            f"{format_bytes(facts['disk_free_bytes'])} left.",
            style="dim",
        )
        others = facts["num_owners"] - 1
        console.print(
            f"Read and written {how}; {counted(facts['num_prepared'], 'record')} not written yet, and "
            f"{others or 'no'} other process{'es have' if others != 1 else ' has'} it open.",
            style="dim",
        )
    if not data["scopes"]:
        return
    table = Table.grid(padding=(0, 2))
    for title in ("scope", "records", "bytes", "groups", "newest", "oldest"):
        is_scope = title == "scope"
        table.add_column(f"[bold]{title}[/bold]", justify="left" if is_scope else "right", no_wrap=is_scope)
    table.add_row(*(str(column.header) for column in table.columns))
    for scope in data["scopes"]:
        table.add_row(
            scope["scope"],
            f"{scope['records']:,}",
            format_bytes(scope["bytes"]),
            str(scope["parts"]),
            format_seconds(scope["newest_idle_seconds"]),
            format_seconds(scope["oldest_idle_seconds"]),
        )
    console.print(table)
    console.print("newest, oldest: how long ago the record was used that was used last, and least lately.", style="dim")
    for scope in data["scopes"]:
        if scope["flushed"]:
            console.print(
                f"[yellow]{scope['scope']} was flushed[/yellow]: no engine finds it, and `quire store gc` removes it."
            )

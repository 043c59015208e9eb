"""`quire store verify`: every record is read, and its header and digest are checked."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress

from quire.cli.store_options import StoreUrl, opened, scope_prefix
from quire.engine.setting import Settings, setting

if TYPE_CHECKING:
    from quire.tiers.store import Entry, Store, StoreKey

EXIT_CORRUPT = 4
EXIT_UNREAD = 2
_BATCH_BYTES = 64 << 20
_BATCH_RECORDS = 512
_SHOWN = 20


@dataclass(slots=True)
class Verdict:
    """What was found. `gone`: listed, and forgotten before it was read. `unread`: the store could not say."""

    records: int = 0
    num_bytes: int = 0
    gone: int = 0
    unread: int = 0
    corrupt: list[tuple[StoreKey, str]] = field(default_factory=list)
    removed: int = 0


class VerifySettings(Settings):
    """Which records are read, and what becomes of corrupt ones."""

    scope: str | None = setting(None, "Only this scope, in hex as `inspect` shows it, or how it begins.")
    remove: bool = setting(False, "Drop what is corrupt.", option="--remove")


def verify(url: StoreUrl, settings: VerifySettings, *, as_json: bool) -> None:
    """Read every record and check it: its header, the digest that binds it to key, layout and length, and its place.

    Serving checks the same on every load, and treats what fails as a miss. To look changes nothing, nor what a
    directory forgets next. Exits with 4 if anything is corrupt, else with 2 if something could not be read.

    [dim]Example:[/dim] quire store verify /var/cache/quire

    [dim]Example:[/dim] quire store verify s3://bucket/prefix --remove --json
    """
    with opened(url.url) as store:
        from quire.tiers.tombstones import tombstone_scope

        prefix = "" if settings.scope is None else scope_prefix(settings.scope)
        started = time.monotonic()
        told = Console(stderr=True)
        with Progress(console=told, transient=True, disable=as_json or not told.is_terminal) as bar:
            task = bar.add_task("Listing", total=None)
            listed = [
                entry
                for entry in store.entries()
                if entry.key.scope.hex().startswith(prefix) and tombstone_scope(entry.key) is None
            ]
            bar.update(task, description="Reading", total=sum(entry.num_bytes for entry in listed))
            verdict = check(store, listed, lambda num_bytes: bar.advance(task, num_bytes))
        if settings.remove and verdict.corrupt:
            verdict.removed = store.remove([key for key, _ in verdict.corrupt])
        data = _as_dict(url.url, verdict, time.monotonic() - started)
        if as_json:
            print(json.dumps(data))
        else:
            _print(data)
        if verdict.corrupt:
            raise typer.Exit(EXIT_CORRUPT)
        if verdict.unread:
            raise typer.Exit(EXIT_UNREAD)


def check(store: Store, entries: Iterable[Entry], progress: Any = lambda num_bytes: None) -> Verdict:
    """Read and check these records. `progress` is called with the bytes of each batch."""
    from quire.tiers.store import Answer

    verdict = Verdict()
    for batch in _batches(entries):
        buffers = [bytearray(entry.num_bytes) for entry in batch]
        answers = store.get([entry.key for entry in batch], buffers)
        for entry, buffer, answer in zip(batch, buffers, answers, strict=True):
            if answer is Answer.HIT:
                verdict.records += 1
                verdict.num_bytes += entry.num_bytes
                defect = _defect(entry.key, buffer)
                if defect:
                    verdict.corrupt.append((entry.key, defect))
            elif answer is Answer.RETRY:
                verdict.unread += 1
            else:
                verdict.gone += 1
        progress(sum(entry.num_bytes for entry in batch))
    return verdict


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        if batch and (num_bytes + entry.num_bytes > _BATCH_BYTES or len(batch) == _BATCH_RECORDS):
            yield batch
            batch, num_bytes = [], 0
        batch.append(entry)
        num_bytes += entry.num_bytes
    if batch:
        yield batch


def _defect(key: StoreKey, record: bytearray) -> str:
    """As `check_record`, and whether it is the record of this key: "group", "key"."""
    from quire.memory.record import check_record

    defect = check_record(record)
    if defect:
        return defect
    if int.from_bytes(record[4:6], "little") != key.part:
        return "group"
    return "" if record[32:48] == key.page[:16] else "key"


def _as_dict(url: str, verdict: Verdict, seconds: float) -> dict[str, Any]:
    from quire.tiers.stores.registry import without_secrets

    return {
        "url": without_secrets(url),
        "records": verdict.records,
        "bytes": verdict.num_bytes,
        "seconds": round(seconds, 3),
        "gone": verdict.gone,
        "unread": verdict.unread,
        "corrupt": [{"key": str(key), "defect": defect} for key, defect in verdict.corrupt],
        "removed": verdict.removed,
        "passed": not verdict.corrupt and not verdict.unread,
    }


def _print(data: dict[str, Any]) -> None:
    from quire.plan.budget import counted, format_bytes

    console = Console(highlight=False)
    beside = [f"{data[name]:,} {what}" for name, what in (("gone", "gone meanwhile"), ("unread", "not read"))]
    console.print(
        f"{counted(data['records'], 'record')}, {format_bytes(data['bytes'])}, in {data['seconds']:.1f} s; "
        f"{', '.join(beside)}."
    )
    corrupt = data["corrupt"]
    if data["unread"]:
        console.print("[bold red]Not all of it could be checked:[/bold red] the store did not give it out. Try again.")
    if not corrupt:
        if data["records"]:
            console.print("[green]Every record that was read is what its header says.[/green]")
        else:
            console.print("There was nothing to check.")
        return
    defects = Counter(found["defect"] for found in corrupt)
    told = ", ".join(f"{count:,} by {defect}" for defect, count in defects.most_common())
    console.print(f"[bold red]{len(corrupt):,} corrupt:[/bold red] {told}; {data['removed']:,} removed.")
    for found in corrupt[:_SHOWN]:
        console.print(f"  {found['defect']:7} {found['key']}", style="dim", soft_wrap=True)
    if len(corrupt) > _SHOWN:
        console.print(f"  and {len(corrupt) - _SHOWN:,} more; --json has all of them.", style="dim")
    if not data["removed"]:
        console.print("--remove drops them.", style="dim")

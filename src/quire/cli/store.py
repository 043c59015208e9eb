"""`quire store inspect`, `verify` and `gc`: list, check and delete the records of a store."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.text import Text

from quire.cli.report import Report, plain_table
from quire.errors import InvalidInput, StoreError
from quire.plan.budget import counted, format_bytes
from quire.settings.setting import Bytes, Settings, setting, without_secrets

if TYPE_CHECKING:
    from rich.status import Status

    from quire.tiers.store import Entry, Store, StoreKey

EXIT_CORRUPT = 4
EXIT_UNREAD = 2

_TOLD_EVERY = 5000  # records
_READ_BYTES, _READ_RECORDS = 64 << 20, 512  # at a time
_REMOVED_RECORDS = 500
_MOST_LISTED = 20
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class StoreUrl(Settings):
    """The store that a command looks at."""

    store: str = setting(
        ...,
        "A directory, or valkey://, redis://, s3://, mooncake:// and what follows.",
        argument=True,
        metavar="DIR_OR_URL",
    )


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """The store as it is, closed afterwards. A missing store is not created, and reading does not count as a use."""
    from quire.tiers.stores.registry import open_store

    store = open_store(url, counts_use=False)
    try:
        yield store
    finally:
        store.close()


def listed(store: Store, status: Status) -> tuple[list[Entry], dict[StoreKey, bytes], dict[StoreKey, bytes]]:
    """Records; the scope of each tombstone: scopes that were deleted and whose records are not all removed; and the
    prefix of scopes of each record of facts."""
    from quire.tiers.scope_facts import is_facts
    from quire.tiers.store import SCOPE_PREFIX_BYTES
    from quire.tiers.tombstones import tombstone_scope

    records: list[Entry] = []
    tombstones: dict[StoreKey, bytes] = {}
    facts: dict[StoreKey, bytes] = {}
    for number, entry in enumerate(store.entries(), 1):
        if number % _TOLD_EVERY == 0:
            status.update(f"Reading the index: {number:,} records ...")
        scope = tombstone_scope(entry.key)
        if is_facts(entry.key):
            facts[entry.key] = entry.key.scope[:SCOPE_PREFIX_BYTES]
        elif scope is None:
            records.append(entry)
        else:
            tombstones[entry.key] = scope
    return records, tombstones, facts


def _scope_prefix(text: str) -> str:
    """The beginning of a scope, in hex. Raises InvalidInput."""
    found = text.lower()
    if not re.fullmatch(r"[0-9a-f]{1,32}", found):
        raise InvalidInput(
            f"'{text}' is no scope.", fix="give up to 32 hex digits, as `quire store inspect` shows them."
        )
    return found


def working(text: str) -> Status:
    """Tells a terminal what goes on, as a `with` block."""
    return Console(stderr=True).status(f"{text} ...")


# -- inspect


def inspect(url: StoreUrl) -> Report:
    """Say what is in a store: records, bytes and ages by scope, and how much room is left.

    A scope stands for a model, its weights, its layouts, an adapter and a salt: what pages are kept apart by. Its first
    16 digits are the model's, and the same for all adapters and salts. What was flushed, and whose records are not all
    removed yet, is found by no engine any more; `gc` removes the rest. To look changes nothing, nor what goes next.

    [dim]Example:[/dim] quire store inspect /var/cache/quire

    [dim]Example:[/dim] quire store inspect valkey://cache:6379/0 --json
    """
    with opened(url.store) as store, working("Reading the index") as status:
        from quire.tiers.stores.directory import DirectoryStore

        records, tombstones, _ = listed(store, status)
        facts = asdict(store.facts()) if isinstance(store, DirectoryStore) else None
    by_scope: dict[bytes, list[Entry]] = {}
    for entry in records:
        by_scope.setdefault(entry.key.scope, []).append(entry)
    deleted = tuple(tombstones.values())
    scopes = [_scope(name, entries, name.startswith(deleted)) for name, entries in by_scope.items()]
    data = {
        "url": without_secrets(url.store),
        "backend": type(store).__name__,
        "records": len(records),
        "bytes": sum(entry.num_bytes for entry in records),
        "scopes": sorted(scopes, key=lambda scope: -scope["bytes"]),
        "facts": facts,
    }
    return Report(data, lambda: _shown_contents(data))


def _scope(name: bytes, entries: Sequence[Entry], flushed: bool) -> dict[str, Any]:
    idle = [entry.idle_seconds for entry in entries if entry.idle_seconds is not None]
    return {
        "scope": name.hex(),
        "records": len(entries),
        "parts": max(entry.key.part for entry in entries) + 1,
        "flushed": flushed,
        "newest_idle_seconds": min(idle, default=None),
        "oldest_idle_seconds": max(idle, default=None),
        "bytes": sum(entry.num_bytes for entry in entries),
    }


def _shown_contents(data: dict[str, Any]) -> Iterator[RenderableType]:
    size = f"{counted(data['records'], 'record')}, {format_bytes(data['bytes'])}"
    yield Text.assemble((data["backend"], "bold"), f" {data['url']}: {size}")
    if (facts := data["facts"]) is not None:
        how = "around the page cache (O_DIRECT)" if facts["direct"] else "through the page cache (no O_DIRECT here)"
        others = facts["num_owners"] - 1
        yield Text(
            f"Capacity {format_bytes(facts['capacity'])}: {format_bytes(facts['slab_bytes'])} on the disk in "
            f"{facts['num_slabs']:,} slabs, {format_bytes(facts['free_bytes'])} free, and "
            f"{format_bytes(facts['index_bytes'])} of index beside it. The disk has "
            f"{format_bytes(facts['disk_free_bytes'])} left.\n"
            f"Read and written {how}; {counted(facts['num_prepared'], 'record')} not written yet, and "
            f"{others or 'no'} other process{'es have' if others != 1 else ' has'} it open.",
            style="dim",
        )
    if not data["scopes"]:
        return
    columns = ("scope", "records", "bytes", "groups", "newest", "oldest")
    yield plain_table(columns, map(_scope_cells, data["scopes"]), wraps=columns[1:])
    yield Text("newest, oldest: how long ago the record was used that was used last, and least lately.", style="dim")
    for scope in data["scopes"]:
        if scope["flushed"]:
            rest = ": no engine finds it, and `quire store gc` removes it."
            yield Text.assemble((f"{scope['scope']} was flushed", "yellow"), rest)


def _scope_cells(scope: dict[str, Any]) -> tuple[Any, ...]:
    ages = (age_of(scope[f"{name}_idle_seconds"]) for name in ("newest", "oldest"))
    return scope["scope"], scope["records"], format_bytes(scope["bytes"]), scope["parts"], *ages


def age_of(seconds: float | None) -> str:
    """A time in its largest unit; a dash where it is not known."""
    if seconds is None:
        return "-"
    unit = next((unit for unit in "wdhm" if seconds >= 2 * _SECONDS[unit]), "s")
    return f"{seconds / _SECONDS[unit]:.0f} {unit}"


# -- verify


@dataclass(slots=True)
class CheckedRecords:
    """What was found. `gone`: listed, and evicted before it was read. `unread`: the store could not say."""

    records: int = 0
    num_bytes: int = 0
    gone: int = 0
    unread: int = 0
    corrupt: list[tuple[StoreKey, str]] = field(default_factory=list)


class ScopeSettings(Settings):
    """The scope that a command is about."""

    scope: str | None = setting(None, "Only this scope, in hex as it is shown, or how it begins.")


class VerifySettings(ScopeSettings):
    """Which records are read, and what becomes of corrupt ones."""

    remove: bool = setting(False, "Drop what is corrupt.", option="--remove")


def verify(url: StoreUrl, settings: VerifySettings) -> Report:
    """Read every record and check it: its header, the digest that binds it to key, layout and length, and its place.

    Serving checks the same on every load, and treats what fails as a miss. To look changes nothing, nor what a
    directory evicts next. Exits with 4 if anything is corrupt, else with 2 if something could not be read.

    [dim]Example:[/dim] quire store verify /var/cache/quire

    [dim]Example:[/dim] quire store verify s3://bucket/prefix --remove --json
    """
    prefix = "" if settings.scope is None else _scope_prefix(settings.scope)
    started = time.monotonic()
    with opened(url.store) as store:
        with working("Reading the index") as status:
            entries = [entry for entry in listed(store, status)[0] if entry.key.scope.hex().startswith(prefix)]
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("Reading", total=sum(entry.num_bytes for entry in entries))
            verdict = check(store, entries, lambda num_bytes: bar.advance(task, num_bytes))
        corrupt = verdict.corrupt
        removed = store.remove([key for key, _ in corrupt]) if settings.remove and corrupt else 0
    data = {
        "url": without_secrets(url.store),
        "records": verdict.records,
        "bytes": verdict.num_bytes,
        "seconds": round(time.monotonic() - started, 3),
        "gone": verdict.gone,
        "unread": verdict.unread,
        "corrupt": [{"key": str(key), "defect": defect} for key, defect in corrupt],
        "removed": removed,
        "passed": not corrupt and not verdict.unread,
    }
    exit_code = EXIT_CORRUPT if corrupt else EXIT_UNREAD if verdict.unread else 0
    return Report(data, lambda: _shown_verdict(data), exit_code)


def check(
    store: Store, entries: Iterable[Entry], progress: Callable[[int], None] = lambda num_bytes: None
) -> CheckedRecords:
    """Read and check these records. `progress` is called with the bytes of each batch."""
    from quire.tiers.store import Answer

    verdict = CheckedRecords()
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
        if batch and (num_bytes + entry.num_bytes > _READ_BYTES or len(batch) == _READ_RECORDS):
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


def _shown_verdict(data: dict[str, Any]) -> Iterator[RenderableType]:
    yield Text(
        f"{counted(data['records'], 'record')}, {format_bytes(data['bytes'])}, in {data['seconds']:.1f} s; "
        f"{data['gone']:,} gone meanwhile, {data['unread']:,} not read."
    )
    if data["unread"]:
        yield Text.assemble(
            ("Not all of it could be checked:", "bold red"), " the store did not give it out. Try again."
        )
    corrupt = data["corrupt"]
    if not corrupt:
        sound = Text("Every record that was read is what its header says.", "green")
        yield sound if data["records"] else "There was nothing to check."
        return
    defects = Counter(found["defect"] for found in corrupt).most_common()
    by_defect = ", ".join(f"{count:,} by {defect}" for defect, count in defects)
    yield Text.assemble((f"{len(corrupt):,} corrupt:", "bold red"), f" {by_defect}; {data['removed']:,} removed.")
    for found in corrupt[:_MOST_LISTED]:
        yield Text(f"  {found['defect']:7} {found['key']}", style="dim", overflow="ignore", no_wrap=True)
    if len(corrupt) > _MOST_LISTED:
        yield Text(f"  and {len(corrupt) - _MOST_LISTED:,} more; --json has all of them.", style="dim")
    if not data["removed"]:
        yield Text("--remove drops them.", style="dim")


# -- gc


class GcSettings(Settings):
    """Which records go."""

    keep: list[str] = setting(
        [], "Drop all scopes but this one, in hex or how it begins; given again for more.", metavar="SCOPE"
    )
    drop: list[str] = setting([], "Drop this scope; given again for more.", metavar="SCOPE")
    older_than: str | None = setting(None, "Drop what was not used for so long: 90s, 15m, 36h, 7d, 2w.", metavar="TIME")
    to_bytes: Bytes | None = setting(None, "Then drop what was used least lately, down to this size: 100GiB.")
    dry_run: bool = setting(False, "Say what would go, and drop nothing.", option="--dry-run")


def gc(url: StoreUrl, settings: GcSettings) -> Report:
    """Drop records by scope, age and size, what was flushed and is still there, and what dead writers had prepared.

    In a directory, what is left then moves together, and the disk has the rest back.

    [dim]Example:[/dim] quire store gc /var/cache/quire --older-than 7d --to-bytes 100GiB

    [dim]Example:[/dim] quire store gc /var/cache/quire --keep 3fa9 --dry-run
    """
    kept, dropped = (tuple(map(_scope_prefix, scopes)) for scopes in (settings.keep, settings.drop))
    seconds = None if settings.older_than is None else _parse_seconds(settings.older_than)
    removed = reclaimed = freed = 0
    with opened(url.store) as store, working("Reading the index") as status:
        from quire.tiers.stores.directory import DirectoryStore

        records, tombstones, facts_of = listed(store, status)
        chosen = _chosen(records, kept, dropped, seconds, settings.to_bytes, tuple(tombstones.values()))
        directory = store if isinstance(store, DirectoryStore) and not settings.dry_run else None
        before = directory.facts().slab_bytes if directory is not None else 0
        if not settings.dry_run:
            removed = _remove(store, chosen, status)
            if removed >= len(chosen):  # a tombstone stays while a record of its scope does
                left = {entry.key.scope[:8] for entry in set(records) - set(chosen)}
                unused = [key for key, prefix in facts_of.items() if prefix not in left]
                store.remove([*tombstones, *unused])
        if directory is not None:
            status.update("Giving room back to the disk ...")
            directory.reclaim()  # prepared records of dead writers; opening the store has dropped some of them
            directory.compact()
            reclaimed = directory.statistics["reclaimed"]
            freed = max(0, before - directory.facts().slab_bytes)
    data = {
        "url": without_secrets(url.store),
        "dry_run": settings.dry_run,
        "records": len(records),
        "bytes": sum(entry.num_bytes for entry in records),
        "chosen": len(chosen),
        "chosen_bytes": sum(entry.num_bytes for entry in chosen),
        "removed": removed,
        "reclaimed": reclaimed,
        "freed_bytes": freed,
    }
    return Report(data, lambda: _shown_removals(data))


def _parse_seconds(text: str) -> float:
    """`90s`, `15m`, `36h`, `7d`, `2w`. Raises InvalidInput."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if found is None:
        raise InvalidInput(f"'{text}' is no time.", fix="write 90s, 15m, 36h, 7d or 2w.")
    return float(found[1]) * _SECONDS[found[2]]


def _chosen(
    records: Sequence[Entry],
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    older_than: float | None,
    to_bytes: int | None,
    deleted: tuple[bytes, ...],
) -> list[Entry]:
    """The records to delete, with those of `deleted` scopes. At the same age, those that are listed first are deleted
    first. Raises InvalidInput for ages that the store does not know, and for a scope that is not there."""
    scopes = {entry.key.scope.hex() for entry in records}
    unknown = [scope for scope in (*keep, *drop) if not any(each.startswith(scope) for each in scopes)]
    if unknown and scopes:
        raise InvalidInput(
            f"no scope here begins with '{unknown[0]}', so nothing would be kept or dropped for it.",
            fix="give scopes as `quire store inspect` shows them.",
        )
    if older_than is not None and any(entry.idle_seconds is None for entry in records):
        raise InvalidInput("this store does not know when a record was last used.", fix="leave out --older-than.")
    chosen: list[Entry] = []
    left: list[Entry] = []
    for entry in records:
        scope = entry.key.scope.hex()
        foreign = scope.startswith(drop) or (bool(keep) and not scope.startswith(keep))
        old = older_than is not None and entry.idle_seconds is not None and entry.idle_seconds > older_than
        (chosen if foreign or old or entry.key.scope.startswith(deleted) else left).append(entry)
    if to_bytes is not None:
        total = sum(entry.num_bytes for entry in left)
        for entry in sorted(left, key=lambda entry: -(entry.idle_seconds or 0.0)):
            if total <= to_bytes:
                break
            total -= entry.num_bytes
            chosen.append(entry)
    return chosen


def _remove(store: Store, entries: Sequence[Entry], status: Status) -> int:
    """How many were removed. Raises StoreError if none could be."""
    keys = [entry.key for entry in entries]
    removed = 0
    for start in range(0, len(keys), _REMOVED_RECORDS):
        removed += store.remove(keys[start : start + _REMOVED_RECORDS])
        status.update(f"Removing: {removed:,} of {len(keys):,} records ...")
    if keys and not removed:
        raise StoreError(
            f"none of the {len(keys):,} records that were to go could be removed, as when the disk is full.",
            fix="free some MiB of the disk, or stop the engines and remove the directory: it fills again.",
        )
    return removed


def _shown_removals(data: dict[str, Any]) -> Iterator[RenderableType]:
    verb = "would go" if data["dry_run"] else "chosen"
    yield Text(
        f"{counted(data['records'], 'record')}, {format_bytes(data['bytes'])}: {data['chosen']:,} {verb}, "
        f"{format_bytes(data['chosen_bytes'])}."
    )
    if not data["dry_run"]:
        yield Text.assemble(
            (f"{data['removed']:,} removed", "green"),
            f", and {data['reclaimed']:,} that dead writers had prepared; "
            f"the disk has {format_bytes(data['freed_bytes'])} of it back.",
        )

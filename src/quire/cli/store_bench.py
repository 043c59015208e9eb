"""`quire store bench`: how fast a store takes and returns records, beside the disk under it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from quire.cli.store_options import StoreUrl, opened
from quire.engine.setting import Bytes, Settings, setting
from quire.errors import StoreError

if TYPE_CHECKING:
    from rich.status import Status

    from quire.cli.store_bandwidth import Bandwidth


class BenchSettings(Settings):
    """What is written and read, and how."""

    sizes: str = setting("64KiB,256KiB,1MiB,4MiB", "Bytes of a record, several with commas.", metavar="SIZES")
    total: Bytes = setting("256MiB", "Bytes to write for each size.", validate_default=True)
    batch: int = setting(64, "Records in a call; fewer of large ones, up to 16 MiB.", ge=1)
    threads: int = setting(4, "Threads of a directory, and of the plain disk.", ge=1)


def bench(store: StoreUrl, settings: BenchSettings, *, as_json: bool) -> None:
    """Measure put and get: GB/s in batches, milliseconds of one record alone, by record size.

    Of a directory, a new store inside it is measured with O_DIRECT and without, each beside plain reads and writes of
    the same sizes by the same number of threads, and removed. The get without O_DIRECT reads from memory. Of a server,
    the store itself is measured, and the records are removed.

    [dim]Example:[/dim] quire store bench /var/cache/quire

    [dim]Example:[/dim] quire store bench valkey://127.0.0.1:6379/0 --sizes 64KiB,1MiB --json
    """
    from quire.plan.budget import parse_bytes
    from quire.tiers.stores.registry import directory_of, without_secrets

    url, batch, threads = store.url, settings.batch, settings.threads
    record_sizes = [parse_bytes(size) for size in settings.sizes.split(",")]
    path = directory_of(url)
    with Console(stderr=True, quiet=as_json).status("Measuring ...") as status:
        if path is None:
            rows = _of_server(url, record_sizes, settings.total, batch, status)
        else:
            rows = _of_directory(Path(path), record_sizes, settings.total, batch, threads, status)
    data = {"url": without_secrets(url), "threads": threads, "total_bytes": settings.total, "rows": rows}
    if as_json:
        print(json.dumps(data))
    else:
        _print(data)


def _of_server(url: str, sizes: list[int], total_bytes: int, batch: int, status: Status) -> list[dict[str, Any]]:
    from quire.cli.store_bandwidth import measure_store

    rows = []
    with opened(url) as store:
        for size in sizes:
            status.update(f"Measuring records of {size:,} bytes ...")
            found = measure_store(store, size, total_bytes, _records_in(batch, size))
            rows.append(_as_dict(type(store).__name__, found, None))
    return rows


def _of_directory(
    folder: Path, sizes: list[int], total_bytes: int, batch: int, threads: int, status: Status
) -> list[dict[str, Any]]:
    from quire.cli.store_bandwidth import measure_directory, measure_disk

    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "is not there"
        raise StoreError(f"'{folder}' {what}.", fix="give a directory on the disk that is to be measured.")
    rows = []
    for direct in (True, False):
        for size in sizes:
            how = "direct" if direct else "buffered"
            status.update(f"Measuring records of {size:,} bytes, {how} ...")
            try:
                disk = measure_disk(folder, size, total_bytes, threads, direct=direct)
                found = measure_directory(folder, size, total_bytes, _records_in(batch, size), threads, direct=direct)
            except StoreError:
                if not direct:
                    raise
                break  # a filesystem without O_DIRECT, of which there is nothing to tell
            rows.append(_as_dict(how, found, disk))
    return rows


def _records_in(batch: int, size: int) -> int:
    return max(1, min(batch, (16 << 20) // size))


def _as_dict(how: str, found: Bandwidth, disk: Bandwidth | None) -> dict[str, Any]:
    row = {"how": how, "record_bytes": found.record_bytes, "store": _plain(found), "disk": None, "ratio": None}
    if disk is not None:
        row["disk"] = _plain(disk)
        row["ratio"] = {
            "put": round(found.put_bytes_per_second / disk.put_bytes_per_second, 3),
            "get": round(found.get_bytes_per_second / disk.get_bytes_per_second, 3),
        }
    return row


def _plain(found: Bandwidth) -> dict[str, Any]:
    return {
        "records": found.num_records,
        "put_gb_per_second": round(found.put_bytes_per_second / 1e9, 3),
        "get_gb_per_second": round(found.get_bytes_per_second / 1e9, 3),
        "put_ms": round(found.put_seconds * 1e3, 3),
        "get_ms": round(found.get_seconds * 1e3, 3),
    }


def _print(data: dict[str, Any]) -> None:
    from quire.plan.budget import format_bytes

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for title in ("", "record", "put GB/s", "of the disk", "get GB/s", "of the disk", "one put", "one get"):
        table.add_column(f"[bold]{title}[/bold]", justify="left" if title == "" else "right")
    table.add_row(*(str(column.header) for column in table.columns))
    for row in data["rows"]:
        store, ratio = row["store"], row["ratio"]
        table.add_row(
            row["how"],
            format_bytes(row["record_bytes"]),
            f"{store['put_gb_per_second']:.2f}",
            "-" if ratio is None else f"{ratio['put']:.0%}",
            f"{store['get_gb_per_second']:.2f}",
            "-" if ratio is None else f"{ratio['get']:.0%}",
            f"{store['put_ms']:.2f} ms",
            f"{store['get_ms']:.2f} ms",
        )
    console.print(table)

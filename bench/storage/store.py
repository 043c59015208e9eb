"""The speed of put and get of a store, and of the disk under it.

python -m bench.storage.store DIR_OR_URL [--sizes 64KiB,1MiB] [--json]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from bench.storage.bandwidth import Bandwidth, measure_directory, measure_disk, measure_store
from rich.console import Console

from quire.cli.command import command
from quire.cli.report import Report, plain_table
from quire.cli.store import StoreUrl, opened
from quire.errors import StoreError
from quire.plan.budget import format_bytes
from quire.settings.setting import Bytes, Settings, parse_bytes, setting, without_secrets
from quire.tiers.stores.registry import directory_of

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")

_MOST_BATCH_BYTES = 16 << 20


class BenchSettings(Settings):
    """The store and the records to measure."""

    sizes: str = setting("64KiB,256KiB,1MiB,4MiB", "Bytes of a record, several with commas.", metavar="SIZES")
    total: Bytes = setting("256MiB", "Bytes to write for each size.", validate_default=True)
    batch: int = setting(64, "Records in a call; fewer of large ones, up to 16 MiB.", ge=1)
    threads: int = setting(4, "Threads of a directory, and of the plain disk.", ge=1)

    def measured(self) -> Iterator[tuple[int, int]]:
        """Bytes of a record, and records in a call, for each size."""
        for size in self.sizes.split(","):
            num_bytes = parse_bytes(size)
            yield num_bytes, max(1, min(self.batch, _MOST_BATCH_BYTES // num_bytes))


@command(app)
def bench(url: StoreUrl, settings: BenchSettings) -> Report:
    """Measure put and get: GB/s in batches, milliseconds of one record alone, by record size.

    Of a directory, a new store inside it is measured with O_DIRECT and without, each beside plain reads and writes of
    the same sizes by the same number of threads, and removed. The get without O_DIRECT reads from memory. Of a server,
    the store itself is measured, and the records are removed.

    [dim]Example:[/dim] python -m bench.storage.store /var/cache/quire

    [dim]Example:[/dim] python -m bench.storage.store valkey://127.0.0.1:6379/0 --sizes 64KiB,1MiB --json
    """
    folder = directory_of(url.store)
    with Console(stderr=True).status("Measuring ..."):
        found = _of_server(url.store, settings) if folder is None else _of_directory(Path(folder), settings)
        rows = list(found)
    data = {"url": without_secrets(url.store), "threads": settings.threads, "total_bytes": settings.total, "rows": rows}
    columns = ("", "record", "put GB/s", "of the disk", "get GB/s", "of the disk", "one put", "one get")
    return Report(data, lambda: [plain_table(columns, map(_cells, rows))])


def _of_server(url: str, settings: BenchSettings) -> Iterator[dict[str, Any]]:
    with opened(url) as store:
        for size, batch in settings.measured():
            yield _row(type(store).__name__, measure_store(store, size, settings.total, batch), None)


def _of_directory(folder: Path, settings: BenchSettings) -> Iterator[dict[str, Any]]:
    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "is not there"
        raise StoreError(f"'{folder}' {what}.", fix="give a directory on the disk that is to be measured.")
    total, threads = settings.total, settings.threads
    for direct in (True, False):
        for size, batch in settings.measured():
            try:
                disk = measure_disk(folder, size, total, threads, direct=direct)
                found = measure_directory(folder, size, total, batch, threads, direct=direct)
            except StoreError:
                if not direct:
                    raise
                break  # a filesystem without O_DIRECT
            yield _row("direct" if direct else "buffered", found, disk)


def _row(how: str, found: Bandwidth, disk: Bandwidth | None) -> dict[str, Any]:
    row = {"how": how, "record_bytes": found.record_bytes, "store": _rates(found), "disk": None, "ratio": None}
    if disk is not None:
        row["disk"] = _rates(disk)
        row["ratio"] = {
            "put": round(found.put_bytes_per_second / disk.put_bytes_per_second, 3),
            "get": round(found.get_bytes_per_second / disk.get_bytes_per_second, 3),
        }
    return row


def _rates(found: Bandwidth) -> dict[str, Any]:
    return {
        "records": found.num_records,
        "put_gb_per_second": round(found.put_bytes_per_second / 1e9, 3),
        "get_gb_per_second": round(found.get_bytes_per_second / 1e9, 3),
        "put_ms": round(found.put_seconds * 1e3, 3),
        "get_ms": round(found.get_seconds * 1e3, 3),
    }


def _cells(row: dict[str, Any]) -> tuple[str | None, ...]:
    store, ratio = row["store"], row["ratio"]
    put, get = (None, None) if ratio is None else (f"{ratio['put']:.0%}", f"{ratio['get']:.0%}")
    return (
        row["how"],
        format_bytes(row["record_bytes"]),
        f"{store['put_gb_per_second']:.2f}",
        put,
        f"{store['get_gb_per_second']:.2f}",
        get,
        f"{store['put_ms']:.2f} ms",
        f"{store['get_ms']:.2f} ms",
    )


if __name__ == "__main__":
    app()

"""What the commands of `quire store` have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.engine.setting import Settings, setting
from quire.errors import InvalidInput

if TYPE_CHECKING:
    from rich.status import Status

    from quire.tiers.store import Entry, Store


class StoreUrl(Settings):
    """The store that a command looks at."""

    url: str = setting(
        ...,
        "A directory, or valkey://, redis://, s3://, mooncake:// and what follows.",
        argument=True,
        metavar="DIR_OR_URL",
    )


_TOLD_EVERY = 5000
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """The store as it is, closed afterwards. Nothing is made where there is none, and to look is not to use."""
    from quire.tiers.stores.registry import open_store

    store = open_store(url, counts_use=False)
    try:
        yield store
    finally:
        store.close()


def told(entries: Iterable[Entry], status: Status, verb: str) -> Iterator[Entry]:
    """The same entries; `status` says how many there were so far."""
    for number, entry in enumerate(entries, 1):
        if number % _TOLD_EVERY == 0:
            status.update(f"{verb}: {number:,} records ...")
        yield entry


def scope_prefix(text: str) -> str:
    """The beginning of a scope, in hex. Raises InvalidInput."""
    found = text.lower()
    if not re.fullmatch(r"[0-9a-f]{1,32}", found):
        raise InvalidInput(
            f"'{text}' is no scope.", fix="give up to 32 hex digits, as `quire store inspect` shows them."
        )
    return found


def parse_seconds(text: str) -> float:
    """`90s`, `15m`, `36h`, `7d`, `2w`. Raises InvalidInput."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if found is None:
        raise InvalidInput(f"'{text}' is no time.", fix="write 90s, 15m, 36h, 7d or 2w.")
    return float(found[1]) * _SECONDS[found[2]]


def format_seconds(seconds: float | None) -> str:
    """A time in its largest unit; a dash where it is not known."""
    if seconds is None:
        return "-"
    unit = next((unit for unit in "wdhm" if seconds >= 2 * _SECONDS[unit]), "s")
    return f"{seconds / _SECONDS[unit]:.0f} {unit}"

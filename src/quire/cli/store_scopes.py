"""`quire store explain`: what each engine has in a store, and why one does not find the pages of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from quire.cli.report import Report, plain_table
from quire.cli.store import ScopeSettings, StoreUrl, age_of, listed, opened, working
from quire.errors import InvalidInput
from quire.plan.budget import counted, format_bytes
from quire.settings.setting import without_secrets

if TYPE_CHECKING:
    from quire.tiers.scope_facts import Facts
    from quire.tiers.store import Entry

_COLUMNS = ("scopes", "engine", "model", "records", "bytes", "used")


def explain(url: StoreUrl, settings: ScopeSettings) -> Report:
    """Say which engine and model each part of a store belongs to, and what differs where engines share nothing.

    Engines find only what has their own model, weights, dtype, page size, layout and rank. Each says so in the store
    with its first record. Pages whose engine said nothing are shown too. With --scope one is compared with all others,
    else each with those of its model. To look changes nothing.

    [dim]Example:[/dim] quire store explain /var/cache/quire

    [dim]Example:[/dim] quire store explain valkey://cache:6379/0 --scope 3fa9 --json
    """
    from quire.tiers.scope_facts import read_facts
    from quire.tiers.store import SCOPE_PREFIX_BYTES

    with opened(url.store) as store, working("Reading the index") as status:
        entries, deleted, described = listed(store, status)
        by_prefix: dict[bytes, list[Entry]] = {prefix: [] for prefix in described.values()}
        for entry in entries:
            by_prefix.setdefault(entry.key.scope[:SCOPE_PREFIX_BYTES], []).append(entry)
        facts = read_facts(store, by_prefix)
    wanted = (settings.scope or "").lower()
    if wanted and not any(prefix.hex().startswith(wanted[:16]) for prefix in by_prefix):
        raise InvalidInput(f"no scope here begins with '{wanted}'.", fix="give one as `quire store explain` shows it.")
    engines = [_engine(prefix, found, facts.get(prefix)) for prefix, found in by_prefix.items()]
    engines.sort(key=lambda engine: engine["idle_seconds"] if engine["idle_seconds"] is not None else -1.0)
    data = {
        "url": without_secrets(url.store),
        "engines": engines,
        "differences": list(_differences(engines, wanted[:16])),
        "deleted": sorted(scope.hex() for scope in deleted.values()),
    }
    return Report(data, lambda: _shown(data))


def _engine(prefix: bytes, entries: Sequence[Entry], facts: Facts | None) -> dict[str, Any]:
    return {
        "scopes": prefix.hex(),
        "facts": facts,
        "namespaces": len({entry.key.scope for entry in entries}),
        "records": len(entries),
        "bytes": sum(entry.num_bytes for entry in entries),
        "idle_seconds": min((entry.idle_seconds for entry in entries if entry.idle_seconds is not None), default=None),
    }


def _differences(engines: Sequence[dict[str, Any]], wanted: str) -> Iterator[dict[str, Any]]:
    """Pairs that share nothing, with the facts that differ. Two engines of other models say nothing about each other,
    unless one is `wanted`."""
    from quire.tiers.scope_facts import differences

    known = [engine for engine in engines if engine["facts"] is not None]
    for at, first in enumerate(known):
        for second in known[at + 1 :]:
            pair = (first, second)
            is_wanted = wanted and any(engine["scopes"].startswith(wanted) for engine in pair)
            if is_wanted or (not wanted and first["facts"].get("model") == second["facts"].get("model")):
                names = differences(first["facts"], second["facts"])
                values = {name: [engine["facts"].get(name) for engine in pair] for name in names}
                yield {"scopes": [engine["scopes"] for engine in pair], "differ": values}


def _shown(data: dict[str, Any]) -> Iterator[RenderableType]:
    if not data["engines"]:
        yield f"{data['url']}: there is nothing in it."
        return
    rows = [
        (
            engine["scopes"],
            str((engine["facts"] or {}).get("engine", "not said")),
            str((engine["facts"] or {}).get("model", "-")),
            engine["records"],
            format_bytes(engine["bytes"]),
            age_of(engine["idle_seconds"]),
        )
        for engine in data["engines"]
    ]
    yield plain_table(_COLUMNS, rows, wraps=("model",))
    yield Text("scopes: the digits that all scopes of one engine begin with. used: how long ago.", style="dim")
    for pair in data["differences"]:
        first, second = pair["scopes"]
        yield Text.assemble(("\n0 hits between ", "yellow"), first, " and ", second, " because of:")
        for name, (one, other) in pair["differ"].items():
            yield Text(f"  other {name}: {_said(one)} and {_said(other)}")
    if not data["differences"] and len(data["engines"]) > 1:
        said = sum(engine["facts"] is not None for engine in data["engines"])
        yield Text(f"{counted(said, 'engine')} said what it is of; no two have the same model.", style="dim")


def _said(value: object) -> str:
    return "nothing" if value is None else str(value)

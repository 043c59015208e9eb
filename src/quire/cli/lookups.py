"""`quire explain --lookups`: why prompts were not found in a connector's store, from its log of lookups."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from quire.cli.report import Report, plain_table
from quire.errors import InvalidInput
from quire.plan.budget import counted
from quire.settings.setting import Settings, setting

if TYPE_CHECKING:
    from quire.tiers.scope_facts import Facts

_MEANINGS = {
    "found": "all of it was there",
    "unanswered": "the store did not say in time, or the request ended before",
    "bad": "a record was there and bad, and was removed",
    "later": "stored since then",
    "other": "stored by an engine with other facts",
    "gone": "was stored, and evicted or removed before",
    "new": "never stored, as far as the log goes back",
}
_MOST_ROWS = 20


class LoggedLookups(Settings):
    """The log of a connector."""

    lookups: Path | None = setting(
        None, "A connector's log of lookups, to explain its requests; `--store` tells more of them.", metavar="FILE"
    )
    lookups_store: str | None = setting(
        None, "The connector's store, to find what lies there now.", metavar="DIR_OR_URL", option="--store"
    )


@dataclass(slots=True)
class _Log:
    """Lookups in their order; by scope and key, the times of the first and last save, and what was bad and when."""

    lookups: list[dict[str, Any]] = field(default_factory=list)
    saved: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    bad: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    torn: int = 0


def lookups_report(path: Path, store: str | None, request: str | None) -> Report:
    """Each lookup with its cause, or those of one request. Raises InvalidInput for a log that cannot be read, or does
    not have the request."""
    log = _read(path)
    chosen = [each for each in log.lookups if request is None or _is_of(request, each["request"])]
    if not chosen:
        said = "has no lookups" if request is None else f"has no lookup of '{request}'"
        raise InvalidInput(f"'{path}' {said}.", fix="give the log of a connector that served requests.")
    missed = {each["missed"] for each in chosen if each["missed"] is not None}
    there, facts = _there(store, missed, log) if store is not None else ({}, {})
    rows = [each | dict(zip(("cause", "detail"), _cause(each, log, there, facts), strict=True)) for each in chosen]
    totals = Counter({name: sum(row[name] for row in rows) for name in ("asked", "found")})
    causes = Counter(row["cause"] for row in rows)
    data = {"log": str(path), "lookups": rows, **totals, "causes": causes, "torn_lines": log.torn}
    return Report(data, lambda: _shown(data))


def _read(path: Path) -> _Log:
    log = _Log()
    older = path.with_name(f"{path.name}.1")
    try:
        texts = [file.read_text(errors="replace") for file in ((older, path) if older.exists() else (path,))]
    except OSError as error:
        raise InvalidInput(f"'{path}' cannot be read: {error}.", fix="give the file of a connector's `log`.") from error
    for text in "".join(texts).splitlines():
        try:
            _add(log, json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError):
            log.torn += 1
    return log


def _add(log: _Log, line: Mapping[str, Any]) -> None:
    when, scope = line["time"], line["scope"]
    for key in line.get("saved", ()):
        first, _ = log.saved.get((scope, key), (when, when))
        log.saved[scope, key] = first, when
    log.bad |= {(scope, key): (when, defect) for key, defect in line.get("bad", {}).items()}
    if "asked" in line:
        log.lookups.append(dict(line))


def _is_of(request: str, logged: str) -> bool:
    """Whether the engine's name of a request is of that of a response: vLLM appends a number to it."""
    return logged == request or logged.startswith(f"{request}-")


def _there(url: str, missed: set[str], log: _Log) -> tuple[dict[str, set[str]], Mapping[str, Facts]]:
    """In which scopes of the store these keys are now, and the facts of all scopes of the log and of the store."""
    from quire.cli.store import opened
    from quire.tiers.scope_facts import read_facts

    found: dict[str, set[str]] = {}
    scopes = {each["scope"] for each in log.lookups} | {scope for scope, _ in log.saved}
    with opened(url) as store:
        for entry in store.entries():
            name = f"{entry.key.page.hex()}.{entry.key.part}"
            if name in missed:
                found.setdefault(name, set()).add(entry.key.scope.hex())
        facts = read_facts(store, map(bytes.fromhex, scopes.union(*found.values())))
    return found, {scope.hex(): of for scope, of in facts.items()}


def _cause(
    lookup: Mapping[str, Any], log: _Log, there: Mapping[str, set[str]], facts: Mapping[str, Facts]
) -> tuple[str, str]:
    """Why its first missing key was not found when the request asked."""
    from quire.tiers.scope_facts import differences

    missed, scope, since = lookup["missed"], lookup["scope"], lookup["since"]
    if missed is None:
        return "found", _MEANINGS["found"]
    if lookup.get("unanswered"):
        return "unanswered", _MEANINGS["unanswered"]
    first, last = log.saved.get((scope, missed), (since, 0.0))
    bad_at, defect = log.bad.get((scope, missed), (0.0, ""))
    if first < since and first < bad_at <= lookup["time"] and not bad_at < last < since:
        return "bad", f"{_MEANINGS['bad']}: {defect}"
    if first < since:
        return "gone", _MEANINGS["gone"]
    others = {of for (of, key), (saved_at, _) in log.saved.items() if key == missed and saved_at < since} - {scope}
    if not last:
        others |= there.get(missed, set()) - {scope}
    if others:
        names = [", ".join(differences(facts[scope], facts[of])) for of in others if scope in facts and of in facts]
        said = min(names, key=len, default="--store says which")
        return "other", f"{_MEANINGS['other']}: {said}"
    cause = "later" if last or scope in there.get(missed, ()) else "new"
    return cause, _MEANINGS[cause]


def _shown(data: Mapping[str, Any]) -> Iterator[RenderableType]:
    rows = data["lookups"]
    yield Text(f"{counted(len(rows), 'lookup')}: {data['found']:,} of {counted(data['asked'], 'chunk')} found.")
    columns = ("request", "part", "asked", "found", "cause", "detail")
    shown = [tuple(row[name] for name in columns) for row in rows[-_MOST_ROWS:]]
    yield plain_table(columns, shown, left=("request", "cause", "detail"), wraps=("detail",))
    yield Text(
        "part: the group of layers. One with windows needs its last chunks alone, which come first.", style="dim"
    )
    if len(rows) > _MOST_ROWS:
        yield Text(f"The last {_MOST_ROWS} of {len(rows):,}; --json has all of them.", style="dim")

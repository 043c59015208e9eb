"""Explanations as a person reads them: a row for each run of tokens, or for each cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from quire.cli.report import plain_table
from quire.plan.budget import counted

_MEANINGS = {
    "hit": "reused",
    "last_token": "cached, and computed again: the last token, with its page",
    "slower": "cached below the device, and faster to compute than to load",
    "group": "cached, but a group of layers could not go on from there",
    "peer": "asked of a prefill engine, and computed here",
    "evicted": "was cached and had to make room",
    "namespace": "cached for another adapter or salt only",
    "page": "less than a page in common",
    "new": "never seen behind this prefix",
    "refused": "of requests that this pool can never hold",
}
_MOST_EVICTIONS = 8  # rows of a table
_MOST_NAMES = 2  # of requests in one of them
_STYLES = {"hit": "green", "evicted": "red", "group": "yellow", "peer": "yellow", "namespace": "yellow"}


def reasons_table(explanation: Mapping[str, Any]) -> Table:
    """A row for each reason of an explanation (`Explanation.to_dict`), in the order of the prompt. Neighbouring
    evictions share one if they were for the same request, or if there would be too many."""
    rows = []
    for reason in merged_evictions(explanation["reasons"]):
        start, tokens, cause = reason["start"], reason["tokens"], reason["cause"]
        detail = Text(reason.get("detail", _MEANINGS[cause]))
        rows.append((start, start + tokens - 1, tokens, Text(cause, _STYLES.get(cause, "")), detail))
    return plain_table(("from", "to", "tokens", "cause", "detail"), rows, left=("cause", "detail"), wraps=("detail",))


def merged_evictions(reasons: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The reasons with neighbouring evictions put together: those for the same request, then, while there are more than
    `_MOST_EVICTIONS`, the two that are fewest tokens together."""
    rows = [list(same) for _, same in groupby(reasons, key=lambda reason: reason.get("by") or reason["start"])]
    while sum(map(_is_eviction, rows)) > _MOST_EVICTIONS:
        pairs = [at for at in range(len(rows) - 1) if _is_eviction(rows[at]) and _is_eviction(rows[at + 1])]
        if not pairs:
            break
        at = min(pairs, key=lambda at: _tokens(rows[at]) + _tokens(rows[at + 1]))
        rows[at : at + 2] = [rows[at] + rows[at + 1]]
    return [row[0] if len(row) == 1 else _together(row) for row in rows]


def _together(reasons: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One row for several evictions: from the latest to the earliest, and the requests that caused them."""
    ages = sorted(reason["seconds_ago"] for reason in reasons)
    latest, earliest = f"{ages[0]:.1f}", f"{ages[-1]:.1f}"
    when = latest if latest == earliest else f"{latest} to {earliest}"
    causes = {reason["by"]: None for reason in reasons}
    names = list(dict.fromkeys(name.partition(" and ")[0] for name in causes))
    said = ", ".join(names[:_MOST_NAMES])
    if len(causes) == 1:
        said = reasons[0]["by"]
    elif any(" and " in name for name in causes):  # for several requests at once, of which only the first is named
        said += " and others"
    elif len(names) > _MOST_NAMES:
        said += f" and {len(names) - _MOST_NAMES} more"
    return {**reasons[0], "tokens": _tokens(reasons), "detail": f"evicted {when} s ago for {said}"}


def _is_eviction(reasons: Sequence[Mapping[str, Any]]) -> bool:
    return bool(reasons[0]["cause"] == "evicted")


def _tokens(reasons: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(reason["tokens"]) for reason in reasons)


def causes_table(causes: Mapping[str, int]) -> Table:
    """A row for each cause, and the sum."""
    total = sum(causes.values())
    rows = [
        (tokens, f"{tokens / total:.1%}" if total else "", Text(cause, _STYLES.get(cause, "")), _MEANINGS[cause])
        for cause, tokens in causes.items()
    ]
    last = "what it is"
    table = plain_table(("tokens", "share", "cause", last), rows, left=("cause", last), wraps=(last,))
    table.add_row(f"{total:,}", "", "", "all prompt tokens", style="dim")
    return table


def sequence_heading(name: str, explanation: Mapping[str, Any]) -> Text:
    """Which sequence, and how much of it was reused."""
    prompt, hit = explanation["prompt_tokens"], explanation["hit_tokens"]
    return Text(f"{name}: {counted(prompt, 'prompt token')}, {hit:,} of them reused ({hit / prompt:.1%}).\n")

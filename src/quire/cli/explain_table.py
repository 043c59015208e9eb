"""Explanations as a person reads them: a row for each run of tokens, or for each cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

_MEANINGS = {
    "hit": "reused",
    "last_token": "cached, and computed again: the last token, with its page",
    "group": "cached, but a group of layers could not go on from there",
    "evicted": "was cached and had to make room",
    "namespace": "cached for another adapter or salt only",
    "page": "less than a page in common",
    "new": "never seen behind this prefix",
}
_STYLES = {"hit": "green", "evicted": "red", "group": "yellow", "namespace": "yellow"}


def reasons_table(explanation: Mapping[str, Any]) -> Table:
    """A row for each reason of an explanation (`Explanation.to_dict`), in the order of the prompt."""
    table = _table("from", "to", "tokens", "cause", "detail")
    for reason in explanation["reasons"]:
        start, tokens, cause = reason["start"], reason["tokens"], reason["cause"]
        detail = reason.get("detail", _MEANINGS[cause])
        table.add_row(
            f"{start:,}", f"{start + tokens - 1:,}", f"{tokens:,}", Text(cause, _STYLES.get(cause, "")), detail
        )
    return table


def causes_table(causes: Mapping[str, int]) -> Table:
    """A row for each cause, and what they are together."""
    total = sum(causes.values())
    table = _table("tokens", "share", "cause", "what it is")
    for cause, tokens in causes.items():
        share = f"{tokens / total:.1%}" if total else ""
        table.add_row(f"{tokens:,}", share, Text(cause, _STYLES.get(cause, "")), _MEANINGS[cause])
    table.add_row(f"{total:,}", "", "", "all prompt tokens", style="dim")
    return table


def sequence_heading(name: str, explanation: Mapping[str, Any]) -> Text:
    """Which sequence, and how much of it was reused."""
    prompt, hit = explanation["prompt_tokens"], explanation["hit_tokens"]
    return Text(f"{name}: {prompt:,} prompt tokens, {hit:,} of them reused ({hit / prompt:.1%}).\n")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        words = name in ("cause", "detail", "what it is")
        table.add_column(name, justify="left" if words else "right", no_wrap=name not in ("detail", "what it is"))
    return table

"""A plan as a person reads it: the ledger, what fits, and why. Drawn from the dictionary that machines get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.plan.budget import format_bytes

Explanation = Sequence[tuple[str, str]]


def plan_panel(found: Mapping[str, Any], *, title: str, why: Explanation = ()) -> Panel:
    """The plan in one panel; `why` adds the formula of each number."""
    parts: list[RenderableType] = [ledger_table(found), Text(""), summary_table(found)]
    parts += [Text(f"Note: {note}", style="dim") for note in found["notes"]]
    if found["to_fit"]:
        parts.append(Text.assemble(("To fit: ", "bold yellow"), ", or ".join(found["to_fit"]) + "."))
    elif not found["fits"]:
        parts.append(Text("Nothing that was tried makes it fit: not less context, fewer requests or fewer bits."))
    if why:
        parts += [Text(""), why_table(why)]
    verdict = "[bold green]fits[/bold green]" if found["fits"] else "[bold red]does not fit[/bold red]"
    return Panel(
        Group(*parts),
        title=f"[bold]{title}[/bold] {verdict}",
        title_align="left",
        border_style="green" if found["fits"] else "red",
        expand=False,
    )


def ledger_table(found: Mapping[str, Any]) -> Table:
    """A line for every byte of one rank's budget, and their sum."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("One rank" if _ranks(found) > 1 else "Device", no_wrap=True)
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
    table.add_column("")
    lines = [line for line in found["ledger"] if line["where"] == "device"]
    for line in lines:
        about = "about " if line["estimated"] else ""
        table.add_row(line["name"], f"{line['bytes']:,}", about + format_bytes(line["bytes"]), _share(line, found))
    total = sum(line["bytes"] for line in lines)
    name = found["device"] or "KV memory"
    table.add_section()
    table.add_row(
        Text(name, style="bold"), Text(f"{total:,}", style="bold"), Text(format_bytes(total), style="bold"), ""
    )
    for line in found["ledger"]:
        if line["where"] == "host":
            table.add_row(Text(f"host: {line['name']}", style="dim"), f"{line['bytes']:,}", format_bytes(line["bytes"]))
    return table


def _share(line: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Beside a pool, its frames."""
    pool = next((pool for pool in found["pools"] if line["name"] == f"pool {pool['name']}"), None)
    if pool is None:
        return ""
    return f"{pool['frames'] - 1:,} of {format_bytes(pool['bytes_per_frame'])}"


def summary_table(found: Mapping[str, Any]) -> Table:
    """What the budget holds."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    price = found["bytes_per_token"]
    table.add_row("Tokens", f"{found['max_total_num_tokens']:,} ({price:,.10g} bytes for each, as {found['kv_dtype']})")
    if found["swa_max_total_num_tokens"] is not None and found["full_max_total_num_tokens"] is not None:
        table.add_row("Window tokens", f"{found['swa_max_total_num_tokens']:,}")
    if found["state_slots"] is not None:
        table.add_row("State slots", f"{found['state_slots']:,}")
    asked, room = found["required_requests"], found["room_at_context"]
    wanted = f"; {asked:,} asked for" if asked > 1 else ""
    wanted += f"; room for {room:,}" if room > found["requests_at_context"] else ""
    table.add_row("Requests at once", f"{found['requests_at_context']:,} of {found['context']:,} tokens{wanted}")
    if found["expected"]["given"] and found["expected"]["mean_tokens"] != found["context"]:
        mean = found["expected"]["mean_tokens"]
        table.add_row("As expected", f"{found['requests_at_mean']:,} of {mean:,} tokens, the mean")
    table.add_row("Largest request", f"{found['largest_request']:,} tokens, prompt and output together")
    reused = found["minimum_reusable_prefix"]
    table.add_row(
        "Smallest reuse", "none: prefix caching is off" if reused is None else f"prefixes from {reused:,} tokens on"
    )
    shape = found["geometry"]
    table.add_row(
        "Page",
        f"{shape['page_size']:,} tokens, wasting {shape['waste']:.2%} of a request of {shape['request_tokens']:,}; "
        f"runner-up {shape['runner_up']:,}, wasting {shape['runner_up_waste']:.2%}",
    )
    return table


def why_table(why: Explanation) -> Table:
    """Each number and how it comes about."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for what, formula in why:
        table.add_row(what, formula)
    return table


def rows_table(columns: Iterable[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A plain table, numbers to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    return table


def cell(value: Any) -> str:
    """A value of a table: thousands apart, yes and no, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.10g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _ranks(found: Mapping[str, Any]) -> int:
    return int(found["parallel"]["tp"] * found["parallel"]["pp"])

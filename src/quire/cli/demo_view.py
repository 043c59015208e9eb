"""How the demo looks: conversations as they go, the counters after, and what they showed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.cli.demo_client import Conversation
from quire.cli.demo_pools import NUM_TALKS, NUM_TURNS, Hybrid, Tick, ticks
from quire.cli.demo_tiers import tier_ticks
from quire.plan.budget import format_bytes

FRAMES = {
    "total": "frames",
    "free": "of nobody",
    "private": "of running requests",
    "cached": "of cached pages",
    "dropped": "taken from cached pages that stayed",
    "revived": "given back to such pages",
    "left": "for others to begin on",
    "skipped": "not left, because none was to spare",
}
"""Owners and counters of frames, and what they mean; see `quire.cache.statistics.FrameCounts`."""


def live(console: Console, talks: list[Conversation], num_turns: int) -> AbstractContextManager[object]:
    """Shows the conversations as they go, on a terminal."""
    if console.quiet or not console.is_terminal:
        return nullcontext()
    return Live(_Progress(talks, num_turns), console=console, refresh_per_second=8, transient=True)


class _Progress:
    """The conversations as they go; drawn anew at every refresh."""

    def __init__(self, talks: list[Conversation], num_turns: int) -> None:
        self._talks = talks
        self._num_turns = num_turns

    def __rich__(self) -> Table:
        table = Table(expand=True, title="Conversations over one system prompt")
        table.add_column("About", no_wrap=True)
        table.add_column("Turn", no_wrap=True)
        table.add_column("From cache", justify="right", no_wrap=True)
        table.add_column("Answer", ratio=1, no_wrap=True, overflow="ellipsis")
        for talk in self._talks:
            last = talk.turns[-1] if talk.turns else None
            cached = f"{last.cached_tokens} of {last.prompt_tokens}" if last else "-"
            table.add_row(talk.name, f"{len(talk.turns)}/{self._num_turns}", cached, Text(talk.text.replace("\n", " ")))
        return table


def print_serving(console: Console, found: Mapping[str, Any]) -> None:
    """What the server with the plain model did."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    _add_reuse(facts, found)
    facts.add_row("Pages shared", f"{found['shared_pages']} at once, by several running requests")
    facts.add_row("Pages evicted", f"{found['evicted_pages']:,}, because the pool is that small")
    facts.add_row("Preemptions", f"{found['preemptions']}")
    facts.add_row("Largest prompt", f"{found['largest_served_tokens']:,} tokens served")
    facts.add_row(
        "Throughput",
        f"{found['output_tokens_per_s']:,} output tokens/s; first token after {found['first_token_s'] * 1000:.0f} ms",
    )
    frames = ", ".join(
        f"{frames['free']} free + {frames['cached']} cached + {frames['private']} private = {frames['total']}"
        for frames in found["frames"].values()
    )
    facts.add_row("Pages at idle", frames)
    answers = Text()
    for answer in found["answers"]:
        answers.append(f"{answer['question']}\n", style="bold")
        answers.append(f"{answer['answer']}\n\n")
    answers.rstrip()
    refusal = found["refusal"]
    refused = Text(f"HTTP {refusal['status']}, {refusal.get('code', 'nothing was refused')}\n", style="bold")
    refused.append(str(refusal.get("message", "")), style="not bold")
    panels = [
        Panel(answers, title="Answers", title_align="left"),
        Panel(facts, title="The server's counters", title_align="left", border_style="green"),
        Panel(refused, title="A request larger than the pool", title_align="left", border_style="yellow"),
    ]
    console.print(Group(*panels))
    for name, passed in found["checks"].items():
        _tick(console, Tick(name, passed))


def print_pools(console: Console, hybrid: Hybrid, found: Mapping[str, Any]) -> None:
    """What became of the frames of a hybrid, pool by pool."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("Conversations", f"{NUM_TALKS} over one system prompt, {NUM_TURNS} turns each")
    _add_reuse(facts, found)
    pools = Table.grid(padding=(0, 2))
    pools.add_column(style="bold")
    for _ in found["pools"]:
        pools.add_column(justify="right")
    pools.add_column(style="dim")
    pools.add_row("Pool", *(Text(name, style="bold") for name in found["pools"]))
    pools.add_row("Memory", *(format_bytes(pool["bytes"]) for pool in found["pools"].values()))
    for name, meaning in FRAMES.items():
        pools.add_row(name.capitalize(), *(f"{pool[name]:,}" for pool in found["pools"].values()), meaning)
    title = f"{hybrid.model}: {hybrid.layers}"
    console.print(Panel(Group(facts, Text(""), pools), title=title, title_align="left", border_style="green"))
    for tick in ticks(hybrid, found):
        _tick(console, tick)


def print_tiers(console: Console, found: Mapping[str, Any]) -> None:
    """Where the prompt of the last question came from, server by server."""
    host, storage = found["tiers"]["host"], found["tiers"]["storage"]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("Device", f"{found['pool_tokens']:,} tokens")
    facts.add_row("Host memory", f"{host['tokens']:,} tokens, {format_bytes(host['bytes'])}")
    facts.add_row("Storage", f"about {storage['tokens']:,} tokens, {format_bytes(storage['bytes'])} in a directory")
    runs = Table.grid(padding=(0, 2))
    runs.add_column(style="bold")
    for _ in range(5):
        runs.add_column(justify="right")
    runs.add_row(
        *(Text(name, style="bold") for name in ("Server", "of prompt", "device", "host", "storage", "bytes moved"))
    )
    for name, run in zip(("first", "after SIGTERM", "after SIGKILL"), found["runs"], strict=True):
        counts = (run["prompt_tokens"], run["device"], run["host"], run["storage"], sum(run["moved_bytes"].values()))
        runs.add_row(name, *(f"{count:,}" for count in counts))
    title = f"{found['model']}: one question to three servers on one directory"
    console.print(Panel(Group(facts, Text(""), runs), title=title, title_align="left", border_style="green"))
    for tick in tier_ticks(found):
        _tick(console, tick)


def _add_reuse(facts: Table, found: Mapping[str, Any]) -> None:
    share = found["reused_tokens"] / max(1, found["prompt_tokens"])
    facts.add_row(
        "Tokens reused", f"{found['reused_tokens']:,} of {found['prompt_tokens']:,} prompt tokens ({share:.0%})"
    )
    for number, row in enumerate(found["reused_by_turn"], start=1):
        facts.add_row(f"  in turn {number}", f"{row['cached_tokens']:,} of {row['prompt_tokens']:,}")


def _tick(console: Console, tick: Tick) -> None:
    numbers = f": {tick.numbers}" if tick.numbers else ""
    mark = "[green]✓[/green]" if tick.passed else "[red]✗ not shown:[/red]"
    console.print(f"{mark} {tick.name}{numbers}", highlight=False)

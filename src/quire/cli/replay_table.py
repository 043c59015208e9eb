"""The runs of `quire replay` as a person reads them: a table for each model, and progress while they go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quire.plan.budget import counted
from quire.sim.comparison import ReportProgress
from quire.sim.result import ReplayResult
from quire.sim.trace_request import Trace

_COLUMNS = {
    "policy": 0, "hit": 6, "of gap": 6, "evicted": 7, "preempts": 8, "TTFT": 7, "p99": 7, "out/s": 6, "manager": 7,
    "digest": 0,
}  # fmt: skip
"""Columns of a table and their least widths; 0 for those that stand on the left."""


def run_tables(runs: Sequence[ReplayResult]) -> Iterator[Table]:
    """A table for each model, page size and pool, in the order of the runs: its policies, and what they could reach."""
    for (model, page_size, pool), group in groupby(runs, key=attrgetter("place")):
        same = list(group)
        share = pool / same[0].working_set_tokens if same[0].working_set_tokens else 0.0
        table = Table(
            title=f"{model}: pages of {page_size}, {pool:,} tokens, {share:.3g} of the working set{_refused(same[0])}",
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, 1, 0, 0),
        )
        for name, width in _COLUMNS.items():
            table.add_column(name, justify="right" if width else "left", no_wrap=True, min_width=width or 8)
        for run in same:
            table.add_row(*_row(run))
        table.add_row("optimum", f"{same[0].optimal_hit_rate:.2%}", style="dim")
        table.add_row("ideal", f"{same[0].ideal_hit_rate:.2%}", style="dim")
        yield table


def heading(trace: Trace, runs: Sequence[ReplayResult]) -> Text:
    """The trace, and what it would fill."""
    return Text(
        f"{trace.source}: {counted(len(trace), 'request')}, {trace.prompt_tokens:,} prompt and "
        f"{trace.output_tokens:,} output tokens; a working set of {runs[0].working_set_tokens:,}.\n"
    )


def remarks(runs: Sequence[ReplayResult]) -> Iterator[Text]:
    """What a table does not say: pools that are larger than was asked for; requests that were refused, which depends on
    the pool alone, and why the first of them was; and what was checked."""
    for note in dict.fromkeys(run.pool_note for run in runs if run.pool_note):
        yield Text(note, style="yellow")
    for (model, page_size, pool), group in groupby(runs, key=attrgetter("place")):
        result = next(group)
        refused = [record for record in result.records if record.refused]
        if refused:
            yield Text(
                f"{model}, pages of {page_size}, {pool:,} tokens: {len(refused):,} of {len(result.records):,} requests "
                f"were refused; their {result.refused_tokens:,} prompt tokens count as not hit. The first: "
                f"{refused[0].refused}",
                style="yellow",
            )
    yield from tier_remarks(runs)
    if runs and runs[0].checked != "off":
        yield Text("Every page that a step read held what it must.", style="green")


def _refused(run: ReplayResult) -> str:
    count = run.count("refused")
    return f"; {count:,} refused" if count else ""


def _row(result: ReplayResult) -> tuple[str, ...]:
    first, late = result.first_token_seconds((50, 99))
    return (
        result.policy if result.tiers is None else "  + tiers",
        f"{result.hit_rate:.2%}",
        "" if result.gap_closed is None else f"{result.gap_closed:.1%}",
        _short(result.evicted_tokens),
        f"{result.preemptions:,}",
        f"{first:.2f} s",
        f"{late:.2f} s",
        f"{result.output_rate:,.0f}",
        f"{result.manager_seconds:.2f} s",
        result.digest[:8],
    )


def _short(count: int) -> str:
    """A count in three or four digits."""
    for size, name in ((10**6, "M"), (10**3, "k")):
        if count >= 10 * size:
            return f"{count / size:,.1f}{name}"
    return f"{count:,}"


_PERCENTILES = (50, 95, 99)
_TIER_COLUMNS = ("policy", "device", "host", "storage", "declined", "saved", "loaded", "fetched")


def tier_tables(runs: Sequence[ReplayResult]) -> Iterator[Table]:
    """For each model, page size and pool that was replayed with tiers: where its tokens were hit, and what moved; then
    the times to the first token without tiers and with them."""
    for place in dict.fromkeys(run.place for run in runs):
        same = [run for run in runs if run.place == place]
        if not any(run.tiers for run in same):
            continue
        model, page_size, pool = place
        where = f"{model}: pages of {page_size}, {pool:,} tokens"
        table = _table(f"{where}: hits by tier, and GB moved", _TIER_COLUMNS)
        for run in same:
            if run.tiers is not None:
                table.add_row(*_uses(run))
        yield table
        names = [f"p{percentile}" for percentile in _PERCENTILES] + ["mean"]
        table = _table(f"{where}: seconds to the first token, with and without", ("policy", *names))
        for without, beside in zip(same[::2], same[1::2], strict=True):
            table.add_row(without.policy, *map(_change, _times(without), _times(beside)))
        yield table


def tier_remarks(runs: Sequence[ReplayResult]) -> Iterator[Text]:
    """How large and fast the tiers were, and which links turned themselves off, when and why."""
    for tiers in [run.tiers for run in runs if run.tiers is not None][:1]:
        storage = ""
        if tiers.storage_tokens:
            storage = f"; storage of {tiers.storage_tokens:,} at {tiers.storage_bandwidth / 1e9:.1f} GB/s"
        yield Text(f"A host of {tiers.host_tokens:,} tokens at {tiers.host_bandwidth / 1e9:.1f} GB/s{storage}.")
    for run in runs:
        for change in run.tiers.changes if run.tiers is not None else ():
            what = f"turned itself off: {change.why}" if change.why else "is on again"
            policy, pool = run.policy, f"{run.pool_tokens:,} tokens"
            yield Text(f"{policy}, {pool}, after {change.time:.1f} s: {change.link} {what}.", style="yellow")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    return table


def _uses(result: ReplayResult) -> tuple[str, ...]:
    tiers = result.tiers
    assert tiers is not None
    shares = (tiers.device_hit_tokens, tiers.host_hit_tokens, tiers.storage_hit_tokens, tiers.declined_tokens)
    moved = (tiers.saved_bytes, tiers.loaded_bytes, tiers.fetched_bytes)
    tokens = max(1, result.prompt_tokens)
    return (result.policy, *(f"{share / tokens:.2%}" for share in shares), *(f"{size / 1e9:.2f}" for size in moved))


def _times(result: ReplayResult) -> list[float]:
    return [*result.first_token_seconds(_PERCENTILES), result.mean_first_token_seconds]


def _change(without: float, beside: float) -> str:
    return f"{without:.3f} -> {beside:.3f}"


class _Rate(ProgressColumn):
    """Requests a second."""

    def render(self, task: Task) -> Text:
        """The rate of the run that goes on."""
        return Text(f"{task.speed:,.0f} requests/s" if task.speed else "", style="dim")


@contextmanager
def progress_bar(requests: int) -> Iterator[ReportProgress]:
    """A bar on the standard error stream, where that is a terminal, for runs of that many requests."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=requests)

        def show(what: ReplayResult | str, ended: int) -> None:
            if bar.disable:
                return
            if isinstance(what, ReplayResult):
                rate = f"{what.hit_rate:.2%} hit in {what.wall_seconds:.1f} s"
                bar.console.print(f"{what.model}, {what.policy}: {rate}", style="dim")
            elif not ended:
                bar.reset(task, description=what, total=requests)
            else:
                bar.update(task, completed=ended)

        yield show

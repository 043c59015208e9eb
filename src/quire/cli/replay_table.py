"""The runs of `quire replay` as tables, one for each model and pool, and their progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quire.cli.report import Terminal, drafts_remark, plain_table
from quire.plan.budget import counted, format_bytes
from quire.sim.comparison import ReportProgress
from quire.sim.replicas import ReplicasResult
from quire.sim.result import PERCENTILES, ReplayResult
from quire.sim.roles import RolesResult
from quire.sim.trace_request import Trace

_COLUMNS = {
    "policy": 8, "hit": 6, "of gap": 6, "evicted": 7, "preempts": 8, "TTFT": 7, "p99": 7, "out/s": 6, "manager": 7,
    "digest": 8,
}  # fmt: skip
"""Columns of a table and their least widths, so that tables of different pools look alike."""

_LEGEND = (
    "hit: share of the prompt tokens that were cached. optimum: the most that any policy could hit in this pool; "
    "ideal: in a pool that holds everything. of gap: the part of the way from lru to the optimum.\n"
    "evicted: tokens. preempts: preemptions. TTFT, p99: time to the first token, median and 99th percentile; "
    "out/s: output tokens a second; all three on the simulated device.\n"
    "manager: CPU time of scheduler and cache. digest: equal where all hits and evictions are."
)
_HOT_COLUMNS = ("policy", "pool, tokens", "at most", "mean", "hit", "optimum", "MB", "ms")
_HOT_LEGEND = (
    "+ hot: latents in host memory, in the same device bytes; ->: without and with. at most, mean: requests that run "
    "in a step. hit: share of the selected tokens that were in hot buffers; optimum: Belady's. MB, ms: swapped in by a "
    "step that decodes, on one rank, and its time with bookkeeping."
)
_TIER_COLUMNS = ("policy", "device", "host", "storage", "declined", "saved", "loaded", "fetched")


def shown_runs(trace: Trace, runs: Sequence[ReplayResult]) -> Iterator[RenderableType]:
    """The trace and what it would fill, a table for each model, page size and pool, and remarks."""
    yield Text(
        f"{trace.source}: {counted(len(trace), 'request')}, {trace.prompt_tokens:,} prompt and "
        f"{trace.output_tokens:,} output tokens; a working set of {runs[0].working_set_tokens:,}.\n"
    )
    pools = [list(group) for _, group in groupby(runs, key=attrgetter("place"))]
    for same in pools:
        yield _run_table(same)
        yield ""
    yield Text(f"{_LEGEND}\n", style="dim")
    for same in pools:
        if any(run.tiers for run in same):
            for table in _tier_tables(same):
                yield table
                yield ""
    for run in runs:
        if run.tenants is not None:
            yield _tenant_table(run)
            yield ""
    for same in pools:
        if hot := [run for run in same if run.hisparse]:
            yield plain_table(_HOT_COLUMNS, map(_hot_row, hot), title=f"{_pool_of(hot[0], ':')}: hot buffers")
            yield Text(f"\n{_HOT_LEGEND}\n", style="dim")
    yield from _remarks(pools)


def roles_table(trace: Trace, results: Sequence[RolesResult]) -> Iterator[RenderableType]:
    """Engines with roles beside as many without: times of the virtual clock, and what they did for each other."""
    yield Text(f"{trace.source}: {counted(len(trace), 'request')}, {trace.prompt_tokens:,} prompt tokens.\n")
    columns = ("", "TTFT, ms", "ITL, ms", "hit", "computed", "out/s", "digest")
    rows = []
    for each in results:
        first = " ".join(f"{1e3 * seconds:,.0f}" for seconds in each.ttft_s)
        between = " ".join(f"{1e3 * seconds:.1f}" for seconds in each.itl_s)
        shares = f"{each.hit_rate:.1%}", f"{each.computed_rate:.1%}"
        rows.append((each.name, first, between, *shares, f"{each.output_tokens_per_s:,.0f}", each.digest[:8]))
    yield plain_table(columns, rows)
    yield Text(
        "\nTTFT, ITL: time to the first token, and between two tokens of a request: median, 95th and 99th percentile. "
        "hit: share of the prompt tokens that were cached at the engine that answers; computed: by all engines, some "
        "twice. All on simulated devices; each engine has the same pool and host memory.",
        style="dim",
    )
    for each in results:
        if each.prefill:
            moved = f"{each.received_tokens:,} tokens, {each.received_bytes / 1e9:.2f} GB"
            yield f"{each.name}: {counted(each.asks, 'prompt')} asked for; {moved} came over the link."
            for cause, count in sorted(each.fallbacks.items()):
                yield Text(f"{each.name}: {counted(count, 'prompt')} computed after all: {cause}.", style="yellow")
        if each.speculation is not None:
            yield f"{each.name}: {drafts_remark(each.speculation)}; ITL is from step to step."


def replicas_table(trace: Trace, results: Sequence[ReplicasResult]) -> Iterator[RenderableType]:
    """A row for each router: what was hit and computed, and how long requests waited."""
    yield Text(f"{trace.source}: {counted(len(trace), 'request')}, {trace.prompt_tokens:,} prompt tokens.\n")
    columns = ("router", "hit", "computed", "TTFT", "p99", "queue", "busiest", "digest")
    rows = []
    for each in results:
        seconds = (f"{time:.2f} s" for time in (each.ttft_s[0], each.ttft_s[2], each.queue_s[2]))
        shares = f"{each.hit_rate:.2%}", _short(each.computed_tokens)
        rows.append((each.router, *shares, *seconds, f"{each.imbalance:.2f}", each.digest[:8]))
    yield plain_table(columns, rows, left=("router", "digest"))
    yield Text(
        "\nhit: share of the prompt tokens that were cached at the engine that answered; computed: the others. TTFT, "
        "p99: time to the first token, median and 99th percentile; queue: until a request began, 99th percentile. "
        "busiest: what the busiest engine computed, prompts and answers, divided by the mean. All on simulated "
        "devices; each engine has the same pool.",
        style="dim",
    )
    for each in results:
        if each.restarts:
            yield Text(f"{each.router}: {counted(each.restarts, 'cache')} lost by restarts and flushes.")
        if any(each.events.values()):
            lost, asked = each.events["lost"], each.events["asked"]
            yield Text(f"{each.router}: {counted(lost, 'message')} lost, {counted(asked, 'time')} asked again.")


def _run_table(same: Sequence[ReplayResult]) -> Table:
    """The policies in one pool, and what they could reach."""
    first = same[0]
    share = first.pool_tokens / first.working_set_tokens if first.working_set_tokens else 0.0
    refused = f"; {count:,} refused" if (count := first.count("refused")) else ""
    title = f"{_pool_of(first, ':')}, {share:.3g} of the working set{refused}"
    table = plain_table(tuple(_COLUMNS), map(_row, same), left=("policy", "digest"), title=title)
    for column, width in zip(table.columns, _COLUMNS.values(), strict=True):
        column.min_width = width
    for name, rate in (("optimum", first.optimal_hit_rate), ("ideal", first.ideal_hit_rate)):
        table.add_row(name, f"{rate:.2%}", style="dim")
    return table


def _pool_of(run: ReplayResult, after_model: str = ",") -> str:
    return f"{run.model}{after_model} pages of {run.page_size}, {run.pool_tokens:,} tokens{' in one arena' * run.arena}"


def _row(result: ReplayResult) -> tuple[str, ...]:
    first, late = result.first_token_seconds((50, 99))
    return (
        "  + tiers" if result.tiers else "  + hot" if result.hisparse else result.policy,
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


def _tier_tables(same: Sequence[ReplayResult]) -> Iterator[Table]:
    """Where the tokens of one pool were hit, and what moved; then times to the first token without tiers and with."""
    where = _pool_of(same[0], ":")
    uses = [_tier_use(run) for run in same if run.tiers is not None]
    yield plain_table(_TIER_COLUMNS, uses, title=f"{where}: hits by tier, and GB moved")
    names = ("policy", *(f"p{percentile}" for percentile in PERCENTILES), "mean")
    rows = []
    for without, beside in zip(same[::2], same[1::2], strict=True):
        pairs = zip(_first_token_times(without), _first_token_times(beside), strict=True)
        rows.append((without.policy, *(f"{before:.3f} -> {after:.3f}" for before, after in pairs)))
    yield plain_table(names, rows, title=f"{where}: seconds to the first token, with and without")


def _tier_use(result: ReplayResult) -> tuple[str, ...]:
    tiers = result.tiers
    assert tiers is not None
    shares = (tiers.device_hit_tokens, tiers.host_hit_tokens, tiers.storage_hit_tokens, tiers.declined_tokens)
    moved = (tiers.saved_bytes, tiers.loaded_bytes, tiers.fetched_bytes)
    tokens = max(1, result.prompt_tokens)
    return (result.policy, *(f"{share / tokens:.2%}" for share in shares), *(f"{size / 1e9:.2f}" for size in moved))


def _tenant_table(run: ReplayResult) -> Table:
    """What became of each tenant's prompts, and what it has at the end."""
    rows = []
    for name, use in (run.tenants or {}).items():
        if use["prompt_tokens"]:
            sizes = (format_bytes(use[f"{each}_bytes"]) for each in ("floor", "ceiling", "cached"))
            tokens, rate = use["prompt_tokens"], use["hit_tokens"] / use["prompt_tokens"]
            rows.append((name, *sizes, _short(tokens), f"{rate:.2%}", f"{use['lost_pages']:,}"))
    columns = ("tenant", "floor", "ceiling", "cached", "prompts", "hit", "lost to others, pages")
    return plain_table(columns, rows, title=f"{_pool_of(run, ':')}, {run.policy}: tenants")


def _hot_row(result: ReplayResult) -> tuple[str, ...]:
    use = result.hisparse
    assert use is not None
    return (
        result.policy,
        f"{_short(use.resident_tokens)} -> {_short(use.tokens)}",
        f"{use.resident_most_running:,} -> {result.most_running:,}",
        f"{use.resident_mean_running:,.1f} -> {result.mean_running:,.1f}",
        f"{use.hit_rate:.1%}",
        "" if use.optimal_hit_rate is None else f"{use.optimal_hit_rate:.1%}",
        f"{use.swapped_bytes_per_step / 1e6:,.1f}",
        f"{1e3 * use.swap_s_per_step:,.1f}",
    )


def _first_token_times(result: ReplayResult) -> list[float]:
    return [*result.first_token_seconds(), result.mean_first_token_seconds]


def _remarks(pools: Sequence[Sequence[ReplayResult]]) -> Iterator[Text]:
    """Larger pools than asked for; refused requests, which depend on the pool alone; tenants without requests; what
    tiers did; what was checked."""
    runs = [run for same in pools for run in same]
    for note in dict.fromkeys(run.pool_note for run in runs if run.pool_note):
        yield Text(note, style="yellow")
    for first, *_ in pools:
        refused = [record.refused for record in first.records if record.refused]
        if refused:
            yield Text(
                f"{_pool_of(first)}: {len(refused):,} of {len(first.records):,} requests were refused; their "
                f"{first.refused_tokens:,} prompt tokens count as not hit. The first: {refused[0]}",
                style="yellow",
            )
    for run in [run for run in runs if any(sample.size < 1 for sample in run.occupancy)]:
        least = min(sample.size for sample in run.occupancy)
        yield Text(f"{_pool_of(run)}, {run.policy}: the pool had {least:.0%} of its size at times.")
    silent = [name for name, use in (runs[0].tenants or {}).items() if not use["prompt_tokens"] and name != "default"]
    if silent:
        which = f"No request of the trace has a key of {' or '.join(map(repr, silent))}"
        yield Text(f"{which}: a key's name is what its salt has before the first /.", style="yellow")
    for tiers in [run.tiers for run in runs if run.tiers is not None][:1]:
        storage = ""
        if tiers.storage_tokens:
            storage = f"; storage of {tiers.storage_tokens:,} at {tiers.storage_bandwidth / 1e9:.1f} GB/s"
        yield Text(f"A host of {tiers.host_tokens:,} tokens at {tiers.host_bandwidth / 1e9:.1f} GB/s{storage}.")
    for run in runs:
        if (limited := run.chunk_budget) is not None and limited["steps"]:
            between = " / ".join(f"{1e3 * seconds:.1f}" for seconds in run.itl_s)
            yield Text(
                f"{_pool_of(run)}, {run.policy}: {between} ms between tokens (p50 / p95 / p99); "
                f"{limited['tokens']:,} prompt tokens in {counted(limited['steps'], 'step')} with decodes."
            )
        if (found := run.speculation) is not None:
            yield Text(f"{_pool_of(run)}, {run.policy}: {drafts_remark(found)}.")
    for run in runs:
        if (use := run.hisparse) is not None:
            yield Text(
                f"{_pool_of(run)}: buffers of {use.device_buffer_size:,} tokens, of which a step reads {use.top_k:,}; "
                f"latents take {format_bytes(use.host_bytes)} of host memory; selections: {use.source}."
            )
            if use.loses:
                yield Text(f"{_pool_of(run)}, {run.policy}: hisparse loses: {use.loses}.", style="yellow")
    for run in runs:
        for change in run.tiers.changes if run.tiers is not None else ():
            what = f"turned itself off: {change.why}" if change.why else "is on again"
            pool = f"{run.policy}, {run.pool_tokens:,} tokens"
            yield Text(f"{pool}, after {change.time:.1f} s: {change.link} {what}.", style="yellow")
    if runs[0].checked != "off":
        yield Text("Every page that a step read held what it must.", style="green")


class _Rate(ProgressColumn):
    """Requests a second."""

    def render(self, task: Task) -> Text:
        """The rate of the run that goes on."""
        return Text(f"{task.speed:,.0f} requests/s" if task.speed else "", style="dim")


@contextmanager
def progress_bar(requests: int) -> Iterator[ReportProgress]:
    """A bar on the standard error stream, where that is a terminal, for runs of that many requests."""
    console = Terminal(stderr=True)
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

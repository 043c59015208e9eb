"""What the tiers of `quire replay` did: where tokens were hit, what moved, what that was worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from quire.sim.result import ReplayResult

_PERCENTILES = (50, 95, 99)
_COLUMNS = ("policy", "device", "host", "storage", "declined", "saved", "loaded", "fetched")


def tier_tables(runs: Sequence[ReplayResult]) -> Iterator[Table]:
    """For each model, page size and pool that was replayed with tiers: where its tokens were hit, and what moved; then
    the times to the first token without tiers and with them."""
    for place in dict.fromkeys(run.place for run in runs):
        same = [run for run in runs if run.place == place]
        if not any(run.tiers for run in same):
            continue
        model, page_size, pool = place
        where = f"{model}: pages of {page_size}, {pool:,} tokens"
        table = _table(f"{where}: hits by tier, and GB moved", _COLUMNS)
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

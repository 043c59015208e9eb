"""`python -m tests.fuzz`: random operations on tiny caches, with all checks after each of them."""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress
from rich.text import Text

from quire.cli.report import EXIT_DEFECT, reported
from quire.errors import InvalidInput

if TYPE_CHECKING:
    from tests.fuzz.parallel import Task
    from tests.fuzz.run import Tally, Violation
    from tests.fuzz.tier_world import TierAsk

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
DebugOption = Annotated[bool, typer.Option("--debug", hidden=True, help="Show tracebacks.")]

_LEVELS = ("both", "cache", "scheduler", "tiers")
_TIERS = ("device", "host", "storage")
_SAME = {"swap-pages": "exchange-pages", "truncate-row": "truncate-record", "drop-component": "drop-field"}
"""Other names of faults, under which they are known elsewhere."""
_SECONDS = 10.0
_WORTH_TELLING = (
    "hit",
    "evicted",
    "duplicate",
    "split",
    "out of pages",
    "fault",
    "abort",
    "preemption",
    "drafted",
    "rejected",
)


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def fuzz(
    seconds: Annotated[
        float | None, typer.Option(help="How long. (default: 10, where --operations gives no limit)", min=0.1)
    ] = None,
    operations: Annotated[int | None, typer.Option(help="How many operations, about.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Of the first life. (default: another one each time)", min=0)] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes. (default: one for each core)", min=1)] = None,
    level: Annotated[
        str,
        typer.Option(help="What is driven: cache (its verbs), scheduler (requests), both in turn, or tiers (both)."),
    ] = "both",
    tiers: Annotated[
        str | None,
        typer.Option(help="With these tiers: device,host or device,host,storage. Implies --level tiers."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many lives, each of its own seed.", min=1)] = None,
    inject: Annotated[
        str | None,
        typer.Option(
            help="Break the code in this way, or records and stores in these, which must be noticed: see --list.",
            show_default=False,
        ),
    ] = None,
    list_mutants: Annotated[bool, typer.Option("--list", help="Name what can be injected.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Drive caches of a few pages at random, and check every law and all contents after each operation.

    Every kind of group and mix of them, allocations that fail, steps that settle late and out of order, aborts at any
    moment. Exits with 1 where something is found, and says how to see it again; with --inject, where nothing is.

    [dim]Example:[/dim] python -m tests.fuzz --seconds 60

    [dim]Example:[/dim] python -m tests.fuzz --inject free-before-fence

    [dim]Example:[/dim] python -m tests.fuzz --tiers device,host,storage --inject bit-flip,torn-write --seeds 2000
    """
    with reported(as_json=as_json, debug=debug):
        if list_mutants:
            _list(as_json=as_json)
            return
        if level not in _LEVELS:
            raise InvalidInput(f"there is no level '{level}'.", fix=f"use one of {', '.join(_LEVELS)}.")
        from tests.fuzz.parallel import Task

        if seconds is None and operations is None and seeds is None:
            seconds = _SECONDS
        first = secrets.randbelow(10**9) if seed is None else seed
        mutant, ask = _asked(tiers, inject)
        level = "tiers" if tiers is not None or ask.faults else level
        task = Task(level, first, jobs or os.cpu_count() or 1, operations, seconds, mutant, seeds, ask)
        tally = _run(task, as_json=as_json)
        short = _shortened(tally.violation, as_json=as_json) if tally.violation is not None and mutant is None else ()
        data = _as_dict(task, tally, short)
        if as_json:
            print(json.dumps(data))
        else:
            _print(task, tally, data)
        if not data["passed"]:
            raise typer.Exit(EXIT_DEFECT)


def _asked(tiers: str | None, inject: str | None) -> tuple[str | None, TierAsk]:
    """The mutant that `inject` names, if it names one, and what there is below the device."""
    from tests.fuzz.tier_faults import FAULTS
    from tests.fuzz.tier_world import TierAsk

    named = tuple(tiers.split(",")) if tiers is not None else ()
    if named not in ((), _TIERS, _TIERS[:2]):
        raise InvalidInput(f"there are no tiers '{tiers}'.", fix="use device,host or device,host,storage.")
    storage = None if not named else named == _TIERS
    names = [_SAME.get(name, name) for name in inject.split(",")] if inject is not None else []
    if not names or (len(names) == 1 and names[0] not in FAULTS):
        return inject, TierAsk(storage)
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise InvalidInput(f"there is no fault '{unknown[0]}'.", fix=f"use one or some of {', '.join(FAULTS)}.")
    return None, TierAsk(storage, tuple(names))


def _run(task: Task, *, as_json: bool) -> Tally:
    from tests.fuzz.parallel import fuzz as run

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=as_json) as bar:
        text = f"Fuzzing from seed {task.seed}"
        shown = bar.add_task(text, total=task.operations or task.lives or task.seconds)
        started = time.monotonic()

        def progress(tally: Tally) -> None:
            done = tally.operations.total()
            passed = time.monotonic() - started
            bar.update(
                shown,
                description=f"{text}: {done:,} operations, {done / passed:,.0f}/s",
                completed=done if task.operations else tally.lives if task.lives else passed,
            )

        return run(task, progress)


def _shortened(violation: Violation, *, as_json: bool) -> tuple[str, ...]:
    from tests.fuzz.shorten import shorten

    with Console(stderr=True, quiet=as_json).status("Looking for a shorter sequence ..."):
        return shorten(violation)


def _as_dict(task: Task, tally: Tally, short: tuple[str, ...]) -> dict[str, Any]:
    found, done = tally.violation, tally.operations.total()
    seconds = sum(tally.seconds.values())
    caught = found is not None and found.by_check
    return {
        "seed": task.seed,
        "jobs": task.jobs,
        "level": task.level,
        "operations": done,
        "operations_per_second": round(done / tally.wall),
        "operations_per_cpu_second": round(done / seconds) if seconds else 0,
        "seconds": round(tally.wall, 3),
        "cpu_seconds": round(seconds, 3),
        "levels": {
            name: {"operations": count, "cpu_seconds": round(tally.seconds[name], 3)}
            for name, count in sorted(tally.operations.items())
        },
        "lives": tally.lives,
        "happened": {name: int(count) for name, count in sorted(tally.happened.items())},
        "digest": f"{tally.digest:016x}",
        "faults": list(task.ask.faults),
        "met": _met(tally),
        "inject": task.inject,
        "passed": caught if task.inject is not None else found is None,
        "violation": None
        if found is None
        else {
            "level": found.level,
            "seed": found.seed,
            "operation": found.operation,
            "message": found.message,
            "command": found.command + (f" --inject {task.inject}" if task.inject is not None else ""),
            "last_steps": list(found.trail),
            "short_sequence": list(short),
        },
    }


def _met(tally: Tally) -> dict[str, dict[str, int]]:
    """By fault, under which name a check has found it, and how often."""
    found: dict[str, dict[str, int]] = {}
    for (fault, name), count in sorted(tally.met.items()):
        found.setdefault(fault, {})[name] = count
    return found


def _list(*, as_json: bool) -> None:
    from tests.fuzz.tier_faults import FAULTS
    from tests.mutants import MUTANTS

    if as_json:
        mutants = [{"name": m.name, "level": m.level, "wrong": m.wrong, "field": m.field} for m in MUTANTS.values()]
        print(json.dumps({"mutants": mutants, "faults": list(FAULTS)}))
        return
    console = Console(highlight=False)
    for made in MUTANTS.values():
        line = Text(f"{made.name}: ", style="bold")
        line.append(made.wrong, style="not bold").append(f" ({made.field})", style="not bold dim")
        console.print(line, soft_wrap=True)
    console.print(f"Faults of records and stores, some at once: {', '.join(FAULTS)}", soft_wrap=True)


def _print(task: Task, tally: Tally, data: dict[str, Any]) -> None:
    console = Console(highlight=False)
    processes = f"{task.jobs} process{'es' if task.jobs > 1 else ''}"
    console.print(
        f"{data['operations']:,} operations in {data['seconds']:.1f} s on {processes}: "
        f"[bold]{data['operations_per_second']:,} operations/s[/bold] ({data['operations_per_cpu_second']:,} for each "
        "second of CPU), each with the audit and the content oracle."
    )
    levels = [f"{found['operations']:,} on the {name}" for name, found in data["levels"].items()]
    happened = [f"{name} {tally.happened[name]:,}" for name in _WORTH_TELLING if tally.happened[name]]
    told = f"{tally.lives:,} {'life' if tally.lives == 1 else 'lives'}" + (
        f", {' and '.join(levels)}" if levels else ""
    )
    console.print(f"{told}; {', '.join(happened) or 'nothing happened yet'}.", style="dim")
    for fault in task.ask.faults:
        names = ", ".join(f"{name} {count:,}" for name, count in data["met"].get(fault, {}).items())
        met = f"met {tally.happened[fault]:,} times" if tally.happened[fault] else "not met"
        console.print(f"{fault}: {'found as ' + names if names else met}.")
    violation = data["violation"]
    if violation is None:
        if task.inject is None:
            console.print(f"[green]Nothing found.[/green] Seed {task.seed}, digest {data['digest']}.")
        else:
            console.print(f"[bold red]Not caught:[/bold red] {task.inject}. Seed {task.seed}.")
        return
    if task.inject is not None and data["passed"]:
        console.print(
            f"[green]Caught[/green] {task.inject} after {data['operations']:,} operations (operation "
            f"{violation['operation']} of seed {violation['seed']}):"
        )
        console.print(Text(violation["message"], style="dim"))
        return
    _print_violation(console, violation)


def _print_violation(console: Console, violation: dict[str, Any]) -> None:
    steps = violation["short_sequence"] or violation["last_steps"]
    title = "A short sequence" if violation["short_sequence"] else "The last steps"
    body = Text(violation["message"], style="bold")
    body.append(f"\n\n{title}:\n", style="not bold")
    body.append("".join(f"  {number}. {step}\n" for number, step in enumerate(steps, 1)), style="not bold dim")
    body.append(f"\nAgain: {violation['command']}", style="not bold")
    where = f"[bold]Operation {violation['operation']} of seed {violation['seed']}[/bold]"
    console.print(Panel(body, title=where, title_align="left", border_style="red"))


if __name__ == "__main__":
    app(prog_name="python -m tests.fuzz")

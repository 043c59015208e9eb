"""What bookkeeping costs in CPU time: Quire's cache and its peers', the same work on the same tokens, in one run.

    python -m bench.bookkeeping.metadata --install-peers everything; the flag installs the peers, needed once
    python -m bench.bookkeeping.metadata --only match,decode   rows whose names contain one of these
    python -m bench.bookkeeping.metadata --beside ../old --peers none    Quire of another checkout as a peer in all rows
    python -m bench.bookkeeping.metadata --toy  Quire alone at small sizes, in seconds; fails if a result is wrong
    python -m bench.bookkeeping.metadata --read FILE --plot bars.svg      a result that was written before

Each system is a process of its own. A row is prepared in all of them, then samples are taken in shuffled order, so that
what else the machine does falls on all alike. See bench/README.md for what each system does in each row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.bookkeeping.cases import FAMILIES, Case, cases
from bench.bookkeeping.documents import write_tables
from bench.bookkeeping.report import console, plot, print_table
from bench.bookkeeping.workloads import TOY, Arrival, Sizes, ideal_hits, made_up_trace, read_trace, save_trace
from bench.harness import ALLOCATOR, ROOT, SEED, SHARED, Worker, machine, new_parser, save

from quire.sim.trace import open_trace

ENVIRONMENTS = {
    "sglang": "sglang-cache",
    "cpp": "cpp-cache",
    "vllm": "vllm-cache",
    "nano": "nano-cache",
    "vllmcpu": "vllm-cpu",
}
_TIMES = ("cpu", "wall", "least", "most", "parts")
BESIDE = "beside"
MOONCAKE = SHARED / "data" / "traces" / "mooncake" / "conversation_trace.jsonl"


class Process(Worker):
    """A worker process; see peers/metadata_worker.py for what it answers."""

    def __init__(self, system: str, python: str, log: Path, *, own_malloc: bool, checkout: Path = ROOT) -> None:
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
        }
        name = "quire" if system == BESIDE else system
        super().__init__(python, "metadata_worker.py", name, log, env | ({} if own_malloc else ALLOCATOR), checkout)
        self.system = system


def start(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Process], dict[str, Any], dict[str, str]]:
    """A process for each system, what it says of itself, and why others are absent."""
    found: dict[str, Process] = {}
    about: dict[str, Any] = {}
    absent: dict[str, str] = {}
    beside = (BESIDE,) if options.beside else ()
    for system in ("quire", *beside, *(name for family in options.peers for name in FAMILIES[family])):
        python = Path(sys.executable)
        if system not in ("quire", BESIDE):
            python = options.folder / ENVIRONMENTS[system.partition("-")[0]] / "bin" / "python"
        if not python.exists():
            absent[system] = "not installed; --install-peers installs it"
            continue
        checkout = options.beside.resolve() if system == BESIDE else ROOT
        log = folder / f"{system}.log"
        process = Process(system, str(python), log, own_malloc=options.default_malloc, checkout=checkout)
        try:
            about[system] = process.ask("about")
            found[system] = process
        except RuntimeError as error:
            absent[system] = str(error)
    return found, about, absent


def measure(
    case: Case, workers: dict[str, Process], about: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Samples of one row: `{"samples": {system: [...]}, "failed": {system: why}}`."""
    families = ("quire", BESIDE, *case.peers)
    chosen = [s for s in workers if s.partition("-")[0] in families and case.operation in about[s]["operations"]]
    failed: dict[str, str] = {}
    for system in list(chosen):
        try:
            workers[system].ask(
                "prepare",
                operation=case.operation,
                sizes=asdict(options.sizes),
                collect=not options.toy,
                **case.arguments,
            )
        except RuntimeError as error:
            failed[system] = str(error)
            chosen.remove(system)
    samples: dict[str, list[dict[str, Any]]] = {system: [] for system in chosen}
    spent = dict.fromkeys(chosen, 0.0)
    for repeat in range(options.repeats):
        order = [system for system in chosen if repeat < 2 or spent[system] < options.patience]
        random.Random(f"{SEED} {case.name} {repeat}").shuffle(order)
        for system in order:
            began = time.perf_counter()
            try:
                samples[system].append(workers[system].ask("sample"))
            except RuntimeError as error:
                failed[system] = str(error)
                chosen.remove(system)
            spent[system] += time.perf_counter() - began
    for system in failed:
        if not workers[system].alive:
            del workers[system]
    return {"samples": {system: taken for system, taken in samples.items() if taken}, "failed": failed}


def summarise(case: Case, measured: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A row of the result: medians, ratios to Quire as medians over pairs of the same repeat, and goals."""
    samples = measured["samples"]
    row: dict[str, Any] = {
        "name": case.name,
        "label": case.label,
        "page": case.page,
        "unit": case.unit,
        "failed": measured["failed"],
        "systems": {},
        "goals": [],
    }
    for system, taken in samples.items():
        found = {name: value for name, value in taken[-1].items() if name not in _TIMES}
        row["systems"][system] = {
            "cpu_us": statistics.median(sample["cpu"] for sample in taken),
            "cpu_us_min": min(sample.get("least", sample["cpu"]) for sample in taken),
            "cpu_us_max": max(sample.get("most", sample["cpu"]) for sample in taken),
            "wall_us": statistics.median(sample["wall"] for sample in taken),
            "samples": [round(sample["cpu"], 6) for sample in taken],
            "parts": _parts(taken),
            "found": found,
            "ratio": statistics.median(
                sample["cpu"] / quire["cpu"] for sample, quire in zip(taken, samples.get("quire", taken), strict=False)
            ),
        }
    if "quire" not in samples:
        return row
    for family, factor in case.goals.items():
        others = [s for s in samples if s not in ("quire", BESIDE)]
        names = [s for s in others if family == "best" or s.partition("-")[0] == family]
        if names:
            peer = min(names, key=lambda name: row["systems"][name]["cpu_us"])
            ratio = row["systems"][peer]["ratio"]
            fastest = _fastest(row, peer) / _fastest(row)
            row["goals"].append(
                {"peer": peer, "factor": factor, "ratio": ratio, "fastest": fastest, "met": ratio >= factor}
            )
    if case.relative and case.relative[0] in rows:
        other, most = case.relative
        times = row["systems"]["quire"]["cpu_us"] / rows[other]["systems"]["quire"]["cpu_us"]
        fastest = _fastest(row) / _fastest(rows[other])
        row["goals"].append({"row": other, "most": most, "times": times, "fastest": fastest, "met": times <= most})
    if case.at_most is not None:
        figure = row["systems"]["quire"]["cpu_us"]
        goal = {"at_most": case.at_most, "figure": figure, "fastest": _fastest(row), "met": figure <= case.at_most}
        row["goals"].append(goal)
    return row


def _fastest(row: dict[str, Any], system: str = "quire") -> float:
    """The lowest sample: what is left where nothing else was busy."""
    samples: list[float] = row["systems"][system]["samples"]
    return min(samples)


def _parts(taken: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each part of an operation, where samples tell of any: the median over samples, and the extremes."""
    found = {}
    for name in taken[0].get("parts", ()):
        middles, least, most = zip(*(sample["parts"][name] for sample in taken), strict=True)
        found[name] = {"median": statistics.median(middles), "min": min(least), "max": max(most)}
    return found


def wrong(case: Case, measured: dict[str, Any], ideals: dict[str, float]) -> list[str]:
    """What a run must not show: another result of Quire's than the work has, or a lower hit rate than a peer's."""
    found = []
    if "quire" in measured["failed"] or "quire" not in measured["samples"]:
        return [f"{case.name}: Quire failed: {measured['failed'].get('quire', 'no sample')}"]
    for sample in measured["samples"]["quire"]:
        for name, value in case.expect.items():
            if sample[name] != value:
                found.append(f"{case.name}: {name} is {sample[name]}, not {value}")
    if case.operation == "replay":
        rates = {system: taken[0]["hit_rate"] for system, taken in measured["samples"].items()}
        if len({sample["hit_rate"] for sample in measured["samples"]["quire"]}) > 1:
            found.append(f"{case.name}: the hit rate differs from run to run")
        if rates["quire"] > ideals[case.name] + 1e-9:
            found.append(f"{case.name}: hit rate {rates['quire']:.4f} is above the ideal {ideals[case.name]:.4f}")
        for system, rate in rates.items():
            if rates["quire"] < rate - 5e-4:
                found.append(f"{case.name}: hit rate {rates['quire']:.4f}, {system} has {rate:.4f}")
    return found


def traces_of(options: argparse.Namespace) -> dict[str, list[Arrival]]:
    """The traces to replay, by name."""
    if options.toy:
        return {"small": made_up_trace(options.sizes.replay_requests)}
    if options.trace:
        return {Path(name).stem: read_trace(Path(name), options.sizes.replay_requests) for name in options.trace}
    return {name: workload_trace(name, options.sizes.replay_requests) for name in ("chat", "sessions")}


def workload_trace(name: str, count: int) -> list[Arrival]:
    """A workload of `quire.sim`, one request every four steps unless its turn before has not ended."""
    place: dict[str, int] = {}
    found = []
    for index, request in enumerate(open_trace(f"{name}:requests={count}")):
        place[request.request_id] = index
        found.append(Arrival(request.prompt, request.output, place.get(request.after, -1), 4 * index, 0))
    return found


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows that were asked for."""
    traces = traces_of(options)
    paths = {name: folder / f"{name}.npz" for name in traces}
    for name, path in paths.items():
        save_trace(path, traces[name])
    workers, about, absent = start(options, folder)
    others = {"model": folder / "model"} | ({"mooncake": options.mooncake} if options.mooncake.exists() else {})
    every = [case for case in cases(options.sizes, paths, others) if any(part in case.name for part in options.only)]
    rows: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    ideals: dict[str, float] = {}
    began = time.perf_counter()
    try:
        for number, case in enumerate(every, 1):
            console(options).print(
                f"[dim]{time.perf_counter() - began:5.0f} s  {number} of {len(every)}: {case.name}[/]"
            )
            if case.operation == "replay":
                trace = traces[Path(case.arguments["trace"]).stem]
                ideals[case.name] = ideal_hits(trace, case.page) / sum(len(request.prompt) for request in trace)
            limited = argparse.Namespace(**vars(options))
            limited.repeats = min(options.repeats, case.repeats)
            measured = measure(case, workers, about, limited)
            rows[case.name] = summarise(case, measured, rows)
            if options.toy:
                rows[case.name]["goals"] = []  # at this size they mean nothing
            if case.name in ideals:
                rows[case.name]["ideal_hit_rate"] = ideals[case.name]
            problems += wrong(case, measured, ideals)
            absent |= measured["failed"]
    finally:
        for worker in workers.values():
            worker.close()
    return {
        **machine(),
        "versions": {system: said["versions"] for system, said in about.items()},
        "absent": absent,
        "allocator": {} if options.default_malloc else ALLOCATOR,
        "repeats": options.repeats,
        "sizes": asdict(options.sizes),
        "traces": {
            name: {
                "requests": len(trace),
                "prompt_tokens": sum(len(request.prompt) for request in trace),
                "output_tokens": sum(len(request.output) for request in trace),
            }
            for name, trace in traces.items()
        },
        "rows": list(rows.values()),
        "problems": problems,
    }


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of several runs as those of one, that of the last run where several have it; the rest is the first's."""
    found = results[0] | {"load": max(result["load"] for result in results)}
    for name in ("versions", "traces"):
        found[name] = {key: value for result in results for key, value in result[name].items()}
    found["rows"] = list({row["name"]: row for result in results for row in result["rows"]}.values())
    found["problems"] = [problem for result in results for problem in result["problems"]]
    measured = {system for row in found["rows"] for system in row["systems"]}
    found["absent"] = {
        system: why for result in results for system, why in result["absent"].items() if system not in measured
    }
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options, with `sizes` put together from them."""
    parser = new_parser("Compare what bookkeeping costs.", toy="small sizes, no peers; exits 1 if a result is wrong")
    parser.add_argument(
        "--peers", help=f"comma-separated, of {','.join(FAMILIES)}, or none; default all, none with --toy"
    )
    parser.add_argument("--beside", type=Path, help="another checkout of Quire")
    parser.add_argument("--install-peers", action="store_true", help="install them into --folder first")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "quire-bench", help="%(default)s")
    parser.add_argument("--only", default="", help="comma-separated parts of names of rows")
    parser.add_argument("--trace", action="append", metavar="FILE.py", help="a generator to replay; may be repeated")
    parser.add_argument(
        "--mooncake", type=Path, default=MOONCAKE, help="the conversation trace of Mooncake; default %(default)s"
    )
    parser.add_argument("--repeats", type=int, help="samples of each row; default 11, with --toy 2; replays at most 3")
    parser.add_argument(
        "--patience", type=float, default=20, help="seconds for samples of one row and system (%(default)s)"
    )
    parser.add_argument("--running", type=int, help="requests that a replay runs at once; default 32")
    parser.add_argument("--pool", type=int, help="tokens of the pool of a replay; default 262,144")
    parser.add_argument("--default-malloc", action="store_true", help="leave the allocator as it is, for all systems")
    parser.add_argument("--text", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a chart of the ratios here")
    parser.add_argument(
        "--readme", type=Path, metavar="FILE.md", action="append", default=[], help="write tables there"
    )
    parser.add_argument(
        "--read",
        type=Path,
        action="append",
        metavar="FILE",
        help="measure nothing; show what --json wrote, several runs as one if repeated",
    )
    options = parser.parse_args(arguments)
    names = "" if options.toy else ",".join(FAMILIES)
    options.peers = [name for name in (names if options.peers is None else options.peers).split(",") if name]
    options.peers = [] if options.peers == ["none"] else options.peers
    unknown = set(options.peers) - set(FAMILIES)
    if unknown:
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    options.only = options.only.split(",")
    if options.toy:
        options.mooncake = Path(os.devnull, "none")
    options.repeats = options.repeats or (2 if options.toy else 11)
    options.sizes = TOY if options.toy else Sizes()
    given = {"replay_running": options.running, "replay_pool": options.pool}
    options.sizes = replace(options.sizes, **{name: value for name, value in given.items() if value})
    return options


def main() -> int:
    """Measure, print, write."""
    options = parse()
    if options.read:
        result = together([json.loads(file.read_text()) for file in options.read])
    else:
        if options.install_peers:
            from bench.peers.install import install

            for family in options.peers:
                install(ENVIRONMENTS[family], options.folder)
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as temporary:
            result = run(options, Path(temporary))
    print_table(result, console(options))
    if options.text:
        with options.text.open("w") as file:
            print_table(result, console(options, file))
    save(options.json, result)
    if options.plot:
        plot(result, options.plot)
    for document in options.readme:
        write_tables(result, document)
    for problem in result["problems"]:
        console(options).print(f"[red]wrong:[/] {problem}", highlight=False)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

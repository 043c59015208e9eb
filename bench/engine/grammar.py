"""What grammars cost: output tokens per second with a JSON schema and without, 16 requests at once; and forced tokens.

    python -m bench.engine.grammar                       the bundled model, product defaults
    python -m bench.engine.grammar --larger              a model of 55 million parameters, whose weights are random
    python -m bench.engine.grammar --beside ../old       and another checkout of Quire without grammars
    python -m bench.engine.grammar --toy                 small sizes, in seconds

Rows run in turns, in another order each time; a ratio is the median over turns. Prompts are cached, so what is timed is
decoding. The schema of the first comparison has no end within the limit, so that all rows draw as many tokens. The
second one has long names, which its grammar forces: with n-gram drafts they are drafted, however few n-grams there are.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.engine.compare import Shape, save_model
from bench.harness import ROOT, SEED, Worker, machine, new_parser, save, shuffled

ENDLESS = {"type": "array", "items": {"type": "string", "minLength": 8, "maxLength": 40}, "minItems": 1000}
_NAMES = ("customer_identification_number", "shipping_address_is_confirmed", "number_of_ordered_articles")
RECORD = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in zip(_NAMES, ("integer", "boolean", "integer"), strict=True)},
    "required": list(_NAMES),
    "additionalProperties": False,
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 2, "prompt_lookup_max": 5}

Found = dict[str, list[dict[str, Any]]]


@contextmanager
def workers(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, tuple[Worker, str]]]:
    """Engines by name, each with its process."""
    made: list[Worker] = []
    model = "quire-bundled"
    if options.larger:
        model = str(folder / "larger")
        save_model(Shape(), Path(model))

    def start(checkout: Path, name: str, drafts: dict[str, Any] | None) -> tuple[Worker, str]:
        made.append(Worker(sys.executable, "grammar_worker.py", name, folder / name, os.environ, checkout))
        made[-1].ask("start", name=name, folder=model, speculative=drafts)
        return made[-1], name

    try:
        found = {"here": start(ROOT, "here", None), "drafts": start(ROOT, "drafts", DRAFTS)}
        if options.beside is not None:
            found["beside"] = start(options.beside.resolve(), "beside", None)
        yield found
    finally:
        for worker in made:
            worker.close()


def measure(options: argparse.Namespace) -> Found:
    """What each row found, in each turn."""
    rows = {
        "without": ("here", None),
        "schema": ("here", ENDLESS),
        "record": ("here", RECORD),
        "record, drafts": ("drafts", RECORD),
        "without, drafts": ("drafts", None),
    }
    if options.beside is not None:
        rows["without, beside"] = ("beside", None)
    prompts = [f"Chapter {at}. It was a fine morning in the town of Bath, and" for at in range(options.requests)]
    found: Found = {name: [] for name in rows}
    with tempfile.TemporaryDirectory() as folder, workers(options, Path(folder)) as engines:
        for turn in range(options.rounds + 1):
            for name in shuffled(rows, SEED, turn):
                (worker, engine), schema = engines[rows[name][0]], rows[name][1]
                answer = worker.ask("run", name=engine, prompts=prompts, new=options.new, schema=schema)
                if turn:  # in the first one, prompts and grammars are cached
                    found[name].append(answer)
                    print(
                        f"round {turn}: {name}, {answer['tokens'] / answer['seconds']:,.0f} tokens/s", file=sys.stderr
                    )
    return found


def main() -> None:
    """Measure, show and write."""
    parser = new_parser("Measure what grammars cost.")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--larger", action="store_true", help="a model of 55 million parameters")
    parser.add_argument("--beside", type=Path, help="another checkout of Quire")
    options = parser.parse_args()
    if options.toy:
        options.requests, options.new, options.rounds = 4, 32, 1
    found = measure(options)
    rates = {name: [each["tokens"] / each["seconds"] for each in rows] for name, rows in found.items()}
    ratios = {
        f"{name} to {to}": round(
            statistics.median(one / two for one, two in zip(rates[name], rates[to], strict=True)), 3
        )
        for name, to in (("schema", "without"), ("record, drafts", "record"), ("without", "without, beside"))
        if to in rates
    }
    per_step = {
        name: statistics.median(each["tokens"] / each["steps"] for each in rows) for name, rows in found.items()
    }
    drafted = found["record, drafts"]
    accepted = sum(each["accepted"] for each in drafted) / max(1, sum(each["drafts"] for each in drafted))
    for name, values in rates.items():
        print(f"{name:24} {statistics.median(values):10,.0f} tokens/s {per_step[name]:8.2f} tokens a step")
    for name, value in ratios.items():
        print(f"{name:40} {value:6.3f}")
    print(f"{'drafts of records that were accepted':40} {accepted:6.1%}")
    save(
        options.json,
        {**machine(larger=options.larger), "ratios": ratios, "accepted": round(accepted, 3), "rows": found},
    )


if __name__ == "__main__":
    main()

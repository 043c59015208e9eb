"""`python -m tests.faults`: processes of servers are killed, stopped and ended; a report of what did not hold."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.faults.run import Matrix


def main() -> int:
    """Run; 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--only", type=int, help="this run alone")
    parser.add_argument("--cluster-every", type=int, default=25, help="the last of so many is of a cluster; 0: none")
    parser.add_argument("--stop-at", type=int, default=5, help="faults, after which the rest is left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.runs) if options.only is None else [options.only]
    until = time.monotonic() + options.seconds
    with Matrix(options.seed, cluster_every=options.cluster_every) as matrix:
        for number in numbers:
            if time.monotonic() > until or len(matrix.faults) >= options.stop_at:
                break
            before = len(matrix.faults)
            matrix.run(number)
            for fault in matrix.faults[before:]:
                print(fault, file=sys.stderr, flush=True)
            print(f"{matrix.num_runs} runs, {len(matrix.faults)} faults", end="\r", file=sys.stderr, flush=True)
    report = matrix.report()
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(matrix.faults))


if __name__ == "__main__":
    raise SystemExit(main())

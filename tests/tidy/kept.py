"""Figures of the source that were decided, in kept.json: lines by package, and faults whose number may only fall.

python -m tests.tidy.kept             figures of today beside those that were kept
python -m tests.tidy.kept --write     keep those of today: growth of lines is a decision, and faults may not grow
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.tidy.features import LOOPS, SOURCE, every_place
from tests.tidy.words import repeated_names, without_noun

KEPT = Path(__file__).with_suffix(".json")
GROWTH = 1.02
SMALL = 25
"""Lines that a package may grow by in any case, where 2 % are less."""

TOTAL = "total"


def lines() -> dict[str, int]:
    """Lines of each package, of the modules beside them as "quire", and of all."""
    found: dict[str, int] = {}
    for path in (*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi")):
        first, *rest = path.relative_to(SOURCE).parts
        package = first if rest else "quire"
        found[package] = found.get(package, 0) + path.read_text().count("\n")
    return {**dict(sorted(found.items())), TOTAL: sum(found.values())}


def faults() -> dict[str, int]:
    """Numbers that may only fall."""
    places = every_place()
    repeated = {f"modules with a class {name}": len(modules) for name, modules in repeated_names().items()}
    return {
        "conditions that ask for a feature outside of it": len(places),
        "files with such conditions": len({place.file for place in places}),
        "such conditions in loops": sum(place.file.startswith(LOOPS) for place in places),
        "remarks that begin without their noun": len(without_noun()),
        **repeated,
    }


def kept() -> dict[str, Any]:
    """What was written down."""
    found: dict[str, Any] = json.loads(KEPT.read_text())
    return found


def limit_of(name: str, count: int) -> int:
    """The most lines of a package that had `count`."""
    return int(count * GROWTH) if name == TOTAL else max(int(count * GROWTH), count + SMALL)


def too_long(today: dict[str, int]) -> dict[str, tuple[int, int]]:
    """By package, its lines and its limit; a package that was not kept may have none."""
    limits = {name: limit_of(name, count) for name, count in kept()["lines"].items()}
    return {name: (count, limits.get(name, 0)) for name, count in today.items() if count > limits.get(name, 0)}


def grown(today: dict[str, int]) -> dict[str, tuple[int, int]]:
    """By fault, its number and the one that was kept."""
    before = kept()["faults"]
    return {name: (count, before.get(name, 0)) for name, count in today.items() if count > before.get(name, 0)}


def main() -> None:
    """Show the figures, or keep them."""
    found = {"lines": lines(), "faults": faults()}
    if "--write" in sys.argv:
        if KEPT.exists() and grown(found["faults"]):
            raise SystemExit(f"these have grown, and may only fall (now, kept): {grown(found['faults'])}")
        KEPT.write_text(json.dumps(found, indent=2) + "\n")
    before = kept()
    for what, figures in found.items():
        for name in figures.keys() | before[what].keys():
            print(f"{figures.get(name, 0):7,} now, {before[what].get(name, 0):7,} kept: {name}")


if __name__ == "__main__":
    main()

"""Counts conditions that ask for a feature outside of it: `python -m tests.tidy.features [FEATURE]` lists them.

A condition is what an `if`, a `while`, an `assert`, a conditional expression or a filter of a comprehension tests, an
operand of `and` and `or`, a comparison with `is`, and a call of `isinstance`. It asks for a feature if an identifier in
it names the feature, and counts once for each line with such an identifier. A feature may ask for itself in its own
packages and modules. The command line and modules of settings may too: there a user switches features.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "quire"
SETTINGS = ("config.py", "setting.py")
LOOPS = ("loop/", "engine/core.py", "sim/replay.py")
"""Where steps are run: features are parts of these loops, which name none of them."""


@dataclass(frozen=True)
class Feature:
    """Identifiers of a feature match `names`. Its own are `packages`, and modules with `word` in their name."""

    word: str
    names: re.Pattern[str]
    packages: tuple[str, ...]

    def owns(self, path: Path) -> bool:
        """Whether a module may ask for it."""
        part = path.relative_to(SOURCE).parts[0]
        return part in (*self.packages, "cli") or path.name in SETTINGS or self.word in path.stem


def _feature(word: str, names: str, *packages: str) -> Feature:
    return Feature(word, re.compile(names, re.IGNORECASE), packages)


FEATURES = {
    "hisparse": _feature("hisparse", r"hisparse|hosted|latent_host|hot(_|$)|^hot|hot_|latents$", "sparse"),
    "speculation": _feature("speculation", r"speculat|draft|verified|proposal", "speculative"),
    "tiers": _feature("tier", r"(^|_)tiers?$|offload|below$|host_pool|has_tiers|^storage", "tiers", "offload"),
    "transfer": _feature(
        "transfer", r"^_?transfer$|peers?$|(^|_)role$|for_peer", "transfer", "tiers", "cluster", "routing", "fleet"
    ),
    "sessions": _feature("session", r"session", "sessions"),
    "tenants": _feature("tenant", r"tenant", "tenants"),
    "canary": _feature("canary", r"canary|proof|self_check", "canary"),
}


@dataclass(frozen=True, order=True)
class Place:
    """A line with a condition that asks for a feature."""

    feature: str
    file: str
    line: int


def places(path: Path, text: str) -> set[Place]:
    """Where one module asks for features that are not its own."""
    found = set()
    asking = [(name, feature) for name, feature in FEATURES.items() if not feature.owns(path)]
    for condition in _conditions(ast.parse(text)):
        for node in ast.walk(condition):
            identifier = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            for name, feature in asking:
                if identifier and feature.names.search(identifier):
                    found.add(Place(name, path.relative_to(SOURCE).as_posix(), node.lineno))  # type: ignore[attr-defined]
    return found


def every_place() -> set[Place]:
    """Where the source asks for features outside of them."""
    return {place for path in SOURCE.rglob("*.py") for place in places(path, path.read_text())}


def _conditions(module: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(module):
        match node:
            case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
                yield node.test
            case ast.comprehension():
                yield from node.ifs
            case ast.BoolOp():
                yield node
            case ast.Compare() if any(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
                yield node
            case ast.Call(func=ast.Name(id="isinstance")):
                yield node


def main() -> None:
    """Print each place, or those of one feature."""
    found = sorted(place for place in every_place() if place.feature in (sys.argv[1:] or FEATURES))
    for place in found:
        print(f"{place.feature:12} {place.file}:{place.line}")
    print(f"{len(found)} conditions in {len({place.file for place in found})} files")


if __name__ == "__main__":
    main()

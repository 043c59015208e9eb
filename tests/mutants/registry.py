"""The registry of mutants: mistakes that engines of this kind have shipped, each as a change to the real code.

A mutant is a function that breaks something through a `Patch`, its docstring, which says what goes wrong for a user,
and the reports of the field that had it. `injected` breaks the code for the length of a `with` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import InvalidInput

Level = Literal["cache", "scheduler", "tiers"]


class Patch:
    """Sets attributes, and can put back what was there."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def setattr(self, target: Any, name: str, value: Any, raising: bool = True) -> None:
        """Set one; with `raising` it must have been there."""
        own = vars(target)
        if raising and not hasattr(target, name):
            raise AttributeError(f"{target} has no {name}")
        self._before.append((target, name, own.get(name, _NOTHING)))
        setattr(target, name, value)

    def undo(self) -> None:
        """Put everything back, the last change first."""
        while self._before:
            target, name, value = self._before.pop()
            if value is _NOTHING:
                delattr(target, name)
            else:
                setattr(target, name, value)


_NOTHING = object()


@dataclass(frozen=True)
class Mutant:
    """`level` is what has to be driven to meet it, `field` the projects that had it."""

    apply: Callable[[Patch], None]
    level: Level
    field: str

    @property
    def name(self) -> str:
        """As it is injected by."""
        return self.apply.__name__.replace("_", "-")

    @property
    def wrong(self) -> str:
        """What it does to a user, in a sentence."""
        return " ".join((self.apply.__doc__ or "").split())


MUTANTS: dict[str, Mutant] = {}


def mutant(level: Level, field: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register the decorated function as a mutant; its docstring says what goes wrong for a user."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        made = Mutant(apply, level, field)
        assert made.name not in MUTANTS
        MUTANTS[made.name] = made
        return apply

    return register


def find(name: str) -> Mutant:
    """The mutant of that name. Raises InvalidInput, naming those that are near."""
    found = MUTANTS.get(name.replace("_", "-"))
    if found is None:
        words = set(name.replace("_", "-").split("-"))
        near = sorted(MUTANTS, key=lambda other: -len(words & set(other.split("-"))))[:3]
        raise InvalidInput(f"there is no mutant '{name}'.", fix=f"see --list; near it are {', '.join(near)}.")
    return found


@contextmanager
def injected(name: str) -> Iterator[Mutant]:
    """The code, broken in that way until the block ends. Raises InvalidInput for a name that is not known."""
    made, patch = find(name), Patch()
    made.apply(patch)
    try:
        yield made
    finally:
        patch.undo()

"""Parameters of tests: all combinations where there is time, and else so few that every value occurs. Many quick cases
are a loop in one test, as pytest takes longer for a test than such a case does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from itertools import product
from typing import Any

import pytest


def few(values: Collection[Any], most: int) -> list[Any]:
    """All values, those after the first `most` marked slow."""
    return [value if i < most else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]


def covering(most: int | None = None, /, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize by the product of these values. Combinations beyond a diagonal, in which every value occurs, are
    marked slow, and those with a value that is marked slow. Of the diagonal `most` are quick."""
    values = [[_marked(value) for value in axis] for axis in axes.values()]
    longest = max(map(len, values))
    diagonal = {tuple(k % len(axis) for axis in values) for k in range(longest if most is None else min(most, longest))}
    cases = [
        pytest.param(
            *(axis[i].values[0] for axis, i in zip(values, place, strict=True)),
            marks=[
                *(mark for axis, i in zip(values, place, strict=True) for mark in axis[i].marks),
                *(() if place in diagonal else (pytest.mark.slow,)),
            ],
        )
        for place in product(*(range(len(axis)) for axis in values))
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def _marked(value: Any) -> Any:
    """The value as a parameter with its marks."""
    return value if hasattr(value, "marks") else pytest.param(value)


def each_of(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, but all cases are one test. All of them run, and each that fails is named. Fixtures
    are those of the one test, so what a case changes of them the next one sees."""
    every = list(cases)
    singles = (names,) if isinstance(names, str) else names

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @wraps(check)
        def run(*arguments: Any, **fixtures: Any) -> None:
            failed: list[Exception] = []
            for case in every:
                values = dict(zip(singles, (case,) if isinstance(names, str) else case, strict=True))
                try:
                    check(*arguments, **fixtures, **values)
                except Exception as error:
                    error.add_note(f"in the case {values}")
                    failed.append(error)
            assert every, "there is no case"
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(every)} cases", failed)

        given = inspect.signature(check)
        others = [parameter for name, parameter in given.parameters.items() if name not in singles]
        run.__signature__ = given.replace(parameters=others)  # type: ignore[attr-defined]
        del run.__wrapped__  # type: ignore[attr-defined]  # pytest would look at its parameters
        return run

    return decorate

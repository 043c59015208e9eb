"""needs: tests of a contract that apply to some implementations only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., None])


def needs(*attributes: str) -> Callable[[Test], Test]:
    """Mark a test of `ContractTests` that applies only to classes where all these attributes are true."""

    def mark(test: Test) -> Test:
        test.__dict__["needs"] = attributes
        return test

    return mark


class ContractTests:
    """Tests to subclass. A subclass omits tests that need an attribute which is false there."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in dir(cls):
            if not all(getattr(cls, attribute) for attribute in getattr(getattr(cls, name), "needs", ())):
                setattr(cls, name, None)

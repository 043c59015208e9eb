"""The source does not grow unnoticed, features stay in their packages, and names keep one meaning: tests.tidy.kept."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.tidy import kept
from tests.tidy.features import SOURCE, places
from tests.tidy.words import _NO_NOUN, remarks


def test_no_package_has_grown_beyond_what_was_decided() -> None:
    """`python -m tests.tidy.kept --write` records a growth that was decided, and new packages."""
    assert kept.too_long(kept.lines()) == {}
    assert kept.kept()["lines"].keys() <= kept.lines().keys(), "a package is gone: keep the lines of today"


def test_nothing_that_may_only_fall_has_grown() -> None:
    """`python -m tests.tidy.features` and `python -m tests.tidy.words` say where. The first counts are to become 120
    conditions in 30 files, and none in loops."""
    assert kept.grown(kept.faults()) == {}


def test_growth_is_noticed() -> None:
    today = {**kept.lines(), "new": 10, "cache": 2 * kept.lines()["cache"]}
    assert kept.too_long(today).keys() == {"new", "cache"}
    assert kept.too_long({"total": 2 * today["total"]}).keys() == {"total"}
    assert kept.grown({**kept.kept()["faults"], "modules with a class Thing": 2}).keys() == {
        "modules with a class Thing"
    }
    fault = next(iter(kept.kept()["faults"]))
    assert kept.grown({fault: kept.kept()["faults"][fault] + 1}).keys() == {fault}


CODE = """
    def step(self):
        if self.hisparse is not None and self.draft:     # two features on a line, each once
            pass
        assert not self.peers
        found = [each for each in rows if each.sessions]
        also = 1 if isinstance(self.canary, Canary) else 2
        while waits: break
        self.hisparse.step()
        return self.tiers
"""


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("loop/loop.py", ["canary", "hisparse", "sessions", "speculation", "transfer"]),
        ("sparse/coordinator.py", ["canary", "sessions", "speculation", "transfer"]),
        ("engine/sessions.py", ["canary", "hisparse", "speculation", "transfer"]),
        ("cli/serve.py", []),
        ("engine/config.py", []),
    ],
)
def test_conditions_count_outside_of_their_feature(file: str, found: list[str]) -> None:
    assert sorted(place.feature for place in places(SOURCE / file, dedent(CODE))) == found


REMARKS = '''
    """The noun is there."""
    SIZE = 4  # of a page
    LIMIT = 4  # bytes of a page
    # What is said here goes on in a second line, which begins with a word
    # of no weight.
    NAME = 4
    """By name."""
    # It is a fault, too.
    offset = 4  # often
'''


def test_remarks_without_a_noun_are_found() -> None:
    found = sorted(text for _, text in remarks(dedent(REMARKS)) if _NO_NOUN.match(text))
    assert found == ["By name.", "It is a fault, too.", "of a page"]

"""Reach: what a resuming request still reads, against the definition of each kind, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import UnsupportedModel
from quire.prefix.reach import Full, reach_of
from quire.spec.group import ReachSpec
from quire.testing.choices import Choices
from tests.fuzz.plans import reach, tokens_read

KINDS = ("full", "window", "chunk", "state")


def pages(marks: str) -> np.ndarray:
    return np.array([mark == "1" for mark in marks], dtype=np.bool_)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_needed_is_what_the_next_token_reads(kind: str) -> None:
    for seed in range(400):
        choices = Choices.seeded(seed)
        size, num_pages = choices.between(1, 5), choices.between(0, 9)
        spec = reach(choices, kind, size)
        found, first = reach_of(spec, size), tokens_read(spec, size)
        for n in range(num_pages + 1):
            read = {at // size for at in range(first(n * size), n * size)}
            assert set(found.needed(n)) == read, (spec, size, n)
        resident = np.array([choices.chance(70) for _ in range(num_pages)], dtype=np.bool_)
        usable = [all(resident[at] for at in found.needed(n)) for n in range(1, num_pages + 1)]
        assert found.resumable(resident).tolist() == usable, (spec, size, resident)


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_holds_more_than_it_says(kind: str) -> None:
    """To write its next token a request holds the pages that its whole pages need, and the page that token goes to."""
    for seed in range(300):
        choices = Choices.seeded(seed)
        size = choices.between(1, 5)
        spec = reach(choices, kind, size)
        found = reach_of(spec, size)
        most = 0
        for tokens in range(1, 12 * size):
            whole, all_pages = tokens // size, tokens // size + 1
            held = 1 if found.in_place else all_pages - found.needed(whole).start
            most = max(most, held)
            assert held <= found.held(all_pages), (spec, size, tokens)
        assert spec.kind in ("full", "chunk") or most == found.held(12), "a bound that is never reached"


def test_a_prefix_with_a_hole() -> None:
    """Windows of 4 in pages of one token, 4 + 3 + 2 + 3 pages of which the second run is gone."""
    window = reach_of(ReachSpec("window", 5), 1)  # a token reads itself and four before it
    path = pages("1111" + "000" + "11" + "111")
    assert np.flatnonzero(window.resumable(path)).tolist()[-1] == 11
    assert np.flatnonzero(window.resumable(path[:9])).tolist()[-1] == 3


@pytest.mark.parametrize(("tokens", "first"), [(1000, 864), (1008, 880), (128, 0), (130, 0)])
def test_how_far_a_window_has_passed(tokens: int, first: int) -> None:
    """Pages of 16, a window of 128: what a request of so many tokens still holds begins at the page of token `first`,
    so that the last whole page can be resumed on."""
    assert reach_of(ReachSpec("window", 128), 16).needed(tokens // 16).start * 16 == first


def test_full_reach_ends_at_the_first_hole() -> None:
    assert reach_of(ReachSpec(), 1).resumable(pages("1101")).tolist() == [True, True, False, False]


def test_reach_comes_from_its_description() -> None:
    assert isinstance(reach_of(ReachSpec(), 4), Full)
    with pytest.raises(UnsupportedModel, match=r"'ring'.*has chunk, full, state, window"):
        reach_of(ReachSpec("ring"), 4)

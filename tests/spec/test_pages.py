"""Page arithmetic, at every length around a page boundary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.spec.pages import floor_to_page, pages_for

sizes = st.integers(1, 300)


@pytest.mark.parametrize(
    ("num_tokens", "pages", "floor"), [(0, 0, 0), (1, 1, 0), (15, 1, 0), (16, 1, 16), (17, 2, 16), (50, 4, 48)]
)
def test_pages_of_sixteen(num_tokens: int, pages: int, floor: int) -> None:
    assert (pages_for(num_tokens, 16), floor_to_page(num_tokens, 16)) == (pages, floor)


@given(st.integers(0, 10_000), sizes)
def test_pages_hold_the_tokens_and_not_one_page_more(num_tokens: int, page_size: int) -> None:
    assert pages_for(num_tokens, page_size) * page_size >= num_tokens
    assert (pages_for(num_tokens, page_size) - 1) * page_size < num_tokens
    assert 0 <= num_tokens - floor_to_page(num_tokens, page_size) < page_size
    assert floor_to_page(num_tokens, page_size) % page_size == 0

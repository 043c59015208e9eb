"""Which draws are kept, against the definition, and how a governor chooses."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.speculative.governor import Governor
from quire.speculative.verify import accepted_draws

_work = st.tuples(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=5))


@given(st.lists(_work, min_size=1, max_size=6))
def test_a_draft_is_kept_while_it_equals_the_draw(works: list[tuple[int, list[tuple[int, int]]]]) -> None:
    tokens, draws, counts, drawn, expected = [], [], [], [], []
    for prompt, pairs in works:  # tokens of a prompt, and (draft that follows, draw) of each draw
        tokens += [9] * (prompt + 1)
        for at, (draft, draw) in enumerate(pairs):
            draws.append(len(tokens) - 1)
            drawn.append(draw)
            if at + 1 < len(pairs):
                tokens.append(draft)
        counts.append(len(pairs))
        right = 0
        while right < len(pairs) - 1 and pairs[right][0] == pairs[right][1]:
            right += 1
        expected.append(right + 1 if pairs else 0)
    kept = accepted_draws(*(np.array(each, dtype=np.int64) for each in (tokens, draws, counts, drawn)))
    assert kept.tolist() == expected


def _run(acceptance: float, draft_cost: float, steps: int, most: int = 8) -> tuple[float, Governor]:
    """Tokens a second of one request whose drafts are right so often, in plain steps; a plain step takes 1 s."""
    governor, random = Governor(1, most), np.random.default_rng(0)
    rows, serials, tokens, seconds = np.array([0]), np.array([1], dtype=np.int64), 0, 0.0
    for _ in range(steps):
        drafts = int(governor.limits(rows, serials)[0])
        right = 0
        while right < drafts and random.random() < acceptance:
            right += 1
        took = 1.0 + draft_cost * drafts
        if drafts:
            governor.settled(rows, serials, np.array([drafts]), np.array([right]))
        governor.measured(1, drafts, took)
        tokens, seconds = tokens + 1 + right, seconds + took
    return tokens / seconds, governor


def test_drafts_that_are_right_and_cheap_are_made() -> None:
    speed, _ = _run(0.9, 0.05, 2000)
    assert speed > 3.3


def test_drafts_that_cost_more_than_they_bring_are_left_out() -> None:
    speed, governor = _run(0.3, 0.6, 20_000)
    assert speed > 0.98
    assert governor.num_plain > 19_000


def test_drafts_that_are_never_right_are_left_out() -> None:
    speed, _ = _run(0.0, 0.1, 20_000)
    assert speed > 0.98


def test_what_becomes_worth_it_is_found() -> None:
    governor = Governor(1, 4)
    rows, serials = np.array([0]), np.array([1], dtype=np.int64)
    for right in (0, 1):
        tokens = 0
        for _ in range(6000):
            drafts = int(governor.limits(rows, serials)[0])
            if drafts:
                governor.settled(rows, serials, np.array([drafts]), np.array([drafts * right]))
            governor.measured(1, drafts, 1.0 + 0.1 * drafts)
            tokens += 1 + drafts * right
    assert tokens > 2 * 6000

"""The ideal and the optimum, against every choice a cache could make on tiny traces, and against LRU on longer ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidInput
from quire.sim.hit_bounds import HitBounds
from quire.sim.trace import TraceRequest, open_trace
from tests.sim.tiny_traces import request, trace_of

Page = tuple[int, int]
"""How many pages end before it, and a name for all that it depends on: the namespace, and every token up to its end."""

NAMES: dict[object, int] = {}


def pages_of(each: TraceRequest, page_size: int) -> list[Page]:
    tokens = (*each.prompt.tolist(), *each.output[: each.abort_after].tolist())
    pages: list[Page] = []
    name: object = each.namespace
    for at in range(len(tokens) // page_size):
        name = NAMES.setdefault((name, tokens[at * page_size : (at + 1) * page_size]), len(NAMES))
        pages.append((at, name))
    return pages


def served(requests: list[TraceRequest], page_size: int) -> Iterator[tuple[list[Page], int, int]]:
    """Pages, how many of them are looked up, and pages held, of each request that runs."""
    for each in requests:
        if each.abort_after == 0:
            continue
        pages = pages_of(each, page_size)
        tokens = len(each.prompt) + len(each.output[: each.abort_after])
        yield pages, (len(each.prompt) - 1) // page_size, max(len(pages), -(-(tokens - 1) // page_size))


def num_found(pages: list[Page], lookup: int, cached: set[Page] | frozenset[Page]) -> int:
    return next((at for at, page in enumerate(pages[:lookup]) if page not in cached), lookup)


def plain_ideal(requests: list[TraceRequest], page_size: int) -> tuple[int, int]:
    """Hit pages and different pages."""
    cached: set[Page] = set()
    hits = 0
    for pages, lookup, _ in served(requests, page_size):
        hits += num_found(pages, lookup, cached)
        cached.update(pages)
    return hits, len(cached)


def best_of_all_choices(requests: list[TraceRequest], page_size: int, pool_pages: int) -> int:
    """Hit pages of the best cache there is, by trying everything that it could keep."""
    best: dict[frozenset[Page], int] = {frozenset(): 0}
    for pages, lookup, held in served(requests, page_size):
        if held > pool_pages:
            continue
        after: dict[frozenset[Page], int] = {}
        for cached, hits in best.items():
            hits += num_found(pages, lookup, cached)
            others = sorted(cached.difference(pages))
            for kept in combinations(others, min(len(others), pool_pages - held)):
                state = frozenset(kept).union(pages)
                after[state] = max(after.get(state, 0), hits)
        best = after
    return max(best.values())


def least_recently_used(requests: list[TraceRequest], page_size: int, pool_pages: int) -> int:
    """Hit pages of a cache that forgets what was used longest ago, deepest first."""
    cached: dict[Page, int] = {}
    hits = 0
    for now, (pages, lookup, held) in enumerate(served(requests, page_size)):
        if held > pool_pages:
            continue
        hits += num_found(pages, lookup, set(cached))
        others = sorted(cached.keys() - set(pages), key=lambda page: (cached[page], -page[0]))
        for page in others[: max(len(others) - (pool_pages - held), 0)]:
            del cached[page]
        cached.update(dict.fromkeys(pages, now))
    return hits


TOKENS = st.lists(st.integers(0, 1), max_size=6)
REQUEST = st.tuples(
    TOKENS.filter(bool), TOKENS, st.sampled_from(["", "", "", "salt"]), st.sampled_from([None, None, 0, 2])
)
REQUESTS = st.lists(REQUEST, min_size=1, max_size=6).map(
    lambda drawn: [
        request(number, prompt, output, salt=salt, abort_after=leaves)
        for number, (prompt, output, salt, leaves) in enumerate(drawn)
    ]
)


@settings(max_examples=100)
@given(requests=REQUESTS, page_size=st.integers(1, 3))
def test_the_ideal_is_that_of_a_set_of_prefixes(requests: list[TraceRequest], page_size: int) -> None:
    found = HitBounds(trace_of(requests), page_size)
    hits, different = plain_ideal(requests, page_size)
    assert (found.ideal_hit_tokens, found.working_set_tokens) == (hits * page_size, different * page_size)
    assert found.prompt_tokens == sum(len(each.prompt) for each in requests if each.abort_after != 0)


@settings(max_examples=150)
@given(requests=REQUESTS, page_size=st.integers(1, 3), pool_pages=st.integers(1, 10))
def test_no_choice_is_better_than_the_optimum(requests: list[TraceRequest], page_size: int, pool_pages: int) -> None:
    found = HitBounds(trace_of(requests), page_size).optimal_hit_tokens(pool_pages * page_size + page_size - 1)
    assert found == best_of_all_choices(requests, page_size, pool_pages) * page_size


def check_optimum(seed: int) -> None:
    """As the test above, on requests that are drawn without a library, for mutants."""
    source = random.Random(seed)
    drawn = [(source.randint(2, 4), source.randint(0, 2), source.choice(["", "", "salt"])) for _ in range(8)]
    requests = [
        request(number, source.choices((0, 1), k=prompt), source.choices((0, 1), k=output), salt=salt)
        for number, (prompt, output, salt) in enumerate(drawn)
    ]
    for page_size, pool_pages in ((1, 6), (1, 7), (2, 3)):
        hits = HitBounds(trace_of(requests), page_size).optimal_hits(pool_pages * page_size)
        assert sum(hits) == best_of_all_choices(requests, page_size, pool_pages) * page_size


def test_the_tiny_traces_make_the_optimum_choose() -> None:
    """What the comparison above is worth: often the pool is too small for the ideal and large enough for some hits, and
    often LRU is not the best."""
    source = random.Random(5)
    between = worse = 0
    for _ in range(200):
        requests = [
            request(
                number, source.choices((0, 1), k=source.randint(1, 6)), source.choices((0, 1), k=source.randint(0, 6))
            )
            for number in range(6)
        ]
        bounds = HitBounds(trace_of(requests), 1)
        best = bounds.optimal_hit_tokens(9)
        between += 0 < best < bounds.ideal_hit_tokens
        worse += least_recently_used(requests, 1, 9) < best
    assert between > 50 and worse > 30


@pytest.mark.parametrize(
    "name", ["chat:requests=80", "sessions:requests=80", "alternating:tokens=600", "rl-groups:most=9"]
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_lru_is_never_better_and_a_large_pool_reaches_the_ideal(name: str, page_size: int) -> None:
    trace = open_trace(name)
    requests = list(trace)
    bounds = HitBounds(trace, page_size)
    assert bounds.ideal_hit_tokens == plain_ideal(requests, page_size)[0] * page_size
    last = -1
    for part in (8, 4, 2):
        pool = bounds.working_set_tokens // part
        best = bounds.optimal_hit_tokens(pool)
        assert (
            least_recently_used(requests, page_size, pool // page_size) * page_size <= best <= bounds.ideal_hit_tokens
        )
        assert best >= last
        last = best
    room = bounds.working_set_tokens + page_size
    assert bounds.optimal_hit_tokens(room) == bounds.ideal_hit_tokens


def test_a_request_that_the_pool_cannot_hold_touches_nothing() -> None:
    small = [request(0, [1, 2, 3], [4]), request(2, [1, 2, 3], [4])]
    large = request(1, list(range(10, 30)), [])
    alone = HitBounds(trace_of(small), 1).optimal_hit_tokens(4)
    assert alone == 2
    assert HitBounds(trace_of([small[0], large, small[1]]), 1).optimal_hit_tokens(4) == alone


def test_of_a_prompt_the_last_token_is_computed() -> None:
    trace = trace_of([request(0, [1, 2, 3, 4], []), request(1, [1, 2, 3, 4], [])])
    assert [HitBounds(trace, page_size).ideal_hit_tokens for page_size in (1, 2, 4)] == [3, 2, 0]


def test_outputs_are_found_by_the_next_turn() -> None:
    trace = trace_of([request(0, [1, 2], [3, 4]), request(1, [1, 2, 3, 4, 5], [])])
    assert HitBounds(trace, 2).ideal_hit_tokens == 4


def test_what_was_not_said_before_the_client_left_is_not_found() -> None:
    trace = trace_of([request(0, [1, 2], [3, 4, 5], abort_after=1), request(1, [1, 2, 3, 4, 5], [])])
    assert HitBounds(trace, 1).ideal_hit_tokens == 3


def test_pages_of_no_tokens_are_refused() -> None:
    trace = trace_of([request(0, [1], [])])
    with pytest.raises(InvalidInput, match="page of 0 tokens"):
        HitBounds(trace, 0)

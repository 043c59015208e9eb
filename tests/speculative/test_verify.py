"""Which draws are kept, against the definition, and how a governor chooses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.speculative.drafter import BestFirst, joined
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
    arrays = [np.array(each, dtype=np.int64) for each in (tokens, draws, counts, drawn)]
    assert accepted_draws(*arrays).kept.tolist() == expected


@st.composite
def _trees(draw: st.DrawFn) -> list[tuple[int, list[int], list[int], list[int]]]:
    """Works: tokens of a prompt before the last known one, and parents, tokens and draws of that and of its drafts."""
    works = []
    for _ in range(draw(st.integers(1, 4))):
        parents: list[int] = []
        tokens: list[int] = []
        for at in range(draw(st.integers(0, 6))):
            parent, token = draw(st.integers(-1, at - 1)), draw(st.integers(0, 2))
            if (parent, token) not in zip(parents, tokens, strict=True):
                parents.append(parent)
                tokens.append(token)
        drawn = draw(st.lists(st.integers(0, 3), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
        works.append((draw(st.integers(0, 2)), parents, tokens, drawn))
    return works


@given(_trees())
def test_the_accepted_path_of_a_tree(works: list[tuple[int, list[int], list[int], list[int]]]) -> None:
    flat_parents, tokens, draws, counts, drawn = [], [], [], [], []
    expected, moves = [], []
    for prompt, parents, own, drawn_here in works:
        flat_parents += [-1 if at == 0 else len(tokens) + at - 1 for at in range(prompt + 1)]
        root = len(tokens) + prompt
        tokens += [9] * (prompt + 1) + own
        flat_parents += [root + 1 + parent for parent in parents]
        draws += range(root, root + 1 + len(own))
        counts.append(1 + len(own))
        drawn += drawn_here
        path, node = [drawn_here[0]], -1
        while (node, path[-1]) in zip(parents, own, strict=True):
            node = list(zip(parents, own, strict=True)).index((node, path[-1]))
            if node + 1 != len(path):
                moves.append((root + 1 + node, root + len(path)))
            path.append(drawn_here[node + 1])
        expected.append(path)
    arrays = [np.array(each, dtype=np.int64) for each in (tokens, draws, counts, drawn, flat_parents)]
    found = accepted_draws(*arrays)
    order = np.arange(len(draws)) if found.order is None else found.order
    kept = np.array(drawn)[order]
    first = np.cumsum(counts) - counts
    assert [kept[at : at + n].tolist() for at, n in zip(first, found.kept, strict=True)] == expected
    assert sorted(zip(found.sources.tolist(), found.targets.tolist(), strict=True)) == sorted(moves)


@given(
    st.lists(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=3, max_size=3), min_size=1, max_size=3),
    st.integers(1, 8),
)
def test_chains_are_joined_where_they_begin_alike(requests: list[list[list[int]]], most: int) -> None:
    chains = np.zeros((len(requests), 3, 4), dtype=np.int32)
    for i, request in enumerate(requests):
        for c, chain in enumerate(request):
            chains[i, c, : len(chain)] = chain
    lengths = np.array([[len(chain) for chain in request] for request in requests])
    drafts = joined(chains, lengths, most)
    assert drafts.parents is not None
    for i, request in enumerate(requests):
        nodes: list[tuple[int, ...]] = []
        for chain in request:
            for end in range(1, len(chain) + 1):
                if tuple(chain[:end]) not in nodes:
                    if len(nodes) == most:
                        break
                    nodes.append(tuple(chain[:end]))
        found: list[tuple[int, ...]] = []
        for at in range(drafts.counts[i]):
            above = drafts.parents[i, at]
            found.append((*(found[above] if above >= 0 else ()), int(drafts.tokens[i, at])))
        assert found == nodes


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


def test_a_search_that_was_interrupted_costs_little_more_than_others() -> None:
    """Another process ran meanwhile. Many of these would use up the credit of a load that begins to repeat later."""
    governor = Governor(1, 4)
    for turn in range(40):
        resting = governor.rests(1)
        searched = 0.0 if resting else 1.0 if turn % 5 == 4 else 0.05
        governor.measured(1, 0, 1.0 + searched, searched)
    assert not governor.rests(1), "seven searches of a step each are most of the first credit"


def test_a_first_search_that_was_interrupted_costs_a_step() -> None:
    """Nothing says yet how long a search takes."""
    governor, rows, serials = Governor(1, 4), np.array([0]), np.array([1], dtype=np.int64)
    while not governor.limits(rows, serials).any():
        governor.measured(1, 0, 1.0)
    governor.measured(1, 0, 61.0, 60.0)
    assert not governor.rests(1)


def test_searches_that_find_nothing_are_left_out() -> None:
    governor, rows, serials = Governor(1, 4), np.array([0]), np.array([1], dtype=np.int64)
    searches = 0
    for _ in range(10_000):
        searched = 0.1 if governor.limits(rows, serials).any() else 0.0
        governor.measured(1, 0, 1.0 + searched, searched)
        searches += searched > 0
    assert 500 <= searches < 800, "half a percent of the time, and the first credit"


@pytest.mark.parametrize("slow", [2.0, 5.0, 20.0])
def test_a_slow_first_step_with_drafts_is_no_verdict(slow: float) -> None:
    """The first step of a kind takes longer: something is built, or a page is touched."""
    governor = Governor(1, 4)
    rows, serials, with_drafts = np.array([0]), np.array([1], dtype=np.int64), 0
    for _ in range(500):
        drafts = int(governor.limits(rows, serials)[0])
        if drafts:
            governor.settled(rows, serials, np.array([drafts]), np.array([drafts]))
            with_drafts += 1
        governor.measured(1, drafts, slow if drafts and with_drafts == 1 else 1.0 + 0.05 * drafts)
    assert with_drafts > 400


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


def _life(governor: Governor, steps: int, right: int, *, finds: int = 1) -> int:
    """Steps with six drafts where each `finds`-th search finds some, of which so many are right. The first draft of a
    step costs as much as the step, and others little. How many of the steps had drafts."""
    rows, serials, drafted = np.array([0]), np.array([1], dtype=np.int64), 0
    for turn in range(steps):
        counts = governor.limits(rows, serials) * (turn % finds == 0)
        drafts = int(counts[0]) if counts.any() and governor.pays(rows, serials, counts) else 0
        if drafts:
            governor.settled(rows, serials, np.array([drafts]), np.array([min(right, drafts)]))
        governor.measured(1, drafts, 1.0 + (1.0 + 0.05 * drafts if drafts else 0.0), 0.0)
        drafted += drafts > 0
    return drafted


def test_what_becomes_right_is_tried_again_where_the_first_draft_costs_most() -> None:
    """Drafts of which one in two is right would not pay there, so nothing would ever show that more are."""
    governor = Governor(1, 6)
    _life(governor, 400, right=0)
    assert _life(governor, 2000, right=6, finds=3) > 300


def test_steps_with_drafts_that_were_interrupted_are_no_verdict() -> None:
    """Another process ran meanwhile, and the drafts were wrong besides. Three of these do not use up the credit."""
    governor, rows, serials = Governor(1, 6), np.array([0]), np.array([1], dtype=np.int64)
    _life(governor, 40, right=6)
    for _ in range(3):
        governor.settled(rows, serials, np.array([6]), np.array([0]))
        governor.measured(1, 6, 60.0)
    assert not governor.rests(1)


@pytest.mark.parametrize(("topk", "depth", "most"), [(2, 1, 2), (2, 4, 6), (3, 3, 9), (4, 3, 40), (1, 5, 4)])
def test_trees_grow_best_first(topk: int, depth: int, most: int) -> None:
    """Against the definition, for requests of different depths: at each depth the likeliest nodes are expanded."""
    limits = [depth, 1, max(1, depth - 1), depth]

    def children(request: int, path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng([request, *path])
        scores = np.log(random.dirichlet(np.ones(9))).astype(np.float32)
        if request == 3:
            scores[2:] = -np.inf  # filters leave two tokens
        tokens = (-scores).argsort(kind="stable")[:topk]
        return tokens, scores[tokens]

    tree = BestFirst(len(limits), topk, depth)
    nodes: list[dict[tuple[int, ...], float]] = [{} for _ in limits]
    expanded: list[list[tuple[int, ...]]] = [[()] for _ in limits]
    every: list[list[tuple[int, ...]]] = [[] for _ in limits]
    for place in range(depth):
        at = np.array([request for request, limit in enumerate(limits) if limit > place])
        found = [[children(request, path) for path in expanded[request]] for request in at]
        tree.grow(at, *(np.array([[pair[of] for pair in each] for each in found]) for of in (0, 1)))
        for request, own in zip(at.tolist(), found, strict=True):
            new = {
                (*path, int(token)): nodes[request].get(path, np.float32(0)) + score
                for path, (tokens, scores) in zip(expanded[request], own, strict=True)
                for token, score in zip(tokens, scores, strict=True)
            }
            nodes[request] |= new
            expanded[request] = sorted(new, key=lambda path: -new[path])[:topk]
            every[request] += expanded[request]
        tokens, parents = tree.rows(at)
        for request, own_tokens, own_parents in zip(at.tolist(), tokens.tolist(), parents.tolist(), strict=True):
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(own_tokens, own_parents, strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            assert paths == every[request]
    drafts = tree.drafts(most)
    assert drafts.parents is not None
    for request, known in enumerate(nodes):
        likeliest = sorted((path for path in known if np.isfinite(known[path])), key=lambda path: -known[path])[:most]
        own = []
        for at in range(int(drafts.counts[request])):
            parent = int(drafts.parents[request, at])
            assert parent < at
            own.append((*(own[parent] if parent >= 0 else ()), int(drafts.tokens[request, at])))
        assert own == likeliest

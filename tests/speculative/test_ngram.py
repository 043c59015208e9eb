"""NgramDrafter against a search through lists, with few different tokens, so that everything occurs again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire.cache.running import RunningBatch
from quire.spec.events import Namespace
from quire.spec.speculation import SpeculativeConfig
from quire.speculative import ngram
from quire.speculative.drafter import Drafting, Drafts
from quire.speculative.ngram import NgramDrafter
from tests.speculative.compared_drafters import ComparedDrafters, check_a_life

ROWS, WIDTH, DEPTH = 4, 40, 6
TREES = st.tuples(st.integers(1, 3), st.integers(2, 12))
SPACES = [Namespace(), Namespace(salt="other")]


def config_of(shortest: int, longest: int, topk: int = 1, verified: int = DEPTH + 1) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram",
        num_steps=DEPTH,
        topk=topk,
        num_draft_tokens=verified,
        prompt_lookup_min=shortest,
        prompt_lookup_max=longest,
    )


class _Kv:
    """What a drafter reads of a request of the cache."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace


def expected(text: list[int], shortest: int, longest: int, others: list[list[int]]) -> tuple[int, list[list[int]]]:
    """The length of the longest n-gram at the end of `text` that occurred before, and what may be proposed for it."""
    for size in range(longest, shortest - 1, -1):
        end = text[-size:]
        if len(text) < size:
            continue
        own = [at for at in range(len(text) - size) if text[at : at + size] == end]
        shared = [
            other[at + size :] for other in others for at in range(len(other) - size) if other[at : at + size] == end
        ]
        if own:
            follow = text[own[-1] + size :]
            repeated = [follow[at % len(follow)] for at in range(DEPTH)]
            return size, [repeated]
        if shared:
            return size, [each[:DEPTH] for each in shared]
    return 0, [[]]


class NgramMachine(RuleBasedStateMachine):
    """Requests that grow, end and begin in the rows of others."""

    @initialize(shortest=st.integers(1, 3), more=st.integers(0, 2), shares=st.booleans(), resumes=st.booleans())
    def start(self, shortest: int, more: int, shares: bool, resumes: bool) -> None:
        self.shortest, self.longest, self.shares = shortest, shortest + more, shares
        self.resumes = resumes
        self.drafter: NgramDrafter | ComparedDrafters = self.made(shares=shares, resumes=resumes)
        self.tokens = np.zeros((ROWS, WIDTH), dtype=np.int32)
        self.texts: dict[int, list[int]] = {}
        self.spaces: dict[int, Namespace] = {}
        self.serials = np.zeros(ROWS, dtype=np.int64)
        self.history: dict[Namespace, list[list[int]]] = {space: [] for space in SPACES}
        self.serial = 0

    def made(self, **settings: bool) -> NgramDrafter | ComparedDrafters:
        return NgramDrafter(ROWS, config_of(self.shortest, self.longest), **settings)

    @rule(
        row=st.integers(0, ROWS - 1),
        text=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        space=st.sampled_from(SPACES),
    )
    def begin(self, row: int, text: list[int], space: Namespace) -> None:
        if row not in self.texts:
            self.serial += 1
            self.texts[row], self.spaces[row], self.serials[row] = text.copy(), space, self.serial
            self.tokens[row, : len(text)] = text

    @rule(row=st.integers(0, ROWS - 1), more=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def grow(self, row: int, more: list[int]) -> None:
        if row in self.texts and len(self.texts[row]) + len(more) <= WIDTH:
            self.texts[row] += more
            self.tokens[row, : len(self.texts[row])] = self.texts[row]

    @rule(row=st.integers(0, ROWS - 1))
    def end(self, row: int) -> None:
        if row in self.texts:
            text, space = self.texts.pop(row), self.spaces.pop(row)
            self.drafter.ended(space, np.array(text, dtype=np.int32), 0)
            self.history[space].append(text)
            self.tokens[row, :] = 7  # what another request leaves there

    @rule(namespace=st.sampled_from([None, *SPACES]))
    def clear(self, namespace: Namespace | None) -> None:
        self.drafter.clear(namespace)
        self.history |= {space: [] for space in SPACES if namespace in (None, space)}

    @rule(most=st.lists(st.integers(0, DEPTH), min_size=ROWS, max_size=ROWS))
    def propose(self, most: list[int]) -> None:
        rows = sorted(self.texts)
        batch = RunningBatch([_Kv(self.spaces[row]) for row in rows], np.array(rows, dtype=np.intp), self.serials[rows])  # type: ignore[arg-type]
        known = np.array([len(self.texts[row]) for row in rows], dtype=np.int64)
        limits = np.array([most[row] for row in rows], dtype=np.int64)
        self.check(self.drafter.propose(Drafting(batch, self.tokens, known, limits)), rows, most)

    def check(self, drafts: Drafts, rows: list[int], most: list[int]) -> None:
        for at, row in enumerate(rows):
            others = self.history[self.spaces[row]] if self.shares else []
            text = self.texts[row]
            size, candidates = expected(text, self.shortest, self.longest, others)
            if self.resumes and size <= 2:  # a copy may go on at any place of the last token
                ends = [at for at in range(len(text) - 1) if text[at] == text[-1]]
                candidates += [[text[at + 1 + i % (len(text) - at - 1)] for i in range(DEPTH)] for at in ends]
            found = drafts.tokens[at, : drafts.counts[at]].tolist()
            allowed = [each[: most[row]] for each in candidates]
            assert found in allowed, f"{self.texts[row]} proposes {found}, not one of {allowed}"


NgramMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNgramMachine = NgramMachine.TestCase


class NativeMachine(NgramMachine):
    """The library and operations on arrays, with trees, in tables so small that n-grams replace each other."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ngram, "_TABLE_BITS", 5)
        self.patch.setattr(ngram, "_HISTORY", 32)

    @initialize(
        shortest=st.integers(1, 3), more=st.integers(0, 2), shares=st.booleans(), resumes=st.booleans(), tree=TREES
    )
    def start(self, shortest: int, more: int, shares: bool, resumes: bool, tree: tuple[int, int] = (1, 2)) -> None:
        self.tree = tree
        super().start(shortest, more, shares, resumes)

    def made(self, **settings: bool) -> ComparedDrafters:
        return ComparedDrafters(ROWS, config_of(self.shortest, self.longest, *self.tree), **settings)

    def check(self, drafts: Drafts, rows: list[int], most: list[int]) -> None:
        assert len(drafts.counts) == len(rows)
        if self.tree[0] == 1:
            assert all(count <= most[row] for count, row in zip(drafts.counts, rows, strict=True))

    def teardown(self) -> None:
        self.patch.undo()


NativeMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestNativeMachine = NativeMachine.TestCase


@pytest.mark.parametrize("ended", [0, ngram._MOST_TEXTS - 10])
def test_a_full_history_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch, ended: int) -> None:
    monkeypatch.setattr(ngram, "_HISTORY", 16)
    drafter = NgramDrafter(1, config_of(2, 2))
    assert drafter._history is not None
    drafter._history.num_texts = ended  # of which none is remembered
    for first in range(0, 100, 4):
        drafter.ended(Namespace(), np.arange(first, first + 4, dtype=np.int32), 0)
    batch = RunningBatch([_Kv(Namespace())], np.array([0]), np.array([1]))  # type: ignore[list-item]

    def after(*tokens: int) -> list[int]:
        batch.serials = batch.serials + 1
        row = np.zeros((1, 8), dtype=np.int32)
        row[0, : len(tokens)] = tokens
        found = drafter.propose(Drafting(batch, row, np.array([len(tokens)]), np.array([4])))
        return found.tokens[0, : found.counts[0]].tolist()

    assert after(96, 97) == [98, 99]
    assert after(0, 1) == []


def test_a_namespace_finds_its_own() -> None:
    drafter = NgramDrafter(1, config_of(2, 2))
    drafter.ended(SPACES[0], np.array([5, 6, 7, 8, 9], dtype=np.int32), 0)
    counts = []
    for serial, space in enumerate(SPACES, start=1):
        batch = RunningBatch([_Kv(space)], np.array([0]), np.array([serial]))  # type: ignore[list-item]
        row = np.array([[5, 6, 0, 0, 0, 0, 0, 0]], dtype=np.int32)
        counts.append(int(drafter.propose(Drafting(batch, row, np.array([2]), np.array([3]))).counts[0]))
    assert counts == [3, 0]


def test_a_flush_deletes_what_its_namespace_had() -> None:
    drafter = NgramDrafter(1, config_of(2, 2))
    counts, serial = [], 0
    for space in SPACES:
        drafter.ended(space, np.array([5, 6, 7, 8, 9], dtype=np.int32), 0)
    for flushed in SPACES:
        drafter.clear(flushed)
        for space in SPACES:
            serial += 1
            batch = RunningBatch([_Kv(space)], np.array([0]), np.array([serial]))  # type: ignore[list-item]
            row = np.array([[5, 6, 0, 0, 0, 0, 0, 0]], dtype=np.int32)
            counts.append(int(drafter.propose(Drafting(batch, row, np.array([2]), np.array([3]))).counts[0]))
    assert counts == [0, 3, 0, 0]


def drafts_along(text: list[int], steps: list[int], **settings: bool) -> list[list[int]]:
    """What is proposed when the first `steps[i]` tokens of a text are known, by n-grams of two or more."""
    drafter, tokens = NgramDrafter(1, config_of(2, 4), **settings), np.array([text], dtype=np.int32)
    batch = RunningBatch([_Kv(Namespace())], np.array([0]), np.array([1]))  # type: ignore[list-item]
    found = [drafter.propose(Drafting(batch, tokens, np.array([known]), np.array([3]))) for known in steps]
    return [each.tokens[0, : each.counts[0]].tolist() for each in found]


RECORD = [1, 2, 3, 50, 9, 8, 4, 5, 60, 9, 8, 6, 7]


def test_a_copy_is_taken_up_near_the_place_where_it_departed() -> None:
    """Two tokens that are there twice, and the nearer ones are not the newest."""
    text = [*RECORD, 1, 2, 3, 51, 52, 9, 8, 4]
    steps = [len(RECORD) + known for known in (3, 4, 5, 6, 7)]
    assert drafts_along(text, steps) == [[50, 9, 8], [], [], [8, 4, 5], [4, 5, 60]]
    assert drafts_along(text, steps, resumes=False)[-1] == [6, 7, 1]


def test_a_copy_is_given_up() -> None:
    """After some tokens of its own, and when another request begins in the row."""
    own = list(range(100, 100 + ngram._RESUME_TOKENS + 1))
    text = [*RECORD, 1, 2, 3, *own, 9]
    steps = [len(RECORD) + 3 + known for known in range(len(own) + 2)]
    assert drafts_along(text, steps)[-1] == []
    drafter = NgramDrafter(1, config_of(2, 4))
    tokens = np.array([[*RECORD, 1, 2, 3, 51, 9]], dtype=np.int32)
    for serial, known, expected in ((1, 16, [50, 9, 8]), (1, 17, []), (2, 18, [])):
        batch = RunningBatch([_Kv(Namespace())], np.array([0]), np.array([serial]))  # type: ignore[list-item]
        drafts = drafter.propose(Drafting(batch, tokens, np.array([known]), np.array([3])))
        assert drafts.tokens[0, : drafts.counts[0]].tolist() == expected


@pytest.mark.parametrize("seed", range(24))
def test_the_library_drafts_the_same(seed: int) -> None:
    check_a_life(seed)

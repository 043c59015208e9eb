"""Drafts at the edges: reserves, the end of the context, stop tokens and texts, states, tiers, follow-up turns."""

from __future__ import annotations

import pytest

from tests.engine.drafted import (
    CHAIN,
    TREE,
    check_a_full_batch_of_states,
    check_flush,
    check_log_probabilities,
    check_min_tokens,
    check_reserves,
    check_states,
    check_stop_inside,
    check_the_context_end,
)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_reserves_are_those_of_the_plan(page_size: int) -> None:
    check_reserves(page_size)


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_to_the_end_of_the_context(page_size: int, speculation: dict[str, object]) -> None:
    check_the_context_end(page_size, speculation)


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_log_probabilities(speculation: dict[str, object]) -> None:
    check_log_probabilities(speculation)


def test_a_stop_token_inside_a_draft() -> None:
    check_stop_inside()


def test_min_tokens() -> None:
    check_min_tokens()


def test_states_follow_the_accepted_drafts() -> None:
    check_states()


def test_a_full_batch_of_states() -> None:
    check_a_full_batch_of_states()


def test_a_flush_deletes_the_history() -> None:
    check_flush()

"""From bytes to pages and from requests to pages: tables, properties, and advice that works when followed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ContextTooLong, InvalidInput, PlanError, RequestTooLarge
from quire.plan.budget import MemoryPlan, format_bytes, parse_bytes, plan_memory
from quire.spec.group import GroupSpec
from quire.spec.layout import DType, Field, PageLayout
from quire.testing import small_plan

KIB, MIB, GIB = 2**10, 2**20, 2**30


def groups(bytes_per_token: int, page_size: int) -> tuple[GroupSpec, ...]:
    field = Field(name="k", shape=(bytes_per_token,), dtype=DType.UINT8, layers=(0,))
    return (GroupSpec(name="full", layout=PageLayout(page_size, (field,))),)


# -- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * GIB),
        ("8 GiB", 8 * GIB),
        (" 512 MiB ", 512 * MIB),
        ("1.5G", 3 * GIB // 2),
        ("2GB", 2 * 10**9),
        ("2gb", 2 * 10**9),
        ("1k", KIB),
        ("1KB", 1000),
        ("640 B", 640),
        ("640", 640),
        ("1TiB", 1024 * GIB),
        (640, 640),
        ("0.5KiB", 512),
    ],
)
def test_parse_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 parsecs", "-1", "1,5G", "1e9", "8GiB8", "0x10", "\u0661", ".5G"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInput, match="8GiB or 512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", 0, -5, "0GiB", "0.4", "0.0001B"])
def test_nothing_is_no_size(text: str | int) -> None:
    with pytest.raises(InvalidInput, match="above zero"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [2**53 + 1, 10**400 - 1], ids=["beyond a float's digits", "beyond a float"])
def test_large_sizes_are_exact(size: int) -> None:
    assert parse_bytes(f"{size}B") == parse_bytes(str(size)) == size


@pytest.mark.parametrize(
    ("size", "text"), [(640, "640 B"), (1024, "1.00 KiB"), (3 * GIB // 2, "1.50 GiB"), (5 * 1024 * GIB, "5.00 TiB")]
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1, 2**50))
def test_what_is_printed_can_be_read_again(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.01)


# -- the plan


@pytest.mark.parametrize(
    ("kv_bytes", "per_token", "page_size", "context", "max_requests", "num_pages"),
    [
        (1000, 10, 1, 1000, 1, 99),  # one page of the hundred is the padding page
        (1000, 10, 4, 1000, 1, 24),
        (1039, 10, 4, 1000, 1, 24),
        (1040, 10, 4, 1000, 1, 25),
        (80, 10, 4, 1000, 1, 1),
        (1000, 10, 4, 10, 2, 6),  # two requests of three pages: more would never be used
        (1000, 10, 16, 1, 1, 1),
    ],
)
def test_pages_of_a_budget(
    kv_bytes: int, per_token: int, page_size: int, context: int, max_requests: int, num_pages: int
) -> None:
    plan = plan_memory(groups(per_token, page_size), kv_bytes=kv_bytes, context=context, max_requests=max_requests)
    assert plan.num_pages == num_pages
    assert plan.pool_bytes == (num_pages + 1) * page_size * per_token <= kv_bytes


def test_the_price_of_a_page_is_that_of_all_its_groups() -> None:
    two = small_plan(3, 4, groups=("full", "window"))
    assert (two.bytes_per_page, two.pool_bytes) == (8, 32)


budgets = st.integers(1, 10_000)


@given(budgets, budgets, st.integers(1, 50), st.sampled_from([1, 2, 3, 16, 64]), st.integers(1, 500), st.integers(1, 9))
def test_more_memory_never_gives_fewer_pages(
    one: int, other: int, per_token: int, page_size: int, context: int, max_requests: int
) -> None:
    found = []
    for kv_bytes in sorted((one, other)):
        try:
            plan = plan_memory(
                groups(per_token, page_size), kv_bytes=kv_bytes, context=context, max_requests=max_requests
            )
        except PlanError:
            found.append(0)
            assert kv_bytes < 2 * per_token * page_size, "refused although a page fits"
        else:
            assert 1 <= plan.num_pages <= max_requests * -(-context // page_size)
            assert plan.pool_bytes <= kv_bytes
            assert plan.num_tokens % page_size == 0
            found.append(plan.num_pages)
    assert found[0] <= found[1]


@given(st.integers(1, 3_000_000), st.sampled_from([1, 3, 16]))
def test_a_refused_budget_names_one_that_works(per_token: int, page_size: int) -> None:
    layout = groups(per_token, page_size)
    with pytest.raises(PlanError, match=r"holds no page") as caught:
        plan_memory(layout, kv_bytes=1, context=1_000, max_requests=1)
    advice = re.search(r"at least ([0-9.]+ [A-Za-z]+) \(2 pages\)", caught.value.fix)
    assert advice is not None
    assert plan_memory(layout, kv_bytes=parse_bytes(advice[1]), context=1_000, max_requests=1).num_pages >= 1


# -- requests


@pytest.mark.parametrize(
    ("num_tokens", "pages"), [(0, 0), (1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)], ids=lambda value: str(value)
)
def test_the_last_output_token_takes_no_room(num_tokens: int, pages: int) -> None:
    assert small_plan(8, 4).pages_of(num_tokens) == pages


@given(st.integers(1, 30), st.integers(1, 8), st.integers(2, 200), st.integers(1, 100), st.integers(1, 100))
def test_the_stated_limit_is_the_limit(pages: int, page_size: int, context: int, prompt: int, max_tokens: int) -> None:
    plan = small_plan(pages, page_size, context=context)
    total = prompt + max_tokens
    if total <= plan.largest_request:
        plan.check_request(prompt, max_tokens)
        assert plan.pages_of(total) <= plan.num_pages
        return
    kind = ContextTooLong if total > context else RequestTooLarge
    with pytest.raises(kind) as caught:
        plan.check_request(prompt, max_tokens)
    follow(plan, caught.value, prompt, max_tokens)


def follow(plan: MemoryPlan, error: InvalidInput, prompt: int, max_tokens: int) -> None:
    """Do what the error advises; then the request is admitted."""
    shorter = re.search(r"prompt to at most ([\d,]+)", error.fix)
    fewer = re.search(r"lower max_tokens to ([\d,]+)", error.fix)
    if shorter is not None:
        plan.check_request(int(shorter[1].replace(",", "")), max_tokens if fewer is None else 1)
    else:
        assert fewer is not None
        plan.check_request(prompt, int(fewer[1].replace(",", "")))


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 5_000), st.integers(20, 90), st.integers(1, 90))
def test_the_memory_that_a_refusal_asks_for_is_enough(
    pages: int, page_size: int, per_token: int, prompt: int, max_tokens: int
) -> None:
    layout = groups(per_token, page_size)
    plan = MemoryPlan(page_size=page_size, groups=layout, num_pages=pages, context=200, max_requests=2)
    try:
        plan.check_request(prompt, max_tokens)
    except RequestTooLarge as error:
        advice = re.search(r"--kv-memory (\S+)\.$", error.fix)
        assert advice is not None
        larger = plan_memory(layout, kv_bytes=parse_bytes(advice[1]), context=200, max_requests=2)
        larger.check_request(prompt, max_tokens)


def test_a_refusal_says_need_have_and_what_would_work() -> None:
    plan = small_plan(10, 16, context=4_096)
    with pytest.raises(RequestTooLarge) as caught:
        plan.check_request(150, 50)
    assert str(caught.value) == (
        "QUIRE-FIT-02: 150 prompt tokens and 50 output tokens need 13 pages of 16 tokens; this server has 10 in all "
        "(176 B of KV memory), so it can never hold more than 161 tokens in one request. "
        "Fix: lower max_tokens to 11, or start the server with at least --kv-memory 1MiB."
    )
    with pytest.raises(
        ContextTooLong, match=r"5,000 prompt tokens .* 5,001; the context is 4,096 .* at most 160 tokens"
    ):
        plan.check_request(5_000, 1)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 5), (3, 0), (3, -1)])
def test_a_request_without_a_prompt_or_an_output_is_refused(prompt: int, max_tokens: int) -> None:
    with pytest.raises(InvalidInput):
        small_plan(10, 16).check_request(prompt, max_tokens)

"""From bytes to pages and from requests to pages: tables, properties, and advice that works when followed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ContextTooLong, InvalidInput, RequestTooLarge
from quire.plan.budget import MemoryPlan, format_bytes
from quire.settings.setting import parse_bytes, parse_tokens
from quire.spec.group import GroupSpec
from quire.spec.hisparse import HotBuffers
from quire.spec.layout import DType, Field, PageLayout
from quire.spec.record_size import records_bytes
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


@pytest.mark.parametrize(
    ("text", "count"), [("32k", 32768), ("1m", 2**20), ("131072", 131072), ("131,072", 131072), (7, 7), ("1.5k", 1536)]
)
def test_parse_tokens(text: str | int, count: int) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "k", "32 km", "-1", "0", 0, "1e3", "0.0001k", True])
def test_what_is_no_number_of_tokens_is_refused(text: str | int) -> None:
    with pytest.raises(InvalidInput, match="tokens"):
        parse_tokens(text)


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


def test_the_price_of_a_page_is_that_of_all_its_groups() -> None:
    two = small_plan(3, 4, groups=("full", "window"))
    assert (two.bytes_per_page, two.pool_bytes) == (8, 32)


def test_frames_of_latents_are_in_host_memory_and_buffers_on_the_device() -> None:
    two = MemoryPlan(
        page_size=4, groups=groups(2, 4) + groups(1, 4), num_pages=50, context=64, max_requests=3, frames=(40, 50)
    )
    hot = replace(two, hot=HotBuffers(group=0, buffer_size=8, top_k=4))
    assert (two.host_bytes, two.hot_frames_per_row) == (0, 0)
    assert (hot.frames_of(0), hot.hot_frames_per_row) == (40, 3)
    assert [hot.device_frames_of(group) for group in range(2)] == [9, 50]
    assert hot.pool_bytes == 10 * 8 + 51 * 4
    assert hot.host_bytes == records_bytes(two.groups[:1], [40])


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
        frames = parse_bytes(advice[1]) // (per_token * page_size)
        replace(plan, num_pages=frames - 1).check_request(prompt, max_tokens)


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


def test_what_never_fits_names_host_memory_if_latents_are_there() -> None:
    layout = small_plan(4, 16, groups=("full", "indexer"))
    hot = replace(layout, hot=HotBuffers(group=0, buffer_size=16, top_k=8), context=4096)
    with pytest.raises(RequestTooLarge, match=r"of latents in host memory\), so it can never hold") as refused:
        hot.check_request(1000, 100)
    assert "--kv-memory 1MiB and --host-memory 1MiB" in refused.value.fix

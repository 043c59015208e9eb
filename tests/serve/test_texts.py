"""Texts of prompts: for the admin key of a server that is told to keep them, and for no one else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import InvalidInput
from quire.observe.explain import Cause, Reason
from quire.serve.config import ServerConfig
from quire.serve.texts import PromptTexts
from tests.serve.fake_core import ByteTokenizer
from tests.serve.live_server import LiveServer

PROMPT = "A prompt that a server may keep: café, <b>no markup</b>. " * 3
KEYS = ("--api-key", "client", "--admin-key", "operator")


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[LiveServer]:
    """It keeps some 600 tokens of prompts; each prompt counts as 64 more than it has."""
    with LiveServer.quire("--model", str(tiny_model), *KEYS, "--kept-texts", "2400") as server:
        yield server


def complete(live: LiveServer, prompt: str, **more: Any) -> str:
    headers = {"Authorization": "Bearer client"}
    status, answer = live.request("/v1/completions", {"prompt": prompt, "max_tokens": 1, **more}, headers=headers)
    assert status == 200, answer
    return str(answer["id"])


def explained(live: LiveServer, request_id: str, key: str = "operator", query: str = "?texts=true") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    status, answer = live.request(f"/v1/cache/explain/{request_id}{query}", headers=headers)
    assert status == 200, answer
    return dict(answer["explanations"][0])


def test_the_operator_reads_the_text_of_each_reason(live: LiveServer) -> None:
    complete(live, PROMPT)
    told = explained(live, complete(live, PROMPT + "And more.", n=2))
    assert told["reasons"][0]["cause"] == "hit"
    assert len(told["texts"]) == len(told["reasons"]) and "".join(told["texts"]) == PROMPT + "And more."


def test_no_other_key_reads_it_and_nothing_tells_it_unasked(live: LiveServer) -> None:
    request_id = complete(live, PROMPT)
    assert "texts" not in explained(live, request_id, "client")
    assert "texts" not in explained(live, request_id, query="")
    assert "markup" not in live.log()


def test_memory_is_bounded_and_the_last_prompts_stay(live: LiveServer) -> None:
    first, second, third = (complete(live, f"{number}{PROMPT}") for number in range(3))
    assert explained(live, first)["texts"] == []
    assert "".join(explained(live, third)["texts"]) == f"2{PROMPT}"
    large = complete(live, "x" * 500)
    assert "".join(explained(live, large)["texts"]) == "x" * 500
    for request_id in (second, third):
        assert explained(live, request_id)["texts"] == []


@pytest.mark.parametrize(("path", "body"), [("/v1/cache/flush", {"cache_salt": "mine"}), ("/flush_cache", {})])
def test_what_is_flushed_is_kept_no_longer(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    request_id = complete(live, "short", cache_salt="mine")
    assert explained(live, request_id)["texts"] == ["short"]
    assert live.request(path, body, headers={"Authorization": "Bearer operator"})[0] == 200
    assert explained(live, request_id)["texts"] == []


def test_a_server_that_is_not_told_keeps_none(tiny_model: Path) -> None:
    with LiveServer.quire("--model", str(tiny_model), *KEYS) as live:
        assert explained(live, complete(live, PROMPT))["texts"] == []


def test_a_prompt_without_room_takes_that_of_no_other() -> None:
    texts, reason = PromptTexts(400), Reason(Cause.NEW, 0, 20)
    texts.keep("small", np.full(20, 65, dtype=np.int32))
    texts.keep("large", np.full(200, 66, dtype=np.int32))
    assert texts.beside([reason], "small-0", ByteTokenizer()) == ["A" * 20]
    assert texts.beside([reason], "large-0", ByteTokenizer()) == []


def test_texts_need_a_key_of_the_operator() -> None:
    with pytest.raises(InvalidInput, match="admin key alone"):
        ServerConfig(kept_texts=1 << 20, api_key="client").keys()

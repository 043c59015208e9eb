"""Errors in the form of each dialect, wherever they are raised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.messages import WireError
from quire.errors import ContextTooLong, UnknownModel
from quire.serve.config import LEAST_BODY_BYTES
from quire.serve.errors import ANTHROPIC, OPENAI, form_of
from tests.routing.live_router import LiveRouter
from tests.serve.fake_core import CONTEXT
from tests.serve.live_server import LiveServer

LONG = {"prompt": "a" * 2 * CONTEXT, "max_tokens": 3}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with LiveServer.echo(api_key="secret") as server:
        yield server


def has_form(answer: Any, kind: str) -> bool:
    return set(answer) == {"type", "error", "request_id"} and (answer["type"], answer["error"]["type"]) == (
        "error",
        kind,
    )


def test_each_failure_below_messages_is_anthropics(live: LiveServer) -> None:
    key, mine = {"x-api-key": "secret"}, {"X-Request-Id": "mine"}
    asked: list[tuple[str, dict[str, Any], int, str]] = [
        ("/v1/messages", {"headers": {}, "body": {}}, 401, "authentication_error"),
        ("/v1/messages/batches", {"headers": key}, 404, "not_found_error"),
        (
            "/v1/messages?beta=true",
            {"headers": key | {"Content-Length": "9" * 12}, "raw": b""},
            413,
            "request_too_large",
        ),
    ]
    for path, how, status, kind in asked:
        got, headers, answer = live.exchange(path, **how | {"headers": how["headers"] | mine})
        assert got == status and has_form(answer, kind), answer
        assert answer["request_id"] == headers["request-id"] == headers["x-request-id"] == "mine"
    assert "error" in live.request("/v1/messagesx", headers=key)[1] and form_of("/v1/messagesx") is OPENAI


def test_what_a_router_says_itself_has_the_form_of_the_path() -> None:
    with LiveServer.echo(max_restarts=0) as server, LiveRouter([server]) as router:
        server.close()
        status, answer = router.request("/v1/messages", {})
        assert status == 503 and has_form(answer, "overloaded_error"), answer
        status, answer = router.request("/v1/completions", {})
        assert status == 503 and answer["error"]["type"] == "service_unavailable_error"


def test_keys_are_taken_from_either_header(live: LiveServer) -> None:
    for headers in ({"Authorization": "Bearer secret"}, {"X-Api-Key": "secret"}):
        assert live.request("/v1/models", headers=headers)[0] == 200
    for headers in ({}, {"Authorization": "secret"}, {"X-Api-Key": "Bearer secret"}, {"X-Api-Key": "wrong"}):
        assert live.request("/v1/models", headers=headers)[0] == 401


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(live: LiveServer) -> None:
    status, answer = live.request("/v1/completions", LONG, headers={"X-Api-Key": "secret"})
    error = answer["error"]
    assert (status, error["code"], error["quire_code"]) == (400, "context_length_exceeded", "QUIRE-CONTEXT-01")
    assert f"This model's maximum context length is {CONTEXT} tokens." in error["message"]
    raised = ContextTooLong("too many.", tokens=700, context=512, fix="shorten it.")
    arrived = WireError.of(raised).rebuild()
    told = ANTHROPIC.body(arrived, "mine")
    assert told["error"]["message"] == "prompt is too long: 699 tokens > 511 maximum. too many. Fix: shorten it."
    assert ANTHROPIC.last_events(told).startswith(b'event: error\ndata: {"type":"error"')


def test_details_of_an_error_are_told() -> None:
    error = UnknownModel("gone.")
    vars(error)["details"] = {"error_code": "x"}
    assert ANTHROPIC.body(error, "")["error"]["details"] == {"error_code": "x"}


def test_a_body_without_its_type_is_told_so(live: LiveServer) -> None:
    headers = {"X-Api-Key": "secret", "Content-Type": "application/x-www-form-urlencoded"}
    status, answer = live.request("/v1/completions", raw=json.dumps(LONG).encode(), headers=headers)
    assert status == 400
    assert "sent as application/x-www-form-urlencoded" in answer["error"]["message"]


def test_every_get_route_answers_head_and_options(live: LiveServer) -> None:
    key = {"X-Api-Key": "secret"}
    for path in live.request("/openapi.json")[1]["paths"]:
        if "{" in path:
            continue
        status, headers, _ = live.exchange(path, method="OPTIONS", headers=key)
        assert status == 204 and "OPTIONS" in headers["Allow"], path
        answers = [live.exchange(path, method=method, headers=key) for method in ("HEAD", "GET")]
        assert answers[0][0] == answers[1][0] and not answers[0][2], path
        assert (answers[0][0] == 405) == ("GET" not in headers["Allow"]), path
    status, answer = live.request("/v1/nope", headers=key)
    assert (status, answer["error"]["code"]) == (404, "QUIRE-SERVE-05")
    assert live.request("/v1/models", {}, headers=key)[0] == 405
    assert live.request("/v1/completions", {"prompt": "a" * LEAST_BODY_BYTES}, headers=key)[0] == 413


def test_a_missed_deadline_is_not_tried_again(live: LiveServer) -> None:
    body = {"prompt": "ab", "max_tokens": 400, "timeout_s": 1e-6}
    status, headers, answer = live.exchange("/v1/completions", body, headers={"X-Api-Key": "secret"})
    assert (status, headers["x-should-retry"]) == (408, "false"), answer

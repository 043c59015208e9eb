"""Sessions over HTTP, on the real server and engine: turns compute their new tokens, and tenants have their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.serve.live_server import LiveServer


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[LiveServer]:
    """Pages of 16 tokens."""
    options = ("--kv-memory", "200KiB", "--max-model-len", "256", "--session-ttl", "60")
    with LiveServer.quire("--model", str(tiny_model), *options) as server:
        yield server
        server.terminate()
        assert server.wait() == 0, server.log()


def turn(live: LiveServer, prompt: list[int], session: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True, "session_id": session}
    status, answer = live.request("/v1/completions", body | more)
    assert status == 200, answer
    return dict(answer)


def test_turns_compute_their_new_tokens(live: LiveServer) -> None:
    history = list(range(5, 42))
    held = 0
    for at in range(3):
        answer = turn(live, history, "a", ignore_eos=True)
        [choice] = answer["choices"]
        plain = turn(live, history, "", session_id=None, ignore_eos=True, cache_salt=f"fresh {at}")["choices"][0]
        assert choice["token_ids"] == plain["token_ids"] and "session" not in plain
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == held
        grant = choice["session"]
        assert grant["resumed_tokens"] == held and grant["start"] == ("continued" if at else "new")
        assert grant["held_tokens"] == len(history) + 5 and 0 < grant["expires_in_seconds"] <= 60
        held, history = grant["held_tokens"], [*history, *choice["token_ids"], 7, 8, 9]
    status, found = live.request("/v1/sessions")
    assert status == 200
    [session] = found["sessions"]
    assert session["session_id"] == "a" and session["saved_tokens"] > session["partial_tokens"] > 0
    assert found["held_tokens"] == session["held_tokens"] == held
    assert live.request("/v1/sessions?cache_salt=other")[1]["sessions"] == []
    assert live.request("/v1/sessions/a?cache_salt=other", method="DELETE")[1]["closed"] is False
    assert live.request("/v1/sessions/a", method="DELETE") == (200, {"session_id": "a", "closed": True})
    assert live.request("/v1/sessions")[1]["sessions"] == []


def test_a_turn_that_ends_on_a_stop_string_says_what_is_held(live: LiveServer) -> None:
    prompt = list(range(5, 42))
    text = turn(live, prompt, "b", ignore_eos=True, max_tokens=12)["choices"][0]["text"]
    stop = text[2:4]
    answer = turn(live, prompt, "b", ignore_eos=True, max_tokens=12, stop=stop)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    assert choice["session"]["held_tokens"] >= len(prompt), choice


@pytest.mark.parametrize("name", ["user/42", "a b?c#d", "..", "/", "é%2F"])
def test_a_session_is_closed_whatever_its_name_is(live: LiveServer, name: str) -> None:
    assert turn(live, [5, 6, 7], name)["choices"][0]["session"]["held_tokens"] > 0
    status, answer = live.request(f"/v1/sessions/{quote(name, safe='')}", method="DELETE")
    assert (status, answer) == (200, {"session_id": name, "closed": True})


def test_the_last_turn_closes_its_session(live: LiveServer) -> None:
    history = list(range(60, 100))
    assert turn(live, history, "d")["choices"][0]["session"]["held_tokens"] > 0
    [choice] = turn(live, [*history, 7], "d", last_turn=True)["choices"]
    assert choice["session"]["resumed_tokens"] > 0 and choice["session"]["held_tokens"] == 0
    assert "d" not in [each["session_id"] for each in live.request("/v1/sessions")[1]["sessions"]]
    assert live.request("/v1/sessions/d", method="DELETE")[1]["closed"] is False
    status, answer = live.request("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "last_turn": True})
    assert status == 400 and answer["error"]["param"] == "last_turn", answer


def test_a_session_follows_one_sequence(live: LiveServer) -> None:
    for more in ({"n": 2}, {"prompt": [[5, 6], [7, 8]]}):
        body = {"prompt": [5, 6], "max_tokens": 2, "session_id": "c"} | more
        status, answer = live.request("/v1/completions", body)
        assert status == 400 and answer["error"]["param"] == "session_id", answer
    status, answer = live.request("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "session_id": ""})
    assert status == 400 and answer["error"]["param"] == "session_id", answer


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 2},
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}},
}
CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
}


def named(live: LiveServer, route: str, body: dict[str, Any], session: str) -> tuple[int, dict[str, Any]]:
    status, answer = live.request(route, body, headers={"X-Quire-Session": session})
    return status, dict(answer)


@pytest.mark.parametrize("route", [*ROUTES, *CHATS])
def test_a_header_names_the_session_and_its_last_turn(live: LiveServer, route: str) -> None:
    body, name = (ROUTES | CHATS)[route], f"of {route}"
    for _ in range(2):
        status, answer = named(live, route, body, name)
        assert status == 200, answer
        assert name in [each["session_id"] for each in live.request("/v1/sessions")[1]["sessions"]]
    status, answer = named(live, route, body, f"{name}; last")
    assert status == 200, answer
    assert name not in [each["session_id"] for each in live.request("/v1/sessions")[1]["sessions"]]


@pytest.mark.parametrize("value", ["", ";last", "a; first", "a;", "a; last; last", "x" * 257, "a\tb"])
def test_a_header_that_names_no_session_is_refused(live: LiveServer, value: str) -> None:
    status, answer = named(live, "/v1/completions", ROUTES["/v1/completions"], value)
    assert status == 400 and answer["error"]["param"] == "X-Quire-Session", answer


def test_a_header_and_a_body_name_the_same_session(live: LiveServer) -> None:
    body = ROUTES["/v1/completions"] | {"session_id": "both"}
    status, answer = named(live, "/v1/completions", body, "another")
    assert status == 400 and answer["error"]["param"] == "X-Quire-Session", answer
    assert named(live, "/v1/completions", body, "both; last")[0] == 200
    assert live.request("/v1/sessions/both", method="DELETE")[1]["closed"] is False


def test_the_policy_knows_which_outputs_have_reached_their_limit(live: LiveServer) -> None:
    def told() -> int:
        return int(live.request("/v1/cache/statistics")[1]["eviction"]["told_endings"]["length"])

    before = told()
    turn(live, list(range(30, 70)), "", session_id=None, ignore_eos=True, max_tokens=3)
    assert told() == before + 1

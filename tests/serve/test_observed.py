"""What an operator sees of requests: metrics as dashboards know them, log lines, ids."""

from __future__ import annotations

import http.client
import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import __version__
from quire.serve.openapi import ChatAnswer, CompletionAnswer, ErrorAnswer
from tests.serve.live_server import LiveServer

REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"


def samples(server: LiveServer) -> dict[tuple[str, ...], float]:
    """By name and label values; each sample says of which model."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(server.request("/metrics")[1]):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            found[(sample.name, *labels.values())] = sample.value
    return found


def grown(server: LiveServer, body: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """What a request adds to the samples."""
    server.wait_idle()
    before = samples(server)
    assert server.request("/v1/completions", body)[0] == 200
    server.wait_idle()
    return {key: value - before.get(key, 0.0) for key, value in samples(server).items()}


def test_a_request_is_timed_and_counted(server: LiveServer) -> None:
    more = grown(server, {"prompt": "What dashboards know", "max_tokens": 5, "ignore_eos": True, "n": 2})
    assert more[("quire_time_to_first_token_seconds_count",)] == 1
    assert more[("quire_inter_token_latency_seconds_count",)] == 2 * 4
    assert more[("quire_request_latency_seconds_count",)] == 1
    assert more[("quire_request_queue_time_seconds_count",)] == 2
    assert more[("quire_request_prompt_tokens_sum",)] == 20
    assert more[("quire_request_generation_tokens_sum",)] == 10
    assert more[("quire_request_generation_tokens_bucket", "5.0")] == 0
    assert more[("quire_request_generation_tokens_bucket", "10.0")] == 1
    assert more[("quire_request_success_total", "length")] == 2
    now = samples(server)
    assert now[("quire_build_info", __version__)] == 1
    assert now[("quire_kv_cache_usage_ratio",)] == 0, "what could be evicted counts as free"


def test_what_requests_hold_is_in_use(server: LiveServer) -> None:
    body = {"prompt": "x" * 50, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with server.open_request("/v1/completions", body) as connection:
        connection.recv(100)
        assert 0.1 < samples(server)[("quire_kv_cache_usage_ratio",)] <= 1
    server.wait_idle()


def test_the_reference_maps_names_that_exist(server: LiveServer) -> None:
    server.request("/v1/completions", {"prompt": "a", "max_tokens": 1})
    known = {key[0] for key in samples(server)}
    rows = re.findall(r"^\| `(vllm:\w+)` \| `(quire_\w+)`", REFERENCE.read_text(), re.MULTILINE)
    assert len(rows) > 10
    for _, name in rows:
        assert {name, f"{name}_count"} & known, name


def request_id(server: LiveServer, headers: dict[str, str]) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/v1/models", headers=headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.headers["X-Request-Id"]


def test_a_request_id_comes_back(server: LiveServer) -> None:
    assert request_id(server, {"X-Request-Id": "trace-17/a"}) == "trace-17/a"
    for bad in ({}, {"X-Request-Id": "with space"}, {"X-Request-Id": "x" * 200}):
        assert re.fullmatch(r"[0-9a-f]{32}", request_id(server, bad))


def test_the_openapi_document_says_what_is_sent(server: LiveServer) -> None:
    document = server.request("/openapi.json")[1]
    assert document["info"]["version"] == __version__
    for methods in document["paths"].values():
        for route in methods.values():
            assert {"400", "401", "404", "413", "503"} <= set(route["responses"]) and "422" not in route["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    body = {"max_tokens": 2, "logprobs": 1, "return_token_ids": True, "explain": True, "prompt": "a", "n": 2}
    CompletionAnswer.model_validate(server.request("/v1/completions", body)[1], extra="forbid")
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    ChatAnswer.model_validate(server.request("/v1/chat/completions", body)[1], extra="forbid")
    ErrorAnswer.model_validate(server.request("/v1/completions", {})[1], extra="forbid")


def test_pages_of_named_origins_may_call() -> None:
    def asked(live: LiveServer, origin: str) -> tuple[int, str | None]:
        connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        connection.request("OPTIONS", "/v1/completions", headers=headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status, answer.headers["Access-Control-Allow-Origin"]

    with LiveServer.echo("--api-key", "k", "--cors-origins", "https://a.example, https://b.example") as live:
        assert asked(live, "https://b.example") == (200, "https://b.example")
        assert asked(live, "https://c.example") == (400, None)
    with LiveServer.echo() as live:
        assert asked(live, "https://b.example") == (405, None)


def test_requests_and_the_end_are_logged() -> None:
    with LiveServer.echo("--drain", "0.5") as live:
        status, answer = live.request(
            "/v1/completions", {"prompt": "abc", "max_tokens": 4}, headers={"X-Request-Id": "trace-1"}
        )
        assert status == 200
        live.request("/v1/completions", {"max_tokens": 4}, headers={"X-Request-Id": "trace-2"})
        live.terminate()
        assert live.wait() == 0
        log = live.log()
    line = next(line for line in log.splitlines() if "trace-1" in line)
    assert re.search(
        rf"{answer['id']} \[trace-1\]: 3 prompt tokens, 0 cached, 4 output tokens, "
        r"first after 0\.\d{3} s, 0\.\d{3} s, length$",
        line,
    )
    assert "POST /v1/completions: 400 [trace-2]" in log
    assert "SIGTERM: no new requests; open ones get 0.5 s to finish" in log


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_an_abort(server: LiveServer, stream: bool) -> None:
    before = samples(server)[("quire_request_success_total", "abort")]
    body = {"prompt": "leave", "max_tokens": 300, "ignore_eos": True, "stream": stream}
    with server.open_request("/v1/completions", body):
        for _ in range(200):
            if server.statistics()["running_requests"]:
                break
            time.sleep(0.005)
    server.wait_idle()
    assert samples(server)[("quire_request_success_total", "abort")] == before + 1

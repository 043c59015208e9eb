"""What an operator sees of requests: metrics as dashboards know them, log lines, ids."""

from __future__ import annotations

import http.client
import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from quire import __version__
from quire.serve.answers import ChatAnswer, CompletionAnswer, ErrorAnswer
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


def test_names_of_vllm_have_the_same_samples(drafting: LiveServer) -> None:
    """Each that the reference maps, but those of engines with a role, which have another form."""
    drafting.request("/v1/completions", {"prompt": "a", "max_tokens": 1})
    found = samples(drafting)

    def of(name: str) -> dict[tuple[str, ...], float]:
        parts = {name + end: end for end in ("", "_bucket", "_sum", "_count")}
        return {(parts[key[0]], *key[1:]): value for key, value in found.items() if key[0] in parts}

    rows = re.findall(r"^\| `(vllm:\w+)` \| `(quire_\w+)`", REFERENCE.read_text(), re.MULTILINE)
    mapped = {theirs: ours for theirs, ours in rows if not ours.startswith("quire_transfer_")}
    assert len(mapped) >= 20
    for theirs, ours in mapped.items():
        assert of(theirs) == of(ours) != {}, theirs
    config = next(key for key in found if key[0] == "vllm:cache_config_info")
    assert config[1:] == ("16", str(drafting.summary["num_pages"]))


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


def check(kind: type, answer: object) -> None:
    TypeAdapter(kind).validate_python(answer, extra="forbid")


def test_the_openapi_document_says_what_is_sent(server: LiveServer) -> None:
    document = server.request("/openapi.json")[1]
    assert document["info"]["version"] == __version__
    for methods in document["paths"].values():
        for route in methods.values():
            assert {"400", "401", "404", "413", "503"} <= set(route["responses"]) and "422" not in route["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    body = {"max_tokens": 2, "logprobs": 1, "return_token_ids": True, "explain": True, "prompt": "a", "n": 2}
    check(CompletionAnswer, server.request("/v1/completions", body)[1])
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    check(ChatAnswer, server.request("/v1/chat/completions", body)[1])
    check(ErrorAnswer, server.request("/v1/completions", {})[1])


def test_pages_of_named_origins_may_call() -> None:
    def asked(live: LiveServer, origin: str) -> tuple[int, str | None]:
        connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        connection.request("OPTIONS", "/v1/completions", headers=headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status, answer.headers["Access-Control-Allow-Origin"]

    with LiveServer.echo(api_key="k", cors_origins="https://a.example, https://b.example") as live:
        assert asked(live, "https://b.example") == (200, "https://b.example")
        assert asked(live, "https://c.example") == (400, None)
    with LiveServer.echo() as live:
        assert asked(live, "https://b.example") == (204, None)  # the methods of the route, and no leave for a page


def test_requests_and_the_end_are_logged() -> None:
    with LiveServer.echo(drain_s=0.5) as live:
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


def test_drafts_are_counted_by_request_and_in_all(drafting: LiveServer) -> None:
    """The usage of requests, their lines in the log, and the metrics say the same. Of the two, one draws one token
    again and again, and the other tokens that are in its prompt in another order."""
    drafting.wait_idle()
    before, accepted, rejected = samples(drafting), 0, 0
    for more_fields in ({"prompt": "abc", "logit_bias": {"97": 100}}, {"prompt": list(range(256))}):
        body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, **more_fields}
        status, answer = drafting.request("/v1/completions", body)
        assert status == 200, answer
        check(CompletionAnswer, answer)
        assert answer["usage"]["completion_tokens"] == 200
        details = answer["usage"]["completion_tokens_details"]
        right, wrong = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        line = next(line for line in drafting.log().splitlines() if answer["id"] in line)
        assert f"200 output tokens, {right} of {right + wrong} drafts accepted, first" in line
        accepted, rejected = accepted + right, rejected + wrong
    assert accepted > 0 < rejected, "no draft was accepted or none was rejected, so this shows little"
    statistics = drafting.wait_idle()
    more = {key: value - before.get(key, 0.0) for key, value in samples(drafting).items()}
    assert more[("quire_spec_decode_num_draft_tokens_total",)] == accepted + rejected
    in_all = more[("quire_spec_decode_num_accepted_tokens_total",)]
    assert accepted <= in_all <= accepted + 6, "the last drafts of each may be right, and behind the end"
    by_place = [more[("quire_spec_decode_num_accepted_tokens_per_pos_total", str(at))] for at in range(4)]
    assert sum(by_place) == in_all and sorted(by_place, reverse=True) == by_place
    assert by_place[0] <= more[("quire_spec_decode_num_drafts_total",)] <= accepted + rejected
    found = statistics["speculation"]
    assert found["tokens_per_step"] == pytest.approx(samples(drafting)[("quire_spec_decode_tokens_per_step",)])
    assert 1 < found["tokens_per_step"] <= 5


def test_without_speculation_nothing_is_said_of_drafts(server: LiveServer) -> None:
    answer = server.request("/v1/completions", {"prompt": "abab", "max_tokens": 4})[1]
    assert "completion_tokens_details" not in answer["usage"]
    assert not [name for name, *_ in samples(server) if "spec_decode" in name]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_an_abort(server: LiveServer, stream: bool) -> None:
    before = samples(server)[("quire_request_success_total", "abort")]
    body = {"prompt": "leave", "max_tokens": 300, "ignore_eos": True, "stream": stream}
    with server.open_request("/v1/completions", body):
        while not server.statistics()["running_requests"]:
            time.sleep(0.005)
    server.wait_idle()
    assert samples(server)[("quire_request_success_total", "abort")] == before + 1

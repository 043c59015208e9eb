"""Spans of requests, as a collector of OpenTelemetry gets them from real servers."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config import EngineConfig
from quire.errors import InvalidInput
from quire.serve.tracing import open_tracing
from tests.routing.live_router import LiveRouter
from tests.serve.live_server import LiveServer
from tests.serve.test_tiers import REUSABLE, TIERS, ask, from_tiers

trace_service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="it comes with the extra otel"
)
SMALL = ("--host-memory", "400KiB")  # four prompts
ENDED = ["queue", "match", "prefill", "decode"]


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP, and has them as they arrived."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Take(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                taken = trace_service.ExportTraceServiceRequest()
                taken.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in taken.resource_spans:
                    names = {each.key: each.value.string_value for each in resource.resource.attributes}
                    collector.services.add(names["service.name"])
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Take)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def request(self, answer: dict[str, Any]) -> tuple[Any, list[Any]]:
        """The span of an answered request, and those inside it in the order of their begin."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            for span in [*self.spans]:
                if attributes(span).get("gen_ai.response.id") == answer["id"]:
                    inside = [each for each in self.spans if each.parent_span_id == span.span_id]
                    return span, sorted(inside, key=lambda each: each.start_time_unix_nano)
            time.sleep(0.02)
        raise AssertionError("no such span has arrived")


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def traced(tiny_model: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a pool of one prompt, a host tier and a store. Spans are sent ten times a second."""
    plain = (
        "--model",
        str(tiny_model),
        "--dtype",
        "float32",
        "--kv-memory",
        "130KiB",
        "--eviction",
        "lru",
        *TIERS,
        *SMALL,
    )
    where = str(tmp_path_factory.mktemp("stores") / "pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with LiveServer.quire(*plain, "--storage", where, "--otlp-traces-endpoint", collector.url) as live:
            yield live


def test_a_request_is_a_span_with_its_parts_inside(traced: LiveServer, collector: Collector) -> None:
    answer = ask(traced, 1)
    request, inside = collector.request(answer)
    assert [span.name for span in inside if span.name != "fetch"] == ENDED and collector.services == {"quire"}
    assert not request.parent_span_id and {span.trace_id for span in inside} == {request.trace_id}
    found = attributes(request)
    assert found["gen_ai.usage.input_tokens"] == 320 and found["gen_ai.usage.output_tokens"] == 8
    assert abs(request.start_time_unix_nano / 1e9 - time.time()) < 120
    moments = [request.start_time_unix_nano]
    for span in inside:
        if span.name != "fetch":
            assert moments[-1] <= span.start_time_unix_nano <= span.end_time_unix_nano
            moments.append(span.end_time_unix_nano)
    assert moments[-1] <= request.end_time_unix_nano
    queue, match, prefill, decode = (span for span in inside if span.name != "fetch")
    assert queue.end_time_unix_nano == match.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano


def test_more_tokens_are_no_more_spans(traced: LiveServer, collector: Collector) -> None:
    for count in (2, 40):
        _, inside = collector.request(ask(traced, 2, max_tokens=count))
        assert [span.name for span in inside if span.name != "fetch"] == ENDED


def test_loads_say_from_where(traced: LiveServer, collector: Collector) -> None:
    ask(traced, 3)
    ask(traced, 4)  # takes the place of the third
    answer = ask(traced, 3)
    by_tier = from_tiers(answer)
    _, inside = collector.request(answer)
    by_name = {span.name: attributes(span) for span in inside}
    assert by_name["match"]["quire.cached_tokens"] == REUSABLE
    assert by_name["load"]["quire.loaded_tokens"] == by_tier["host"] + by_tier["storage"] > 0


def test_what_comes_from_the_store_is_fetched_in_a_span(traced: LiveServer, collector: Collector) -> None:
    for number in range(10, 16):  # more than the host has room for
        ask(traced, number)
    _, inside = collector.request(ask(traced, 10))
    by_name = {span.name: span for span in inside}
    assert attributes(by_name["fetch"])["quire.storage_tokens"] == REUSABLE
    assert by_name["queue"].start_time_unix_nano <= by_name["fetch"].start_time_unix_nano
    assert by_name["fetch"].end_time_unix_nano <= by_name["match"].end_time_unix_nano


def test_each_sequence_has_spans_of_its_own(traced: LiveServer, collector: Collector) -> None:
    _, inside = collector.request(ask(traced, 5, n=2))
    names = [(attributes(span)["quire.sequence"], span.name) for span in inside if span.name != "fetch"]
    assert sorted(names) == sorted((index, name) for index in (0, 1) for name in ENDED)


def test_the_span_of_a_client_is_the_parent_also_behind_a_router(traced: LiveServer, collector: Collector) -> None:
    body = {"prompt": "abc", "max_tokens": 2}
    with LiveRouter([traced]) as router:
        for at, server in enumerate((traced, router)):
            trace, span = f"{at + 1:032x}", f"{at + 7:016x}"
            headers = {"traceparent": f"00-{trace}-{span}-01"}
            status, answer = server.request("/v1/completions", body, headers=headers)
            assert status == 200
            request, inside = collector.request(answer)
            assert (request.trace_id.hex(), request.parent_span_id.hex()) == (trace, span)
            assert {each.trace_id for each in inside} == {request.trace_id}


def test_a_client_that_samples_nothing_has_no_spans(traced: LiveServer, collector: Collector) -> None:
    headers = {"traceparent": f"00-{9:032x}-{9:016x}-00"}
    assert traced.request("/v1/completions", {"prompt": "abc", "max_tokens": 2}, headers=headers)[0] == 200
    collector.request(ask(traced, 6))
    assert not [span for span in collector.spans if span.trace_id.hex() == f"{9:032x}"]


def test_an_unreadable_parent_is_none(traced: LiveServer, collector: Collector) -> None:
    headers = {"traceparent": "00-zz\u00e9-1-01", "tracestate": ",=,"}
    status, answer = traced.request("/v1/completions", {"prompt": "abc", "max_tokens": 2}, headers=headers)
    assert status == 200 and not collector.request(answer)[0].parent_span_id


def test_a_collector_that_is_gone_holds_nothing(tiny_model: Path) -> None:
    options = ("--kv-memory", "100KiB", "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces")
    with LiveServer.quire("--model", str(tiny_model), *options) as live:
        for _ in range(3):
            assert live.request("/v1/completions", {"prompt": "abc", "max_tokens": 2})[0] == 200
        live.terminate()
        began = time.monotonic()
        assert live.wait() == 0 and time.monotonic() - began < 15


def test_it_is_off_unless_asked_for_and_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracing(EngineConfig()) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidInput, match=r"quire-kv\[otel\]"):
        open_tracing(EngineConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"))

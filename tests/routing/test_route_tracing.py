"""Spans of a router, as a collector of OpenTelemetry gets them: which servers were asked, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.routing.chooser import Cheapest
from quire.routing.config import ClusterConfig
from quire.routing.tracing import RouteTracing, SentRoutes, open_routes
from quire.routing.upstream import Preference, Upstream, preferred
from tests.routing.live_router import LiveRouter
from tests.routing.test_relay import body, echo
from tests.serve.live_server import LiveServer
from tests.serve.test_tracing import Collector, attributes

CLIENT = f"00-{5:032x}-{6:016x}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found
        found.shutdown()


def routes(collector: Collector, servers: list[LiveServer], *requests: tuple[dict[str, Any], str]) -> list[Any]:
    """The router's spans, in the order of these requests: a body and its `traceparent`."""
    tracing = SentRoutes(collector.url, "quire-router")
    with LiveRouter(servers, tracing=tracing) as router:
        for given, parent in requests:
            assert router.request("/v1/completions", given, headers={"traceparent": parent} if parent else {})[0] == 200
    tracing.close()
    return [span for span in collector.spans if span.name == "route"]


def told(span: Any) -> list[tuple[str, str]]:
    """Name of each event, and why."""
    return [(each.name, attributes(each).get("quire.why", "")) for each in span.events]


def test_a_span_says_who_answered_and_why(collector: Collector) -> None:
    plain, turn = {"prompt": "abc", "max_tokens": 2}, {"prompt": "abc", "max_tokens": 2, "session_id": "s"}
    with echo() as first, echo() as second:
        found = routes(collector, [first, second], (plain, ""), (plain, CLIENT), (turn, ""))
    assert [told(span) for span in found] == [
        [("asked", "beginning")],
        [("asked", "beginning")],
        [("asked", "session")],
    ]
    one, again, _ = (attributes(span) for span in found)
    assert one["quire.server"] == again["quire.server"] in ("decode-0", "decode-1")
    assert one["url.path"] == "/v1/completions"
    assert not found[0].parent_span_id and collector.services == {"quire-router"}
    assert (found[1].trace_id.hex(), found[1].parent_span_id.hex()) == tuple(CLIENT.split("-")[1:3])


def test_servers_that_are_lost_are_events(collector: Collector) -> None:
    servers = [echo() for _ in range(3)]
    try:
        [span] = routes(collector, servers, (body(prompt="a late crash"), ""))
    finally:
        for server in servers:
            server.close()
    assert [name for name, _ in told(span)] == ["asked", "lost", "asked", "lost", "failed"]
    assert told(span)[2][1] == "failover" and span.status.code == span.status.STATUS_CODE_ERROR
    names = [attributes(each)["quire.server"] for each in span.events[:4]]
    assert names[0] == names[1] != names[2] == names[3] == attributes(span)["quire.server"]


def test_the_span_of_a_server_is_inside(collector: Collector) -> None:
    options = ("--kv-memory", "1MiB", "--otlp-traces-endpoint", collector.url)
    given = {"prompt": "abc", "max_tokens": 2}
    with LiveServer.quire(*options) as live:
        [route] = routes(collector, [live], (given, CLIENT), (given, CLIENT[:-1] + "0"))
        live.terminate()
        live.wait()
    [request] = [span for span in collector.spans if span.name == "request"]
    assert (request.trace_id, request.parent_span_id) == (route.trace_id, route.span_id)


def test_what_is_no_request_for_tokens_has_no_span(collector: Collector) -> None:
    tracing = SentRoutes(collector.url, "quire-router")
    with echo() as server, LiveRouter([server], tracing=tracing) as router:
        assert router.request("/v1/models")[0] == 200
    tracing.close()
    assert collector.spans == []


def test_why_a_server_is_the_first() -> None:
    upstreams = [Upstream(name=f"u{number}", role="engine", url="") for number in range(3)]
    for each in upstreams:
        each.works()
    first = preferred(upstreams, b"key")[0]
    assert Preference(b"key").why(first, upstreams) == {"why": "beginning"}
    assert Preference(b"key", stays=True).why(first, upstreams) == {"why": "session"}
    first.in_flight = 9
    assert Preference(b"key").why(preferred(upstreams, b"key")[0], upstreams) == {"why": "share"}
    first.fails("is gone")
    assert Preference(b"key").why(preferred(upstreams, b"key")[0], upstreams) == {"why": "beginning"}
    first.events, first.num_waiting = ("a", "b"), 7.0
    cheapest = Cheapest(b"key", num_tokens=100, lacks={("a", "b"): 40})
    expected = {"why": "tokens", "prompt_tokens": 100, "lacks": 40, "waiting": 7}
    assert cheapest.why(first, upstreams) == expected


def test_it_is_off_unless_asked_for() -> None:
    tracing = open_routes(ClusterConfig())
    assert type(tracing) is RouteTracing
    scope = {"method": "POST", "headers": [(b"traceparent", CLIENT.encode())]}
    tracing.begin(scope)
    assert scope["headers"] == [(b"traceparent", CLIENT.encode())]

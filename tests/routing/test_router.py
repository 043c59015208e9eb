"""The router in front of real servers: what it passes on, where it sends requests, and what happens if one fails."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import APIStatusError
from prometheus_client.parser import text_string_to_metric_families

from quire.routing.router import CHECK_S
from quire.routing.upstream import Upstream, preference_of, preferred
from quire.serve.config import LEAST_BODY_BYTES, MOST_BODY_BYTES
from quire.serve.keys import Keys
from tests.routing.live_router import LiveRouter, wait_until
from tests.serve.live_server import LiveServer


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LiveServer]]:
    """Two that stay."""
    with LiveServer.echo() as first, LiveServer.echo() as second:
        yield [first, second]


@pytest.fixture(scope="module")
def router(servers: list[LiveServer]) -> Iterator[LiveRouter]:
    with LiveRouter(servers) as live:
        yield live


def sent(router: LiveRouter) -> list[int]:
    return [upstream.num_requests for upstream in router.upstreams]


def chosen(router: LiveRouter, before: list[int]) -> set[int]:
    """The servers that got requests since then."""
    return {index for index, (now, then) in enumerate(zip(sent(router), before, strict=True)) if now > then}


# -- what passes


def test_a_router_waits_as_long_as_a_change_of_memory_may(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    real, limits = httpx.AsyncClient.request, list[float]()

    async def request(client: httpx.AsyncClient, *given: Any, **options: Any) -> httpx.Response:
        if "/v1/cache/" in str(options.get("url", given)):
            limits.append(options["timeout"])
        return await real(client, *given, **options)

    monkeypatch.setattr(httpx.AsyncClient, "request", request)
    for path in ("resize", "memory/release", "memory/resume"):
        for body, least in (({"wait_s": 300}, 300), ({"wait_s": 1e9}, 600), ({"wait_s": "x"}, 0), ({}, 0)):
            router.request(f"/v1/cache/{path}", body)
            assert {limit - least for limit in limits} == {60.0} and len(limits) == 2
            limits.clear()
    router.request("/v1/cache/flush", {"wait_s": 300})
    assert limits == [60.0, 60.0]


def test_answers_are_those_of_a_server(router: LiveRouter) -> None:
    client = router.client()
    assert client.models.list().data[0].id == "echo"
    assert client.models.retrieve("echo").id == "echo"
    assert client.completions.create(model="echo", prompt="abc", max_tokens=6).choices[0].text == "abcabc"
    streamed = client.completions.create(model="echo", prompt="abc", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "abcabc"
    chat = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert chat.choices[0].message.content == "hihi"
    status, answer = router.request("/v1/completions", raw=b"{bad")
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert router.request("/nowhere?x=1")[0] == 404
    assert router.request("/openapi.json")[1]["info"]["title"] == "Quire"


def test_events_are_passed_on_one_by_one(router: LiveRouter) -> None:
    connection = router.open_request("/v1/completions", {"prompt": "abc", "max_tokens": 200, "stream": True})
    with connection, connection.makefile("rb") as lines:
        first = next(line for line in lines if line.startswith(b"data:"))
        assert json.loads(first[5:])["choices"][0]["text"] == "a"
        assert any(upstream.in_flight for upstream in router.upstreams), "it came after the end of the stream"
        assert b"data: [DONE]\n" in lines
    wait_until(lambda: not any(upstream.in_flight for upstream in router.upstreams))


def test_the_id_of_a_request_is_the_same_everywhere(router: LiveRouter) -> None:
    raw = router.client().completions.with_raw_response
    got = raw.create(model="echo", prompt="abc", extra_headers={"X-Request-Id": "mine"})
    assert got.headers["x-request-id"] == "mine"
    assert got.headers.get_list("x-request-id") == ["mine"]
    assert len(got.headers.get_list("date")) == 1
    assert raw.create(model="echo", prompt="abc").headers["x-request-id"]


def test_a_body_may_be_as_large_as_a_servers(router: LiveRouter) -> None:
    status, answer = router.request("/v1/completions", {"prompt": "a" * (LEAST_BODY_BYTES - 100)})
    assert (status, answer["error"]["quire_code"]) == (400, "QUIRE-CONTEXT-01"), "the server got it, and refused it"
    for num_bytes in (LEAST_BODY_BYTES, MOST_BODY_BYTES):  # too much for the servers, and for the router
        status, answer = router.request("/v1/completions", {"prompt": "a" * num_bytes})
        assert (status, answer["error"]["code"]) == (413, "QUIRE-BODY-01")


def test_a_key_is_asked_for_and_passed_on() -> None:
    headers = {"Authorization": "Bearer schlüssel".encode().decode("latin-1")}
    with (
        LiveServer.echo(api_key="schlüssel") as server,
        LiveRouter([server], keys=Keys("schlüssel")) as router,
        LiveRouter([server]) as open_router,
    ):
        assert router.request("/v1/models", headers=headers)[0] == 200
        assert router.request("/v1/cache/statistics", headers=headers)[0] == 200
        status, answer = router.request("/v1/models")
        assert (status, answer["error"]["code"]) == (401, "QUIRE-AUTH-01")
        assert router.request("/health")[0] == 200
        assert open_router.request("/v1/models", headers=headers)[0] == 200
        for path in ("/v1/models", "/v1/cache/statistics"):
            assert open_router.request(path)[0] == 401, "the server's answer"


def test_a_server_with_a_key_of_its_own_is_sent_that_one() -> None:
    with LiveServer.echo(api_key="inside") as server, LiveRouter([server]) as router:
        router.upstreams[0].key = "inside"
        for headers in ({}, {"Authorization": "Bearer of a client"}, {"X-Api-Key": "of a client"}):
            assert router.request("/v1/models", headers=headers)[0] == 200
        assert router.request("/v1/cache/statistics")[0] == 200
        assert "inside" not in repr(router.upstreams) + str(router.request("/health"))


def test_servers_come_and_go(servers: list[LiveServer]) -> None:
    with LiveRouter([servers[0]]) as live:
        first = live.upstreams[0]
        second = Upstream(name="decode-9", role="decode", url=servers[1].summary["url"])
        live.router.use([first, second])
        wait_until(lambda: second.is_healthy)
        assert len(live.request("/v1/cache/statistics")[1]["processes"]) == 2
        live.router.use([second])
        for _ in range(4):
            assert live.request("/v1/completions", {"prompt": "abc", "max_tokens": 2})[0] == 200
        assert (first.num_requests, second.num_requests) == (0, 4)
        live.router.use([])
        assert live.request("/health")[1]["status"] == "unhealthy"
        for path in ("/v1/models", "/server_info", "/v1/cache/explain/x", "/v1/cache/statistics"):
            status, answer = live.request(path)
            assert (status, "there is none yet" in answer["error"]["message"]) == (503, True)
        assert live.request("/v1/cache/flush", {"all": True})[0] == 503
        second.fails("is not asked")
        live.router.use([first])
        assert live.request("/v1/models")[0] == 200
        time.sleep(2 * CHECK_S)
        assert not second.is_healthy, "it is asked no more"


def test_answers_name_their_server_and_the_page_asks_for_one(servers: list[LiveServer]) -> None:
    def live_head(query: str) -> bytes:
        with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
            connection.sendall(f"GET /v1/cache/live{query} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return connection.recv(4096)

    with LiveRouter(servers) as live:
        names = [upstream.name for upstream in live.upstreams]
        for path, body in (("/v1/models", None), ("/v1/completions", {"prompt": "abc", "max_tokens": 2})):
            status, got, _ = live.exchange(path, body)
            assert status == 200 and got["X-Quire-Server"] in names
        live.router.use([*live.upstreams, Upstream(name="gone", role="decode", url="http://127.0.0.1:9")])
        for name in names:
            assert f"x-quire-server: {name}\r\n".encode() in live_head(f"?server={name}")
        assert b"HTTP/1.1 503" in live_head("?server=gone"), "no other one takes its place"
        for query in ("", "?server=unknown"):
            assert b"HTTP/1.1 200" in live_head(query)


def test_what_concerns_all_servers_is_asked_of_all(router: LiveRouter, servers: list[LiveServer]) -> None:
    status, found = router.request("/v1/cache/statistics")
    assert status == 200
    assert [row["url"] for row in found["processes"]] == [server.summary["url"] for server in servers]
    assert all("running_requests" in row["answer"] for row in found["processes"])
    status, found = router.request("/v1/sessions")
    assert status == 200 and [row["answer"]["sessions"] for row in found["processes"]] == [[], []]
    status, text = router.request("/metrics")
    assert status == 200
    assert text.count("# TYPE quire_steps counter") + text.count("# TYPE quire_steps_total counter") == 1
    assert "quire_router_can_answer 1.0" in text
    for index in range(2):
        assert f'quire_healthy{{model_name="echo",process="decode-{index}"}} 1.0' in text
        assert f'quire_router_healthy{{process="decode-{index}"}} 1.0' in text
    status, health = router.request("/health")
    assert (status, health["status"], len(health["processes"])) == (200, "ok", 2)


def test_the_metrics_of_all_are_those_of_each_with_its_name() -> None:
    name = 'x"} {\u2028\\n} 1 #'
    with (
        LiveServer.quire("--served-model-name", name, "--kv-memory", "8MiB") as server,
        LiveRouter([server] * 16) as live,
    ):
        assert server.request("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 2})[0] == 200
        alone, together = (
            {each: family.samples for family in text_string_to_metric_families(told) for each in [family.name]}
            for told in (one.request("/metrics")[1] for one in (server, live))
        )
        for family, samples in alone.items():
            for each in samples:
                named = {**each.labels, "process": "decode-15"}
                assert named["model_name"] == name
                assert [one.labels for one in together[family] if one.name == each.name].count(named) == 1
            assert len(together[family]) >= 16 * len(samples)
        with ThreadPoolExecutor(1) as pool:
            scraped, longest_s = pool.submit(live.request, "/metrics"), 0.0
            while not scraped.done():
                began = time.monotonic()
                assert live.request("/load")[0] == 200
                longest_s = max(longest_s, time.monotonic() - began)
        assert longest_s < 0.25, "a scrape holds up all else"


def test_one_of_several_routers_names_itself_in_its_own_metrics(servers: list[LiveServer]) -> None:
    with LiveRouter(servers[:1], name="router-a") as live:
        assert live.request("/v1/models")[0] == 200
        text = live.request("/metrics")[1]
    own = [line for line in text.splitlines() if line.startswith("quire_router_")]
    assert len(own) > 4 and all('router="router-a"' in line for line in own)
    assert text.count('router="') == len(own), "an engine is the same behind each router"


def test_roles_and_peers_are_not_changed_through_the_router(router: LiveRouter) -> None:
    before = sent(router)
    for method, name, body in (("POST", "role", {"role": "decode"}), ("PUT", "peers", {"prefill_peers": []})):
        status, answer = router.request(f"/v1/cache/{name}", body, method=method)
        assert (status, sent(router)) == (400, before)
        assert "roles" in answer["error"]["message"] and "quire up" not in str(answer)


def test_answers_are_counted_by_the_names_that_a_server_gives_its_routes(
    router: LiveRouter, servers: list[LiveServer]
) -> None:
    def counted(live: LiveServer, family: str) -> set[str]:
        lines = [line for line in live.request("/metrics")[1].splitlines() if line.startswith(family)]
        return {line.split('route="')[1].partition('"')[0] for line in lines}

    described = servers[0].request("/openapi.json")[1]["paths"]
    for path, methods in described.items():
        method = next(iter(methods)).upper()
        router.request(path.replace("{name}", "echo"), {} if method == "POST" else None, method=method)
    router.request("/nowhere")
    servers[0].request("/v1/models/echo")
    whole = {"{name}": "{name:path}", "{session_id}": "{session_id:path}"}
    named = {re.sub(r"\{\w+\}", lambda found: whole.get(found[0], found[0]), path) for path in described}
    assert counted(router, "quire_router_responses_total") >= named | {"other"}
    assert "/v1/models/{name:path}" in counted(servers[0], "quire_http_responses_total")


# -- where requests go


def test_the_same_beginning_goes_to_the_same_server(router: LiveRouter) -> None:
    seen = set()
    for number in range(8):
        before = sent(router)
        turns = [{"role": "user", "content": f"{number}"}]
        for said in ("one", "two"):
            assert router.request("/v1/chat/completions", {"messages": turns, "max_tokens": 1})[0] == 200
            turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        assert len(chosen(router, before)) == 1
        seen |= chosen(router, before)
    assert seen == {0, 1}, "all beginnings went to one server"


def beginning(body: bytes) -> bytes:
    return preference_of(body).key


def test_turns_of_an_agent_have_one_beginning() -> None:
    def key(*items: object, **more: str) -> bytes:
        return beginning(json.dumps({"input": items, **more}).encode())

    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use tools."}]}
    user = {"role": "user", "content": "Hello"}
    later = [developer | {"id": "msg_1"}, user, {"type": "function_call", "name": "x"}]
    assert key(developer, user) == key(*later) != key(developer, user | {"content": "Bye"})
    assert key(user, instructions="a") != key(user, instructions="b")
    assert beginning(b'{"input": "one"}') == beginning(b'{"input": ["one"]}') != beginning(b'{"input": "two"}')


def test_turns_of_a_conversation_have_one_beginning() -> None:
    def key(*said: tuple[str, str], **more: str) -> bytes:
        turns = [{"role": role, "content": content} for role, content in said]
        return beginning(json.dumps({"messages": turns, **more}).encode())

    first = (("system", "Be brief."), ("user", "Who is Emma?"))
    assert key(*first) == key(*first, ("assistant", "A lady."), ("user", "And?"))
    assert key(*first) != key(first[0], ("user", "Who is Harriet?"))
    assert key(*first) != key(*first, cache_salt="mine")
    first, second = (beginning(json.dumps({"prompt": each, "session_id": "s"}).encode()) for each in ("one", "two"))
    assert first == second != beginning(b'{"prompt": "one", "session_id": "t"}')
    assert beginning(b'{"prompt": "one", "session_id": null}') == beginning(b'{"prompt": "one"}')
    named = preference_of(b'{"prompt": "three"}', "s; last")
    assert named == preference_of(b'{"prompt": "four", "session_id": "s"}') and named.stays and named.key == first
    assert not preference_of(b'{"prompt": "three"}').stays
    assert beginning(b'{"prompt": [1, 2, 3]}') == beginning(b'{"prompt_token_ids": [1, 2, 3]}') != beginning(b"{}")
    assert beginning(b"{bad") == beginning(b"[" * 100_000) == beginning(b'{"messages": 1}') == beginning(b"\xff") == b""


def test_a_server_gets_no_more_than_its_share() -> None:
    upstreams = [Upstream(name=f"decode-{index}", role="decode", url="") for index in range(4)]
    for upstream in upstreams:
        upstream.works()
    first, *others = preferred(upstreams, b"key")
    for _ in range(200):
        preferred(upstreams, b"key")[0].in_flight += 1
        assert first.in_flight >= max(other.in_flight for other in others), "requests leave it only above its share"
    assert sum(upstream.in_flight for upstream in upstreams) == 200
    assert first.in_flight <= 1.25 * 50 + 3
    assert first in preferred(upstreams, b"key")[2:]
    others[0].fails("does not answer")
    assert others[0] not in preferred(upstreams, b"key")
    for upstream in upstreams:
        upstream.fails("does not answer")
    assert preferred(upstreams, b"key") == []


def test_few_requests_move_when_a_server_is_gone() -> None:
    upstreams = [Upstream(name=f"decode-{index}", role="decode", url="") for index in range(4)]
    for upstream in upstreams:
        upstream.works()
    keys = [str(number).encode() for number in range(400)]
    before = {key: preferred(upstreams, key)[0] for key in keys}
    upstreams[0].fails("ended")
    moved = [key for key in keys if preferred(upstreams, key)[0] is not before[key]]
    assert moved == [key for key in keys if before[key] is upstreams[0]]
    assert 60 < len(moved) < 140


# -- failures


def test_a_client_that_leaves_ends_its_request(router: LiveRouter, servers: list[LiveServer]) -> None:
    def running() -> int:
        return sum(server.statistics()["running_requests"] for server in servers)

    for stream in (True, False):
        connection = router.open_request("/v1/completions", {"prompt": "stall", "stream": stream})
        wait_until(lambda: running() == 1)
        connection.close()
        wait_until(lambda: running() == 0)
    wait_until(lambda: not any(upstream.in_flight for upstream in router.upstreams))
    assert all(upstream.is_healthy for upstream in router.upstreams)


def test_another_server_gets_a_request_that_was_not_answered(servers: list[LiveServer]) -> None:
    """The servers stall before the first token; the first is killed then, and the other gets the request."""
    with LiveServer.echo() as lost, LiveRouter([lost, servers[0]]) as router:
        prompt = next(f"stall {n}" for n in range(100) if _is_first(router, f"stall {n}"))
        bodies = ({"prompt": prompt, "stream": stream} for stream in (True, False))
        connections = [router.open_request("/v1/completions", body) for body in bodies]
        wait_until(lambda: lost.statistics()["running_requests"] == 2)
        lost.close()
        wait_until(lambda: servers[0].statistics()["running_requests"] == 2)
        assert [upstream.num_failures for upstream in router.upstreams] == [2, 0]
        for connection in connections:
            connection.close()
        wait_until(lambda: servers[0].statistics()["running_requests"] == 0)
        assert router.client().completions.create(model="echo", prompt="abc", max_tokens=3).choices[0].text == "abc"
        assert router.request("/health")[1]["status"] == "degraded"
        statuses = [row["status"] for row in router.request("/v1/cache/statistics")[1]["processes"]]
        assert statuses == [503, 200]
        assert router.request("/v1/cache/flush", {"all": True})[0] == 503, "not all have done it"


def _is_first(router: LiveRouter, prompt: str) -> bool:
    return preferred(router.upstreams, beginning(json.dumps({"prompt": prompt}).encode()))[0] is router.upstreams[0]


def test_what_is_said_without_a_server() -> None:
    with LiveServer.echo() as server, LiveRouter([server]) as router:
        server.close()
        with pytest.raises(APIStatusError, match="decode-0 does not answer") as failed:
            router.client().completions.create(model="echo", prompt="abc")
        assert (failed.value.status_code, failed.value.code) == (503, "QUIRE-SERVE-02")
        status, health = router.request("/health")
        assert (status, health["status"]) == (503, "unhealthy")
        assert "quire_router_can_answer 0.0" in router.request("/metrics")[1]
        router.router.use(())  # as those of a fleet that has lost all of them
        assert "quire_router_can_answer 0.0" in router.request("/metrics")[1]


@pytest.mark.parametrize("said", [b"[]", b"3", b"{}", b"what?"])
def test_an_odd_answer_does_not_end_the_checks_of_others(servers: list[LiveServer], said: bytes) -> None:
    class Odd(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd) as odd, LiveRouter([servers[0]]) as live:
        threading.Thread(target=odd.serve_forever, daemon=True).start()
        second = Upstream(name="odd", role="decode", url=f"http://127.0.0.1:{odd.server_port}")
        live.router.use([second])
        wait_until(lambda: second.reason == "does not answer")
        later = Upstream(name="decode-9", role="decode", url=servers[0].summary["url"])
        live.router.use([second, later])
        wait_until(lambda: later.is_healthy, 10)
        odd.shutdown()


def test_a_server_is_passed_over_while_it_is_stopped_and_when_its_engine_is_dead(servers: list[LiveServer]) -> None:
    with LiveServer.echo(max_restarts=0) as first, LiveRouter([first, servers[0]]) as router:
        os.kill(first.process.pid, signal.SIGSTOP)
        wait_until(lambda: not router.upstreams[0].is_healthy)
        assert router.request("/v1/completions", {"prompt": "abc", "max_tokens": 2})[0] == 200
        rows = router.request("/v1/cache/statistics")[1]["processes"]
        assert [row["status"] for row in rows] == [503, 200]
        os.kill(first.process.pid, signal.SIGCONT)
        wait_until(lambda: router.upstreams[0].is_healthy)
        first.engine().kill()  # from now on its server answers 503
        for _ in range(20):
            assert router.request("/v1/completions", {"prompt": "abc", "max_tokens": 2})[0] == 200
            time.sleep(0.02)
        wait_until(lambda: router.upstreams[0].is_broken)
        assert "SIGKILL" in router.request("/health")[1]["processes"][0]["reason"]


def test_requests_at_once_are_spread(router: LiveRouter) -> None:
    before = sent(router)
    threads = [
        threading.Thread(target=router.request, args=("/v1/completions", {"prompt": "same", "max_tokens": 200}))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (now - then for now, then in zip(sent(router), before, strict=True))
    assert first + second == 12
    assert min(first, second) >= 2

"""A router that knows what its servers have cached, by their events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.observe.kv_batch import KvBatches
from quire.observe.kv_publisher import KvPublisher
from quire.routing.page_index import PageIndex
from quire.routing.upstream import Upstream
from quire.serve.journal import GENERATING, TOKENS
from quire.spec.events import Namespace, PagesStored
from tests.routing.live_router import SECRET, LiveRouter, wait_until
from tests.serve.live_server import LiveServer

TEXT = "It was a fine autumn evening, and the whole party had walked out to see the new plantation. "
SMALL = ("--kv-memory", "16MiB", "--dtype", "float32", "--router-secret", SECRET)
EVENTS = ("--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0")


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LiveServer]]:
    with LiveServer.quire(*SMALL, *EVENTS) as first, LiveServer.quire(*SMALL, *EVENTS) as second:
        yield [first, second]


@pytest.fixture
def router(servers: list[LiveServer]) -> Iterator[LiveRouter]:
    for server in servers:
        server.request("/v1/cache/flush", {"all": True})
    with LiveRouter(servers, router="events") as live:
        yield live


def ask(live: LiveServer, prompt: str, **more: Any) -> int:
    """The cached tokens of a prompt."""
    status, answer = live.request("/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0} | more)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def sent(router: LiveRouter) -> list[int]:
    return [upstream.num_requests for upstream in router.upstreams]


def check_goes_to(router: LiveRouter, server: int, prompt: str, **more: Any) -> int:
    """The request goes there; the cached tokens of it."""
    before = sent(router)
    found = ask(router, prompt, **more)
    assert [now - then for now, then in zip(sent(router), before, strict=True)] == [1 - server, server]
    return found


def test_a_prompt_goes_where_it_is_cached(router: LiveRouter, servers: list[LiveServer]) -> None:
    """Each server computes prompts that the router has not seen. It sends both to the one that has them."""
    for turn, prompt in enumerate(f"{name} {TEXT * 4}" for name in ("Anne", "Emma", "Jane", "Mary", "Lucy", "Fanny")):
        ask(servers[turn % 2], prompt)
        time.sleep(0.1)
        assert check_goes_to(router, turn % 2, prompt + "And then") >= 64
        assert check_goes_to(router, turn % 2, prompt + "And then they went home.", cache_salt="") >= 64


def test_salts_are_apart(router: LiveRouter, servers: list[LiveServer]) -> None:
    prompt = TEXT * 5
    ask(servers[0], prompt, cache_salt="one")
    ask(servers[1], prompt, cache_salt="two")
    time.sleep(0.1)
    assert check_goes_to(router, 0, prompt, cache_salt="one") >= 64
    assert check_goes_to(router, 1, prompt, cache_salt="two") >= 64


def test_what_was_cached_before_the_router_began_is_known(servers: list[LiveServer]) -> None:
    prompts = [f"{number} {TEXT * 4}" for number in range(4)]
    for number, prompt in enumerate(prompts):
        ask(servers[number % 2], prompt)
    with LiveRouter(servers, router="events") as router:
        time.sleep(1.0)
        for number, prompt in enumerate(prompts):
            assert check_goes_to(router, number % 2, prompt) >= 64


def test_every_dialect_is_routed(router: LiveRouter, servers: list[LiveServer]) -> None:
    turns = {"messages": [{"role": "user", "content": "Tell me. " + TEXT * 5}], "max_tokens": 2}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": TEXT * 5, "max_tokens": 2}),
        ("/v1/chat/completions", turns),
        ("/v1/messages", turns),
        ("/v1/responses", {"input": turns["messages"], "max_output_tokens": 16}),
        ("/generate", {"text": TEXT * 5, "sampling_params": {"max_new_tokens": 2}}),
    ]
    assert {path for path, _ in bodies} == GENERATING
    for path, body in bodies:
        for server in (1, 0):
            for each in servers:
                each.request("/v1/cache/flush", {"all": True})
            servers[server].request(path, body)
            time.sleep(0.1)
            before = sent(router)
            assert router.request(path, body)[0] == 200
            assert sent(router)[server] == before[server] + 1, path


def retained(server: LiveServer) -> int:
    return len(server.request("/v1/cache/retained")[1]["retentions"])


def test_what_generates_nothing_is_asked_once(router: LiveRouter, servers: list[LiveServer]) -> None:
    """The server it goes to answers it, and is asked for no tokens before."""
    ask(router, TEXT * 5)
    wait_until(lambda: getattr(router.router._chooser, "_index", None) is not None)

    def answers() -> float:
        texts = [server.request("/metrics")[1] for server in servers]
        lines = [line for text in texts for line in text.splitlines() if line.startswith("quire_http_responses_total{")]
        return sum(float(line.split()[-1]) for line in lines if "/metrics" not in line and "/health" not in line)

    for path, body in (("/tokenize", {"prompt": TEXT}), ("/v1/cache/retain", {"prompt": TEXT * 5, "ttl_seconds": 1})):
        before = answers()
        assert router.request(path, body)[0] == 200
        assert answers() == before + 1, path


def test_a_server_that_is_asked_for_tokens_runs_nothing_else(servers: list[LiveServer]) -> None:
    body, asks = {"prompt": TEXT * 5, "ttl_seconds": 60}, {TOKENS: f"0 {SECRET}"}
    before = retained(servers[0])
    status, _, answer = servers[0].exchange("/v1/cache/retain", body, headers=asks)
    assert status == 400 and TOKENS in answer["error"]["message"]
    assert retained(servers[0]) == before


class _Edge:
    """Keys of 64 pages that no other has."""

    parent = b""

    def __init__(self, number: int) -> None:
        self._at = 64 * number

    def __len__(self) -> int:
        return 64

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple((self._at + page).to_bytes(8, "big") for page in range(64))

    @property
    def tokens(self) -> bytes:
        return np.arange(16 * self._at, 16 * (self._at + 64), dtype=np.int32).tobytes()


def test_requests_go_on_while_the_router_learns_what_is_cached(servers: list[LiveServer]) -> None:
    number = 200_000 // 64
    anywhere = ("tcp://127.0.0.1:0",) * 2
    publisher = KvPublisher(KvBatches(16, lambda namespace: b""), *anywhere, lambda: None)
    for each in range(number):
        publisher.append(PagesStored(Namespace(), _Edge(each)))
    publisher.flush()
    wait_until(lambda: not publisher.counters().waiting)
    assert publisher.replay_address is not None
    with LiveRouter(servers[:1], router="events") as router:
        router.upstreams[0].events = (publisher.address, publisher.replay_address)
        longest_s, until = 0.0, time.monotonic() + 60
        while True:
            began = time.monotonic()
            assert router.request("/load")[0] == 200 and began < until
            longest_s = max(longest_s, time.monotonic() - began)
            index: PageIndex | None = getattr(router.router._chooser, "_index", None)
            if index is not None and 64 * number in map(index.num_pages, range(2)):
                break
    publisher.close()
    assert longest_s < 0.4, "a router answers nothing meanwhile"


def test_a_server_that_is_lost_is_forgotten(servers: list[LiveServer]) -> None:
    prompt = "Of one that is lost. " + TEXT * 5
    with LiveServer.quire(*SMALL, *EVENTS) as lost, LiveRouter([servers[0], lost], router="events") as router:
        ask(lost, prompt)
        time.sleep(0.1)
        assert check_goes_to(router, 1, prompt) >= 64
        lost.close()
        wait_until(lambda: not router.upstreams[1].is_healthy)
        check_goes_to(router, 0, prompt)
        assert check_goes_to(router, 0, prompt) >= 64


def test_tokens_that_wait_count(router: LiveRouter, servers: list[LiveServer]) -> None:
    """A server that has a prompt is not asked while more tokens wait there than the prompt has."""
    prompt = TEXT * 5
    ask(servers[0], prompt)
    time.sleep(0.1)
    router.upstreams[0].num_waiting += 1000
    ask(router, prompt)
    router.upstreams[0].num_waiting -= 1000
    assert all(upstream.num_waiting == 0 for upstream in router.upstreams)
    assert sent(router) == [0, 1]


def test_a_server_without_events_counts_as_empty(servers: list[LiveServer]) -> None:
    with LiveServer.quire(*SMALL) as silent, LiveRouter([silent, servers[1]], router="events") as router:
        prompt = "Of two. " + TEXT * 5
        ask(servers[1], prompt)
        time.sleep(1.0)
        assert check_goes_to(router, 1, prompt) >= 64


def test_a_request_that_cannot_be_read_is_refused_as_before(router: LiveRouter) -> None:
    assert router.request("/v1/completions", {"prompt": 7})[0] == 400
    assert router.request("/v1/completions", {"prompt": ""})[0] == 400
    assert router.request("/v1/models")[0] == 200
    assert isinstance(router.upstreams[0], Upstream)

"""The router: one OpenAI endpoint in front of several servers. It reads no more of a body than where to send it.

A request goes to the server that requests with the same beginning go to, unless that has more than its share of the
load; or where the least is to be computed, if servers tell (`quire.routing.chooser`). If that server is lost, another
one answers or goes on (`quire.routing.relay`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import httpx
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from quire.counters import counter, gauge, metrics_of, plain
from quire.errors import InvalidInput, NoServer
from quire.observe.metrics import families_of
from quire.routing.chooser import Chooser, EventChooser
from quire.routing.config import RouterKind
from quire.routing.relay import Relay, answered, passed_on
from quire.routing.tracing import RouteSpan, RouteTracing
from quire.routing.upstream import Upstream
from quire.serve import errors
from quire.serve.errors import error_response
from quire.serve.gate import add_gate
from quire.serve.keys import LIVE, Keys
from quire.serve.sse import ClientGone, while_connected

logger = logging.getLogger(__name__)

CHECK_S = 0.5
_CHECK_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 60.0  # for a healthy server to answer a question to all

_WAITING = ("resize", "memory/release", "memory/resume")  # whose answers wait as long as a body says, below /v1/cache

_FOR_ONE = (
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/generate"),
    *("/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/models", "/v1/models/{name:path}", "/v1/cache/retain", "/", "/version", "/model_info", "/get_model_info"),
    *("/is_sleeping", "/sleep", "/wake_up", "/pause", "/resume", "/start_profile", "/stop_profile"),
    *("/tokenize", "/detokenize", "/tokenizer_info"),
)
"""Routes of servers whose requests go to one of them, as their metrics name them."""

_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A machine that is gone says nothing: its connections break after five seconds."""


def open_client() -> httpx.AsyncClient:
    """The connections to servers. Idle ones are closed before the servers would close them."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
    timeout = httpx.Timeout(None, connect=_CHECK_TIMEOUT_S)
    transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False, verify=False, socket_options=_ALIVE)
    return httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)


async def check(upstream: Upstream, client: httpx.AsyncClient) -> None:
    """Ask for its health once, and note the answer."""
    try:
        answer = await client.get(f"{upstream.url}/health", timeout=_CHECK_TIMEOUT_S)
        if answer.status_code == 200:
            upstream.works()
        else:
            upstream.fails(f"is unhealthy: {answer.json()['reason']}", is_broken=True)
    except (httpx.HTTPError, ValueError, TypeError, KeyError):  # or it is no server of ours
        upstream.fails("does not answer")


@dataclass(kw_only=True)
class RouterCounters:
    """Counters of one router, by the server that was asked; `responses` by route and status."""

    PREFIX: ClassVar = "router_"

    can_answer: bool = gauge("1 while any server can answer.")
    healthy: dict[str, bool] = gauge("1 if requests may be sent there.", "process", start=dict)
    in_flight: dict[str, int] = gauge("Requests sent there that have not ended.", "process", start=dict)
    requests: dict[str, int] = counter("Requests sent there.", "process", start=dict)
    failures: dict[str, int] = counter("Requests that broke off there.", "process", start=dict)
    responses: Counter[tuple[str, str]] = counter("Answers to clients.", "route", "status", start=Counter)


class Router:
    """The ASGI app is `app`. `watch` runs beside it, and checks the health of servers. The client is the caller's.

    `use` changes the servers while it runs: those that stay are the same objects, and keep what is counted of them.
    """

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        client: httpx.AsyncClient,
        *,
        keys: Keys | None = None,
        cors_origins: Sequence[str] = (),
        name: str | None = None,
        router: RouterKind = "prefix",
        tracing: RouteTracing | None = None,
    ) -> None:
        """With a `name`, each sample of its own metrics has it as the label `router`. `tracing` is the caller's."""
        self._client = client
        self._chooser = EventChooser(client) if router == "events" else Chooser()
        self.use(upstreams)
        self._tracing = tracing or RouteTracing()
        self._labels = {} if name is None else {"router": name}
        self._responses = Counter[tuple[str, str]]()
        self._for_one = [Route(path, self._relay) for path in _FOR_ONE]
        self.app = app = FastAPI(title="Quire's router", docs_url=None, redoc_url=None, openapi_url=None)
        errors.install(app)
        app.add_api_route("/health", self._health, response_model=None)
        app.add_api_route("/ping", self._health, response_model=None)
        app.add_api_route("/load", self._load)
        app.add_api_route("/metrics", self._metrics, response_model=None)
        app.add_api_route("/v1/cache/explain/{request_id}", self._explain, response_model=None)
        for name in ("statistics", "retained", "audit", "history", "tree", "plan", "memory"):
            app.add_api_route(f"/v1/cache/{name}", self._ask_all, response_model=None)
        for name in ("release", "flush", "epoch", "resize", "memory/release", "memory/resume"):
            app.add_api_route(f"/v1/cache/{name}", self._ask_all, methods=["POST"], response_model=None)
        app.add_api_route("/v1/tenants", self._ask_all, methods=["GET", "POST"], response_model=None)
        for path in ("/server_info", "/get_server_info"):
            app.add_api_route(path, self._server_info, response_model=None)
        for path in ("/flush_cache", "/reset_prefix_cache"):
            app.add_api_route(path, self._ask_all, methods=["POST"], response_model=None)
        app.add_api_route("/v1/sessions", self._ask_all, response_model=None)
        app.add_api_route("/v1/sessions/{session_id:path}", self._ask_all, methods=["DELETE"], response_model=None)
        for name, method in (("role", "POST"), ("peers", "PUT")):
            app.add_api_route(f"/v1/cache/{name}", self._refuse_role, methods=[method], response_model=None)
        app.mount("", self._relay)
        add_gate(app, self._responses, keys=keys or Keys(), cors_origins=cors_origins)

    def use(self, upstreams: Sequence[Upstream]) -> None:
        """These are the servers from now on. What was sent to others goes on."""
        self._upstreams = tuple(upstreams)
        self._answering = [upstream for upstream in upstreams if upstream.role != "prefill"]

    # -- requests for one server

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = next((route for route in self._for_one if route.matches(scope)[0] is not Match.NONE), None)
        with suppress(ClientGone, ClientDisconnect), closing(self._tracing.begin(scope)) as span:
            request = Request(scope, receive)
            body = await request.body()
            await while_connected(receive, self._answer(request, body, send, span))

    async def _answer(self, request: Request, body: bytes, send: Send, span: RouteSpan) -> None:
        choice = await self._chooser.choice(request, body, self._answering)
        relay = Relay(self._client, request, body, choice, send, span)
        await relay.run(lambda: self._servers_for(request), self._none_answers)

    def _servers_for(self, request: Request) -> Sequence[Upstream]:
        """Those that may answer it. The page asks for the figures of one by its name, if that is still there."""
        name = request.query_params.get("server") if request.scope["path"] == LIVE else None
        return [each for each in self._upstreams if each.name == name] or self._answering

    def _no_answer(self, request: Request) -> Response:
        return error_response(self._none_answers(), request.scope)

    def _none_answers(self) -> NoServer:
        reasons = [f"{upstream.name} {upstream.reason}" for upstream in self._answering if not upstream.is_healthy]
        why = "; ".join(reasons) or ("those that were asked failed" if self._answering else "there is none yet")
        return NoServer(f"no server can answer now: {why}.", fix="send the request again.")

    async def _refuse_role(self) -> Response:
        """The router has chosen which engines answer by their roles."""
        raise InvalidInput(
            "the router changes no role and no peers: its requests go to engines by the roles they were started with.",
            fix="start it with other numbers of engines of each role.",
        )

    # -- requests for all of them

    async def _ask_all(self, request: Request) -> Response:
        """A list of what each server says. What changes servers has to succeed in all of them."""
        answers = await self._ask(request)
        if not answers:
            return self._no_answer(request)
        failed = [answer for _, answer in answers if answer.status_code >= 400]
        if failed and (request.method != "GET" or len(failed) == len(answers)):
            return failed[0]
        rows = [
            {**upstream.to_dict(), "status": answer.status_code, "answer": json.loads(bytes(answer.body))}
            for upstream, answer in answers
        ]
        return JSONResponse({"processes": rows})

    async def _explain(self, request: Request) -> Response:
        """What the one server says that answered the request."""
        answers = [answer for _, answer in await self._ask(request)]
        return min(answers, key=lambda answer: answer.status_code, default=self._no_answer(request))

    async def _server_info(self, request: Request) -> Response:
        """What a server says, with the state of each."""
        answers = [answer for _, answer in await self._ask(request)]
        worked = [json.loads(bytes(answer.body)) for answer in answers if answer.status_code == 200]
        if not worked:
            return answers[0] if answers else self._no_answer(request)
        return JSONResponse(worked[0] | {"internal_states": [each["internal_states"][0] for each in worked]})

    async def _load(self) -> dict[str, int]:
        return {"server_load": sum(upstream.in_flight for upstream in self._upstreams)}

    async def _ask(self, request: Request) -> list[tuple[Upstream, Response]]:
        body = await request.body()

        async def ask(upstream: Upstream) -> tuple[Upstream, Response]:
            try:
                asked = passed_on(upstream, request, body)
                seconds = _ANSWER_TIMEOUT_S + _wait_of(request, body) if upstream.is_healthy else _CHECK_TIMEOUT_S
                answer = await self._client.request(**asked, timeout=seconds)
            except httpx.TransportError:
                silent = NoServer(f"{upstream.name} does not answer.", fix="send the request again.")
                return upstream, error_response(silent, request.scope)
            return upstream, answered(upstream, answer, answer.content)

        return await asyncio.gather(*map(ask, self._upstreams))

    # -- health and metrics

    async def watch(self) -> None:
        """Check the health of each server, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._chooser.watch(lambda: self._answering))
            watched = set[Upstream]()
            while True:
                watched &= set(self._upstreams)
                for upstream in set(self._upstreams) - watched:
                    watched.add(upstream)
                    tasks.create_task(self._watch(upstream))
                await asyncio.sleep(CHECK_S)

    async def _watch(self, upstream: Upstream) -> None:
        while upstream in self._upstreams:
            await check(upstream, self._client)
            await asyncio.sleep(CHECK_S)

    @property
    def _can_answer(self) -> bool:
        return any(upstream.is_healthy for upstream in self._answering)

    async def _health(self) -> Response:
        """200 while a request could be answered; then `degraded` says that a server is missing."""
        can_answer = self._can_answer
        all_work = all(upstream.is_healthy for upstream in self._upstreams)
        status = "unhealthy" if not can_answer else "ok" if all_work else "degraded"
        why = {} if can_answer else {"reason": self._none_answers().message}
        processes = [upstream.to_dict() for upstream in self._upstreams]
        return JSONResponse({"status": status, **why, "processes": processes}, status_code=200 if can_answer else 503)

    async def _metrics(self, request: Request) -> Response:
        """The metrics of all servers, each sample with the name of its process as a label: a query adds them up, and
        could not take a sum apart. Texts are not read: that would take 20 ms for each server, in which no stream goes
        on."""
        families: dict[str, list[str]] = {}
        _add_samples(families, generate_latest(_Families(self._own_metrics())), "")
        for upstream, answer in await self._ask(request):
            if answer.status_code == 200:
                _add_samples(families, bytes(answer.body), upstream.name)
        lines = [*chain.from_iterable(families.values()), ""]
        return Response("\n".join(lines), media_type=CONTENT_TYPE_LATEST)

    def _own_metrics(self) -> Iterator[Metric]:
        counters = RouterCounters(responses=self._responses, can_answer=self._can_answer)
        for each in self._upstreams:
            counters.healthy[each.name] = each.is_healthy
            counters.in_flight[each.name] = each.in_flight
            counters.requests[each.name] = each.num_requests
            counters.failures[each.name] = each.num_failures
        return families_of(metrics_of(RouterCounters), plain(counters), self._labels)


def _wait_of(request: Request, body: bytes) -> float:
    """Seconds that a server was asked to wait before it answers. What is wrong there a server refuses."""
    if request.url.path.removeprefix("/v1/cache/") not in _WAITING:
        return 0.0
    with suppress(ValueError, TypeError, LookupError):
        return min(600.0, max(0.0, float(json.loads(body)["wait_s"])))
    return 0.0


def _add_samples(families: dict[str, list[str]], text: bytes, process: str) -> None:
    """Add the samples of a scrape to the lines of their families, with the process as one more label."""
    head, family = "", list[str]()
    for line in text.decode().split("\n"):
        if line.startswith("# HELP "):
            head = line
        elif line.startswith("# TYPE "):
            family = families.setdefault(line.split(" ")[2], [head, line])
        elif line:
            sample, brace, value = line.rpartition("} ") if "} " in line else line.partition(" ")
            opening = "," if brace == "} " else "{"
            family.append(f'{sample}{opening}process="{process}"}} {value}' if process else line)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

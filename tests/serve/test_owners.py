"""Whose something is: each route of a server and of the router, asked by another key for what one key has."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.routing import Route

from quire.client.llm import LLM
from quire.errors import UnknownRequest
from quire.routing.router import _FOR_ONE, Router
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.config import ServerConfig
from tests.routing.live_router import LiveRouter
from tests.serve.live_server import LiveServer

ANN, BOB, OPERATOR = "key-of-ann", "key-of-bob", "key-of-admin"
PROMPT = list(range(5, 42))
SALTS = ("", "x", "ann/", "ann/x")


@dataclass(frozen=True)
class Asked:
    """A route, and how it is asked for what ann has. Of another key it gets one of the `refused` statuses, or 200 with
    an answer that `shows_nothing`. A field `{request}`, `{session}` or `{retention}` is an id of hers."""

    body: dict[str, Any] | None = None
    refused: tuple[int, ...] = (403,)
    expected: dict[str, Any] = field(default_factory=dict)
    path: str = ""


HERS = {"prompt": PROMPT, "max_tokens": 2, "session_id": "{session}", "return_token_ids": True}
NOTHING = Asked(refused=())
OPERATORS = (
    *("/flush_cache", "/reset_prefix_cache", "/sleep", "/wake_up", "/pause", "/resume"),
    *("/start_profile", "/stop_profile"),
)

ROUTES: dict[tuple[str, str], Asked] = {
    ("GET", "/v1/cache/explain/{request_id}"): Asked(refused=(404,), path="/v1/cache/explain/{request}"),
    ("GET", "/v1/sessions"): NOTHING,
    ("DELETE", "/v1/sessions/{session_id}"): Asked(
        refused=(), expected={"closed": False}, path="/v1/sessions/{session}"
    ),
    ("POST", "/v1/cache/release"): Asked({"id": "{retention}"}, refused=(), expected={"released": False}),
    ("POST", "/v1/cache/retain"): Asked({"prompt": PROMPT, "ttl_seconds": 60}, refused=()),
    ("POST", "/v1/completions"): Asked(HERS, refused=()),
    ("POST", "/v1/chat/completions"): Asked(
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "session_id": "{session}"}, refused=()
    ),
    ("POST", "/v1/messages"): Asked(
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "session_id": "{session}"}, refused=()
    ),
    ("POST", "/v1/messages/count_tokens"): Asked({"messages": [{"role": "user", "content": "a"}]}, refused=()),
    ("POST", "/v1/responses"): Asked({"input": "a", "max_output_tokens": 2, "session_id": "{session}"}, refused=()),
    ("POST", "/v1/responses/input_tokens"): Asked({"input": "a"}, refused=()),
    ("POST", "/tokenize"): Asked({"prompt": "a"}, refused=()),
    ("POST", "/detokenize"): Asked({"tokens": [5]}, refused=()),
    ("GET", "/tokenizer_info"): NOTHING,
    ("POST", "/generate"): Asked(
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "session_id": "{session}"}, refused=()
    ),
    **dict.fromkeys(
        (("GET", path) for path in ("/", "/ping", "/is_sleeping", "/model_info", "/get_model_info")), NOTHING
    ),
    **dict.fromkeys((("GET", path) for path in ("/load", "/server_info", "/get_server_info")), Asked()),
    **dict.fromkeys((("POST", path) for path in OPERATORS), Asked({})),
    ("POST", "/v1/cache/flush"): Asked({"all": True}),
    ("POST", "/v1/cache/epoch"): Asked({"weights_epoch": 1}),
    ("POST", "/v1/cache/role"): Asked({"role": "both"}),
    ("GET", "/v1/tenants"): Asked(),
    ("POST", "/v1/tenants"): Asked({"name": "default", "floor": "90%"}),
    ("GET", "/v1/cache/memory"): Asked(),
    ("POST", "/v1/cache/resize"): Asked({"device_bytes": 2**20, "wait_s": 0}),
    **dict.fromkeys((("POST", f"/v1/cache/memory/{verb}") for verb in ("release", "resume")), Asked({"wait_s": 0})),
    ("PUT", "/v1/cache/peers"): Asked({"prefill_peers": []}),
    ("GET", "/v1/cache/statistics"): Asked(),
    ("GET", "/v1/cache/retained"): Asked(),
    ("GET", "/v1/cache/audit"): Asked(),
    ("GET", "/v1/cache/history"): Asked(),
    ("GET", "/v1/cache/tree"): Asked(),
    ("GET", "/v1/cache/plan"): Asked(),
    ("GET", "/metrics"): Asked(),
    ("GET", "/health"): NOTHING,
    ("GET", "/version"): NOTHING,
    ("GET", "/v1/models"): NOTHING,
    ("GET", "/v1/models/{name}"): Asked(refused=(404,), path="/v1/models/{request}"),
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@dataclass
class Server:
    """`asked` is the server itself or a router before it; keys with names, or one key beside that of the operator."""

    asked: LiveServer
    hers: str
    other: str
    admin: str = OPERATOR


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"ann {ANN}\nbob {BOB}\n")
    path.chmod(0o600)
    return path


def started(model: Path, *options: str) -> LiveServer:
    same = ("--served-model-name", "tiny", "--kv-memory", "1MiB", "--admin-key", OPERATOR)
    return LiveServer.quire("--model", str(model), *same, *options)


@pytest.fixture(scope="module")
def tenants(tiny_model: Path, keys: Path) -> Iterator[LiveServer]:
    with started(tiny_model, "--api-keys", str(keys)) as live:
        yield live


@pytest.fixture(scope="module", params=["tenants", "router", "shared", pytest.param("one", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tiny_model: Path, keys: Path) -> Iterator[Server]:
    """Tenants, also behind a router; named keys that share a cache; and one key beside that of the operator."""
    if request.param == "tenants":
        yield Server(request.getfixturevalue("tenants"), ANN, BOB)
    elif request.param == "router":
        same = ServerConfig.read({"api_keys": keys, "admin_key": OPERATOR}).keys()
        with LiveRouter([request.getfixturevalue("tenants")], keys=same) as router:
            yield Server(router, ANN, BOB)
    elif request.param == "shared":
        with started(tiny_model, "--api-keys", str(keys), "--share-cache") as live:
            yield Server(live, ANN, BOB)
    else:
        with started(tiny_model, "--api-key", BOB) as live:
            yield Server(live, OPERATOR, BOB)


def one(answer: Any) -> Any:
    """What the one server behind a router said."""
    if not isinstance(answer, dict) or "answer" not in (answer.get("processes") or [{}])[0]:
        return answer
    return answer["processes"][0]["answer"]


def what_she_has(server: Server) -> dict[str, str]:
    """Ids of a request, a session and a retention of ann's, none of which another key gets by chance."""
    live, mine = server.asked, bearer(server.hers)
    session = f"s-{uuid.uuid4().hex}"
    body = HERS | {"session_id": session, "cache_salt": "x", "ignore_eos": True}
    status, answer = live.request("/v1/completions", body, headers=mine)
    assert status == 200, answer
    retained = {"prompt": PROMPT, "ttl_seconds": 60, "cache_salt": "x"}
    status, granted = live.request("/v1/cache/retain", retained, headers=mine)
    assert status == 200 and granted["granted_tokens"] == 32, granted
    return {"request": answer["id"], "session": session, "retention": granted["id"]}


def filled(value: Any, ids: dict[str, str]) -> Any:
    text = json.dumps(value)
    for name, found in ids.items():
        text = text.replace(f"{{{name}}}", found)
    return json.loads(text)


def asked_by(server: Server, key: str, route: tuple[str, str], ids: dict[str, str], salt: str) -> tuple[int, Any]:
    method, template = route
    case = ROUTES[route]
    path, body = filled(case.path or template, ids), filled(case.body, ids)
    if template.startswith("/v1/sessions"):
        path += f"?cache_salt={quote(salt)}"
    elif template in ("/v1/completions", "/v1/chat/completions", "/v1/cache/retain"):
        body |= {"cache_salt": salt}
    return server.asked.request(path, body, headers=bearer(key), method=method)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: " ".join(route))
def test_another_key_gets_nothing(server: Server, route: tuple[str, str]) -> None:
    ids = what_she_has(server)
    case = ROUTES[route]
    for salt in SALTS:
        status, answer = asked_by(server, server.other, route, ids, salt)
        answer = one(answer)
        if case.refused:
            assert status in case.refused, answer
            continue
        assert status == 200, answer
        for name, value in case.expected.items():
            assert answer[name] == value
        asked_for = json.dumps([case.path, case.body])
        for name, found in ids.items():
            assert f"{{{name}}}" in asked_for or found not in json.dumps(answer), f"her {name} is told"
        for choice in answer.get("choices", ()):
            assert choice["session"]["start"] == "new"
    still_hers(server, ids)


def still_hers(server: Server, ids: dict[str, str]) -> None:
    """What another key has asked for changed nothing of hers."""
    live, mine = server.asked, bearer(server.hers)
    for key in (server.hers, server.admin):
        status, answer = live.request(f"/v1/cache/explain/{ids['request']}", headers=bearer(key))
        assert status == 200 and answer["request_id"] == ids["request"]
    status, answer = live.request("/v1/sessions?cache_salt=x", headers=mine)
    held = {each["session_id"]: each["held_tokens"] for each in one(answer)["sessions"]}
    assert held[ids["session"]] > 0
    status, answer = live.request("/v1/cache/release", {"id": ids["retention"]}, headers=mine)
    assert status == 200 and one(answer)["released"] is True


def test_an_unknown_id_and_one_of_another_key_are_told_alike(server: Server) -> None:
    ids = what_she_has(server)
    told = []
    for request_id in (ids["request"], "cmpl-unknown", f"{ids['request']}-0-0"):
        status, answer = server.asked.request(f"/v1/cache/explain/{request_id}", headers=bearer(server.other))
        assert status == 404
        told.append(json.dumps(answer).replace(request_id, "ID"))
    assert len(set(told)) == 1


def test_all_routes_of_a_server_are_asked(server: Server) -> None:
    """A new route has a place in this table, and with it a test of what it tells of others."""
    status, document = server.asked.request("/openapi.json")
    if status == 200:
        paths = document["paths"].items()
        assert {(method.upper(), path) for path, methods in paths for method in methods} == ROUTES.keys()


def test_all_routes_of_the_router_are_asked() -> None:
    router = Router([], httpx.AsyncClient())
    own = [route for route in router.app.routes if isinstance(route, Route)]
    found = {(method, route.path.replace(":path", "")) for route in own for method in route.methods or ()}
    assert {route for route in found if route[0] != "HEAD"} <= ROUTES.keys()
    known = {path for _, path in ROUTES}
    assert {path.replace(":path", "") for path in _FOR_ONE} <= known
    assert known == {path for _, path in found} | {path.replace(":path", "") for path in _FOR_ONE}


def test_an_operator_sees_all_and_each_owner_its_own(tiny_model: Path) -> None:
    """In this process, where no request has an owner."""
    llm = LLM(str(tiny_model), kv_memory="100KiB", show_plan=False)
    llm.generate([PROMPT], SamplingParams(max_tokens=2))
    for owner in (None, ""):
        assert llm.engine.explain("r0", owner).keys() == {"r0-0"}
    with pytest.raises(UnknownRequest):
        llm.engine.explain("r0", "ann")

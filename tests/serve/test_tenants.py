"""Keys: what each may do, and what one tenant sees of another."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidInput
from quire.serve.config import ServerConfig
from quire.serve.keys import Client, Keys, read_keys
from tests.serve.live_server import LiveServer

PROMPT = list(range(1, 200))
COMPLETIONS = "/v1/completions"
OF_THE_OPERATOR = [
    ("/metrics", None),
    ("/v1/cache/statistics", None),
    ("/v1/cache/retained", None),
    ("/v1/cache/tree", None),
    ("/v1/cache/plan", None),
    ("/v1/cache/epoch", {"weights_epoch": 1}),
    ("/v1/cache/role", {"role": "both"}),
    ("/v1/cache/memory", None),
    ("/v1/cache/resize", {"device_bytes": 2**20}),
    ("/v1/cache/flush", {"all": True}),
    ("/v1/cache/retain", {"prompt": "a", "ttl_seconds": 1, "pin": True}),
    ("/v1/cache/retain", {"prompt": "a", "ttl_seconds": 1, "priority": 1}),
    ("/v1/cache/anything-that-comes", None),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def live(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of two tenants and an operator."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# clients\nann key-of-ann\nbob key-of-bob\n")
    keys.chmod(0o600)
    options = ("--model", str(tiny_model), "--kv-memory", "1MiB", "--log-level", "info")
    with LiveServer.quire(*options, "--api-keys", str(keys), "--admin-key", "key-of-admin") as server:
        yield server


def complete(live: LiveServer, key: str, **more: object) -> dict[str, Any]:
    status, answer = live.request(
        COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "explain": True} | more, headers=bearer(key)
    )
    assert status == 200, answer
    return dict(answer)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(("path", "body"), OF_THE_OPERATOR)
def test_what_is_the_operators_needs_the_admin_key(live: LiveServer, path: str, body: object) -> None:
    status, answer = live.request(path, body)
    assert (status, answer["error"]["code"]) == (401, "QUIRE-AUTH-01")
    status, answer = live.request(path, body, headers=bearer("key-of-ann"))
    assert (status, answer["error"]["code"]) == (403, "QUIRE-AUTH-02")
    status, _ = live.request(path, body, headers=bearer("key-of-admin"))
    assert status not in (401, 403)


def check_tenants_share_nothing(live: LiveServer) -> None:
    """The same prompt with the same salt is new for each of them, by tokens and by explanation."""
    for salt in ("", "s", "ann/s"):
        first = complete(live, "key-of-ann", cache_salt=salt)
        assert cached(complete(live, "key-of-ann", cache_salt=salt)) > 0, "its own pages are found"
        other = complete(live, "key-of-bob", cache_salt=salt)
        assert cached(first) == cached(other) == 0
        for answer in (other, explained(live, "key-of-bob", other["id"])):
            assert "ann" not in str(answer) and "namespace" not in str(answer)


def explained(live: LiveServer, key: str, request_id: str) -> dict[str, Any]:
    status, answer = live.request(f"/v1/cache/explain/{request_id}", headers=bearer(key))
    assert status == 200, answer
    return dict(answer)


def test_tenants_share_no_page_whatever_salt_they_send(live: LiveServer) -> None:
    check_tenants_share_nothing(live)


def test_a_tenant_flushes_its_own_namespace_alone(live: LiveServer) -> None:
    for key in ("key-of-ann", "key-of-bob"):
        complete(live, key, cache_salt="f")
    status, _ = live.request("/v1/cache/flush", {"cache_salt": "f"}, headers=bearer("key-of-ann"))
    assert status == 200
    assert cached(complete(live, "key-of-ann", cache_salt="f")) == 0
    assert cached(complete(live, "key-of-bob", cache_salt="f")) > 0


def test_the_operator_is_told_what_tenants_are_not(live: LiveServer) -> None:
    complete(live, "key-of-ann", cache_salt="t")
    request_id = complete(live, "key-of-bob", cache_salt="t")["id"]
    causes = [each["cause"] for each in explained(live, "key-of-admin", request_id)["explanations"][0]["reasons"]]
    assert "namespace" in causes
    causes = [each["cause"] for each in explained(live, "key-of-bob", request_id)["explanations"][0]["reasons"]]
    assert "namespace" not in causes


def test_logs_and_metrics_have_no_prompt_salt_or_key(live: LiveServer) -> None:
    complete(live, "key-of-ann", prompt="a-very-secret-prompt", cache_salt="a-very-secret-salt")
    live.request(COMPLETIONS, {"prompt": "a-very-secret-prompt", "top_p": 7}, headers=bearer("key-of-ann"))
    _, metrics = live.request("/metrics", headers=bearer("key-of-admin"))
    _, retained = live.request("/v1/cache/retained", headers=bearer("key-of-admin"))
    for text in (live.log(), str(metrics), str(retained)):
        assert "very-secret" not in text and "key-of" not in text
    assert "prompt tokens" in live.log(), "requests are logged"


@pytest.mark.parametrize(
    ("given", "salt", "is_admin"),
    [
        ({"api_key": "a"}, "s", True),
        ({"api_key": "a", "admin_key": "x"}, "s", False),
        ({"api_key": "a", "named": {"n": "b"}}, "default/s", False),
        ({"api_key": "a", "named": {"n": "b"}, "share_cache": True}, "s", False),
    ],
)
def test_whose_key_the_one_key_is(given: dict[str, Any], salt: str, is_admin: bool) -> None:
    client, refusal = Keys(**given).refusal("/v1/models", b"Bearer a")
    assert (client.salt("s"), client.is_admin, refusal) == (salt, is_admin, None)


def test_no_two_tenants_have_a_salt_in_common() -> None:
    salts = {
        Client(name=name, is_tenant=True).salt(salt)
        for name in ("a", "a.b", "b")
        for salt in ("", "/", "a/", "b/a", "x")
    }
    assert len(salts) == 15


def check_all_keys_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an answer says neither which key was nearly right nor where it stands."""
    lengths: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        lengths.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = Keys("one", named={"n": "two", "m": "three"}, admin_key="four")
    for given in (b"", b"Bearer one", b"Bearer four", b"Bearer " + b"x" * 1000):
        lengths.clear()
        keys.refusal("/v1/models", given)
        assert lengths == [(32, 32)] * 4


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    check_all_keys_are_compared(monkeypatch)


@pytest.mark.parametrize("text", ["", "# none", "a b\na c", "a b\nc b", "a/b c", "name", "a  \t", "ä b"])
def test_a_file_of_keys_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InvalidInput):
        read_keys(path)


def test_a_file_of_keys_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a b")
    path.chmod(0o644)
    with pytest.raises(InvalidInput, match="other users can read"):
        ServerConfig(api_keys=path).keys()


def test_the_tree_has_names_of_tenants_and_no_salts(live: LiveServer) -> None:
    live.request("/v1/cache/flush", {"all": True}, headers=bearer("key-of-admin"))
    for key, salt in (("key-of-ann", "secret"), ("key-of-bob", ""), ("key-of-admin", "eve/secret"), ("key-of-ann", "")):
        complete(live, key, cache_salt=salt)
    status, found = live.request("/v1/cache/tree", headers=bearer("key-of-admin"))
    assert status == 200 and "secret" not in str(found) and found["whole"]
    digest = sha256(b"secret").hexdigest()[:8]
    other = sha256(b"eve/secret").hexdigest()[:8]
    assert {each["name"] for each in found["namespaces"]} == {f"ann, salt {digest}", "bob", f"salt {other}", "ann"}
    pages = (len(PROMPT) + 1) // found["page_size"]
    assert [each["pages"] for each in found["namespaces"]] == [pages] * 4
    assert [(each["pages"], each["parent"]) for each in found["branches"]] == [(pages, -1)] * 4

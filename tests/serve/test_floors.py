"""Tenants of a server: what one is promised stays, whatever the other one sends; the operator sees and changes that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidInput, RefusedCombination
from quire.serve.config import ServerConfig
from quire.settings.tenants import tenants_of
from tests.serve.live_server import LiveServer

TERMS = {"quiet": {"keys": ["ann"], "floor": "25%"}, "noisy": {"keys": ["bob", "carl"], "ceiling": "75%"}}


@pytest.fixture(scope="module")
def live(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("tenants")
    keys, tenants = folder / "keys", folder / "tenants.json"
    keys.write_text("ann key-of-ann\nbob key-of-bob\ncarl key-of-carl\n")
    keys.chmod(0o600)
    tenants.write_text(json.dumps(TERMS))
    options = ("--model", str(tiny_model), "--kv-memory", "1MiB", "--tenants", str(tenants))
    with LiveServer.quire(*options, "--api-keys", str(keys), "--admin-key", "key-of-admin") as server:
        yield server


def ask(live: LiveServer, path: str, body: object, key: str) -> tuple[int, Any]:
    return live.request(path, body, headers={"Authorization": f"Bearer key-of-{key}"})


def complete(live: LiveServer, key: str, prompt: list[int]) -> int:
    """The cached tokens of a prompt."""
    status, answer = ask(live, "/v1/completions", {"prompt": prompt, "max_tokens": 2}, key)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def tenants(live: LiveServer, **change: object) -> dict[str, Any]:
    status, answer = ask(live, "/v1/tenants", change or None, "admin")
    assert status == 200, answer
    return {each["name"]: each for each in answer["tenants"]}


def test_a_noisy_key_takes_nothing_of_a_quiet_one(live: LiveServer) -> None:
    before = tenants(live)
    assert before["quiet"]["floor"] == "25%" and before["quiet"]["keys"] == ["ann"]
    total = before["noisy"]["now"]["ceiling_bytes"] * 4 // 3
    assert before["quiet"]["now"]["floor_bytes"] == pytest.approx(total / 4, abs=2)
    prompt = list(range(1, 200))
    assert complete(live, "ann", prompt) == 0
    hits = complete(live, "ann", prompt)
    assert hits > 150
    for number in range(40):
        complete(live, "bob" if number % 2 else "carl", [number % 250 + 1] * 180)
    after = tenants(live)
    assert complete(live, "ann", prompt) == hits
    noisy = after["noisy"]["now"]
    assert 0 < noisy["cached_bytes"] <= noisy["ceiling_bytes"] and noisy["prompt_tokens"] == 40 * 180
    assert after["quiet"]["now"]["lost_pages"] == 0 and after["quiet"]["now"]["hit_tokens"] == hits
    status, text = ask(live, "/metrics", None, "admin")
    assert status == 200
    (line,) = [
        each for each in str(text).splitlines() if 'tenant="quiet"' in each and "_tenant_hit_tokens_total" in each
    ]
    assert float(line.split()[-1]) == 2 * hits


def test_terms_change_at_run_time_or_not_at_all(live: LiveServer) -> None:
    now = tenants(live, name="noisy", ceiling="20%", weight=0.5)
    assert (now["noisy"]["ceiling"], now["noisy"]["weight"]) == ("20%", 0.5)
    complete(live, "bob", [7] * 100)
    now = tenants(live)
    assert now["noisy"]["now"]["cached_bytes"] <= now["noisy"]["now"]["ceiling_bytes"]
    status, answer = ask(live, "/v1/tenants", {"name": "noisy", "floor": "80%", "ceiling": None}, "admin")
    assert status == 400 and "the floors need 105.0%" in answer["error"]["message"]
    status, answer = ask(live, "/v1/tenants", {"name": "noisy", "floor": "30%"}, "admin")
    assert status == 400 and "a floor of 30% (" in answer["error"]["message"]
    for body in ({"name": "noisy", "floor": "much"}, {"name": "noisy", "weight": -1}, {"name": "x"}, {"floor": "1%"}):
        assert ask(live, "/v1/tenants", body, "admin")[0] == 400
    assert tenants(live)["noisy"] == now["noisy"]
    assert tenants(live, name="noisy", ceiling="2%")["noisy"]["ceiling"] == "2%"
    status, answer = ask(live, "/v1/completions", {"prompt": [5] * 300, "max_tokens": 2}, "bob")
    assert status == 413 and "tenant 'noisy' can have" in answer["error"]["message"]
    assert tenants(live, name="noisy", ceiling=None)["noisy"]["ceiling"] is None


def test_tenants_are_the_operators(live: LiveServer) -> None:
    for body in (None, {"name": "quiet", "floor": "90%"}):
        assert ask(live, "/v1/tenants", body, "ann")[0] == 403


def test_a_tenant_has_keys_of_the_server(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann\n")
    keys.chmod(0o600)
    terms = tenants_of(TERMS)
    with pytest.raises(InvalidInput, match="tenant 'noisy' has a key 'bob' that is not known"):
        ServerConfig(api_keys=keys).keys().check_tenants(terms)
    for config in (ServerConfig(), ServerConfig(api_keys=keys, share_cache=True)):
        with pytest.raises(RefusedCombination, match="needs keys with names"):
            config.keys().check_tenants(terms)

"""Keeping, releasing and forgetting over HTTP, through the real server and engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.client.llm import LLM
from quire.scheduler.sampling_params import SamplingParams
from quire.tiers.scope_facts import is_facts
from quire.tiers.stores.directory import DirectoryStore
from tests.serve.fake_core import ByteTokenizer
from tests.serve.live_server import LiveServer

NAMES = ("retain", "release", "retained", "flush", "epoch")
NOTHING = {"flushed_tokens": 0, "held_tokens": 0, "num_retentions": 0, "storage": "none"}
RETAIN, RELEASE, RETAINED, FLUSH, EPOCH = (f"/v1/cache/{name}" for name in NAMES)


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[LiveServer]:
    """400 tokens of pool, of which a quarter may be kept, and requests of at most 128."""
    options = ["--kv-memory", "100KiB", "--max-model-len", "128", "--retain-share", "0.25"]
    options += ["--served-model-name", "tiny"]
    with LiveServer.quire("--model", str(tiny_model), *options) as server:
        yield server
        server.terminate()
        assert server.wait() == 0, server.log()


@pytest.fixture(autouse=True)
def _forget(live: LiveServer) -> Iterator[None]:
    yield
    assert live.request(FLUSH, {"all": True})[0] == 200
    assert live.request(RETAINED)[1]["retained_tokens"] == 0


def fresh(length: int = 48) -> str:
    """A prompt that was never sent."""
    return (f"{uuid.uuid4().hex} " * 8)[:length]


def compute(live: LiveServer, prompt: str | list[int], **options: Any) -> int:
    """Run a prompt; returns how many of its tokens were cached."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0} | options
    status, answer = live.request("/v1/completions", body)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def asked(live: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    status, answer = live.request(path, body)
    assert status == 200, answer
    return dict(answer)


def flood(live: LiveServer) -> None:
    """More than the pool holds, several times."""
    for _ in range(12):
        compute(live, fresh(120))


def test_what_is_kept_survives_a_flood_and_what_is_not_does_not(live: LiveServer) -> None:
    kept, lost = fresh(60), fresh(60)
    for prompt in (kept, lost):
        assert compute(live, prompt) < 16
    answer = asked(live, RETAIN, prompt=kept, ttl_seconds=300)
    assert (answer["asked_tokens"], answer["granted_tokens"], answer["pinned"]) == (60, 48, False)
    assert answer["reason"] == "granted 48 of 60 tokens: the last 12 are less than a page of 16."
    assert 299 < answer["expires_in_seconds"] <= 300
    flood(live)
    assert compute(live, lost) < 16
    assert compute(live, kept) == 48
    assert asked(live, RELEASE, id=answer["id"]) == {"id": answer["id"], "released": True}
    assert asked(live, RELEASE, id=answer["id"])["released"] is False
    flood(live)
    assert compute(live, kept) < 16


def test_the_answer_says_why_not_more(live: LiveServer) -> None:
    prompts = [fresh(64) for _ in range(3)]
    assert asked(live, RETAIN, prompt=prompts[0], ttl_seconds=9) == {
        "id": None,
        "granted_tokens": 0,
        "asked_tokens": 64,
        "expires_in_seconds": 0.0,
        "pinned": False,
        "host_tokens": 0,
        "reason": "granted 0 of 64 tokens: none of them is cached; ask again when they have been computed.",
    }
    found = []
    for prompt in prompts:
        compute(live, prompt)
        found.append(asked(live, RETAIN, prompt=prompt, ttl_seconds=9))
    budget = live.request(RETAINED)[1]["budget_tokens"]
    assert budget == 96
    assert [answer["granted_tokens"] for answer in found] == [64, 32, 0]
    assert found[1]["reason"] == "granted 32 of 64 tokens: the budget of 96 tokens had 32 left."
    assert found[2]["reason"] == "granted 0 of 64 tokens: the budget of 96 tokens is taken by 2 retentions."


def test_the_three_forms_of_a_prompt(live: LiveServer) -> None:
    text = fresh(32)
    compute(live, text)
    tokens = ByteTokenizer().encode(text).tolist()
    compute(live, tokens)
    found = [asked(live, RETAIN, ttl_seconds=9, **form) for form in ({"prompt": tokens}, {"prompt_token_ids": tokens})]
    assert [answer["granted_tokens"] for answer in found] == [32, 32]
    assert found[0]["id"] == found[1]["id"]
    messages = [{"role": "user", "content": fresh(40)}]
    chat = {"messages": messages, "max_tokens": 1}
    assert live.request("/v1/chat/completions", chat)[0] == 200
    answer = asked(live, RETAIN, messages=messages, ttl_seconds=9)
    assert answer["granted_tokens"] >= 48


def test_it_expires(live: LiveServer) -> None:
    prompt = fresh()
    compute(live, prompt)
    answer = asked(live, RETAIN, prompt=prompt, ttl_seconds=0.2)
    assert answer["granted_tokens"] == 48
    deadline = time.monotonic() + 30
    while live.request(RETAINED)[1]["retentions"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert asked(live, RELEASE, id=answer["id"])["released"] is False
    statistics = live.statistics()
    assert statistics["retentions_expired"] >= 1 and statistics["retained_pages"] == 0


def test_pins_leave_room_for_the_longest_request(live: LiveServer) -> None:
    prompt = fresh(96)
    compute(live, prompt)
    answer = asked(live, RETAIN, prompt=prompt, ttl_seconds=60, pin=True, priority=3)
    assert answer["pinned"] and answer["granted_tokens"] == 96
    flood(live)
    assert compute(live, prompt, max_tokens=32) == 80
    listed = live.request(RETAINED)[1]["retentions"]
    assert [(one["tokens"], one["priority"], one["pinned"]) for one in listed] == [(96, 3, True)]


def test_namespaces_are_the_callers(live: LiveServer) -> None:
    prompt, mine = fresh(), {"cache_salt": "a tenant's secret"}
    compute(live, prompt, **mine)
    others = asked(live, RETAIN, prompt=prompt, ttl_seconds=60, cache_salt="another")
    assert others["id"] is None and others["granted_tokens"] == 0
    answer = asked(live, RETAIN, prompt=prompt, ttl_seconds=60, **mine)
    assert answer["granted_tokens"] == 48
    again = asked(live, RETAIN, prompt=prompt, ttl_seconds=60, salt="a tenant's secret")
    assert again["id"] == answer["id"], "salt is another name of cache_salt"
    status, listing = live.request(RETAINED)
    assert status == 200 and listing["retained_tokens"] == 48
    assert set(listing["retentions"][0]) == {"tokens", "priority", "pinned", "expires_in_seconds"}
    assert answer["id"] not in str(listing) and "secret" not in str(listing)
    assert asked(live, RELEASE, id=answer["id"][:-1])["released"] is False
    flood(live)
    assert compute(live, prompt, **mine) == 32


def test_a_namespace_is_flushed_alone(live: LiveServer) -> None:
    prompts = {salt: fresh() for salt in ("", "one", "two")}
    for salt, prompt in prompts.items():
        compute(live, prompt, cache_salt=salt)
    asked(live, RETAIN, prompt=prompts["one"], ttl_seconds=60, cache_salt="one", pin=True)
    assert asked(live, FLUSH, cache_salt="none") == NOTHING
    answer = asked(live, FLUSH, cache_salt="one")
    assert answer == NOTHING | {"flushed_tokens": 48, "num_retentions": 1}
    assert live.request(RETAINED)[1]["retained_tokens"] == 0
    assert [compute(live, prompt, cache_salt=salt) for salt, prompt in prompts.items()] == [32, 0, 32]
    assert asked(live, FLUSH, salt="")["flushed_tokens"] >= 48
    assert [compute(live, prompt, cache_salt=salt) for salt, prompt in prompts.items()] == [0, 32, 32]
    everything = asked(live, FLUSH, all=True)
    assert everything["flushed_tokens"] == 3 * 48 and everything["held_tokens"] == 0
    assert [compute(live, prompt, cache_salt=salt) for salt, prompt in prompts.items()] == [0, 0, 0]


def test_new_weights_find_nothing_of_the_old(live: LiveServer) -> None:
    prompt = fresh()
    compute(live, prompt)
    asked(live, RETAIN, prompt=prompt, ttl_seconds=60)
    answer = asked(live, EPOCH, weights_epoch=7)
    assert answer["weights_epoch"] == 7 and answer["flushed_tokens"] >= 48
    assert (answer["held_tokens"], answer["num_retentions"]) == (0, 1)
    assert [compute(live, prompt), compute(live, prompt)] == [0, 32]
    again = NOTHING | {"weights_epoch": 7}
    assert asked(live, EPOCH, weights_epoch=7) == again
    assert compute(live, prompt) == 32
    assert live.statistics()["weights_epoch"] == 7


def scopes_in(directory: Path) -> set[bytes]:
    """Of what a directory holds."""
    store = DirectoryStore(directory, None)
    try:
        return {entry.key.scope for entry in store.entries() if not is_facts(entry.key)}
    finally:
        store.close()


def test_flushes_reach_host_memory_and_storage(tiny_model: Path, tmp_path: Path) -> None:
    """A pool so small that what is cached is mostly below the device; the server is stopped right after a flush."""
    options = ["--model", str(tiny_model), "--kv-memory", "50KiB", "--max-model-len", "128", "--dtype", "float32"]
    options += ["--host-memory", "1MiB", "--storage", str(tmp_path / "store"), "--storage-size", "16MiB"]
    options += ["--load", "always", "--prefetch", "wait_complete"]
    prompts = {salt: fresh(96) for salt in ("", "one", "two", "three")}
    with LiveServer.quire(*options) as live:
        for salt, prompt in prompts.items():
            compute(live, prompt, cache_salt=salt)
        assert [compute(live, prompt, cache_salt=salt) for salt, prompt in prompts.items()] == [80] * 4
        answer = asked(live, FLUSH, cache_salt="one")
        assert answer["flushed_tokens"] > 0 and answer["storage"] == "gone"
        assert [compute(live, prompt, cache_salt=salt) for salt, prompt in prompts.items()] == [80, 0, 80, 80]
        assert asked(live, FLUSH, cache_salt="two")["held_tokens"] == 0
        asked(live, RETAIN, prompt=prompts["three"], ttl_seconds=60, cache_salt="three")
        assert [compute(live, prompt, cache_salt=salt) for salt, prompt in prompts.items()] == [80, 80, 0, 80]
        stored = scopes_in(tmp_path / "store")
        assert asked(live, EPOCH, weights_epoch=1)["storage"] == "kept"
        assert [compute(live, prompt, cache_salt=salt) for salt, prompt in prompts.items()] == [0] * 4
        asked(live, EPOCH, weights_epoch=0)
        assert [compute(live, prompt, cache_salt=salt) for salt, prompt in prompts.items()] == [80] * 4
        asked(live, FLUSH, all=True)
        assert [compute(live, prompt, cache_salt=salt) for salt, prompt in prompts.items()] == [0] * 4
        asked(live, FLUSH, all=True)
        live.terminate()
        assert live.wait() == 0, live.log()
    left = scopes_in(tmp_path / "store")
    assert left, "what the other epoch has stored stays for it"
    assert not {scope[:8] for scope in left} & {scope[:8] for scope in stored}, "something of this epoch is left"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RETAIN, {"prompt": "a"}, "ttl_seconds"),
        (RETAIN, {"prompt": "a", "ttl_seconds": "60"}, "ttl_seconds"),
        (RETAIN, {"prompt": "a", "ttl_seconds": float("nan")}, "ttl_seconds"),
        (RETAIN, {"prompt": "a", "ttl_seconds": 0}, None),
        (RETAIN, {"prompt": "a", "ttl_seconds": -1}, None),
        (RETAIN, {"prompt": "a", "ttl_seconds": 1e9}, None),
        (RETAIN, {"ttl_seconds": 1}, "messages"),
        (RETAIN, {"prompt": "a", "prompt_token_ids": [1], "ttl_seconds": 1}, "prompt_token_ids"),
        (RETAIN, {"prompt": ["a", "b"], "ttl_seconds": 1}, "prompt[0]"),
        (RETAIN, {"prompt": [2**31], "ttl_seconds": 1}, "prompt[0]"),
        (RETAIN, {"prompt": "\ud800", "ttl_seconds": 1}, "prompt"),
        (RETAIN, {"prompt_token_ids": [-1], "ttl_seconds": 1}, "prompt_token_ids[0]"),
        (RETAIN, {"messages": [], "ttl_seconds": 1}, "messages"),
        (RETAIN, {"prompt": "a", "ttl_seconds": 1, "priority": 2**31}, "priority"),
        (RETAIN, {"prompt": "a", "ttl_seconds": 1, "pin": "yes"}, "pin"),
        (RETAIN, {"prompt": "a", "ttl_seconds": 1, "cache_salt": "\ud800"}, "cache_salt"),
        (RETAIN, {"prompt": "a", "ttl_seconds": 1, "adapter": "mine"}, None),
        (RETAIN, {"prompt": "a", "ttl_seconds": 1, "ttl": 1}, "ttl"),
        (RETAIN, {"messages": [{"role": "user", "content": "a", "nme": "b"}], "ttl_seconds": 1}, "messages[0].nme"),
        (RELEASE, {}, "id"),
        (RELEASE, {"id": 7}, "id"),
        (RELEASE, {"id": ["a"]}, "id"),
        (FLUSH, {}, "all"),
        (FLUSH, {"all": False}, "all"),
        (FLUSH, {"all": True, "cache_salt": "a"}, "all"),
        (FLUSH, {"all": 1}, "all"),
        (FLUSH, {"everything": True}, "everything"),
        (FLUSH, [], None),
        (EPOCH, {}, "weights_epoch"),
        (EPOCH, {"weights_epoch": -1}, "weights_epoch"),
        (EPOCH, {"weights_epoch": 2**63}, "weights_epoch"),
        (EPOCH, {"weights_epoch": True}, "weights_epoch"),
        (EPOCH, {"weights_epoch": "1"}, "weights_epoch"),
        (EPOCH, {"weights_epoch": 1.0}, "weights_epoch"),
        (EPOCH, {"weights_epoch": 1, "all": True}, "all"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(live: LiveServer, path: str, body: Any, param: str | None) -> None:
    status, answer = live.request(path, body)
    assert status == 400, answer
    assert answer["error"]["param"] == param and answer["error"]["message"]


def test_a_model_that_is_not_served(live: LiveServer) -> None:
    status, answer = live.request(RETAIN, {"prompt": "a", "ttl_seconds": 1, "model": "other"})
    assert status == 404 and answer["error"]["code"] == "QUIRE-MODEL-04"


def test_they_need_the_key_and_a_live_engine() -> None:
    with LiveServer.echo(api_key="sesame", max_restarts=0) as echo:
        for path in (RETAIN, RELEASE, FLUSH, RETAINED, EPOCH):
            assert echo.request(path, None if path == RETAINED else {})[0] == 401
        key = {"Authorization": "Bearer sesame"}
        body = {"prompt": "a", "ttl_seconds": 1}
        status, answer = echo.request(RETAIN, body, headers=key)
        assert status == 500, answer  # a core that cannot: the question is answered, and nothing has ended
        assert echo.request("/v1/completions", {"prompt": "ab", "max_tokens": 2}, headers=key)[0] == 200
        assert echo.request("/v1/completions", {"prompt": "crash", "max_tokens": 2}, headers=key)[0] == 503
        assert echo.request(RETAIN, body, headers=key)[0] == 503


def test_in_this_process(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), kv_memory="100KiB", max_model_len=128, show_plan=False)
    prompt = list(range(60))
    llm.generate([prompt], SamplingParams(max_tokens=1))
    granted = llm.retain(prompt, ttl_seconds=60, pin=True)
    assert (granted.granted_tokens, granted.pinned) == (48, True)
    for first in range(60, 250, 10):
        llm.generate([[first + i % 7 for i in range(100)]], SamplingParams(max_tokens=1))
    assert llm.generate([prompt], SamplingParams(max_tokens=1))[0].num_cached_tokens == 48
    assert llm.retain("this was never sent", ttl_seconds=1).granted_tokens == 0
    assert llm.release(granted.retention_id) and not llm.release(granted.retention_id)
    changes = llm.engine.cache.num_changes
    assert llm.retain(prompt, ttl_seconds=60).granted_tokens == 48
    assert llm.flush().held_tokens == 0
    assert llm.engine.cache.num_changes > changes, "requests that wait for room try again"
    llm.engine.audit()


def test_with_a_budget_of_nothing(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), kv_memory="100KiB", retain_share=0, show_plan=False)
    llm.generate([list(range(40))], SamplingParams(max_tokens=1))
    granted = llm.retain(list(range(40)), ttl_seconds=60)
    assert granted.reason == "granted 0 of 40 tokens: the budget of 0 tokens keeps nothing; raise --retain-share."


def marked(text: str) -> dict[str, Any]:
    """A request of Anthropic's dialect whose prompt has a mark."""
    part = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    return {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}


def test_a_mark_alone_retains_nothing(live: LiveServer) -> None:
    status, answer = live.request("/v1/messages", marked(fresh()))
    assert status == 200, answer
    assert live.request(RETAINED)[1]["retentions"] == []


def test_a_marked_prompt_is_retained(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann\nbob key-of-bob\n")
    keys.chmod(0o600)
    ann, admin = ({"Authorization": f"Bearer key-of-{name}"} for name in ("ann", "admin"))
    options = ("--kv-memory", "100KiB", "--retain-marked", "--api-keys", str(keys), "--admin-key", "key-of-admin")
    with LiveServer.quire("--model", str(tiny_model), "--served-model-name", "tiny", *options) as live:
        plain = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": fresh()}]}
        assert live.request("/v1/messages", plain, headers=ann)[0] == 200
        assert live.request(RETAINED, headers=admin)[1]["retentions"] == []
        status, answer = live.request("/v1/messages", marked(fresh()), headers=ann)
        assert status == 200, answer
        deadline = time.monotonic() + 30
        while not (listed := live.request(RETAINED, headers=admin)[1]["retentions"]):
            assert time.monotonic() < deadline, live.log()
            time.sleep(0.05)
        [one] = listed
        assert one["tokens"] == answer["usage"]["input_tokens"] // 16 * 16

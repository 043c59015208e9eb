"""Explanations over HTTP: the field of a request, the route, and the counters."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from quire.client.llm import LLM
from quire.client.output import SequenceDelta
from quire.client.tokenising import Rendered
from quire.errors import UnknownRequest
from quire.observe.explain import Cause, Explanation, Explanations
from quire.scheduler.sampling_params import SamplingParams
from quire.serve import places
from quire.serve.generation import _events
from quire.serve.journal import NO_JOURNAL
from quire.serve.places import PromptPlaces
from tests.serve.fake_core import ByteTokenizer
from tests.serve.live_server import LiveServer

EXPLAIN = {"explain": True}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> OpenAI:
    return server.client()


def fresh(length: int = 60) -> str:
    """A prompt that was never sent, though others may begin with the same letters."""
    return (f"{uuid.uuid4().hex} " * 8)[:length]


def complete(client: OpenAI, prompt: str | list[str], **options: Any) -> Any:
    create: Any = client.completions.create
    return create(model="tiny", prompt=prompt, max_tokens=3, temperature=0, **options)


def causes(explanation: dict[str, Any]) -> list[tuple[str, int]]:
    tokens = [(reason["cause"], reason["tokens"]) for reason in explanation["reasons"]]
    assert sum(count for _, count in tokens) == explanation["prompt_tokens"]
    assert sum(count for cause, count in tokens if cause == "hit") == explanation["hit_tokens"]
    return tokens


def parts(explanation: dict[str, Any]) -> dict[str, int]:
    """Tokens that were reused, that had been evicted, ...; what is new may begin with a letter or two of others'."""
    found = Counter[str]()
    for cause, count in causes(explanation):
        found["new" if cause == "page" else cause] += count
    return dict(found)


def test_each_choice_says_why(client: OpenAI) -> None:
    prompt = fresh(60)
    first = complete(client, prompt, extra_body=EXPLAIN)
    assert parts(first.choices[0].model_extra["explanation"]) == {"new": 60}
    both = complete(client, [prompt, f"{prompt[:40]}!!!!"], n=2, extra_body=EXPLAIN)
    found = [choice.model_extra["explanation"] for choice in both.choices]
    assert causes(found[0]) == causes(found[1]) == [("hit", 48), ("new", 12)]
    assert causes(found[2]) == [("hit", 32), ("new", 12)], "less than a page in common is not told"
    assert "explanation" not in complete(client, prompt).choices[0].model_extra


def test_the_last_chunk_of_a_stream_says_why(client: OpenAI) -> None:
    prompt = fresh(60)
    chunks = list(complete(client, prompt, stream=True, extra_body=EXPLAIN))
    told = [
        choice.model_extra["explanation"] for c in chunks for choice in c.choices if "explanation" in choice.model_extra
    ]
    assert [parts(one) for one in told] == [{"new": 60}]
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_says_why(client: OpenAI, stream: bool) -> None:
    create: Any = client.chat.completions.create
    message = {"role": "user", "content": fresh(40)}
    answer = create(model="tiny", messages=[message], max_tokens=2, stream=stream, extra_body=EXPLAIN)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    (told,) = [choice.model_extra["explanation"] for choice in choices if "explanation" in choice.model_extra]
    assert sum(tokens for _, tokens in causes(told)) > 40


def test_what_others_have_cached_is_not_told_to_a_client(server: LiveServer, client: OpenAI) -> None:
    prompt = fresh(60)
    complete(client, prompt, extra_body={"cache_salt": "a tenant's secret"})
    probe = complete(client, prompt, extra_body=EXPLAIN)
    assert parts(probe.choices[0].model_extra["explanation"]) == {"new": 60}
    status, answer = server.request(f"/v1/cache/explain/{probe.id}")
    assert status == 200
    assert parts(answer["explanations"][0])["namespace"] >= 48 - 3
    assert "a salt of their own" in str(answer) and "secret" not in str(answer)


@pytest.mark.parametrize("value", ["yes", 1, [], {}])
def test_explain_is_yes_or_no(server: LiveServer, value: object) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", chat)):
        status, answer = server.request(f"/v1/{path}", {**body, "explain": value})
        assert (status, answer["error"]["param"]) == (400, "explain")


def test_the_route_knows_the_last_requests(server: LiveServer, client: OpenAI) -> None:
    victim = fresh(200)
    complete(client, victim)
    for _ in range(4):  # the pool holds 400 tokens, and four times as many are remembered
        complete(client, fresh(200))
    again = complete(client, victim)
    status, answer = server.request(f"/v1/cache/explain/{again.id}")
    assert status == 200 and answer["request_id"] == again.id
    (found,) = answer["explanations"]
    assert found["sequence"] == f"{again.id}-0-0"
    told = parts(found)
    assert told["evicted"] + told.get("hit", 0) == 192
    reason = next(reason for reason in found["reasons"] if reason["cause"] == "evicted")
    assert reason["by"].startswith("cmpl-") and reason["by"] != f"{again.id}-0-0"
    assert 0 <= reason["seconds_ago"] < 60
    assert server.request(f"/v1/cache/explain/{reason['by']}")[0] == 200
    for part in ("cmpl", again.id[:-1]):
        assert server.request(f"/v1/cache/explain/{part}")[0] == 404, "a part of an id is no id"
    status, answer = server.request("/v1/cache/explain/cmpl-unknown")
    assert status == 404
    assert answer["error"]["code"] == "QUIRE-REQUEST-01"
    assert "are, of at most 1,000" in answer["error"]["message"]


def test_an_id_is_no_pattern(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling one takes long, and `re` keeps it."""
    kept = Explanations()
    for key in ("r.1-0", "r.1-0-10", "rx1-0", "r.1-x"):
        kept.add(key, Explanation(1, ()))
    with monkeypatch.context() as patched:
        patched.setattr(re, "compile", None)
        assert kept.of("r.1").keys() == {"r.1-0", "r.1-0-10"}
        assert kept.of("r.1-0").keys() == {"r.1-0"}
    status, answer = server.request(f"/v1/cache/explain/{'x' * 257}")
    assert (status, answer["error"]["param"]) == (400, "request_id")
    assert server.request(f"/v1/cache/explain/{'x' * 256}")[0] == 404


def test_causes_in_the_metrics_add_up(server: LiveServer, client: OpenAI) -> None:
    for _ in range(2):
        complete(client, fresh(100), n=2)
        families = {family.name: family for family in text_string_to_metric_families(server.request("/metrics")[1])}
        by_cause = {s.labels["cause"]: s.value for s in families["quire_prompt_tokens_by_cause"].samples}
        assert set(by_cause) == set(map(str, Cause))
        assert sum(by_cause.values()) == families["quire_prompt_tokens"].samples[0].value > 0
        assert by_cause["hit"] == families["quire_hit_tokens"].samples[0].value


def test_in_this_process(tiny_model: Any) -> None:
    params = SamplingParams(max_tokens=2)
    llm = LLM(str(tiny_model), kv_memory="100KiB", show_plan=False)
    prompt = list(range(40))
    first, again = (llm.generate([prompt], params)[0].outputs[0].explanation for _ in range(2))
    assert first is not None and again is not None
    assert (first.hit_tokens, again.hit_tokens) == (0, 32)
    assert llm.engine.explanations.of("r1") == llm.engine.explanations.of("r1-0") == {"r1-0": again}
    silent = LLM(str(tiny_model), kv_memory="100KiB", show_plan=False, explain=False)
    assert silent.generate([prompt], params)[0].outputs[0].explanation is None
    assert silent.statistics()["explained_tokens"] == {} and not silent.engine.explanations._kept


def test_an_engine_that_does_not_explain_says_so(tiny_model: Any) -> None:
    with LiveServer.quire("--model", str(tiny_model), "--kv-memory", "100KiB", "--no-explain") as live:
        status, answer = live.request("/v1/completions", {"prompt": "a", "max_tokens": 1} | EXPLAIN)
        assert status == 400 and "does not" in answer["error"]["message"]
        assert live.request("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert "by_cause" not in live.request("/metrics")[1]


def test_an_explanation_is_its_owners() -> None:
    kept = Explanations()
    for owner in ("ann", "bob"):
        kept.add(f"of-{owner}-0", Explanation(1, ()), owner)
    assert kept.of("of-ann", "ann").keys() == kept.of("of-ann").keys() == {"of-ann-0"}
    for asked in ("of-ann", "of-ann-0"):
        with pytest.raises(UnknownRequest) as told:
            kept.of(asked, "bob")
        with pytest.raises(UnknownRequest) as unknown:
            kept.of("x", "bob")
        assert told.value.message.replace(asked, "x") == unknown.value.message


def test_only_the_newest_are_kept() -> None:
    kept = Explanations()
    for number in range(Explanations.CAPACITY + 5):
        kept.add(f"r{number}-0", Explanation(number, ()))
    kept.add("r5-0", Explanation(1, ()))
    kept.add("new-0", Explanation(2, ()))
    assert kept.of("r5")["r5-0"].prompt_tokens == 1
    for gone in ("r6", "r"):
        with pytest.raises(UnknownRequest, match="1,000 are, of at most 1,000"):
            kept.of(gone)


@pytest.mark.parametrize("stream", [False, True])
def test_a_block_that_changes_is_named(server: LiveServer, stream: bool) -> None:
    """By its place in the client's own body, and the first token that is not shared."""

    def told(path: str, body: dict[str, Any]) -> Any:
        status, found = server.request(path, body | EXPLAIN | {"stream": stream})
        assert status == 200, found
        events = [json.loads(line[6:]) for line in found.splitlines() if line.startswith("data: {")] if stream else []
        for each in events or [found]:
            for part in (each, *each.get("choices", ()), each.get("response", {})):
                if "explanation" in part:
                    return part["explanation"].get("first_new")
        raise AssertionError(found)

    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    same, old, new = (fresh(70) for _ in range(3))
    user = {"role": "user", "content": fresh(60)}
    few, last = {"max_tokens": 2}, {"messages": [user]}
    conversations: list[tuple[str, str, Any]] = [
        ("chat/completions", "messages[1]", lambda said: few | {"messages": [user, user | {"content": said}, user]}),
        ("responses", "input[1]", lambda said: {"input": [user, user | {"content": said}], "max_output_tokens": 2}),
        ("messages", "system[1]", lambda said: few | last | {"system": [text(same), text(said)]}),
    ]
    for path, place, body in conversations:
        told(f"/v1/{path}", body(old))
        found = told(f"/v1/{path}", body(new))
        assert 48 <= found["token"] <= 96 and found["token"] % 16 == 0, found
        assert found["in"][-1] == place, found
        again = told(f"/v1/{path}", body(new))
        assert again is None or again["token"] > found["token"]


class Answer:
    """An answer, and its form, that write down which threads make their events."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def before(self) -> list[Any]:
        return []

    async def deltas(self) -> AsyncGenerator[list[Any], None]:
        yield [(0, SequenceDelta(index=0, text="a", token_ids=[1]))]
        yield [(0, SequenceDelta(index=0, text="a", token_ids=[1], finish_reason="length"))]

    def events(self, *_: object) -> bytes:
        self.threads.append(threading.current_thread())
        return b""

    end = events

    def tell_endings(self, _: object) -> None: ...

    def close(self) -> None: ...


def test_places_are_looked_for_in_a_thread() -> None:
    answer: Any = Answer()

    async def read() -> None:
        _ = [each async for each in _events(answer, answer, NO_JOURNAL, is_scored=False, explains=True)]

    asyncio.run(read())
    assert [each is threading.main_thread() for each in answer.threads] == [True, False, False]


def test_texts_that_are_not_in_the_prompt_are_looked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has it all read."""
    text = '"tool" one two one three'
    monkeypatch.setattr(places, "_MOST_READ", 3 * len(text))

    def found(messages: list[str], *tools: str) -> list[tuple[int, str]]:
        body = SimpleNamespace(messages=messages, tools=[SimpleNamespace(name=tool) for tool in tools])
        prompt = Rendered(text, np.arange(len(text), dtype=np.int32))
        return list(PromptPlaces(body, prompt, ByteTokenizer())._starts())

    said = [(19, "messages[3]"), (15, "messages[2]"), (11, "messages[1]"), (7, "messages[0]")]
    assert found(["one", "two", " one\n", "three"], "four", "tool") == [*said, (0, "tools[1]")]
    assert found(["one", "four", "", "five"], "tool") == [(15, "messages[0]"), (0, "tools[0]")]
    assert found(["one", "four", "five", "six"], "tool") == []
    assert found([], "four", "five", "six", "tool") == []

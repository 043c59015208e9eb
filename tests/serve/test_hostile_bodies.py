"""Bodies made to hurt: each is refused by name, and the server is as it was before."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from starlette.types import Message
from transformers import PreTrainedTokenizerBase

from quire.client.output import CompletionOutput, Logprob
from quire.serve.choices import TextChoices
from quire.serve.config import LEAST_BODY_BYTES
from quire.serve.conversation import TEMPLATE_ARGUMENTS
from quire.serve.protocol import CompletionBody
from quire.serve.sse import EventStream
from tests.serve.live_server import LiveServer

CHAT = [{"role": "user", "content": "Hello"}]
COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def echo() -> Iterator[LiveServer]:
    with LiveServer.echo() as live:
        yield live


def refused(live: LiveServer, path: str, body: object = None, *, raw: bytes | None = None) -> dict[str, Any]:
    """The error of a body that must be the client's fault, after which nothing runs and the server is well."""
    status, answer = live.request(path, body, raw=raw)
    assert status == 400, answer
    live.wait_idle()
    assert live.request("/health")[0] == 200
    status, answered = live.request(COMPLETIONS, {"prompt": "ab", "max_tokens": 3})
    assert status == 200, answered
    return dict(answer["error"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2**64),
        ("top_k", 2**31),
        ("priority", 2**64),
        ("priority", -(2**31) - 1),
        ("max_tokens", 2**70),
        ("min_tokens", 2**70),
        ("n", 2**70),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("logprobs", 2**70),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {str(2**31): 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", {"5": float("inf")}),
        ("temperature", float("nan")),
        ("stop", "\ud800"),
        ("stop", ["a", "\ud800"]),
        ("cache_salt", "\udfff"),
        ("prompt", "a\ud800"),
        ("prompt", ["a", "\ud800"]),
        ("model", "\ud800"),
    ],
)
def test_values_that_cannot_be_sent_to_the_engine(echo: LiveServer, field: str, value: object) -> None:
    param = refused(echo, COMPLETIONS, {"prompt": "ab", "max_tokens": 3} | {field: value})["param"]
    assert param.partition("[")[0] == field


MANY = 200_000


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "stop", ["x"] * MANY),
        (COMPLETIONS, "stop", [1] * MANY),
        (COMPLETIONS, "stop", "x" * MANY),
        (COMPLETIONS, "stop_token_ids", [1] * MANY),
        (COMPLETIONS, "logit_bias", {str(token): 1 for token in range(MANY)}),
        (COMPLETIONS, "cache_salt", "x" * MANY),
        (COMPLETIONS, "prompt", ["x"] * MANY),
        (COMPLETIONS, "prompt", [[]] * MANY),
        (COMPLETIONS, "prompt", [1] * MANY + ["x"]),
        (COMPLETIONS, "prompt", [[1] * MANY + [None]]),
        (CHAT_COMPLETIONS, "messages", CHAT * (MANY // 10)),
        (CHAT_COMPLETIONS, "messages", [{"role": "user", "content": [{"type": "text", "text": ""}] * (MANY // 10)}]),
        (CHAT_COMPLETIONS, "messages", [{}] * 4096),
        (CHAT_COMPLETIONS, "chat_template_kwargs", {str(number): 1 for number in range(MANY)}),
        (COMPLETIONS, "x" * MANY, 1),
    ],
)
def test_lists_have_ends(echo: LiveServer, path: str, field: str, value: object) -> None:
    """What is too long is refused by its length, before its items are looked at."""
    prompt = {"messages": CHAT} if path == CHAT_COMPLETIONS else {"prompt": "ab"}
    error = refused(echo, path, prompt | {"max_tokens": 3, field: value})
    assert error["param"].startswith(field[:100]) and len(str(error)) < 1000


def test_a_prompt_of_text_is_refused_by_its_length(echo: LiveServer) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "a" * 1_000_000}),
        (CHAT_COMPLETIONS, {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
    ):
        assert "characters" in refused(echo, path, body)["message"]


def test_text_that_has_no_utf_8_in_a_conversation(echo: LiveServer) -> None:
    for content in ("\ud800", [{"type": "text", "text": "\ud800"}]):
        error = refused(echo, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        assert error["param"].startswith("messages[0].content")


@pytest.mark.parametrize("schema", [{"description": "\ud800"}, {"properties": {"\ud800": {}}}], ids=["value", "key"])
def test_text_that_has_no_utf_8_in_a_schema(scripted: LiveServer, schema: dict[str, Any]) -> None:
    """No field of a body is wrong; the prompt that it makes is."""
    user = {"role": "user", "content": "a"}
    function = {"name": "f", "parameters": schema}
    for path, body in (
        (CHAT_COMPLETIONS, {"messages": [user], "tools": [{"type": "function", "function": function}]}),
        ("/v1/messages", {"messages": [user], "max_tokens": 4, "tools": [{"name": "f", "input_schema": schema}]}),
        ("/v1/responses", {"input": [user], "tools": [{"type": "function"} | function]}),
        ("/tokenize", {"messages": [user], "tools": [{"type": "function", "function": function}]}),
    ):
        status, answer = scripted.request(path, body)
        assert status == 400 and "lone surrogates" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_a_body_that_cannot_be_read_says_why(echo: LiveServer, raw: bytes, text: str) -> None:
    assert text in refused(echo, COMPLETIONS, raw=raw)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", {"a": float("nan")}),
        ("metadata", {"a": "\ud800"}),
        ("user", "\ud800"),
        ("tools", [{"type": "function", "name": "f", "parameters": {"default": float("inf")}}]),
        ("text", {"format": {"type": "text", "schema": {"a": float("nan")}}}),
    ],
)
def test_what_an_answer_could_not_repeat(scripted: LiveServer, field: str, value: object, *, stream: bool) -> None:
    body = {"input": "x", "max_output_tokens": 1, "stream": stream, field: value}
    assert refused(scripted, "/v1/responses", body)["param"] == field


def test_a_body_in_chunks_has_the_same_limit(echo: LiveServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", echo.port, timeout=60)
    connection.putrequest("POST", COMPLETIONS)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    for _ in range(LEAST_BODY_BYTES // 2**20):
        connection.send(b"100000\r\n" + b" " * 2**20 + b"\r\n")
    connection.send(b"1\r\n \r\n")
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    assert (response.status, error["code"]) == (413, "QUIRE-BODY-01")


@pytest.mark.parametrize(
    "variables",
    [
        {"chat_template": "{% for i in range(10**9) %}{% endfor %}"},
        {"tools": "x"},
        {"documents": "x"},
        {"self": "x"},
        {"messages": "x"},
        {"conversation": "x"},
        {"tokenize": True},
        {"add_generation_prompt": False},
        {"padding": "max_length"},
        {"a": ["no", "scalar"]},
        {"a": {"no": "scalar"}},
        {"a": "\ud800"},
    ],
)
def test_a_client_sets_variables_of_the_template_and_nothing_else(
    server: LiveServer, variables: dict[str, object]
) -> None:
    body = {"messages": CHAT, "max_tokens": 2, "chat_template_kwargs": variables}
    status, answer = server.request("/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"].startswith("chat_template_kwargs")


def test_plain_variables_reach_the_template(server: LiveServer) -> None:
    variables = {"enable_thinking": False, "style": "brief", "depth": 3, "scale": 0.5, "nothing": None}
    body = {"messages": CHAT, "max_tokens": 2, "chat_template_kwargs": variables}
    assert server.request("/v1/chat/completions", body)[0] == 200


def test_every_argument_of_the_tokenizers_own_is_reserved() -> None:
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    names = {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    assert names <= TEMPLATE_ARGUMENTS


def test_a_stream_that_is_never_read_is_closed() -> None:
    """The client may leave before the first event; what feeds the stream must be closed all the same."""
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"never read"

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        await asyncio.sleep(60)

    stream = EventStream(events(), on_close=lambda: closed.append(True))
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), 5))
    assert closed == [True]


def test_tokens_that_read_alike_keep_their_own_logprobs() -> None:
    position = {
        7: Logprob(logprob=-0.5, rank=1, decoded_token="\ufffd"),
        8: Logprob(logprob=-1.0, rank=2, decoded_token="a"),
        9: Logprob(logprob=-2.0, rank=3, decoded_token="\ufffd"),
    }
    for drawn, expected in ((7, ["\ufffd", "a", "token_id:9"]), (9, ["token_id:7", "a", "\ufffd"])):
        part = CompletionOutput(index=0, text="", token_ids=[drawn], logprobs=[position], text_offsets=[0])
        shape = TextChoices(CompletionBody(prompt="", logprobs=3)).logprobs(0, part)
        assert shape is not None
        assert shape["top_logprobs"] == [dict(zip(expected, (-0.5, -1.0, -2.0), strict=True))]
        assert list(shape["top_logprobs"][0]) == expected
        assert shape["top_logprobs"][0][shape["tokens"][0]] == shape["token_logprobs"][0]


def test_a_full_collection_visits_nothing_that_a_start_has_made(echo: LiveServer) -> None:
    """It would hold all answers for as long as that takes."""
    assert echo.summary["num_frozen"] > 1000


def test_refusals_have_codes_of_their_own(server: LiveServer) -> None:
    for path, body in (("/v1/models/nope", None), (COMPLETIONS, {"prompt": "a", "model": "nope"})):
        status, answer = server.request(path, body)
        assert (status, answer["error"]["code"]) == (404, "QUIRE-MODEL-04")
    status, answer = server.request(COMPLETIONS, raw=b"", headers={"Content-Length": str(2**30)})
    assert (status, answer["error"]["code"]) == (413, "QUIRE-BODY-01")

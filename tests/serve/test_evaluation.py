"""What evaluation clients send: echo, log-probabilities of prompts, no tokens at all, and the tokenizer's routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.client.output import ShownPrompt
from quire.client.prompted import PromptedSequence
from quire.client.request_assembler import RequestAssembler
from quire.engine.messages import PromptLogprobs, TokenLogprobs, TokenOutput
from quire.models.tokenizer import load_tokenizer
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.choices import TextChoices
from quire.serve.keys import Keys
from quire.serve.protocol import CompletionBody
from tests.serve.live_server import LiveServer

TEXT = "It is a truth universally acknowledged, that a single man"
DIFFERENCE = 2e-4  # of log-probabilities in float32


@pytest.fixture(scope="module")
def client(server: LiveServer) -> OpenAI:
    return server.client()


def complete(client: OpenAI, prompt: Any, **more: Any) -> Any:
    create: Any = client.completions.create
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    extra = {name: more.pop(name) for name in ("prompt_logprobs",) if name in more}
    return create(**body | {"echo": True} | more, extra_body=extra)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Iterator[Any]:
    """Log-probabilities by transformers: row i is of the token behind position i."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)

    def found(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)

    return found


@pytest.fixture(scope="module")
def ids(tiny_model: Path) -> list[int]:
    return load_tokenizer(str(tiny_model)).encode(TEXT).tolist()


def check_lists(logprobs: Any, ids: list[int], expected: Any) -> None:
    """The lists that lm-eval reads, of the prompt `ids` and one token: its values are transformers', and the token that
    is there is always in `top_logprobs`, as the same number."""
    wanted = expected(ids)
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == len(ids) + 1
    for at in range(1, len(ids)):
        own, top = logprobs.token_logprobs[at], logprobs.top_logprobs[at]
        assert own == pytest.approx(float(wanted[at - 1, ids[at]]), abs=DIFFERENCE)
        assert max(top.values()) == pytest.approx(float(wanted[at - 1].max()), abs=DIFFERENCE)
        assert top[logprobs.tokens[at]] == own and 1 <= len(top) <= 2
    last = logprobs.token_logprobs[-1]
    assert last == max(logprobs.top_logprobs[-1].values()) == pytest.approx(float(wanted[-1].max()), abs=DIFFERENCE)


def test_an_echo_as_lm_eval_asks_for_it(client: OpenAI, ids: list[int], expected: Any) -> None:
    """Cold, warm, and after other prompts took the memory; several prompts at once, in their order."""
    for prompts in ([ids, ids[:20]], [ids, ids[:20]], [list(range(200))], [ids[:20], ids]):
        answer = complete(client, prompts)
        assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
        for choice, prompt in zip(answer.choices, prompts, strict=True):
            check_lists(choice.logprobs, prompt, expected)
        assert answer.usage.completion_tokens == len(prompts)


def test_an_echo_is_the_text(client: OpenAI) -> None:
    plain = complete(client, TEXT, echo=False, logprobs=None, max_tokens=8)
    for options in ({"logprobs": None}, {"logprobs": 0}, {"logprobs": 3}):
        answer = complete(client, TEXT, max_tokens=8, **options)
        assert answer.choices[0].text == TEXT + plain.choices[0].text
        assert answer.usage.completion_tokens == 8
        if options["logprobs"] is not None:
            found = answer.choices[0].logprobs
            places = zip(found.text_offset, found.tokens, strict=True)
            assert all(TEXT[place:].startswith(token) for place, token in list(places)[: len(TEXT)])
            assert (found.top_logprobs is None) == (options["logprobs"] == 0)


def test_no_tokens_at_all(client: OpenAI, ids: list[int]) -> None:
    answer = complete(client, TEXT, max_tokens=0, n=2)
    assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(ids) and choice.finish_reason == "length"
    assert answer.choices[0].logprobs == answer.choices[1].logprobs
    assert answer.usage.completion_tokens == 0
    bare = complete(client, TEXT, max_tokens=0, logprobs=None).choices[0]
    assert (bare.text, bare.logprobs) == (TEXT, None)


def test_several_sequences_have_the_prompt_s_scores(client: OpenAI, ids: list[int], expected: Any) -> None:
    for _ in range(2):  # cold, and warm
        answer = complete(client, ids, n=3, prompt_logprobs=1)
        for choice in answer.choices:
            check_lists(choice.logprobs, ids, expected)
            assert choice.model_extra["prompt_logprobs"] == answer.choices[0].model_extra["prompt_logprobs"]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_streamed_echo(client: OpenAI, logprobs: int | None) -> None:
    """The prompt and the first token come in one chunk."""
    whole = complete(client, TEXT, max_tokens=6, logprobs=logprobs).choices[0]
    chunks = list(complete(client, TEXT, max_tokens=6, logprobs=logprobs, stream=True))
    assert chunks[0].choices[0].text.startswith(TEXT) and len(chunks[0].choices[0].text) > len(TEXT)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    if logprobs is not None:
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [each for part in parts for each in getattr(part, name)] == getattr(whole.logprobs, name)
    ended = list(complete(client, TEXT, max_tokens=0, logprobs=logprobs, stream=True))
    assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in ended] == [(TEXT, "length")]


def test_prompt_logprobs_as_vllm_has_them(client: OpenAI, ids: list[int], expected: Any) -> None:
    answer = complete(client, ids, echo=False, logprobs=None, prompt_logprobs=2)
    wanted, found = expected(ids), answer.choices[0].model_extra["prompt_logprobs"]
    assert found[0] is None and len(found) == len(ids)
    for at, position in enumerate(found[1:], 1):
        own = position[str(ids[at])]
        assert own["logprob"] == pytest.approx(float(wanted[at - 1, ids[at]]), abs=DIFFERENCE)
        assert own["rank"] == int((wanted[at - 1] > wanted[at - 1, ids[at]]).sum()) + 1
        assert own["decoded_token"] == TEXT[at]
        assert {each["rank"] for each in position.values()} >= {1, 2}
    create: Any = client.chat.completions.create
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
    chat = create(**body, extra_body={"prompt_logprobs": 0})
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens


def test_the_token_that_was_drawn_is_among_the_top_ones(client: OpenAI) -> None:
    """Also where it is not one of the k most likely."""
    found = complete(client, TEXT, echo=False, temperature=30.0, max_tokens=20, seed=1).choices[0].logprobs
    assert any(len(top) == 2 for top in found.top_logprobs)
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob
    create: Any = client.chat.completions.create
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "seed": 1}
    chat = create(**body, temperature=2.0, logprobs=True, top_logprobs=1)
    for position in chat.choices[0].logprobs.content:
        assert position.logprob in {each.logprob for each in position.top_logprobs}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs cannot be streamed"),
        ({"echo": True, "logprobs": 1, "session_id": "s"}, "in a session"),
        ({"echo": True, "logprobs": 1, "n": 2, "stream": True}, "cannot be streamed with n > 1"),
    ],
)
def test_refusals_say_which_field(server: LiveServer, body: dict[str, Any], named: str) -> None:
    status, text = server.request("/v1/completions", {"prompt": "a"} | body)
    assert status == 400 and named in str(text)
    status, text = server.request(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "echo": True}
    )
    assert status == 400 and "echo is not supported" in str(text)


def test_the_tokenizers_routes(server: LiveServer, tiny_model: Path, ids: list[int]) -> None:
    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        status, found = server.request(path, body)
        assert status == 200, found
        return found

    found = ask("/tokenize", {"prompt": TEXT, "return_token_strs": True})
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 512)
    assert found["token_strs"][:3] == ["I", "t", "Ġ"]
    assert ask("/tokenize", {"prompt": TEXT, "add_special_tokens": False})["token_strs"] is None
    chat = ask("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny"})
    assert ask("/detokenize", {"tokens": chat["tokens"]}) == {"prompt": "<user>Hi\n<assistant>"}
    assert ask("/detokenize", {"tokens": [256]}) == {"prompt": "<|end|>"}
    long = "a" * 3000
    status, text = server.request("/tokenize", {"prompt": long * 100})
    assert status == 400 and "context" in str(text)
    assert ask("/tokenize", {"prompt": long})["count"] == 3000
    info = ask("/tokenizer_info")
    assert info["eos_token"] == "<|end|>" and info["bos_token"] is None and info["vocab_size"] == 257
    assert "raise_exception" in info["chat_template"]
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": "a", "x": 1}):
        assert server.request("/tokenize", body)[0] == 400
    assert server.request("/detokenize", {"tokens": ["a"]})[0] == 400
    assert "use prompt, or leave" in str(server.request("/tokenize", {"text": "a"}))
    status, text = server.request("/detokenize", {"tokens": [5, 257]})
    assert status == 400 and "token id 257 is outside the tokenizer's vocabulary of 257" in str(text)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/tokenizer_info"])
def test_the_tokenizers_routes_need_a_key(path: str) -> None:
    keys = Keys("secret")
    assert keys.refusal(path, b"")[1] is not None
    assert keys.refusal(path, b"Bearer secret")[1] is None


def test_what_needs_another_model_is_refused_by_name(client: OpenAI, server: LiveServer) -> None:
    with pytest.raises(BadRequestError, match="'tiny' generates text and was not trained for embeddings"):
        client.embeddings.create(model="tiny", input="a text")
    for path in ("/v1/score", "/v1/rerank", "/v1/moderations"):
        status, answer = server.request(path, {"model": "tiny"})
        assert (status, answer["error"]["code"]) == (400, "QUIRE-MODEL-01")


class Bytes:
    """Token ids are bytes; 0 is a special token."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool | str = True) -> str:
        kept = [token for token in token_ids if token or not skip_special_tokens]
        return "".join("<s>" if token == 0 else "" for token in kept) + bytes(t for t in kept if t).decode(
            errors="replace"
        )


def scored(*positions: TokenLogprobs) -> PromptLogprobs:
    columns = list(zip(*[(p.logprob, p.rank, p.top_logprobs, p.top_ids) for p in positions], strict=True))
    arrays = zip(columns, (np.float32, np.int64, np.float32, np.int64), strict=True)
    return PromptLogprobs(*(np.array(column, dtype=kind).tobytes() for column, kind in arrays))


def test_offsets_are_places_in_the_echoed_text() -> None:
    """Of a character that two tokens make up, and of a special token that the tokenizer has added."""
    text = "aé!"
    prompt = [0, *text.encode()]
    params = SamplingParams(max_tokens=2, prompt_logprobs=1, logprobs=1)
    shown = ShownPrompt(params, Bytes(), prompt=text, token_ids=np.array(prompt, dtype=np.int32), echo=True)
    sequence = PromptedSequence(params, Bytes(), index=0, prompt=shown)
    one = TokenLogprobs(-1.0, 2, [98], [-0.5])
    sequence.push(TokenOutput(request_id="r", prompt_logprobs=scored(one, one)))
    sequence.push(TokenOutput(request_id="r", prompt_logprobs=scored(one, one)))
    delta = sequence.push(TokenOutput(request_id="r", token_ids=[98], logprobs=[one]))
    found = TextChoices(CompletionBody(prompt="", logprobs=1, echo=True)).logprobs(0, delta)
    assert found is not None and delta.text == "aé!b"
    assert found["text_offset"] == [0, 0, 1, 1, 2, 3]
    assert found["tokens"][:2] == ["<s>", "a"]
    assert found["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0, -1.0]
    last = sequence.push(TokenOutput(request_id="r", token_ids=[99], logprobs=[one], finish_reason="length"))
    assert last.text == "c" and last.prompt is None
    assert sequence.completion().text == "aé!bc"


def test_scores_of_a_prompt_are_made_when_they_are_read() -> None:
    """A server reads them in a thread."""
    decoded: list[Any] = []

    class Recorded(Bytes):
        def decode(self, token_ids: Any, **options: Any) -> str:
            decoded.extend(token_ids)
            return super().decode(token_ids, **options)

    ids = np.array([97, 99], dtype=np.int32)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    prompt = ShownPrompt(params, Recorded(), prompt="ac", token_ids=ids, echo=True)
    sequence = PromptedSequence(params, Recorded(), index=0, prompt=prompt)
    sequence.push(TokenOutput(request_id="r", prompt_logprobs=scored(TokenLogprobs(-1.0, 2, [98], [-0.5]))))
    shown = sequence.push(TokenOutput(request_id="r", token_ids=[100], finish_reason="length")).prompt
    assert shown is not None and 98 not in decoded
    assert shown.logprobs is not None and shown.logprobs[1] is not None and 98 in decoded


@pytest.mark.parametrize("prompt", ["ac", None])
def test_the_sequences_of_a_request_share_the_prompt(prompt: str | None) -> None:
    """Its tokens are not decoded one by one where no log-probabilities are asked for."""
    decoded: list[list[int]] = []

    class Recorded(Bytes):
        def decode(self, token_ids: Any, **options: Any) -> str:
            decoded.append(list(token_ids))
            return super().decode(token_ids, **options)

    request = RequestAssembler(
        request_id="r",
        prompt=prompt,
        prompt_token_ids=np.array([97, 99], dtype=np.int32),
        params=SamplingParams(n=3, max_tokens=1),
        decoder=Recorded(),
        echo=True,
    )
    for name in request.sequences:
        request.push(TokenOutput(request_id=name, token_ids=[100], finish_reason="length"))
    assert [each.text for each in request.output().outputs] == ["acd"] * 3
    assert [each for each in decoded if each != [100]] == ([] if prompt else [[97, 99]])


def test_offsets_are_places_in_the_text_that_is_shown() -> None:
    """Also where an answer has special tokens and parts of characters."""
    ids, one = [97, 0, *"€".encode(), 98], TokenLogprobs(-1.0, 2, [98], [-0.5])
    request = RequestAssembler(
        request_id="r",
        prompt=None,
        prompt_token_ids=np.array([97], dtype=np.int32),
        params=SamplingParams(logprobs=1, max_tokens=6),
        decoder=Bytes(),
    )
    form, again = (TextChoices(CompletionBody(prompt="", logprobs=1)) for _ in range(2))
    streamed: list[int] = []
    for token_id in ids:
        delta = request.push(TokenOutput(request_id="r-0", token_ids=[token_id], logprobs=[one]))
        streamed += (form.logprobs(0, delta) or {})["text_offset"]
    whole = again.logprobs(0, request.output().outputs[0])
    assert whole is not None and request.output().outputs[0].text == "a€b"
    assert streamed == whole["text_offset"] == [0, 1, 1, 1, 1, 2]

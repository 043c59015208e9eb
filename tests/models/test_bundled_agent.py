"""The edition for agents: its chat format as text, its tokens, and the tokens of transformers, cold, warm, starved and
at the end of its context."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.errors import InvalidInput
from quire.models import hf
from quire.models.hf import load_model
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.answer_reader import AnswerReader, ReadAnswer
from quire.spec.bundled import BUNDLED_MODELS
from quire.spec.model import ModelSpec
from tests.engine.running import core_for, generated, run, tight_core

FOLDER = BUNDLED_MODELS["quire-bundled-agent"]
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "é"}}}
OPENING = """<|bos|><|system|># Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "weather", "parameters": {"city": "é"}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(FOLDER))


def turn(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


BATH = call("weather", {"city": "Bath", "days": [1, None]})
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bath", "days": [1, null]}}\n</tool_call>'
ASKED = turn("user", "Hi")
HISTORIES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "a question": ([ASKED], {}, "<|bos|><|user|>Hi<|end|><|assistant|>"),
    "a system prompt": (
        [turn("system", " Be brief. "), ASKED],
        {},
        "<|bos|><|system|> Be brief. <|end|><|user|>Hi<|end|><|assistant|>",
    ),
    "tools": ([ASKED], {"tools": [WEATHER]}, f"{OPENING}<|end|><|user|>Hi<|end|><|assistant|>"),
    "tools before a system prompt": (
        [turn("developer", "Be brief."), ASKED],
        {"tools": [WEATHER]},
        f"{OPENING}\n\nBe brief.<|end|><|user|>Hi<|end|><|assistant|>",
    ),
    "a system message in the middle": (
        [ASKED, turn("system", "Now be long."), turn("developer", "Or not.")],
        {"tools": [WEATHER]},
        f"{OPENING}<|end|><|user|>Hi<|end|><|system|>Now be long.<|end|><|system|>Or not.<|end|><|assistant|>",
    ),
    "parts of text": (
        [turn("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        {},
        "<|bos|><|user|>ab<|end|><|assistant|>",
    ),
    "a call and its result": (
        [ASKED, turn("assistant", None, tool_calls=[BATH]), turn("tool", "rain", tool_call_id="1")],
        {},
        f"<|bos|><|user|>Hi<|end|><|assistant|>{CALLED}<|end|>"
        "<|user|><tool_response>\nrain\n</tool_response><|end|><|assistant|>",
    ),
    "a call without a content key": (
        [ASKED, {"role": "assistant", "tool_calls": [BATH]}],
        {"add_generation_prompt": False},
        f"<|bos|><|user|>Hi<|end|><|assistant|>{CALLED}<|end|>",
    ),
    "arguments as text": (
        [ASKED, turn("assistant", "", tool_calls=[call("weather", '{"city":"Bath"}')])],
        {"add_generation_prompt": False},
        '<|bos|><|user|>Hi<|end|><|assistant|><tool_call>\n{"name": "weather", "arguments": {"city":"Bath"}}\n'
        "</tool_call><|end|>",
    ),
    "parallel calls after text": (
        [ASKED, turn("assistant", "Both.", tool_calls=[BATH, BATH]), turn("tool", "rain"), turn("tool", "sun"), ASKED],
        {},
        f"<|bos|><|user|>Hi<|end|><|assistant|>Both.\n{CALLED}\n{CALLED}<|end|><|user|><tool_response>\nrain\n"
        "</tool_response>\n<tool_response>\nsun\n</tool_response><|end|><|user|>Hi<|end|><|assistant|>",
    ),
    "reasoning": (
        [ASKED, turn("assistant", "Yes.", reasoning_content="Hm."), ASKED],
        {"enable_thinking": True},
        "<|bos|><|user|>Hi<|end|><|assistant|><think>\nHm.\n</think>\n\nYes.<|end|>"
        "<|user|>Hi<|end|><|assistant|><think>\n",
    ),
    "no reasoning": ([ASKED], {"enable_thinking": False}, "<|bos|><|user|>Hi<|end|><|assistant|>"),
}


@pytest.mark.parametrize("history", HISTORIES)
def test_the_template_writes(tokenizer: Tokenizer, history: str) -> None:
    messages, variables, expected = HISTORIES[history]
    assert tokenizer.chat_text(messages, **variables) == expected


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([turn("narrator", "Hm.")], "unknown role: narrator"),
        ([turn("user", [{"type": "image_url", "image_url": {}}])], "content of type image_url is not text"),
    ],
)
def test_the_template_refuses(tokenizer: Tokenizer, messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        tokenizer.chat_text(messages)


def test_a_history_continues_the_prompt_and_its_answer(tokenizer: Tokenizer) -> None:
    """What the reader of answers finds, sent back, is the text that it read: the pages of a turn serve the next one."""
    messages = [turn("system", "Be brief."), ASKED]
    variables = {"tools": [WEATHER], "enable_thinking": True}
    prompt = tokenizer.chat_text(messages, **variables)
    written = f"Hm.\n</think>\n\nBoth.\n{CALLED}\n{CALLED}"
    reader = AnswerReader(tokenizer.response_parser(prompt, [WEATHER]))
    read = ReadAnswer.of(reader.whole(written))
    assert (read.content.strip(), read.reasoning.strip()) == ("Both.", "Hm.")
    calls = [call(made.name, json.loads(made.arguments)) for made in read.calls]
    assert calls == [BATH] * 2
    answer = turn("assistant", read.content, reasoning_content=read.reasoning, tool_calls=calls)
    following = tokenizer.chat_text([*messages, answer, turn("tool", "rain")], **variables)
    assert following.startswith(f"{prompt}{written}<|end|>")


def test_marks_are_one_token_each_and_text(tokenizer: Tokenizer) -> None:
    """They are kept where special tokens are skipped; <|end|> is not."""
    ids = [tokenizer.encode(mark, add_special_tokens=False).tolist() for mark in MARKS]
    assert ids == [[tokenizer.vocab_size - len(MARKS) + at] for at in range(len(MARKS))]
    text = f"<think>\nHm.\n</think>\n\n{CALLED}"
    assert tokenizer.decode(tokenizer.encode(text + "<|end|>")) == text


def test_code_and_json_are_no_bytes(tokenizer: Tokenizer) -> None:
    text = Path(hf.__file__).read_text(encoding="utf-8") + json.dumps([WEATHER, BATH], indent=2)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(text) > 2.2 * len(ids)


def test_spec() -> None:
    spec = ModelSpec.from_config(json.loads((FOLDER / "config.json").read_text()))
    full, window = spec.groups(16)
    assert (full.name, window.name, window.reach.tokens) == ("full", "window", 128)
    assert spec.context_length == 65536
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 5_200_000


@cache
def case() -> tuple[Any, list[list[int]], list[list[int]]]:
    """The model in float32, the prompts of a conversation's turns, and what transformers generates for each."""
    tokenizer = load_tokenizer(str(FOLDER))
    messages = [turn("system", "You are a novelist. " * 20), turn("user", "Tell me about Emma.")]
    answer = turn("assistant", None, tool_calls=[BATH])
    turns = [messages, [*messages, answer, turn("tool", "rain in Bath, " * 30)], [turn("user", "Who is Mr. Darcy?")]]
    prompts = [tokenizer.apply_chat_template(turn, tools=[WEATHER]).tolist() for turn in turns]
    reference = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    expected = [generated(reference, prompt, NEW_TOKENS) for prompt in prompts]
    return load_model(str(FOLDER), dtype="float32"), prompts, expected


@pytest.mark.parametrize(("page_size", "chunk"), [(16, 2048), (4, 50)])
def test_tokens_cold_then_warm(page_size: int, chunk: int) -> None:
    model, prompts, expected = case()
    core = core_for(model, page_size=page_size, max_num_batched_tokens=chunk, max_model_len=2048)
    assert run(core, prompts, GREEDY, "cold") == expected
    cold = core.statistics()["hit_tokens"]
    assert run(core, prompts, GREEDY, "warm") == expected
    whole = sum((len(prompt) - 1) // page_size * page_size for prompt in prompts)
    assert core.statistics()["hit_tokens"] - cold == whole


def test_tokens_starved() -> None:
    """Room for little more than the longest prompt, and for two windows: pages are evicted between and in between."""
    model, prompts, expected = case()
    room = max(map(len, prompts)) + NEW_TOKENS + 64
    core = tight_core(
        model, num_tokens=room, window_tokens=320, page_size=16, max_num_batched_tokens=100, max_running_requests=3
    )
    for at in range(2):
        assert run(core, prompts, GREEDY, f"turn{at}") == expected
    found = core.statistics()
    assert found["evicted_pages"] > 0 and found["hit_tokens"] > 0


@pytest.mark.slow
def test_the_whole_context_is_used() -> None:
    """A request of 65,536 tokens; where it continues an earlier one, all whole pages of that are found."""
    model, _, _ = case()
    context = model.spec.context_length
    core = tight_core(model, num_tokens=context + 64, window_tokens=8192, page_size=16, max_num_batched_tokens=4096)
    prompt = np.random.default_rng(3).integers(6, 4000, context - NEW_TOKENS).tolist()
    [answer] = run(core, [prompt[: -40 * 16]], GREEDY, "first")
    assert len(answer) == NEW_TOKENS
    [answer] = run(core, [prompt], GREEDY, "second")
    assert len(prompt) + len(answer) == context
    assert core.statistics()["hit_tokens"] == (len(prompt) - 40 * 16) // 16 * 16

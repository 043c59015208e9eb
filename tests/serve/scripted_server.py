"""`python -m tests.serve.scripted_server FAMILY`: the server, and an engine process that answers what the prompt says.

The answer is the text between the last two `@@@` in the prompt, `ok` without them. So a message of
the user, or a result of a tool, has the model's next answer in it, and nothing is random. The prompt is made by the
chat template of the family (`tests.serve.chat_templates`), by the real tokenizer, one token for each byte.
"""

from __future__ import annotations

import argparse
import json
import logging
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from quire.client.async_engine import AsyncEngine
from quire.client.process import Progress
from quire.engine.config import EngineConfig, engine_config
from quire.engine.messages import EngineRequest, Ready, TokenLogprobs, TokenOutput
from quire.errors import ContextTooLong
from quire.models.tokenizer import Tokenizer
from quire.serve.config import ServerConfig
from quire.serve.server import Running, serve
from tests.serve.chat_templates import CHAT_TEMPLATES
from tests.serve.fake_core import EchoCore
from tests.serve.tiny_model import byte_tokenizer

CONTEXT = 1 << 18
END = 256
TOKENS_A_STEP = 3


class ScriptedCore(EchoCore):
    """Three tokens for each running request and step, of the answer that its prompt has."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        super().__init__(config, progress)
        self._tokenizer = byte_tokenizer()

    def add(self, request: EngineRequest) -> None:
        if len(request.tokens()) >= CONTEXT:
            message, num_tokens = f"the prompt has no room for an answer in {CONTEXT} tokens.", len(request.tokens())
            raise ContextTooLong(message, tokens=num_tokens + 1, context=CONTEXT, fix="shorten it.")
        prompt = self._tokenizer.decode(request.tokens().tolist(), skip_special_tokens=False)
        _, *said = prompt.rsplit("@@@", 2)
        answer = self._tokenizer.encode(said[0] if len(said) == 2 else "ok", add_special_tokens=False).ids
        self._running[request.request_id] = (request, answer[::-1])

    def _advance(self, request_id: str) -> TokenOutput:
        request, left = self._running[request_id]
        limit = request.params.max_tokens
        num = TOKENS_A_STEP if limit is None else min(TOKENS_A_STEP, limit)
        tokens = [left.pop() for _ in range(min(num, len(left)))]
        if limit is not None:
            request.params.max_tokens = limit - len(tokens)
        reason = None
        if not left and len(tokens) < num:
            tokens.append(END)
            reason = "stop"
        elif request.params.max_tokens == 0:
            reason = "length"
        if reason is not None:
            del self._running[request_id]
        stop_token = END if reason == "stop" else None
        logprobs = None
        if request.params.logprobs is not None:  # each token is certain
            logprobs = [TokenLogprobs(0.0, 1, [token], [0.0]) for token in tokens]
        return TokenOutput(
            request_id=request_id, token_ids=tokens, logprobs=logprobs, finish_reason=reason, stop_token=stop_token
        )

    def ready(self) -> Ready:
        ready = super().ready()
        ready.context_length, ready.eos_token_ids = CONTEXT, [END]
        return ready


def scripted_tokenizer(family: str) -> Tokenizer:
    """The real tokenizer, with the chat template of a family."""
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|end|>")
    wrapped.chat_template = CHAT_TEMPLATES[family]
    return Tokenizer(wrapped, name="scripted")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("settings", nargs="*", help="of the server, as NAME=VALUE")
    given = parser.parse_args()
    settings = dict(each.split("=", 1) for each in given.settings)
    logging.basicConfig(level=logging.INFO)

    def on_ready(running: Running) -> None:
        print(json.dumps({"url": running.url}), flush=True)

    serve(
        engine_config(served_model_name="scripted"),
        ServerConfig.read({"port": 0, "drain_s": 5.0} | settings),
        on_ready=on_ready,
        start=partial(AsyncEngine.start, build=ScriptedCore, tokenizer=scripted_tokenizer(given.family)),
    )


if __name__ == "__main__":
    main()

"""`python -m tests.serve.saying_server`: `quire`, whose model says what its prompt asks for, by a grammar.

The answer is the text between the last two `@@@` in the prompt, `ok` without them, as of `scripted_server`. Here the
engine is the real one, with its cache: the tokens are those that the tokenizer makes of the answer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec import structs

from quire.cli import main
from quire.client.async_engine import AsyncEngine, Prompt
from quire.client.request_stream import RequestStream
from quire.grammar import lark
from quire.scheduler.sampling_params import SamplingParams
from quire.serve import server


class SayingEngine(AsyncEngine):
    """Gives each request the grammar of the one answer that its prompt asks for."""

    async def submit(self, prompt: Prompt, params: SamplingParams, **options: Any) -> RequestStream:
        assert self.tokenizer is not None
        token_ids = await self.token_ids(prompt)
        _, *said = self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False).rsplit("@@@", 2)
        answer = self.tokenizer.encode(said[0] if len(said) == 2 else "ok", add_special_tokens=False)
        grammar = lark("start: " + " ".join(f"<[{token}]>" for token in answer))
        return await super().submit(token_ids, structs.replace(params, grammar=grammar), **options)


if __name__ == "__main__":
    server.serve = partial(server.serve, start=SayingEngine.start)  # type: ignore[assignment]
    main()

"""`quire generate`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from quire.cli.report import Terminal
from quire.engine.config import EngineConfig
from quire.settings.setting import Settings, setting


class Question(Settings):
    """The prompt, and how the answer is drawn."""

    prompt: str = setting(..., "The text to go on from; - reads it from the standard input.", argument=True)
    chat: bool = setting(False, "Ask it as a question, through the chat template.", option="--chat")
    max_tokens: int = setting(64, "Most tokens to generate.")
    temperature: float = setting(0.0, "0 takes the most likely token each time.")
    top_p: float = setting(1.0, "Draw from the tokens that make up this probability.")
    sampling_seed: int | None = setting(None, "Same seed, same text.", option="--seed")
    stop: list[str] = setting([], "End at this text; may be given again.")


def generate(question: Question, engine: EngineConfig, *, as_json: bool) -> None:
    """Generate text here, without a server.

    [dim]Example:[/dim] quire generate --chat "Tell me about Emma." --max-tokens 60

    [dim]Example:[/dim] quire generate "$(cat long.txt)" --storage ~/.cache/quire --storage-size 4GiB
    """
    from quire.scheduler.sampling_params import SamplingParams

    params = SamplingParams(
        seed=question.sampling_seed, **question.model_dump(exclude={"prompt", "chat", "sampling_seed"})
    )
    text = sys.stdin.read() if question.prompt == "-" else question.prompt
    with Terminal(stderr=True).status(f"Loading {engine.model_name} ..."):
        from quire.engine.before_load import check_model

        check_model(engine)  # before the imports that take seconds
        from quire.client.llm import LLM

        llm = LLM(show_plan=False, **engine.model_dump())
    with llm:
        ask = llm.chat([{"role": "user", "content": text}], params) if question.chat else llm.generate([text], params)
    if as_json:
        found = asdict(ask[0])
        for shown, output in zip(found["outputs"], ask[0].outputs, strict=True):
            shown["explanation"] = output.explanation and output.explanation.to_dict()
            del shown["prompt"], shown["pooled"]  # no answer here has them
        print(json.dumps(found))
    else:
        print(ask[0].outputs[0].text)

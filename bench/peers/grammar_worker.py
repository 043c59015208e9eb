"""Quire of any checkout for `grammar.py`: lines of JSON on stdin, answers on the stdout it was given.

start -> {}                                                load a model, with drafts or without
run   -> {"seconds", "tokens", "steps", "drafts", "accepted"}   complete prompts that are cached, each with the schema
"""

from __future__ import annotations

import json
import time
from typing import Any

from bench.peers.worker import answer_requests

_CONTEXT = 1024


class Grammars:
    """The engines of one process, by name."""

    def __init__(self, _: str) -> None:
        from quire import LLM

        self._make, self._engines = LLM, dict[str, Any]()

    def start(self, name: str, folder: str, speculative: dict[str, Any] | None) -> dict[str, Any]:
        """Load an engine with the product's defaults, and the bundled model's tokenizer."""
        self._engines[name] = self._make(
            folder, tokenizer="quire-bundled", show_plan=False, max_model_len=_CONTEXT, speculative_config=speculative
        )
        return {}

    def run(self, name: str, prompts: list[str], new: int, schema: dict[str, Any] | None) -> dict[str, Any]:
        """Draw at most `new` tokens for each prompt; without a schema so many."""
        from quire import SamplingParams

        form: dict[str, Any] = {"ignore_eos": True}
        if schema is not None:
            from quire.grammar import json_schema

            form = {"grammar": json_schema(schema)}
        params = [SamplingParams(temperature=1, seed=at, max_tokens=new, **form) for at in range(len(prompts))]
        engine = self._engines[name]
        before, began = self._counted(engine), time.perf_counter()
        outputs = engine.generate(prompts, params)
        seconds, after = time.perf_counter() - began, self._counted(engine)
        answers = [output.outputs[0] for output in outputs]
        for answer in answers:
            if answer.finish_reason == "stop":
                json.loads(answer.text)
        found = {key: after[key] - before[key] for key in after}
        return {"seconds": seconds, "tokens": sum(len(answer.token_ids) for answer in answers), **found}

    def _counted(self, engine: Any) -> dict[str, int]:
        found = engine.statistics()
        said = found.get("speculation") or {}
        names = {"drafts": "draft_tokens", "accepted": "accepted_tokens"}
        return {"steps": found["steps"], **{key: said.get(name, 0) for key, name in names.items()}}


if __name__ == "__main__":
    answer_requests(Grammars)

"""A stand-in for the engine core: echoes the prompt, and misbehaves where the prompt asks for it. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.cache.session import SessionList
from quire.client.process import Progress
from quire.counters import Metric
from quire.engine.config import EngineConfig
from quire.engine.messages import EngineRequest, Ready, StepOutputs, TokenOutput
from quire.errors import ContextTooLong, InvalidFree, PlanError
from quire.spec.ending import Ending
from quire.spec.events import Namespace
from quire.spec.ids import Ids

CONTEXT = 256
STEP_S = 0.002


METRICS = [Metric("steps", "counter", "Steps that were launched.", ("steps",))]


class EchoCore:
    """One token for each running request and step: the prompt, over and over."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        progress(1, 2)
        if config.served_model_name == "no pool":
            raise PlanError("a pool of zero pages.", fix="raise --kv-memory to 1MiB.")
        if config.served_model_name == "broken":
            raise ValueError("broken weights")
        self._running: dict[str, tuple[EngineRequest, list[int]]] = {}
        self._told: dict[str, Ending] = {}
        self._num_steps = 0
        self._num_aborted = 0
        self._num_stopped = 0

    def add(self, request: EngineRequest) -> None:
        tokens = request.tokens().tolist()
        if len(tokens) >= CONTEXT:
            message = f"{len(tokens)} tokens; the context is {CONTEXT}."
            raise ContextTooLong(message, tokens=len(tokens) + 1, context=CONTEXT, fix="shorten it.")
        if b"defect" in bytes(tokens):
            raise RuntimeError("a defect in add")
        assert b"broken law" not in bytes(tokens), "a law does not hold"
        self._running[request.request_id] = (request, request.begun.tokens().tolist() if request.begun else [])

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        if self._running.pop(request_id, None) is not None:
            self._num_stopped += stopped
            self._num_aborted += not stopped

    def has_work(self) -> bool:
        return bool(self._running)

    def is_due(self) -> bool:
        return False

    def sessions(self, namespace: Namespace | None, owner: str | None) -> SessionList:
        return SessionList(budget_tokens=0, held_tokens=0, sessions=())

    def tell_ending(self, request_id: str, ending: Ending) -> bool:
        self._told[request_id] = ending
        return True

    def close_session(self, namespace: Namespace, session_id: str, owner: str | None) -> bool:
        return False

    def close(self) -> None:
        pass

    def step(self) -> StepOutputs:
        time.sleep(STEP_S)
        if any(b"stall" in bytes(t for t in r.tokens() if t < 256) for r, _ in self._running.values()):
            return StepOutputs()
        self._num_steps += 1
        return StepOutputs(noted=[self._advance(request_id) for request_id in list(self._running)])

    def _advance(self, request_id: str) -> TokenOutput:
        request, drawn = self._running[request_id]
        prompt = request.tokens().tolist()
        if b"crash" in bytes(prompt) and b"late" not in bytes(prompt):
            raise RuntimeError("a crash in step")
        if b"late crash" in bytes(prompt) and len(drawn) > 98:
            raise RuntimeError("a crash in a later step")
        if b"free twice" in bytes(prompt):
            raise InvalidFree("a page is freed twice.")
        drawn.append(prompt[len(drawn) % len(prompt)])
        limit = request.params.max_tokens or CONTEXT - len(prompt)
        ended = len(drawn) >= limit
        if ended:
            del self._running[request_id]
        failed = b"fail" in bytes(prompt)
        return TokenOutput(
            request_id=request_id,
            token_ids=drawn[-1:],
            finish_reason="error" if failed else "length" if ended else None,
            error="QUIRE-ENGINE-02: it failed" if failed else "",
        )

    def ready(self) -> Ready:
        return Ready(context_length=CONTEXT, eos_token_ids=[0], counters=self.counters(), metrics=METRICS)

    def counters(self) -> dict[str, Any]:
        return {
            "steps": self._num_steps,
            "running_requests": len(self._running),
            "waiting_requests": 0,
            "waiting_reason": f"waits for the prefix that {next(iter(self._running), '')} is computing",
            "aborted_requests": self._num_aborted,
            "stopped_requests": self._num_stopped,
            "told_endings": self._told,
        }


class ByteTokenizer:
    """Token ids are bytes."""

    longest_token = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool | str = True) -> str:
        return bytes(token_ids).decode(errors="replace")

    def chat_text(self, messages: Sequence[dict[str, Any]], **_: Any) -> str:
        return "".join(message["content"] for message in messages)

    def portable(self) -> str | None:
        return None

    def names(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(token) for token in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def description(self) -> dict[str, Any]:
        return {"tokenizer_class": type(self).__name__, "eos_token": None}

    def response_parser(self, prompt: str, tools: Sequence[Any]) -> None:
        return None

    def call_grammar(self, prompt: str, tools: Sequence[Any], **choice: bool) -> None:
        return None

    def check_tools(self) -> None:
        pass

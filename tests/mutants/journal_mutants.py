"""Mistakes where a server goes on with the answer of one that is lost."""

from __future__ import annotations

import httpx
import numpy as np

from quire.routing.relay import Relay
from quire.scheduler.request import Begun, Request
from quire.spec.ids import Ids
from tests.mutants.mutants import Patch, mutant


@mutant("continued", "a client that has seen the beginning of an answer gets another answer behind it")
def outputs_of_another_engine_are_dropped(patch: Patch) -> None:
    patch.setattr(Begun, "tokens", lambda begun: np.empty(0, dtype=np.int32))


@mutant("continued", "outputs count as a part of the prompt, so that penalties and limits do not see them")
def outputs_of_another_engine_are_a_prompt(patch: Patch) -> None:
    real = Request.__init__

    def init(
        request: Request, name: str, prompt: Ids, *given: object, begun: Begun | None = None, **more: object
    ) -> None:
        before = prompt if begun is None else np.concatenate((prompt, begun.tokens()))
        real(request, name, before, *given, **more)  # type: ignore[arg-type]

    patch.setattr(Request, "__init__", init)


@mutant("continued", "the cached tokens of an answer are those of its second engine, or both")
def the_use_of_another_engine_is_dropped(patch: Patch) -> None:
    real = Request.__init__

    def init(request: Request, *given: object, **more: object) -> None:
        real(request, *given, **more)  # type: ignore[arg-type]
        request.use = None

    patch.setattr(Request, "__init__", init)


@mutant("relayed", "a client sees the beginning of its answer twice")
def a_journal_is_not_kept(patch: Patch) -> None:
    patch.setattr(Relay, "_note", lambda relay, line: None)


@mutant("relayed", "an answer ends in its middle as if it were complete")
def a_stream_without_an_end_is_complete(patch: Patch) -> None:
    async def stream(relay: Relay, upstream: object, answer: object) -> bool:
        try:
            return await real(relay, upstream, answer)  # type: ignore[arg-type]
        except httpx.TransportError:
            await relay._end(b"")
            return True

    real = Relay._stream
    patch.setattr(Relay, "_stream", stream)

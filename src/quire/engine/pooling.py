"""Embeddings and scores, of a model that was made for them. Each request is computed up to its last token, whose hidden
state is reported; the token that the step draws is not used.

A prompt shares cached pages as any other: a hit never has the last token, so its hidden state is always computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quire.cache.running import Lengths
from quire.engine.device.sampler import to_host
from quire.engine.messages import EngineRequest, TokenOutput
from quire.engine.reporting import Reporting
from quire.errors import UnsupportedModel
from quire.loop import ForwardPart, Part, StepResult
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel
from quire.models.pooling import Pooler
from quire.scheduler.step import Step
from quire.upload import to_device

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


class PoolingPart(Part, ForwardPart):
    """Reports what the model gives for each prompt. `serials` are the cache's, of the requests in its rows."""

    def __init__(self, model: LoadedModel, pooler: Pooler, reporting: Reporting, serials: Lengths) -> None:
        self._model, self._pooler, self._reporting, self._serials = model, pooler, reporting, serials
        self._launched: list[tuple[Step, Tensor]] = []  # results of steps, on their way to the host

    def before_forward(self, step: Step, running: RunningForward) -> None:
        running.keeps_output = len(step.draws) > 0

    def after_forward(self, step: Step, running: RunningForward, drawn: Any) -> None:
        if running.keeps_output:
            hidden = self._model.hidden_states(running, to_device(step.draws, self._model.device))
            self._launched.append((step, to_host(self._pooler(hidden))))

    def settling(self, result: StepResult) -> None:
        at = next((at for at, (step, _) in enumerate(self._launched) if step is result.step), None)
        if at is None:
            return
        (step, found), self._launched = self._launched[at], self._launched[at + 1 :]  # those before it have failed
        batch, requests = step.batch, step.requests
        for work, pooled in zip(step.drawers.tolist(), found.numpy(), strict=True):
            if self._serials[batch.rows[work]] == batch.serials[work]:  # else it has left its row since
                self._reporting.note(TokenOutput(request_id=requests[work].request_id, pooled=pooled.tobytes()))


def pooling_parts(engine: EngineCore) -> Iterator[Part]:
    """The part that reports embeddings or scores; none for a model that generates text."""
    if (pooler := engine.model.pooler) is not None:
        yield PoolingPart(engine.model, pooler, engine.reporting, engine.cache.rows.serials)


def refuse_others(message: EngineRequest, model: LoadedModel, name: str) -> None:
    """Raise UnsupportedModel for a request of text to the model `name` that was made for embeddings or scores, and of
    these to one that was not."""
    pooler, is_pooled = model.pooler, message.params.pooled
    if is_pooled and pooler is None:
        raise UnsupportedModel(
            f"'{name}' generates text, and was made for no embeddings or scores.", fix="use a model that was."
        )
    if pooler is not None and not is_pooled:
        gives = pooler.pooling.gives
        raise UnsupportedModel(
            f"'{name}' was made for {gives}, and generates no text.", fix=f"ask it for {gives}, or use another model."
        )


def pooling_facts(model: LoadedModel) -> dict[str, Any]:
    """The model's `Pooling` among the facts of the engine; nothing for a model that generates text."""
    return {} if model.pooler is None else {"pooling": asdict(model.pooler.pooling)}

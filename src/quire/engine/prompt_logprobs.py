"""Log-probabilities of prompts, for requests that ask for them.

Cached pages have no logits. So such a request lets none of its prompt come from the cache, and computes all of it; what
it commits gives way to the pages that are cached already, so that others go on to share them. A request that was
preempted goes on where it was: `Request.most_cached` are the tokens whose log-probabilities have been reported.

    positions of the prompt   0    1    2    3            a step computes 0..2, the next one 3
    token                     a    b    c    d
    logits of the position    b?   c?   d?   first draw   log-probabilities of a prompt of n tokens: n - 1

Logits of a step are computed for a few rows at a time, behind its draws, from what the decoder has returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.cache.running import Lengths
from quire.engine.device.sampler import log_probabilities, to_host
from quire.engine.messages import PromptLogprobs, TokenOutput
from quire.engine.reporting import Reporting
from quire.loop import End, ForwardPart, Part, StepResult
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel
from quire.plan.devices import reported_at_once
from quire.scheduler.request import Request
from quire.scheduler.step import Step
from quire.spec.pages import ALL_TOKENS
from quire.upload import to_device

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Positions `start` to `stop` of a prompt, which the work `work` of a step computes from the flat row `row` on."""

    request: Request
    work: int
    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True)
class _Launched:
    """The log-probabilities of the stretches of a step, one after the other, on their way to the host."""

    step: Step
    stretches: list[_Stretch]
    found: list[Tensor]


class PromptLogprobsPart(Part, ForwardPart):
    """Reports the log-probabilities of prompts. `serials` are the cache's, of the requests in its rows."""

    def __init__(self, model: LoadedModel, reporting: Reporting, serials: Lengths) -> None:
        self._model, self._reporting, self._serials = model, reporting, serials
        self._at_once = reported_at_once(model.spec.vocab_size)
        self._asking: list[Request] = []  # whose prompts are not reported whole
        self._stretches: list[_Stretch] = []  # those of the step that is being launched
        self._launched: list[_Launched] = []

    def scheduled(self, step: Step) -> None:
        if step.admitted:
            self._asking += [request for request in step.admitted if not request.most_cached]

    def before_forward(self, step: Step, running: RunningForward) -> None:
        self._stretches = list(self._stretches_of(step)) if self._asking else []  # those of a step that failed are gone
        if self._stretches:
            running.keeps_output = True

    def _stretches_of(self, step: Step) -> Iterator[_Stretch]:
        for request in self._asking:
            if request.kv is None:
                continue
            for work in (step.batch.rows == request.kv.row).nonzero()[0].tolist():
                begin, stop = int(step.starts[work]), min(int(step.ends[work]), request.num_prompt_tokens - 1)
                start = max(begin, request.most_cached)
                if start < stop:
                    yield _Stretch(request, work, start, stop, int(step.offsets[work]) + start - begin)

    def after_forward(self, step: Step, running: RunningForward, drawn: Any) -> None:
        if not self._stretches:
            return
        device, most = self._model.device, max(each.request.params.prompt_logprobs or 0 for each in self._stretches)
        rows = np.concatenate([np.arange(each.row, each.row + each.stop - each.start) for each in self._stretches])
        following = np.concatenate([each.request.tokens[each.start + 1 : each.stop + 1] for each in self._stretches])
        at, tokens = to_device(rows, device), to_device(following.astype(np.int64), device)
        with torch.inference_mode():
            parts = [
                log_probabilities(self._model.more_logits(running, some), wanted, most)
                for some, wanted in zip(*(torch.split(each, self._at_once) for each in (at, tokens)), strict=True)
            ]
            found = [to_host(torch.cat(each)) for each in zip(*parts, strict=True)]
        self._launched.append(_Launched(step, self._stretches, found))
        self._stretches = []

    def settling(self, result: StepResult) -> None:
        if not self._launched:
            return
        at = next((at for at, each in enumerate(self._launched) if each.step is result.step), None)
        if at is not None:
            launched, self._launched = self._launched[at], self._launched[at + 1 :]  # those before it have failed
            self._report(launched)

    def _report(self, launched: _Launched) -> None:
        """Tell clients, but for requests that have left their rows since."""
        batch, arrays, first = launched.step.batch, [each.numpy() for each in launched.found], 0
        for stretch in launched.stretches:
            request, some = stretch.request, slice(first, first + stretch.stop - stretch.start)
            first = some.stop
            if self._serials[batch.rows[stretch.work]] != batch.serials[stretch.work]:
                continue
            logprobs, ranks, top, ids = (each[some] for each in arrays)
            count = request.params.prompt_logprobs
            found = PromptLogprobs(*(each.tobytes() for each in (logprobs, ranks, top[:, :count], ids[:, :count])))
            self._reporting.note(TokenOutput(request_id=request.request_id, prompt_logprobs=found))
            request.most_cached = ALL_TOKENS if stretch.stop == request.num_prompt_tokens - 1 else stretch.stop
        self._asking = [request for request in self._asking if request.most_cached < ALL_TOKENS]

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        if self._asking:
            self._asking = [each for each in self._asking if each is not request]


def prompt_parts(engine: EngineCore) -> Iterator[Part]:
    """The part that reports log-probabilities of prompts."""
    yield PromptLogprobsPart(engine.model, engine.reporting, engine.cache.rows.serials)

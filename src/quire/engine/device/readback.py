"""Readback: the draws of one step on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.device.sampler import Drawn


class Readback:
    """What a step has drawn, copied to pinned memory behind the step. `wait` waits for an event of this step alone: a
    step that was launched after it goes on meanwhile. On a CPU nothing is copied."""

    def __init__(self, drawn: Drawn | None, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._drawn = drawn
        if device.type != "cpu":
            self._drawn = None if drawn is None else drawn.moved(to_host)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> Drawn | None:
        """The draws, in host memory; None if the step has none. Returns when the device has computed the step."""
        if self._event is not None:
            self._event.synchronize()
        return self._drawn


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, once the device has computed the step that is being launched; on a CPU, `tensor`."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

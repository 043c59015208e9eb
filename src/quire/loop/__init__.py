"""Loop: schedule a step, launch it, settle the one before. Engine and simulator run it, with their device and parts."""

from quire.loop.loop import Loop
from quire.loop.part import Device, End, ForwardPart, Launched, Part, StepResult

__all__ = ["Device", "End", "ForwardPart", "Launched", "Loop", "Part", "StepResult"]

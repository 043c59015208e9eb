"""TransferPart: prompts that a loop computes for other engines, and those that others compute for it."""

from __future__ import annotations

from collections.abc import Callable

from quire.counters import Section
from quire.loop import End, Loop, Part
from quire.offload.tiering import Tiering
from quire.scheduler.request import Request
from quire.transfer.handshake import Identity
from quire.transfer.node import TransferNode
from quire.transfer.prefill import Begins


class TransferPart(Part):
    """The connections of one engine. `begin` queues a request that computes a prompt for another engine, and `identity`
    is what engines that exchange pages have in common, by weights epoch."""

    def __init__(self, node: TransferNode, tiers: Tiering, begin: Begins, identity: Callable[[int], Identity]) -> None:
        self.node = node
        self._tiers, self._begin, self._identity = tiers, begin, identity

    def attach(self, loop: Loop) -> None:
        self.node.start(self._tiers, self._begin, loop.abort)

    @property
    def is_due(self) -> bool:
        return self.node.is_due

    def before_schedule(self) -> None:
        self.node.serve()

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        if request.request_id in self.node.prefill.ids:
            self.node.prefill.ended(request.request_id, str(error) if error is not None else "")

    def model_changed(self, epoch: int) -> None:
        self.node.set_identity(self._identity(epoch))

    def counters(self) -> list[Section]:
        return [("transfer", self.node.counters())]

    def close(self) -> None:
        self.node.close()

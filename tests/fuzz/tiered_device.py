"""TieredDevice: steps on requests whose prefixes are still arriving."""

from __future__ import annotations

from quire.cache import KVCache
from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths
from quire.tiers.transfer import Transfer
from tests.fuzz.device import Device, Part, Step
from tests.fuzz.names import Names


class TieredDevice(Device):
    """As `Device`; a step that is launched on loads waits for them before it reads."""

    def __init__(self, cache: KVCache, names: Names) -> None:
        super().__init__(cache, names)
        self._loads: dict[Step, list[Transfer]] = {}
        self.num_waits = 0

    def launch(self, kvs: list[RequestKV], parts: list[Part], draws: Lengths | None = None) -> Step:
        """Only for requests whose prefix is there, or good and on its way."""
        assert all(kv.is_ready for kv in kvs), "a step was launched on a prefix that is not there"
        loads = [move for kv in kvs for move in kv.loads]
        step = super().launch(kvs, parts, draws)
        self._loads[step] = loads
        return step

    def execute(self, step: Step) -> None:
        """When all have arrived."""
        for move in self._loads.pop(step):
            self.num_waits += not move.done
            assert move.done or move.is_driven, "a step waits for a load that has not begun"
            move.wait()
        super().execute(step)

"""The counters of a tier among vLLM's own metrics."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from quire.connectors.counters import BAD_RECORDS, COUNTERS, OFF

_PREFIX = "vllm:kv_offload_quire_"
_BAD, _OFF = f"{_PREFIX}bad_records", f"{_PREFIX}off"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """All metrics by name."""
    counters = {_PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()}
    bad = OffloadingCounterMetadata(documentation=BAD_RECORDS, labelnames=("reason",))
    return {**counters, _BAD: bad, _OFF: OffloadingGaugeMetadata(documentation=OFF)}


def stats(grown: Mapping[str, int], bad: Mapping[str, int], *, is_off: bool) -> OffloadingConnectorStats:
    """What vLLM adds to its metrics."""
    found = OffloadingConnectorStats()
    for name, count in grown.items():
        found.increase_counter(_PREFIX + name, count)
    for reason, count in bad.items():
        found.increase_counter(_BAD, count, (reason,))
    found.set_gauge(_OFF, int(is_off))
    return found

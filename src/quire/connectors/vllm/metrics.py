"""The counters of a tier among vLLM's own metrics."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata

_PREFIX = "vllm:kv_offload_quire_"
_BAD = f"{_PREFIX}bad_records"
COUNTERS = {
    "hits": "Records that were loaded and passed their check.",
    "misses": "Records that were looked up or loaded and were not there.",
    "saved": "Records that were saved.",
    "present": "Records that were to be saved and were there.",
    "refused": "Records that were not saved: no room, no answer, or too many waited.",
    "expired": "Records that were not looked up or loaded in time, and counted as missed.",
    "loaded_bytes": "Bytes of the records that were loaded.",
    "saved_bytes": "Bytes of the records that were saved.",
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Of all counters, by name."""
    found: dict[str, OffloadingMetricMetadata] = {
        _PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()
    }
    found[_BAD] = OffloadingCounterMetadata(
        documentation="Records that failed their check and were removed, by reason.", labelnames=("reason",)
    )
    return found


def stats(grown: Mapping[str, int]) -> OffloadingConnectorStats:
    """What vLLM adds to its metrics. `grown` are counts since the last time; `bad_digest` has the reason `digest`."""
    found = OffloadingConnectorStats()
    for name, count in grown.items():
        if count and name in COUNTERS:
            found.increase_counter(_PREFIX + name, count)
        elif count and name.startswith("bad_"):
            found.increase_counter(_BAD, count, (name.removeprefix("bad_"),))
    return found

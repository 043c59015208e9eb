"""The counters of a tier among vLLM's own metrics."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata

_PREFIX = "vllm:kv_offload_quire_"
_BAD = f"{_PREFIX}bad_records"
COUNTERS = {
    "hits": "Records that were loaded and are good.",
    "misses": "Records that were looked up or loaded, and were not there or were bad.",
    "saved": "Records that were saved.",
    "present": "Records that were to be saved, and were there already.",
    "refused": "Records that the store could not look up, load or save now, or that would have waited too long.",
    "expired": "Records that were not looked up, loaded or saved within the deadline.",
    "loaded_bytes": "Bytes of records that were loaded.",
    "saved_bytes": "Bytes of records that were saved.",
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """All counters by name."""
    found: dict[str, OffloadingMetricMetadata] = {
        _PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()
    }
    found[_BAD] = OffloadingCounterMetadata(
        documentation="Records that failed their check and were removed, by reason.", labelnames=("reason",)
    )
    return found


def stats(grown: Mapping[str, int]) -> OffloadingConnectorStats:
    """What vLLM adds to its metrics. `grown` are counts since the last time; "bad digest" has the reason "digest"."""
    found = OffloadingConnectorStats()
    for name, count in grown.items():
        _, is_bad, reason = name.partition("bad ")
        found.increase_counter(_BAD if is_bad else _PREFIX + name, count, (reason,) if is_bad else ())
    return found

"""The counters of a connector, and what they have grown by, for the engine's own metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from quire.connectors.checked_store import CheckedStore

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
BAD_RECORDS = "Records that failed their check and were removed, by reason."
OFF = "1: nothing is found or saved, because weights may have changed since records were saved."


class CountGrowth:
    """What the counters of a store have grown by since the last time."""

    def __init__(self, store: CheckedStore) -> None:
        self._store = store
        self._before: Counter[str] = Counter()

    def since(self, more: Mapping[str, int] | None = None) -> tuple[Counter[str], Counter[str]]:
        """The counters, with `more` that the store does not count; and bad records by reason."""
        now = Counter(self._store.counts) + Counter(more or {})
        now.update({f"bad {reason}": count for reason, count in dict(self._store.bad).items()})
        grown, self._before = now - self._before, now
        bad = Counter({name[4:]: grown.pop(name) for name in list(grown) if name.startswith("bad ")})
        return grown, bad

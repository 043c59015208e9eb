"""HiCacheSettings: what `--hicache-storage-backend-extra-config` says to Quire's backend, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.connectors.weights import weights_identity
from quire.errors import InvalidInput
from quire.settings.setting import parse_bytes

_OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1"}
_OURS = {"url", "capacity", "weights", "weights_path", "weights_revision", "deadline_s", "threads", "direct"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheSettings:
    """`capacity` in bytes bounds a directory; None leaves what it has. A call waits `deadline_s` at most for one of the
    `threads`. `direct` says whether a directory is read and written around the page cache; None: if it can be."""

    url: str
    weights: str
    capacity: int | None
    deadline_s: float
    threads: int
    direct: bool | None

    @classmethod
    def read(cls, extra: Mapping[str, Any] | None) -> HiCacheSettings:
        """From the JSON. `weights` is any text that changes with the weights, such as a commit of their repository;
        `weights_path` is a folder or a repository, whose files are read. Raises InvalidInput."""
        given = {name: value for name, value in (extra or {}).items() if name not in _OF_SGLANG}
        unknown = sorted(set(given) - _OURS)
        if unknown:
            raise InvalidInput(
                f"the store beneath HiCache has no setting '{unknown[0]}'.",
                fix=f"use one of {', '.join(sorted(_OURS))}.",
            )
        if not isinstance(url := given.get("url"), str) or not url:
            raise InvalidInput(
                "the store beneath HiCache has no URL.",
                fix='add "url": "/var/cache/quire" and "capacity": "100GiB" to --hicache-storage-backend-extra-config.',
            )
        path, weights = given.get("weights_path"), given.get("weights")
        if not weights and not path:
            raise InvalidInput(
                "SGLang's keys do not name the weights, so pages of other weights would be read.",
                fix='add "weights_path": "/models/x" or "weights": "COMMIT" to --hicache-storage-backend-extra-config.',
            )
        capacity = given.get("capacity")
        return cls(
            url=url,
            weights=str(weights) if weights else weights_identity(str(path), given.get("weights_revision")),
            capacity=None if capacity is None else parse_bytes(capacity),
            deadline_s=_above_zero("deadline_s", given.get("deadline_s", 1.0)),
            threads=int(_above_zero("threads", given.get("threads", 4))),
            direct=None if given.get("direct") is None else bool(given["direct"]),
        )


def _above_zero(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidInput(f"the setting '{name}' of the store beneath HiCache is a number above 0, not {value!r}.")
    return float(value)

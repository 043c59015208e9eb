"""Finding: one cached page that is not what it was. Reports of findings, as files and for operators."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MOST_REPORTS = 64
"""Files in a folder from one engine, and findings in memory."""


class Kind(StrEnum):
    """What is wrong with a page."""

    BYTES = "bytes changed"  # since its stamp: a bit flip, a write of a neighbour
    OVERWRITTEN = "overwritten"  # a step was planned to write to it although it is cached
    WRONG_SLOT = "wrong slot"  # another request, or another position, was planned for one of its slots
    UNWRITTEN = "not written"  # the device left out a write when it was computed
    WRONG_PREFIX = "wrong prefix"  # the tree found it for other tokens, or in another namespace


@dataclass(slots=True, kw_only=True)
class Finding:
    """A damaged page. Steps are numbered by launches. `wrote_step` and `wrote_request` wrote its frame last, as
    planned; what damaged it ran in one of the steps after `good_step`, up to `step`. It has no tokens and no salt:
    reports are read by operators of all tenants."""

    kind: Kind
    group: str
    index: int
    page: int
    frame: int
    position: int  # place of its first token in its prefix
    step: int
    good_step: int  # the last one after which it was known to be good
    wrote_step: int
    wrote_request: str
    neighbours: dict[str, list[Any]] = field(default_factory=dict)  # frames beside it: last step and request
    fields: list[dict[str, int]] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)  # requests that are computed again
    at_unix_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"page {self.page} (group '{self.group}', frame {self.frame}, tokens from {self.position} on): {self.kind} "
            f"after step {self.good_step}, seen in step {self.step}; it was written in step {self.wrote_step} "
            f"by {self.wrote_request}"
        )


class Reports:
    """The newest findings. With a `folder`, each is also written there, at most `MOST_REPORTS` of them."""

    def __init__(self, folder: str | None) -> None:
        self._folder = Path(folder) if folder is not None else None
        self.newest: deque[Finding] = deque(maxlen=MOST_REPORTS)
        self.num_written = 0

    def add(self, finding: Finding) -> None:
        """Log it, and write it."""
        finding.at_unix_s = time.time()
        self.newest.append(finding)
        logger.error(
            "the canary found damage: %s; computed again: %s", finding, ", ".join(finding.readers) or "nothing"
        )
        self.keep("canary", asdict(finding))

    def keep(self, kind: str, data: dict[str, Any]) -> None:
        """Write a file to the folder, if there is one."""
        if self._folder is None or self.num_written >= MOST_REPORTS:
            return
        self.num_written += 1
        path = self._folder / f"{kind}-{os.getpid()}-{self.num_written:03d}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(path, "x", opener=_for_the_owner) as file:
                json.dump(data, file, indent=1)
        except OSError as error:
            logger.warning("no report was written to %s: %s", path, error)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The newest findings, the last one last."""
        return [asdict(each) for each in self.newest]


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

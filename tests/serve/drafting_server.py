"""`python -m tests.serve.drafting_server`: `quire`, whose engine drafts in every step, whatever a step costs here."""

from __future__ import annotations

from functools import partial

import numpy as np

from quire.cli import main
from quire.client.async_engine import AsyncEngine
from quire.client.process import Core, Progress, build_engine_core
from quire.engine.config import EngineConfig
from quire.serve import server


def build(config: EngineConfig, progress: Progress) -> Core:
    core = build_engine_core(config, progress)
    governor = core.speculator._governor  # type: ignore[attr-defined]
    governor.rests, governor.pays = lambda num_requests: False, lambda *_: True
    governor.limits = lambda rows, serials: np.full(len(rows), governor._most, dtype=np.int64)
    return core


if __name__ == "__main__":
    from tests.serve.drafting_server import build as importable

    server.serve = partial(server.serve, start=partial(AsyncEngine.start, build=importable))  # type: ignore[assignment]
    main()

"""Endings for recorded sessions whose data tells none: drawn so that they tell as much of the future as real ones do.

Of other sessions of the same source it is known how they end (issue 37): after calls of tools 1.6 % of the paths are
never used again, and the median gap to the next use is 17 s; after answers 28 % and 244 s. A mixture of two log-normal
distributions with these medians is fitted to the gaps of a trace. Each output is a call or an answer with the chance
that its own gap has in it. So figures with these endings are an estimate of what told endings bring.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from bench.eviction.paged_trace import PagedTrace

ANSWER, TOOL = 1, 2
"""As `PagedRequest.ending`."""
MEDIANS_S = {ANSWER: 244.0, TOOL: 17.0}
NEVER_AGAIN = {ANSWER: 0.28, TOOL: 0.016}
_ROUNDS = 30

Floats = npt.NDArray[np.float64]


def gaps_of(trace: PagedTrace) -> Floats:
    """Seconds from each request to the next one that looks up the last whole page of its prompt; infinite if none."""
    arrivals = trace.arrivals
    found = np.full(len(trace), np.inf)
    next_use: dict[int, float] = {}
    for number, request in reversed(list(enumerate(trace))):
        whole = request.pages[: request.lookup_pages].tolist()
        if whole:
            found[number] = next_use.get(whole[-1], np.inf) - arrivals[number]
        next_use.update(dict.fromkeys(whole, float(arrivals[number])))
    return found


def drawn_endings(trace: PagedTrace, seed: int = 0) -> npt.NDArray[np.int64]:
    """An ending for each request."""
    gaps = gaps_of(trace)
    returns = np.isfinite(gaps)
    logs = np.log(np.maximum(gaps[returns], 0.1))
    kinds = (ANSWER, TOOL)
    share, spread = dict.fromkeys(kinds, 0.5), dict.fromkeys(kinds, 1.5)
    for _ in range(_ROUNDS):
        likely = np.array([share[each] * _density(logs, MEDIANS_S[each], spread[each]) for each in kinds])
        part = likely / likely.sum(axis=0)
        for each, weights in zip(kinds, part, strict=True):
            share[each] = float(weights.mean())
            spread[each] = float(np.sqrt(np.average((logs - np.log(MEDIANS_S[each])) ** 2, weights=weights)))
    all_of = {each: share[each] / (1 - NEVER_AGAIN[each]) for each in kinds}
    ends = {each: all_of[each] * NEVER_AGAIN[each] for each in kinds}
    chance = np.full(len(trace), ends[ANSWER] / sum(ends.values()))
    chance[returns] = part[0]
    return np.where(np.random.default_rng(seed).random(len(trace)) < chance, ANSWER, TOOL)


def _density(logs: Floats, median: float, spread: float) -> Floats:
    found: Floats = np.exp(-(((logs - np.log(median)) / spread) ** 2) / 2) / spread
    return found

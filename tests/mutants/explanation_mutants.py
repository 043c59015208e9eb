"""Mistakes in what people are told: from where tokens came, for whom others had to go, and how long requests took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.cache.admission import Admission
from quire.cache.request_kv import PrefixHit
from quire.counters import Histogram
from quire.observe.explain import Cause, Explanation, FromPeer
from quire.offload.host_groups import HostGroup
from quire.offload.tiering import Tiering
from quire.spec.ids import Ids
from tests.mutants.mutants import Patch, mutant


@mutant("explanations", "pages that were loaded are shown as if they had been on the device")
def all_hits_are_on_the_device(patch: Patch) -> None:
    real = Admission.explain

    def explain(admission: Admission, tokens: Ids, hit: PrefixHit, asked: Sequence[FromPeer] = ()) -> Explanation:
        found = real(admission, tokens, hit, asked)
        told = [replace(each, tier="device") if each.cause is Cause.HIT else each for each in found.reasons]
        return replace(found, reasons=tuple(told))

    patch.setattr(Admission, "explain", explain)


@mutant("explanations", "a page that the host gave up was evicted for no request in particular")
def the_host_names_no_request(patch: Patch) -> None:
    real = Tiering.host_room

    def host_room(tiers: Tiering, host: HostGroup, wanted: int, label: str = "") -> int:
        return real(tiers, host, wanted)

    patch.setattr(Tiering, "host_room", host_room)


@mutant("quantiles", "latencies of the last minute are those since the start")
def quantiles_are_since_the_start(patch: Patch) -> None:
    real = Histogram.quantile

    def quantile(histogram: Histogram, part: float, since: Sequence[int]) -> float | None:
        return real(histogram, part, [0] * len(since))

    patch.setattr(Histogram, "quantile", quantile)

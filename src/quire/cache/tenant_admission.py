"""TenantAdmission: whether one more request fits within the floors and ceilings of tenants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from quire.cache.admission import Admission, Claim
from quire.cache.groups import NO_PAGES
from quire.cache.request_kv import PrefixHit, RequestKV
from quire.cache.running import Lengths
from quire.cache.tenants import Tenants
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.speculation import get_drafts_beyond_end


class TenantAdmission(Admission):
    """Admission to the cache of these tenants."""

    def __init__(self, tenants: Tenants, *given: Any) -> None:
        super().__init__(*given)
        self._tenants = tenants

    def at_once(self, kv: RequestKV, count: int) -> int:
        least = super().at_once(kv, count)
        if not self._windows:
            return least
        slack = -self._rows.allocated(kv) % self._size
        left = self._tenants.pages_left(kv.row, [group.index for group in self._windows])
        return max(1, min(least, slack + left * self._size))

    def why_not(self, claim: Claim, more: Sequence[int] = ()) -> str:
        hit, soft = claim.begins, np.zeros(1, dtype=np.int64)
        if isinstance(hit, PrefixHit):
            soft = self._retention.soft_by_tenant(hit.match, hit.num_pages) * self._tenants.over
        wanted = self._claims_by_tenant(claim)
        objection = self._tenants.objection(claim.namespace, wanted, soft, max(more, default=0))
        if objection is None:  # what others reserve is not promised to them
            claim = Claim(claim.begins, claim.num_pages)
        return objection or super().why_not(claim, more)

    def check(self, namespace: Namespace, prompt: int, max_tokens: int) -> None:
        self._tenants.check_request(namespace, prompt + max_tokens, self._plan.pages_of(prompt + max_tokens))

    def largest_request(self, namespace: Namespace) -> int:
        plan = self._plan
        beyond = get_drafts_beyond_end(plan.speculation, plan.tokens_per_page)
        most = self._tenants.most_pages(namespace) * plan.tokens_per_page + 1 - beyond
        return max(0, min(plan.largest_request, most))

    def units_for(self, requests: Sequence[tuple[Namespace, int]]) -> list[int]:
        needs = [self._tenants.units_for(*each) for each in set(requests)]
        return [max(each) for each in zip(*needs, strict=True)] or [0] * len(self._rooms)

    def _claims_by_tenant(self, claim: Claim) -> Lengths:
        """Frames by group and tenant, and last page ids, that become held: what `_claims` reserves, pins and needs."""
        tenants, needs = self._tenants, self._needs(claim)
        hit = claim.begins if isinstance(claim.begins, PrefixHit) else None
        pinned = [NO_PAGES] * len(needs) if hit is None else list(self._pinned_by(hit))
        wanted = tenants.pages_by(pinned)
        wanted[:, tenants.number(claim.namespace)] += needs
        carries = [*(group.reach.in_place for group in self._groups), False]
        for at, reserved in enumerate(self._reserved(claim)):
            wanted[at] += tenants.by_tenant(claim.rows, reserved + claim.reserve * (not carries[at]))
        return wanted

    def _pinned_by(self, hit: PrefixHit) -> Iterator[Ids]:
        """For each group, and for page ids, the pages whose idle frames a request on a hit pins."""
        end = min(hit.num_pages, hit.match.num_here)
        idle = hit.pages[end - hit.num_evictable : end]
        for group in self._groups:
            needed = group.needed_pages(hit.pages)
            yield idle if group.reach.whole else needed[group.table.ticket[needed] != 0]
        yield idle

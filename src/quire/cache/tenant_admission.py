"""TenantAdmission: whether one more request fits within the floors and ceilings of tenants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from quire.cache.admission import Admission
from quire.cache.request_kv import PrefixHit, RequestKV
from quire.cache.running import NO_ROWS, Lengths, Rows
from quire.cache.tenants import Tenants
from quire.errors import RequestTooLarge
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

    def why_not(
        self,
        begins: PrefixHit | RequestKV,
        num_pages: int,
        rows: Rows = NO_ROWS,
        reached: Lengths = NO_ROWS,
        reserve: int = 0,
        more: Sequence[int] = (),
    ) -> str:
        wanted = self._claims_by_tenant(begins, num_pages, rows, reached, reserve)
        soft = self._soft_by_tenant(begins)
        objection = self._tenants.objection(_namespace_of(begins), wanted, soft, max(more, default=0))
        if objection is None or objection:
            return objection or ""
        return super().why_not(begins, num_pages, rows, reached, reserve, more)

    def check(self, namespace: Namespace, prompt: int, max_tokens: int) -> None:
        if why := self._tenants.too_large(namespace, self._plan.pages_of(prompt + max_tokens)):
            fix = "lower max_tokens, shorten the prompt, or raise the tenant's ceiling."
            raise RequestTooLarge(f"a request of {prompt + max_tokens:,} tokens {why}.", fix=fix)

    def largest_request(self, namespace: Namespace) -> int:
        plan = self._plan
        beyond = get_drafts_beyond_end(plan.speculation, plan.tokens_per_page)
        most = self._tenants.most_pages(namespace) * plan.tokens_per_page + 1 - beyond
        return max(0, min(plan.largest_request, most))

    def frames_for(self, requests: Sequence[tuple[Namespace, int]]) -> list[int]:
        needs = [self._tenants.frames_for(*each) for each in set(requests)]
        return [max(each) for each in zip(*needs, strict=True)] or [0] * len(self._groups)

    def passes(self, namespace: Namespace) -> bool:
        return self._tenants.passes(namespace)

    def was_passed(self, namespace: Namespace) -> bool:
        return self._tenants.was_passed(namespace)

    def gives_way(self, kv: RequestKV | None) -> bool:
        return kv is not None and bool(self._tenants.over[self._tenants.of_row[kv.row]])

    def _claims_by_tenant(
        self,
        begins: PrefixHit | RequestKV,
        num_pages: int,
        rows: Rows,
        reached: Lengths,
        reserve: int,
    ) -> Lengths:
        """Frames that become held, by group and tenant, and page ids in the last line: what `_claims` reserves for
        rows, and what a request pins and needs."""
        have, of = -(-self._rows.num_allocated[rows] // self._size), self._tenants.of_row[rows]
        asks = np.zeros(len(self._groups) + 1, dtype=np.int64)
        if isinstance(begins, PrefixHit):
            wanted = self._tenants.pages_by(list(self._pinned_by(begins)))
            loads = begins.choice.loads or [0] * len(self._groups)
            needs = [g.needs(num_pages, begins.num_pages) + n for g, n in zip(self._groups, loads, strict=True)]
            asks[:] = [*needs, num_pages - begins.num_pages]
        else:
            row, had = np.array([begins.row]), np.array([-(-self._rows.allocated(begins) // self._size)])
            needed = np.maximum(had, num_pages)
            wanted = np.zeros((len(asks), len(self._tenants.terms)), dtype=np.int64)
            asks[:] = [*(g.remaining(row, had, needed) for g in self._groups), int((needed - had).sum())]
        wanted[:, self._tenants.number(_namespace_of(begins))] += asks
        for tenant in np.unique(of).tolist():
            mine = of == tenant
            some, spare = rows[mine], int(np.count_nonzero(mine)) * reserve
            for at, group in enumerate(self._groups):
                wanted[at, tenant] += group.remaining(some, have[mine], reached[mine])
                wanted[at, tenant] += 0 if group.reach.in_place else spare
            wanted[-1, tenant] += int((reached - have)[mine].sum()) + spare
        return wanted

    def _pinned_by(self, hit: PrefixHit) -> Iterator[Ids]:
        """For each group, and for page ids, the pages whose idle frames a request on a hit pins."""
        end = min(hit.num_pages, hit.match.num_here)
        idle = hit.pages[end - hit.num_evictable : end]
        for group in self._groups:
            needed = group.needed_pages(hit.pages)
            yield idle if group.reach.whole else needed[group.table.ticket[needed] != 0]
        yield idle

    def _soft_by_tenant(self, begins: PrefixHit | RequestKV) -> Lengths:
        counts = [0]
        if isinstance(begins, PrefixHit):
            counts = self._retention.soft_by_tenant(begins.match, begins.num_pages)
        return np.array(counts, dtype=np.int64) * self._tenants.over


def _namespace_of(begins: PrefixHit | RequestKV) -> Namespace:
    return begins.match.namespace if isinstance(begins, PrefixHit) else begins.namespace

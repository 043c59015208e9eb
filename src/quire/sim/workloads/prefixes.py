"""Prefixes that a cache finds hard to keep, or to find."""

from __future__ import annotations

from quire.sim.workloads.workload import Draft


def rag_scan(draft: Draft, *, requests: int = 200, system: int = 2048, hot_every: int = 8, rate: float = 4.0) -> None:
    """A scan: long prompts of passages that never come again, and every `hot_every`-th request a short question under
    one system prompt, which a cache should not forget for the passages."""
    hot = draft.text(system)
    arrival = 0.0
    for number in range(requests):
        if number % hot_every:
            prompt = [draft.text(draft.between(256, 512)) for _ in range(4)]
        else:
            prompt = [hot, draft.text(draft.between(20, 100))]
        draft.add(prompt, draft.text(draft.between(16, 64)), arrival=arrival)
        arrival += draft.gap(1 / rate)


def mixed_prefixes(
    draft: Draft, *, requests: int = 400, large: int = 4, small: int = 96, tokens: int = 8192, rate: float = 4.0
) -> None:
    """`large` prefixes of up to `tokens` and `small` ones of a 16th to a 64th of that, every one asked for alike: a
    cache that takes the large ones for one entry each has room for little else."""
    shared = [draft.text(draft.between(tokens // 2, tokens)) for _ in range(large)]
    shared += [draft.text(draft.between(max(tokens // 64, 1), max(tokens // 16, 1))) for _ in range(small)]
    arrival = 0.0
    for _ in range(requests):
        prompt = [draft.random.choice(shared), draft.text(draft.between(10, 50))]
        draft.add(prompt, draft.text(draft.between(8, 32)), arrival=arrival)
        arrival += draft.gap(1 / rate)


def match_unit(draft: Draft, *, unit: int = 64, requests: int = 4, rate: float = 2.0) -> None:
    """Families of `requests` prompts that share just less than a unit, a unit and just more, and 1,600 tokens of 2,200
    and 1,500 of 2,200: what is found depends on the unit in which prefixes match."""
    lengths = [(shared, 2 * unit) for shared in (unit - 1, unit, unit + 1) if shared]
    arrival = 0.0
    for shared, own in (*lengths, (1600, 600), (1500, 700)):
        prefix = draft.text(shared)
        for _ in range(requests):
            session = f"{shared}+{own}"
            draft.add([prefix, draft.text(own)], draft.text(8), arrival=arrival, session=session)
            arrival += 1 / rate

"""More than there is room for, just as much as there is room for, and a little."""

from __future__ import annotations

from quire.sim.workloads.workload import Conversation, Draft


def over_commit(
    draft: Draft, *, pool: int = 16384, ratio: float = 1.25, prompt: int = 128, output: int = 512, rate: float = 50.0
) -> None:
    """Short prompts with long answers, together `ratio` times a pool of `pool` tokens: all of them start, and not all
    of them can end without another giving way."""
    arrival = 0.0
    for _ in range(max(round(pool * ratio / (prompt + output)), 1)):
        length = draft.between(output // 2 + 1, output + output // 2)
        draft.add([draft.text(prompt)], draft.text(length), arrival=arrival)
        arrival += draft.gap(1 / rate)


def two_loads(draft: Draft, *, pool: int = 16384, share: float = 0.6, rounds: int = 4, output: int = 64) -> None:
    """Two prompts of `share` of the pool at the same time, again and again: each fits, both do not."""
    prompts = [draft.text(max(int(pool * share) - output, 1)) for _ in range(2)]
    for number in range(rounds):
        for prompt in prompts:
            draft.add([prompt], draft.text(output), arrival=number * 10.0)


def near_capacity(draft: Draft, *, pool: int = 4096, page: int = 16, rounds: int = 2, output: int = 32) -> None:
    """Requests of a pool's length, and of up to two pages less and more; the longer ones can never be served."""
    for number in range(rounds):
        for at, pages in enumerate((0, -2, 1, -1, 2)):
            length = max(pool + pages * page - output, 1)
            draft.add(
                [draft.text(length)], draft.text(output), arrival=number * 50.0 + at * 10.0, session=f"{pages:+d} pages"
            )


def abort_storm(
    draft: Draft, *, requests: int = 200, share: float = 0.89, systems: int = 4, rate: float = 40.0
) -> None:
    """Requests of which `share` lose their client: a third while they wait, the rest at some token of the answer."""
    opening = [draft.text(draft.between(256, 1024)) for _ in range(systems)]
    leaving = set(draft.random.sample(range(requests), round(requests * min(share, 1.0))))
    arrival = 0.0
    for number in range(requests):
        length = draft.between(40, 200)
        leaves = 0 if draft.random.random() < 1 / 3 else draft.between(1, length - 1)
        draft.add(
            [draft.popular(opening), draft.text(draft.between(50, 500))],
            draft.text(length),
            arrival=arrival,
            abort_after=leaves if number in leaving else None,
        )
        arrival += draft.gap(1 / rate)


def fillers(
    draft: Draft, *, requests: int = 24, fillers: int = 2000, filler_tokens: int = 1, rate: float = 200.0
) -> None:
    """The same `requests` twice, and between them `fillers` prompts of `filler_tokens` that answer with one token: the
    second time should be as good as the first left it."""
    system = draft.text(1024)
    asked = [(draft.text(draft.between(50, 400)), draft.text(draft.between(16, 64))) for _ in range(requests)]
    arrival = 0.0
    for session in ("before", "after"):
        for question, answer in asked:
            draft.add([system, question], answer, arrival=arrival, session=session)
            arrival += 20.0 / rate
        if session == "before":
            for _ in range(fillers):
                draft.add([draft.text(filler_tokens)], draft.text(1), arrival=arrival, session="filler")
                arrival += 1 / rate


def fits(draft: Draft, *, pool: int = 32768, turns: int = 4) -> None:
    """Conversations that a pool of `pool` tokens holds all at once: nothing has to be forgotten, so nothing that is
    done to make room should cost anything."""
    tokens = pool // 2
    system = draft.text(tokens // 8)
    for number in range(8):
        conversation = Conversation(draft, f"s{number}", [system], arrival=number * 2.0)
        for _ in range(turns):
            share = max(tokens // (16 * turns), 1)
            conversation.turn([draft.text(share)], max(share // 2, 1), think=draft.random.uniform(1.0, 5.0))

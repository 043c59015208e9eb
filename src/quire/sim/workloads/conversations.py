"""People and programs that talk on: each prompt repeats what was said before."""

from __future__ import annotations

from quire.sim.workloads.workload import Conversation, Draft

_TURNS = (1, 1, 2, 3, 3, 4, 5, 6, 8, 10)


def chat(draft: Draft, *, requests: int = 200, systems: int = 8, documents: int = 40, rate: float = 2.0) -> None:
    """Conversations of 1 to 10 turns under popular system prompts, every fourth about a popular document.

    `rate` is new conversations a second.
    """
    opening = [draft.text(draft.between(256, 2048)) for _ in range(systems)]
    attached = [draft.text(draft.between(1024, 6144)) for _ in range(documents)]
    arrival, number = 0.0, 0
    while len(draft.requests) < requests:
        said = [draft.popular(opening, 1.1)]
        if draft.random.random() < 0.25:
            said.append(draft.popular(attached, 0.9))
        conversation = Conversation(draft, f"c{number}", said, arrival=arrival)
        for turn in range(min(draft.random.choice(_TURNS), requests - len(draft.requests))):
            think = draft.random.uniform(0.5, 20.0) if turn else 0.0
            conversation.turn([draft.text(draft.between(20, 400))], draft.between(40, 300), think=think)
        arrival += draft.gap(1 / rate)
        number += 1

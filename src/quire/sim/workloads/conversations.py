"""People and programs that talk on: each prompt repeats what was said before."""

from __future__ import annotations

from heapq import heappop, heappush

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


def sessions(draft: Draft, *, requests: int = 200, systems: int = 16, rate: float = 4.0) -> None:
    """Many sessions at a time, 1 to 8 turns each, that come back after 96 to 640 requests of others.

    `rate` is requests a second, new sessions and turns together.
    """
    opening = [draft.text(draft.between(256, 2048)) for _ in range(systems)]
    due: list[tuple[int, int, Conversation, int]] = []
    for tick in range(requests):
        if due and due[0][0] <= tick:
            _, number, conversation, turns = heappop(due)
        else:
            said, turns, number = [draft.popular(opening)], draft.between(1, 8), tick
            conversation = Conversation(draft, f"s{number}", said, arrival=tick / rate)
        wait = draft.between(96, 640)
        conversation.turn([draft.text(draft.between(32, 512))], draft.between(16, 192), think=wait / rate)
        if turns > 1:
            heappush(due, (tick + wait, number, conversation, turns - 1))


def alternating(
    draft: Draft, *, sessions: int = 2, tokens: int = 8192, turns: int = 6, user: int = 200, think: float = 30.0
) -> None:
    """A few sessions of `tokens` each, the whole of which every turn repeats, taking turns: the room one needs is where
    the other was."""
    for number in range(sessions):
        conversation = Conversation(draft, f"s{number}", [draft.text(tokens)], arrival=number * think / sessions)
        for _ in range(turns):
            conversation.turn([draft.text(user)], user // 2 + 1, think=think)


def agents(draft: Draft, *, tasks: int = 32, calls: int = 12, tools: int = 1024) -> None:
    """Agents that call the model in a loop: 86 % of the gaps are under a second, 95 % under ten, the rest minutes.

    `tools` is the length of the instructions that all of them share.
    """
    instructions = draft.text(tools)
    for number in range(tasks):
        task = draft.text(draft.between(100, 800))
        agent = Conversation(draft, f"a{number}", [instructions, task], arrival=draft.random.uniform(0.0, 20.0))
        for _ in range(calls):
            draw = draft.random.random()
            low, high = (0.05, 1.0) if draw < 0.86 else (1.0, 10.0) if draw < 0.95 else (60.0, 600.0)
            think = draft.random.uniform(low, high)
            agent.turn([draft.text(draft.between(20, 600))], draft.between(20, 160), think=think)

"""Requests that must not share, or must not suffer from one another, whatever their text is."""

from __future__ import annotations

from quire.sim.workloads.workload import Conversation, Draft
from quire.spec.events import Namespace


def rl_groups(
    draft: Draft, *, epochs: int = 3, prompts: int = 4, fewest: int = 8, most: int = 64, round_s: float = 60.0
) -> None:
    """Reinforcement learning: in each round `fewest` to `most` samples of each prompt at once, and new weights after
    it, which nothing computed before may be used with. The prompts are the same in every round."""
    asked = [draft.text(draft.between(128, 1024)) for _ in range(prompts)]
    for epoch in range(epochs):
        namespace = Namespace(salt=f"weights {epoch}")
        for number, prompt in enumerate(asked):
            for _ in range(draft.between(min(fewest, most), most)):
                draft.add(
                    [prompt],
                    draft.text(draft.between(32, 256)),
                    arrival=epoch * round_s,
                    session=f"group {number}",
                    namespace=namespace,
                )


def same_text_other_namespace(draft: Draft, *, texts: int = 6, repeats: int = 2, rate: float = 4.0) -> None:
    """The same prompts under the plain model, two adapters and two salts (two images behind the same placeholder, or
    two tenants): each may only find what its own namespace wrote."""
    plain, one, other = Namespace(), Namespace(adapter="one"), Namespace(adapter="other")
    namespaces = (plain, one, other, Namespace(salt="one"), Namespace(adapter="one", salt="other"))
    asked = [(draft.text(draft.between(200, 1500)), draft.text(draft.between(16, 64))) for _ in range(texts)]
    arrival = 0.0
    for _ in range(repeats):
        for prompt, output in asked:
            for namespace in namespaces:
                draft.add([prompt], output, arrival=arrival, namespace=namespace)
                arrival += 1 / rate


def noisy_neighbour(draft: Draft, *, requests: int = 200, noise: int = 9, rate: float = 4.0) -> None:
    """Two tenants: for each turn of a quiet one's conversations a noisy one sends `noise` prompts that never recur."""
    quiet, noisy = Namespace(salt="quiet"), Namespace(salt="noisy")
    system = draft.text(1024)
    turns = max(requests // (noise + 1), 1)
    think = (noise + 1) / rate
    for number in range(0, turns, 4):
        conversation = Conversation(draft, f"quiet {number}", [system], arrival=number * think, namespace=quiet)
        for _ in range(min(4, turns - number)):
            conversation.turn([draft.text(draft.between(50, 300))], draft.between(20, 100), think=think)
    for number in range(max(requests - turns, 0)):
        prompt = draft.text(draft.between(500, 2000))
        draft.add([prompt], draft.text(draft.between(20, 100)), arrival=number / rate, session="noisy", namespace=noisy)

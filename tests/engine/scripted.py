"""A drafter that knows what will be drawn, and proposes it, or something else, by a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.running import Lengths
from quire.engine.core import EngineCore
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.speculative.drafter import Drafter, Drafting, Drafts, joined
from quire.speculative.speculator import Speculator

IsRight = Callable[[int], bool]
"""Whether the draft of an output, by its place, is right."""

SCRIPTS: dict[str, IsRight] = {
    "all right": lambda place: True,
    "none": lambda place: False,
    "alternating": lambda place: place % 2 == 0,
    "wrong in the third": lambda place: place % 5 != 2,
}


class ScriptedDrafter:
    """Proposes for each sequence of `sequences` (prompt and outputs) what comes next, where the script says so."""

    def __init__(
        self, sequences: Sequence[Sequence[int]], prompts: Sequence[int], is_right: IsRight, vocabulary: int, most: int
    ) -> None:
        self._sequences = [np.array(each, dtype=np.int32) for each in sequences]
        self._prompts = list(prompts)
        self._is_right = is_right
        self._vocabulary = vocabulary
        self._most = most  # tokens of a tree, or 0: chains

    def propose(self, drafting: Drafting) -> Drafts:
        depth = int(drafting.most.max(initial=0))
        counts, tokens = np.zeros(len(drafting), dtype=np.int64), np.zeros((len(drafting), depth), dtype=np.int32)
        for at, row in enumerate(drafting.batch.rows.tolist()):
            known = int(drafting.known[at])
            have = drafting.tokens[row, :known]
            for sequence, prompt in zip(self._sequences, self._prompts, strict=True):
                if known >= prompt and np.array_equal(sequence[:known], have):
                    after = sequence[known : known + int(drafting.most[at])].tolist()
                    guesses = [
                        token if self._is_right(known + i - prompt) else (token + 1) % self._vocabulary
                        for i, token in enumerate(after)
                    ]
                    counts[at], tokens[at, : len(guesses)] = len(guesses), guesses
                    break
        return self._branched(counts, tokens) if self._most else Drafts(counts, tokens)

    def _branched(self, counts: Lengths, tokens: Ids) -> Drafts:
        """Beside each draft a wrong one that is computed before it, and goes on as the right one does."""
        wrong, late = tokens.copy(), tokens.copy()
        if tokens.shape[1]:
            wrong[:, 0] = (tokens[:, 0] + 1) % self._vocabulary
            late[:, -1] = (tokens[:, -1] + 2) % self._vocabulary
        chains = np.stack([wrong, late, tokens], axis=1)
        return joined(chains, np.repeat(counts[:, None], 3, axis=1), self._most)

    def ended(self, namespace: Namespace, tokens: Ids, num_cached: int) -> None:
        del namespace, tokens, num_cached

    def clear(self, namespace: Namespace | None) -> None:
        del namespace


def follow_script(
    core: EngineCore, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], script: str
) -> Speculator:
    """From now on the engine drafts by a script, and always as much as there is room for."""
    sequences = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    config = core.plan.speculation
    assert config is not None
    most = config.num_draft_tokens - 1 if config.topk > 1 else 0
    drafter = ScriptedDrafter(sequences, [len(p) for p in prompts], SCRIPTS[script], core.model.spec.vocab_size, most)
    return drafts_with(core, drafter, config.num_steps)


def drafts_with(core: EngineCore, drafter: Drafter, most: int) -> Speculator:
    """From now on the engine drafts so, as much as there is room for, whatever it costs. Counts begin anew."""
    part = core.speculator
    assert part is not None
    made = part._scheduler, part._move, part._revision
    part.__init__(drafter, None, most, *made)  # type: ignore[misc]
    return part

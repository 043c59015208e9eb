"""GrammarDrafts: drafts of requests with a grammar are those that it allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.cache.running import Lengths
from quire.grammar.matcher import Matcher
from quire.grammar.part import GrammarPart
from quire.scheduler.step import StepRows
from quire.spec.ids import Bools, Ids
from quire.speculative.drafter import Drafts


@dataclass(frozen=True)
class GrammarDrafts:
    """Drafts of requests with a grammar (`quire.speculative.part.Revision`): what it forbids is cut off, and tokens
    that it forces are added to chains.

    With `rejects`, drafts may be drawn again by rejection sampling, whose other draws depend on the draft: so the first
    forbidden one stays, which is never accepted. With `follows`, the drafter computes what it has proposed, and other
    tokens may only come behind that.
    """

    part: GrammarPart
    rejects: bool
    follows: bool

    @property
    def is_used(self) -> bool:
        """Whether any request has a grammar."""
        return self.part.is_used

    def revise(self, batch: StepRows, room: Lengths, drafts: Drafts | None) -> Drafts | None:
        """The drafts of these requests, at most `room[i]` tokens ahead; None for none."""
        at = (batch.terms["constrained"] & (room > 0)).nonzero()[0]
        if not len(at):
            return drafts
        width = int(room.max()) if drafts is None else max(drafts.tokens.shape[1], int(room.max()))
        tokens = np.zeros((len(batch), width), dtype=np.int32)
        counts = np.zeros(len(batch), dtype=np.int64)
        parents = None
        if drafts is not None:
            counts = drafts.counts.copy()
            tokens[:, : drafts.tokens.shape[1]] = drafts.tokens
            if drafts.parents is not None:
                parents = np.full(tokens.shape, -1, dtype=np.int32)
                parents[:, : drafts.parents.shape[1]] = drafts.parents
        for row in at.tolist():
            request = batch.requests[row]
            with self.part.timed(request) as matcher:
                if matcher is None:
                    continue
                matcher.advance(request.output_tokens)
                if matcher.has_ended or matcher.state.is_error():
                    continue
                own = tokens[row, : counts[row]].tolist()
                if parents is None:
                    chain = self._chain(matcher, own, int(room[row]))
                    counts[row] = len(chain)
                    tokens[row, : len(chain)] = chain
                else:
                    kept = matcher.visit(own, parents[row, : counts[row]].tolist())
                    counts[row] = _cut(tokens[row], parents[row], np.array(kept, dtype=np.bool_))
        found = Drafts(counts, tokens, parents)
        return found if found.num_tokens else None

    def _chain(self, matcher: Matcher, own: list[int], room: int) -> list[int]:
        forced: list[int] = []

        def last(draft: int) -> None:
            if draft == len(own) - 1:
                forced.extend(matcher.state.compute_ff_tokens())

        if own:
            allowed = matcher.visit(own, None, last)
            right = allowed.index(False) if False in allowed else len(own)
            if right < len(own) and (right or self.rejects or self.follows):
                return own[: right + self.rejects]
            own = own[:right]
        if not own:
            forced = matcher.state.compute_ff_tokens()
        return (own + forced)[:room]


def _cut(tokens: Ids, parents: Ids, kept: Bools) -> int:
    """Leave the drafts of a tree that are `kept`, in place; how many there are. What follows one that is not is not
    kept."""
    count = int(np.count_nonzero(kept))
    places = np.append(np.cumsum(kept) - 1, -1)  # where each goes; the last entry is for the parent -1
    before, above = tokens[: len(kept)][kept], parents[: len(kept)][kept]
    tokens[:count], parents[:count] = before, places[above]
    return count

"""Which drafts were right: a draft is accepted while it equals the token that was drawn in its place.

Each place of a step is drawn as it would be without drafts: the draw is a function of the logits and of the request's
seed and position (decision 004). So the tokens are the same with drafts and without.
"""

from __future__ import annotations

import numpy as np

from quire.cache.running import Lengths, Rows


def accepted_draws(tokens: Lengths, draws: Rows, draw_counts: Lengths, drawn: Lengths) -> Lengths:
    """How many of the draws of each work are tokens of its request: at least one where it drew any, int64 `[works]`.

    `tokens` are the input ids of the step, flat; `draws` the flat places after which a token is drawn, of one work
    after the other, `draw_counts[i]` of work i; `drawn` what was drawn there. A work with several draws computes a
    draft after each of them but the last.
    """
    kept = np.minimum(draw_counts, 1)
    several = draw_counts > 1
    if not np.count_nonzero(several):
        return kept
    first = np.cumsum(draw_counts) - draw_counts
    wrong = np.ones(len(draws), dtype=np.bool_)  # the last draw of a work has no draft after it
    at = (np.diff(draws) == 1).nonzero()[0]
    wrong[at] = tokens[draws[at] + 1] != drawn[at]
    wrong[(first + draw_counts - 1)[draw_counts > 0]] = True
    places = wrong.nonzero()[0]
    ends = places[np.searchsorted(places, first[several])]
    kept[several] = ends - first[several] + 1
    return kept

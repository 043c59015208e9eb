"""Which drafts were right: a draft is accepted while it equals the token that was drawn in its place.

Each place of a step is drawn as it would be without drafts: the draw is a function of the logits and of the request's
seed and position (decision 004). So the tokens are the same with drafts and without.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.cache.running import Lengths, Rows
from quire.spec.ids import Ids

_NOWHERE: Rows = np.empty(0, dtype=np.intp)


class Accepted(NamedTuple):
    """What is right of a step: `kept[i]` draws of work i are tokens of its request, at least one where it drew any.

    `order` int64 `[draws]` has them first, in the order of their places in the request, among the draws of each work;
    None where they are there already. Rows of drafts that were right are those at the flat places `sources`, and belong
    at `targets`.
    """

    kept: Lengths
    order: Rows | None = None
    sources: Rows = _NOWHERE
    targets: Rows = _NOWHERE


def accepted_draws(
    tokens: Lengths, draws: Rows, draw_counts: Lengths, drawn: Lengths, parents: Ids | None = None
) -> Accepted:
    """Which draws of a step are tokens of their requests.

    `tokens` are the input ids of the step, flat; `draws` the flat places after which a token is drawn, of one work
    after the other, `draw_counts[i]` of work i; `drawn` what was drawn there. A work with several draws computes a
    draft after each of them but the last. If drafts are trees, `parents` has for each flat place the one it follows.
    """
    kept = np.minimum(draw_counts, 1)
    several = draw_counts > 1
    if not np.count_nonzero(several):
        return Accepted(kept)
    works, ends = several.nonzero()[0], draw_counts.cumsum()
    first = ends - draw_counts
    if parents is not None:
        return _accepted_path(tokens, draws, drawn, parents, kept, works, first)
    wrong = tokens.take(draws + 1, mode="clip") != drawn
    wrong[ends[works] - 1] = True  # the last draw of a work has no draft after it
    places, first = wrong.nonzero()[0], first[works]
    kept[works] = places[places.searchsorted(first)] - first + 1
    return Accepted(kept)


def _accepted_path(
    tokens: Lengths, draws: Rows, drawn: Lengths, parents: Ids, kept: Lengths, works: Rows, first: Lengths
) -> Accepted:
    """As `accepted_draws`, of trees: from the last known token of each of these works, the draft that equals the draw
    is next, for as long as there is one."""
    order, roots = np.arange(len(draws)), draws[first[works]]
    most = int(tokens.max()) + 1
    keys = parents.astype(np.int64) * most + tokens
    sorted_places = np.argsort(keys, kind="stable")
    keys = keys[sorted_places]
    sources, targets = [], []
    node, depth = roots, 0
    while len(works):
        wanted = drawn[order[first[works] + depth]]
        found = np.searchsorted(keys, node * most + wanted)
        there = (found < len(keys)) & (wanted < most)
        there[there] = keys[found[there]] == (node * most + wanted)[there]
        works, roots, node = works[there], roots[there], sorted_places[found[there]]
        depth += 1
        kept[works] += 1
        order[first[works] + depth] = np.searchsorted(draws, node)
        moved = node != roots + depth
        sources.append(node[moved])
        targets.append(roots[moved] + depth)
    return Accepted(kept, order, np.concatenate(sources), np.concatenate(targets))

"""Passing: windows move on before pages are cached. Whole pages of an answer enter the tree together, when its request
ends or another one may ask for them. Frames that a window has read past are idle before, for pages to come; those that
are not reclaimed stay with their pages.

    |-- cached, leased --|-- private, passed: idle --|-- private, read --|
    0                    protected                   first[row]          allocated
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.groups import NewPages, PagedGroup
from quire.cache.running import Lengths, Rows, RunningBatch, RunningTables
from quire.cache.states import GroupCache
from quire.spec.ids import Bools


class Passing:
    """The windows of one cache. A commit changes the `settling` groups. If pages that enter the tree are saved with
    their frames (`saves`), windows move on with a commit. `retire` gets what no launched step will read."""

    def __init__(
        self, groups: Sequence[GroupCache], rows: RunningTables, retire: Callable[..., None], *, saves: bool
    ) -> None:
        partial = [group for group in groups if not group.reach.whole]
        self.settling = groups if saves else partial
        self._windows = [group for group in partial if isinstance(group, PagedGroup) and not saves]
        self._others = [group for group in partial if group not in self._windows]
        self._rows, self._retire = rows, retire

    @property
    def commits(self) -> bool:
        """Whether a commit may free frames of running requests, beside those of windows."""
        return any(group.may_free for group in self._others)

    def is_due(self, num_steps: int, num_rows: int) -> bool:
        """Whether windows of so many requests should move on, `num_steps` decodes after the last time: half of them
        have passed a page, or they may want all frames that are left."""
        late = num_steps >= self._rows.page_size // 2
        return any(late or group.num_free + group.num_evictable < num_rows for group in self._windows)

    def frees(self, rows: Rows, num_pages: Lengths) -> Bools:
        """Per row, with `num_pages[i]` settled whole pages: whether only a commit frees its frames."""
        found: Bools = np.zeros(len(rows), dtype=np.bool_)
        for group in self._others:
            found |= group.frees(rows, num_pages)
        return found

    def pass_by(self, batch: RunningBatch, places: Rows, num_pages: Lengths) -> Rows:
        """The requests at these places have `num_pages[i]` settled whole pages, and compute no prompt: pages of one may
        give their frames to cached ones that have lost theirs. Returns those of which a commit frees other frames."""
        rows = batch.rows[places]
        if self._windows:
            kvs = [batch.kvs[at] for at in places.tolist()]
            new = NewPages(kvs, rows, num_pages, num_pages, self._rows.pages)
            self._retire(released=[part for group in self._windows for part in group.pass_by(new)])
        return places[self.frees(rows, num_pages)]

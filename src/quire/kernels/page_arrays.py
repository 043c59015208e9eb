"""PageArrays: the host arrays of a step that kernels read pages by."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.spec.ids import Ids

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class PageArrays:
    """The arrays of a `PagedBatch`, not copied. `starts` int32 `[R + 1]`: rows `starts[r]:starts[r + 1]` are those of
    sequence r, the last of its `contexts[r]` tokens. `frames` int32 `[R, max_pages]`, `parents` int32 `[T]` or None."""

    starts: Ids
    contexts: Ids
    frames: Ids
    parents: Ids | None
    page_size: int
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False, init=False)

    def derived(self, name: Hashable, build: Callable[[PageArrays], T]) -> T:
        """The result of `build`; built on first use, then shared by all layers of the step."""
        if name not in self._derived:
            self._derived[name] = build(self)
        found: T = self._derived[name]
        return found

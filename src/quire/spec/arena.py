"""ArenaLayout: frames of two sizes in one range of bytes, one kind from each end.

    0          small        small + large                                              budget
    | padding   | padding    |                                                          |
    | of small  | of large   |  large frames 1, 2 ... ->    gap    <- small frames, the last first
                                                                                       |

A frame lies where its id says, so a frame that does not move keeps its id whatever the other kind does. Each kind has a
padding frame of its own: foreign bytes are never read as its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

SPARED = 4
"""One part of an arena in so many is spared for what is cached: docs/decisions/088-one-arena-from-two-ends.md."""


@dataclass(frozen=True)
class ArenaLayout:
    """`budget` bytes for the frames of two groups of `strides` bytes each, in the order of the plan's groups.

    Frames of both kinds fit if their bytes, without padding, are at most `room`: the budget in whole small frames, less
    both paddings."""

    budget: int
    strides: tuple[int, int]

    @property
    def upper(self) -> int:
        """The group whose frames lie at the upper end: that of the smaller stride."""
        return int(self.strides[1] < self.strides[0])

    @cached_property
    def room(self) -> int:
        """Bytes of frames that fit, of both groups together."""
        small, large = sorted(self.strides)
        return max(0, (self.budget // small - 1) * small - large)

    def most(self, group: int, beside: int = 0) -> int:
        """Frames of a group that fit beside so many of the other."""
        return max(0, (self.room - beside * self.strides[1 - group]) // self.strides[group])

    def last_id(self, group: int) -> int:
        """The largest id of a group's frames."""
        return self.budget // self.strides[group] - 1 if group == self.upper else self.most(group)

    def under(self, group: int, at: int) -> range:
        """Ids of the other group that have bytes of frame `at` of this one, ascending."""
        stride, other = self.strides[group], self.strides[1 - group]
        first = self.origin(group) + at * stride - self.origin(1 - group)
        last = min((first + stride - 1) // other, self.last_id(1 - group))
        return range(max(1, first // other), last + 1)

    def origin(self, group: int) -> int:
        """The byte of the group's frame 0; frame i lies `i * stride` bytes later."""
        return 0 if group == self.upper else self.strides[self.upper]

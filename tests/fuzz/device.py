"""Device: frames that hold names instead of bytes, and steps that read and write them as a real device would.

A launched step has captured where it reads and writes. It touches memory when the device gets to it, in launch order,
and the host hears of that later: so a page that was handed out too early shows, whatever request wrote it last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths
from quire.cache.states import StatePieces
from quire.spec.ids import Ids
from tests.fuzz.names import Names, Page
from tests.fuzz.plans import tokens_read

_KEPT = 8  # steps, of which some may be in flight
Frames = list[list[int]]
"""Per part of a step: the frames of its pages, from the first on."""


@dataclass(slots=True)
class Part:
    """One request's work in a step: its tokens `start..end - 1`, the last of them called `name`.

    If they are a tree, `name` is that of the first, and `branches` are the names of the others, in order.
    """

    start: int
    end: int
    name: int
    branches: Page = ()

    @property
    def path_end(self) -> int:
        """Where the tokens end that are known to follow each other."""
        return self.end - len(self.branches)


@dataclass(eq=False, slots=True)
class Step:
    """A launched step: its fence, its parts, and per group the frames of its pages or the pieces of its work."""

    fence: int
    parts: list[Part]
    frames: dict[int, Frames]
    pieces: dict[int, StatePieces]
    executed: bool = False


class Device:
    """The frames of one cache, and its steps. Raises AssertionError when a step reads what it must not.

    `pages[group][frame]` are the names in a frame, one for each token; `carried[group][frame]` is the name of the last
    token that went into what a request carries along. `num_read` counts pages that were
    checked by being read, `num_executed` steps.
    """

    def __init__(self, cache: KVCache, names: Names) -> None:
        self._cache = cache
        self._names = names
        self._size = cache.page_size
        self.pages: dict[int, list[Page]] = {}
        self.carried: dict[int, list[int]] = {}
        for group in cache.groups:
            num_frames = group.num_frames + 1
            if group.reach.in_place:
                self.carried[group.index] = [0] * num_frames
            else:
                self.pages[group.index] = [(0,) * self._size] * num_frames
        self._reads = [tokens_read(group.reach, cache.page_size) for group in cache.plan.groups]
        self.num_read = self.num_executed = self.num_copied = 0
        self._steps: list[Step] = []
        cache.parts.moved.append(self.copy)

    def copy(self, group: int, sources: Ids, targets: Ids) -> None:
        """Frames are copied behind all launched steps: what these will do there, they do at the copies."""
        held: list[Any] = self.carried[group] if group in self.carried else self.pages[group]
        renamed = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        found = [held[source] for source in renamed]
        for target, content in zip(renamed.values(), found, strict=True):
            held[target] = content
        self.num_copied += len(found)
        del self._steps[:-_KEPT]
        for step in self._steps:
            if group in step.pieces:
                for frames in (step.pieces[group].sources, step.pieces[group].targets):
                    frames[:] = [renamed.get(frame, frame) for frame in frames.tolist()]
            else:
                step.frames[group] = [[renamed.get(frame, frame) for frame in row] for row in step.frames[group]]

    def launch(self, kvs: list[RequestKV], parts: list[Part], draws: Lengths | None = None) -> Step:
        """A step is launched: what it will read and write is what the cache says now. Part i draws `draws[i]` tokens,
        by default one at most."""
        cache, size = self._cache, self._size
        starts = np.array([part.start for part in parts], dtype=np.int64)
        ends = np.array([part.end for part in parts], dtype=np.int64)
        step = Step(cache.open_fence(), parts, {}, {})
        for group in range(len(cache.groups)):
            pieces = cache.launch(group, kvs, ends, draws)
            if pieces is not None:
                step.pieces[group] = pieces
                continue
            table: Frames = cache.rows.page_table(kvs, ends, group).tolist()
            places = [
                row[at // size] * size + at % size
                for row, part in zip(table, parts, strict=True)
                for at in range(part.start, part.end)
            ]
            slots = cache.rows.slots(kvs, starts, ends, group).tolist()
            assert slots == places, f"the page table of group {group} names other frames than its slots"
            step.frames[group] = table
        self._steps.append(step)
        return step

    def execute(self, step: Step) -> None:
        """The device gets to a step: it writes its tokens, and reads what they attend to."""
        assert not step.executed
        step.executed = True
        self.num_executed += 1
        for group, table in step.frames.items():
            for part, frames in zip(step.parts, table, strict=True):
                self._write(group, part, frames)
            for part, frames in zip(step.parts, table, strict=True):
                self._read(group, part, frames)
        for group, pieces in step.pieces.items():
            self._carry(group, pieces, step.parts)

    def move(self, step: Step, at: int, sources: list[int], targets: list[int]) -> None:
        """What a part has written for these tokens of it belongs at others."""
        size, first = self._size, step.parts[at].start
        for group, table in step.frames.items():
            frames, held = table[at], self.pages[group]
            found = [held[frames[(first + n) // size]][(first + n) % size] for n in sources]
            for n, name in zip(targets, found, strict=True):
                frame, place = frames[(first + n) // size], (first + n) % size
                held[frame] = (*held[frame][:place], name, *held[frame][place + 1 :])

    def touches(self, step: Step, group: int) -> set[int]:
        """Frames of a group that a step may still read or write."""
        if group in step.pieces:
            pieces = step.pieces[group]
            return {*pieces.sources.tolist(), *pieces.targets.tolist()}
        size, low = self._size, self._reads[group]
        return {
            frame
            for part, frames in zip(step.parts, step.frames[group], strict=True)
            for frame in frames[low(part.start) // size : -(-part.end // size)]
        }

    def first_page(self, group: int, num_tokens: int) -> int:
        """The first page of which a token at that position reads something, by the definition of the group's reach."""
        return self._reads[group](num_tokens) // self._size

    def reads(self, group: int, num_tokens: int) -> int:
        """The first earlier position that a token at that position reads."""
        return self._reads[group](num_tokens)

    def _write(self, group: int, part: Part, frames: list[int]) -> None:
        size, held = self._size, self.pages[group]
        written, whole = self._names.path[part.name] + part.branches, self._names.pages[part.name]
        for page in range(part.start // size, -(-part.end // size)):
            frame = frames[page]
            assert frame, f"a step writes page {page} of a request, which has no frame in group {group}"
            first = page * size
            if part.start <= first and page < len(whole):
                held[frame] = whole[page]
                continue
            old, low, high = held[frame], max(part.start - first, 0), min(part.end - first, size)
            new = old[:low] + written[first + low : first + high] + old[high:]
            held[frame] = whole[page] if page < len(whole) and new == whole[page] else new

    def _read(self, group: int, part: Part, frames: list[int]) -> None:
        size, held = self._size, self.pages[group]
        path, whole = self._names.path[part.name], self._names.pages[part.name]
        low = self._reads[group](part.start)
        for page in range(low // size, -(-part.path_end // size)):
            self.num_read += 1
            found = held[frames[page]]
            if page < len(whole) and found is whole[page]:
                continue
            first = page * size
            skip, end = max(low - first, 0), min(part.path_end - first, size)
            if found[skip:end] != path[first + skip : first + end]:
                raise AssertionError(
                    f"a step reads frame {frames[page]} of group {group} for tokens {first + skip} to "
                    f"{first + end - 1} of a request, and finds {_contents(found[skip:end])} instead of "
                    f"{path[first + skip : first + end]}"
                )

    def _carry(self, group: int, pieces: StatePieces, parts: list[Part]) -> None:
        """Each piece continues what its request holds, and two of different requests write different frames."""
        held = self.carried[group]
        todo = list(zip(pieces.lengths.tolist(), pieces.sources.tolist(), pieces.targets.tolist(), strict=True))
        writer: dict[int, Part] = {}
        done = 0
        for part in parts:
            path, at = self._names.path[part.name], part.start
            while at < part.end:
                assert done < len(todo), "tokens that belong to no piece"
                length, source, target = todo[done]
                done += 1
                assert bool(at) == bool(source), "a request begins with what another one holds, or goes on from nothing"
                if at and held[source] != path[at - 1]:
                    raise AssertionError(
                        f"a request goes on after token {at - 1} from frame {source} of group {group}, which holds "
                        f"{_contents((held[source],))} instead of ({path[at - 1]},)"
                    )
                self.num_read += 1
                at += length
                assert target and writer.setdefault(target, part) is part, "two requests write one frame"
                assert at <= part.end, "a piece goes beyond its request's tokens"
                held[target] = path[at - 1]
        assert done == len(todo), "pieces that belong to no request"


def ids(numbers: list[int]) -> Ids:
    """As the cache takes them."""
    return np.array(numbers, dtype=np.int32)


def _contents(names: Page) -> str:
    return "nothing" if not any(names) else str(names)

"""Races: memory that streams and threads use without an order between them, found by vector clocks.

Work on a stream follows the work before it there, the events that the stream waited for, and what the host had waited
for when it launched the work. A thread of the host knows what it waited for itself, and what another one knew when it
handed it on. Two accesses to a piece of watched memory, one of which writes, are a race if neither follows the other,
also if they happen to run in a good order here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

_aten = torch.ops.aten

Clock = dict[int, int]
"""How much of the work of each stream is known to be done before: its number, and the number of its last work."""

_HOST = -1


def join(clock: Clock, other: Clock) -> None:
    """Add what the other knows."""
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


@dataclass(eq=False)
class Watched:
    """Memory from address `start` on, in pieces of `piece` bytes. Piece 0 is not watched: padding is written there, and
    its content does not matter."""

    name: str
    start: int
    stop: int
    piece: int
    wrote: dict[int, tuple[int, int, str]] = field(default_factory=dict)  # piece: stream, time, operator
    read: dict[int, dict[int, tuple[int, str]]] = field(default_factory=dict)  # piece, stream: time, operator


class Races:
    """What was found is in `found`."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.accesses = 0  # to watched pieces
        self._watched: list[Watched] = []
        self._thread = threading.local()

    # -- knowledge of the host

    @property
    def host(self) -> Clock:
        """What this thread knows."""
        if not hasattr(self._thread, "clock"):
            self._thread.clock = {}
        found: Clock = self._thread.clock
        return found

    def join_host(self, clock: Clock) -> None:
        """This thread has waited for all of this."""
        join(self.host, clock)

    # -- memory

    def watch(self, name: str, rows: Tensor) -> None:
        """Watch frames of a pool or records of host memory, uint8 `[frames, bytes]`, contiguous: each is one piece,
        whatever view of it is used."""
        assert rows.is_contiguous()
        start = _inner(rows).data_ptr()
        self._watched.append(Watched(name, start, start + rows.nbytes, rows.shape[1]))

    # -- accesses

    def operator(self, stream: Any, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """An operator reads its inputs and writes its outputs; of an input with an index, what that names."""
        if not self._watched:
            return
        schema = function._schema
        given = [
            (argument, args[at] if at < len(args) else kwargs.get(argument.name))
            for at, argument in enumerate(schema.arguments)
        ]
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if is_view:
            return
        clock = self._launch(stream)
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_flatten(value)[0]:
                if isinstance(tensor, Tensor):
                    only = _indexed(function.overloadpacket, args) if argument.name == "self" else {}
                    self._access(stream.number, clock, tensor, only, writes, str(function))

    def copy(self, stream: Any, into: Tensor | None, source: Tensor) -> None:
        """A copy between host and device."""
        if self._watched:
            clock = self._launch(stream)
            self._access(stream.number, clock, source, {}, False, "copy")
            if into is not None:
                self._access(stream.number, clock, into, {}, True, "copy")

    def by_host(self, rows: Tensor, what: str, *, writes: bool) -> None:
        """This thread uses memory itself."""
        self._access(_HOST, self.host, rows, {}, writes, what)

    def _launch(self, stream: Any) -> Clock:
        clock: Clock = stream.clock
        join(clock, self.host)
        clock[stream.number] = clock.get(stream.number, 0) + 1
        return clock

    def _access(self, stream: int, clock: Clock, tensor: Tensor, only: dict[int, Any], writes: bool, what: str) -> None:
        inner = _inner(tensor)
        if not inner.numel():
            return
        at = inner.data_ptr()
        for watched in self._watched:
            if watched.start <= at < watched.stop:
                for piece in _pieces(inner, only, at - watched.start, watched.piece):
                    if piece:
                        self._touch(watched, int(piece), stream, clock, writes, what)

    def _touch(self, watched: Watched, piece: int, stream: int, clock: Clock, writes: bool, what: str) -> None:
        self.accesses += 1
        readers = watched.read.setdefault(piece, {})
        before = [(*watched.wrote[piece],)] if piece in watched.wrote else []
        if writes:
            before += [(other, *rest) for other, rest in readers.items()]
        for other, time, by in before:
            if other not in (stream, _HOST) and clock.get(other, 0) < time:
                kind = "writes" if writes else "reads"
                self.found.append(f"{what} {kind} {watched.name} {piece}, and {by} may not be done")
        time = clock.get(stream, 0)
        if writes:
            watched.wrote[piece] = stream, time, what
            readers.clear()
        else:
            readers[stream] = time, what


def _inner(tensor: Tensor) -> Tensor:
    """What has the numbers of a tensor that may be of a device in Python."""
    found: Tensor = vars(tensor).get("inner", tensor)
    return found


def _indexed(packet: Any, args: Any) -> dict[int, npt.NDArray[np.int64]]:
    """The numbers that an operator uses of each dimension of its first input, where an index says so."""
    if packet in (_aten.index_select, _aten.index_copy_, _aten.index_copy, _aten.index_add_, _aten.index_fill_):
        return {args[1] % args[0].dim(): _numbers(args[2])}
    if packet in (_aten.index, _aten.index_put_, _aten.index_put):
        return {
            at: _numbers(each)
            for at, each in enumerate(args[1])
            if isinstance(each, Tensor) and each.dtype in (torch.int64, torch.int32)
        }
    return {}


def _numbers(index: Tensor) -> npt.NDArray[np.int64]:
    return np.unique(_inner(index).numpy().astype(np.int64))


def _pieces(tensor: Tensor, only: dict[int, Any], offset: int, piece: int) -> Iterator[Any]:
    """The numbers of the pieces that a tensor, which begins at a byte, has elements in."""
    size = tensor.element_size()
    found, span = np.array([offset], dtype=np.int64), size
    for at, (count, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        step = stride * size
        if step * count <= piece and at not in only:
            span += step * (count - 1)
            continue
        numbers = only.get(at, np.arange(count))
        found = np.unique((found[:, None] + numbers * step).reshape(-1))
    first, last = found // piece, (found + span - 1) // piece
    return iter(np.unique(np.concatenate([first, last])).tolist())

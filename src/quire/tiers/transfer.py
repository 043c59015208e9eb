"""Transfers between two endpoints, the table of lanes, and the port for copies."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import cached_property
from typing import ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from quire.errors import MoveFailed, QuireError
from quire.memory.record import QueuedCopy
from quire.spec.ids import Ids
from quire.tiers.store import Answer, StoreKey

# Results of a unit. Any other result names the damage of a record (`quire.memory.record`).
GOOD: Final = ""  # the record arrived whole
MISSING: Final = "missing"  # the source does not have it, or it follows a unit that did not arrive
REFUSED: Final = "store"  # the remote cannot store or return it now, or it follows such a unit
FAILED: Final = "failed"  # the whole transfer failed; `Transfer.error` says why
UNDAMAGED: Final = (GOOD, MISSING, REFUSED, FAILED)

Defects = tuple[tuple[str, ...], ...]
Answers = tuple[tuple[Answer, ...], ...]


class Endpoint(Enum):
    """Where the bytes of a page can be."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"
    PEER = "peer"


@dataclass(frozen=True, eq=False)
class Lane:
    """One kind of transfer, between the host and a `far` endpoint that has its own threads. `carries` is false if only
    names and answers travel. A transfer fails if it has not ended `deadline_s` seconds after its submission."""

    name: str
    source: Endpoint
    target: Endpoint
    carries: bool = True
    most_bytes: float = math.inf  # in flight; they hold frames at both endpoints
    deadline_s: float = math.inf

    SAVE: ClassVar[Lane]
    LOAD: ClassVar[Lane]
    ARCHIVE: ClassVar[Lane]
    FETCH: ClassVar[Lane]
    LOOK: ClassVar[Lane]
    DELETE: ClassVar[Lane]
    RECEIVE: ClassVar[Lane]

    def __str__(self) -> str:
        return self.name

    @cached_property
    def far(self) -> Endpoint:
        """The endpoint that is not the host."""
        return self.target if self.source is Endpoint.HOST else self.source

    @cached_property
    def is_remote(self) -> bool:
        """Whether the far endpoint is a store or a peer, which may be slow, refuse or hang."""
        return self.far is not Endpoint.DEVICE

    @cached_property
    def is_inward(self) -> bool:
        """Whether pages come closer to the device. Requests wait only for such transfers."""
        return self.target is (Endpoint.HOST if self.is_remote else Endpoint.DEVICE)

    @cached_property
    def queue(self) -> Lane | Endpoint:
        """Lanes with the same queue, those that write to one store or peer, begin transfers in order of submission."""
        return self.target if self.is_remote and not self.is_inward else self


_STORE_DEADLINE_S = 600.0  # a store that takes longer hangs; DELETE may take longer for a large scope, and has none

Lane.SAVE = Lane("save", Endpoint.DEVICE, Endpoint.HOST, most_bytes=256 << 20)
Lane.LOAD = Lane("load", Endpoint.HOST, Endpoint.DEVICE, most_bytes=1 << 30)
Lane.ARCHIVE = Lane("archive", Endpoint.HOST, Endpoint.STORE, most_bytes=256 << 20, deadline_s=_STORE_DEADLINE_S)
Lane.FETCH = Lane("fetch", Endpoint.STORE, Endpoint.HOST, most_bytes=1 << 30, deadline_s=_STORE_DEADLINE_S)
Lane.LOOK = Lane("look", Endpoint.STORE, Endpoint.HOST, carries=False, deadline_s=_STORE_DEADLINE_S)
Lane.DELETE = Lane("delete", Endpoint.HOST, Endpoint.STORE, carries=False)
Lane.RECEIVE = Lane("receive", Endpoint.PEER, Endpoint.HOST)
LANES: Final = (Lane.SAVE, Lane.LOAD, Lane.ARCHIVE, Lane.FETCH, Lane.LOOK, Lane.DELETE, Lane.RECEIVE)
"""LOOK asks which records exist. DELETE deletes records, or without units all of scopes with this prefix. RECEIVE
checks records that a peer has written to host memory, after the last byte has landed (`quire.tiers.prefill`)."""


@dataclass(frozen=True, slots=True)
class Units:
    """The pages of one group that move, ancestors first. `device` and `host` are frames, int32 `[pages]`, empty if the
    lane has no such endpoint. `pages` are keys of 32 bytes, all different. If `in_place`, the device reads the host's
    records: a save seals them, a load checks them, and nothing is copied."""

    group: int
    device: Ids
    host: Ids
    pages: tuple[bytes, ...]
    in_place: bool = False

    def __post_init__(self) -> None:
        for frames in (self.device, self.host):
            assert len(frames) in (0, len(self.pages)), "a frame for each page"

    def __len__(self) -> int:
        return len(self.pages)

    def keys(self, scope: bytes) -> list[StoreKey]:
        """The names of the records in a store."""
        return [StoreKey(scope, page, self.group) for page in self.pages]


@dataclass(slots=True, eq=False, repr=False)
class Transfer:
    """Pages of one prefix, in one or several groups, that move together through one lane.

    The submitter holds every frame named here until `Mover.finished` returns the transfer, and reads results only then.
    `checked`, `expired`, `done`, `hidden`, `wait` and `stop` may be used from any thread at any time. A transfer
    that `expired` has failed; it is `done` when nothing uses its frames any more, perhaps much later."""

    lane: Lane
    units: Sequence[Units]
    scope: bytes = b""
    num_bytes: int = 0  # bytes of records; 0 if none move
    _: KW_ONLY
    whole: Collection[int] = ()  # LOOK: groups that need every page: a missing one makes later ones useless
    touches: Sequence[Units] = ()  # ARCHIVE: stored records that were used
    deadline_s: float | None = None  # from submission; None: the lane's

    # Results
    defects: Defects = ()  # parallel to units and their pages
    suspect: frozenset[tuple[int, int]] = frozenset()  # FETCH: (units, place) whose host row is faulty
    answers: Answers = ()  # LOOK: parallel to units and pages; ARCHIVE: to `touches`
    deleted_scopes: tuple[bytes, ...] = ()  # LOOK: scopes, or prefixes of scopes, whose deletion has not ended
    hidden: bool = False  # DELETE: no reader finds the records any more
    asked_bytes: int = 0  # FETCH: requested from the source
    moved_bytes: int = 0
    seconds: float = 0.0  # seconds of work, without the wait before it
    error: str = ""  # why the whole transfer failed

    # State, which movers set
    stopping: bool = False  # asked to end early
    expired: bool = False
    done: bool = False  # nothing changes any more; it may have failed
    expires_at: float = math.inf  # on the mover's clock
    pieces: Iterator[None] = field(default_factory=lambda: iter(()))  # left to do
    over: bool = False  # no piece is left
    are_good: bool = False  # LOAD: all records
    kept_pages: int = 0  # pages that a stopped transfer still moves
    queued: Sequence[QueuedCopy] = ()  # LOAD: copies that steps follow
    is_driven: bool = False  # `wait` itself does the pieces
    _raised: str = ""
    _has_arrived: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __repr__(self) -> str:
        state = "done" if self.done else "expired" if self.expired else "checked" if self.are_good else "waiting"
        return f"Transfer({self.lane}, {sum(map(len, self.units))} units, {self.num_bytes} bytes, {state} {self.error})"

    @property
    def limit_s(self) -> float:
        """The deadline, in seconds from submission."""
        return self.lane.deadline_s if self.deadline_s is None else self.deadline_s

    @property
    def checked(self) -> bool:
        """LOAD: all records are good. A step may be launched if it calls `wait` before it reads them."""
        return self.are_good and not self.error

    @property
    def is_whole(self) -> bool:
        """Whether everything arrived. Only for a transfer that is done."""
        return not self.error and not any(any(defects) for defects in self.defects)

    def stop(self) -> None:
        """Ask a transfer with a store or a peer to end early. Units that it has not begun get a result that says so."""
        self.stopping = True

    def wait(self) -> None:
        """Wait for the bytes, or let later work follow queued copies. Raises MoveFailed if they will not arrive."""
        while self.is_driven and not self.done and not self._has_arrived:
            self.advance()
            if self.over:
                self.end()
        with self._changed:
            self._changed.wait_for(lambda: self.done or self.error or self._has_arrived)
        for copy in self.queued:
            copy.order()
        if self.error or (self.done and not self.is_whole):
            wrong = [defect for defects in self.defects for defect in defects if defect]
            raise MoveFailed(self.error or f"a {self.lane} was given up: {wrong[0]}.")

    # -- for movers

    def advance(self) -> bool:
        """Do the next piece; returns whether the transfer became `checked`. After an error there is no next piece."""
        was_checked, began = self.are_good, time.perf_counter()
        try:
            next(self.pieces)
        except StopIteration:
            self.over = True
        except Exception as raised:
            self.over = True
            self._raised = str(raised) if isinstance(raised, QuireError) else f"{type(raised).__name__}: {raised}"
        self.seconds += time.perf_counter() - began
        return self.are_good and not was_checked

    def arrived(self, queued: Sequence[QueuedCopy]) -> None:
        """LOAD: all bytes are on the device, but for copies that are `queued`. Steps may be launched."""
        with self._changed:
            self.queued, self._has_arrived, self.are_good = tuple(queued), True, True
            self._changed.notify_all()

    def expire(self) -> None:
        """The deadline has passed. No further piece begins; `end` follows when nothing uses the frames."""
        with self._changed:
            where = f"the {self.lane.far.value} hangs, or is too slow"
            self.error = f"the {self.lane} did not end within its deadline of {self.limit_s:g} s: {where}."
            self.expired = self.stopping = True
            self._changed.notify_all()

    def end(self, error: str = "") -> None:
        """Nothing changes any more. After an error every unit has failed, unless a damage is known for it."""
        with self._changed:
            self.error = self.error or error or self._raised
            found = self.defects or tuple((GOOD,) * len(units) for units in self.units)
            if self.error:
                found = tuple(tuple(FAILED if each in UNDAMAGED else each for each in defects) for defects in found)
            self.defects = found
            self.done = True
            self._changed.notify_all()


class Copies(Protocol):
    """Copies between frames of the device and their records on the host. Threads never use the same frame at once."""

    def bytes_of(self, group: int, /) -> int:
        """Size of one record, header and payload."""

    def rows(self, group: int, /) -> npt.NDArray[np.uint8]:
        """The host's records, uint8 `[frames + 1, stride]`; a record is the first `bytes_of(group)` of its row."""

    def to_host(self, group: int, device: Ids, host: Ids, /) -> None:
        """Copy whole frames; returns when the copy is complete. The headers are wrong until `seal`."""

    queues: bool
    """Whether `to_device` queues copies, and returns before they are complete."""

    def to_device(self, group: int, device: Ids, host: Ids, /) -> QueuedCopy | None:
        """Copy whole frames."""

    def seal(self, group: int, host: Ids, keys: Sequence[bytes], /) -> None:
        """Write the headers, with these keys, of records whose payload is complete."""

    def defects(self, group: int, host: Ids, keys: Sequence[bytes], /) -> list[str]:
        """The damage of each record, given the keys that they should have; "" where there is none."""

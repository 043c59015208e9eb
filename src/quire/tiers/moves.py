"""Move: pages on their way between tiers, what became of each of them, and the copies that a mover makes use of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from quire.errors import MoveFailed
from quire.spec.ids import Ids
from quire.tiers.store import Answer, StoreKey

GOOD: Final = ""
"""What became of a unit that arrived whole."""

MISSING: Final = "missing"
"""A unit that the store does not have, or whose page comes after one that did not arrive."""

REFUSED: Final = "store"
"""A unit that the store could not take or give now, or whose page comes after one that it could not."""

FAILED: Final = "failed"
"""A unit of a move that failed as a whole; `Move.error` says why."""

Defects = tuple[tuple[str, ...], ...]
Answers = tuple[tuple[Answer, ...], ...]


class Link(StrEnum):
    """Where a move goes, and what is done on the way."""

    SAVE = "save"  # device to host, then sealed
    LOAD = "load"  # host records checked, then host to device
    ARCHIVE = "archive"  # host records checked, then prepared, put and completed in the store
    FETCH = "fetch"  # store to host rows, then checked
    LOOK = "look"  # what the store has
    FORGET = "forget"  # what the store shall not have any more; without units, nothing of scopes that begin so


@dataclass(frozen=True, slots=True)
class Units:
    """What moves in one group: the frame of each of these pages, ancestors first.

    `device` and `host` are frames, int32 `[pages]`, empty where the link has no such side; `pages` are keys of 32
    bytes. A page is named once.
    """

    group: int
    device: Ids
    host: Ids
    pages: tuple[bytes, ...]

    def __post_init__(self) -> None:
        for frames in (self.device, self.host):
            assert len(frames) in (0, len(self.pages)), "a frame for each page"

    def __len__(self) -> int:
        return len(self.pages)

    def keys(self, scope: bytes) -> list[StoreKey]:
        """Under which the store has them."""
        return [StoreKey(scope, page, self.group) for page in self.pages]


class Move:
    """Pages of one prefix, in one or several groups, moved together.

    The submitter keeps every frame named here from being reused until `Mover.finished` has returned the move, and only
    then reads `defects`, `answers`, `error`, `seconds` and `moved_bytes`. `checked`, `done`, `wait_layer` and `stop`
    may be used from any thread and at any time.
    """

    __slots__ = (
        "_arrived",
        "_changed",
        "_checked",
        "_done",
        "_stopping",
        "answers",
        "asked_bytes",
        "defects",
        "doubtful",
        "drive",
        "error",
        "kept_pages",
        "link",
        "marked",
        "moved_bytes",
        "noted",
        "num_bytes",
        "owner",
        "scope",
        "seconds",
        "touches",
        "units",
        "whole",
    )

    def __init__(
        self,
        link: Link,
        units: Sequence[Units],
        scope: bytes = b"",
        num_bytes: int = 0,
        owner: object = None,
        *,
        whole: Collection[int] = (),
    ) -> None:
        self.link = link
        self.units = tuple(units)
        self.scope = scope
        self.num_bytes = num_bytes  # of records; 0 where none move
        self.owner = owner
        self.whole = whole  # of LOOK: groups of which every page is needed, so that behind a missing one none is
        self.defects: Defects = ()  # parallel to units and their pages
        self.doubtful: frozenset[tuple[int, int]] = frozenset()  # of FETCH: (units, place) whose host row is at fault
        self.asked_bytes = 0  # of FETCH: what the store was asked for by the time it ended
        self.touches: tuple[Units, ...] = ()  # of ARCHIVE: what is stored already and of use
        self.answers: Answers = ()  # of LOOK, parallel to units and their pages; of ARCHIVE, to `touches` and theirs
        self.marked: tuple[bytes, ...] = ()  # of LOOK: what the store was told to forget and has not all forgotten
        self.noted = False  # of FORGET: nobody finds it in the store any more; read at any time
        self.seconds = 0.0  # of work, without the wait before it
        self.moved_bytes = 0  # that really moved
        self.error = ""  # why the move failed as a whole
        self.kept_pages = 0  # pages that a stopped move does all the same; set by movers
        self.drive: Callable[[int], None] | None = None  # brings a layer when it is waited for; set by movers
        self._changed = threading.Condition()
        self._arrived: set[int] = set()
        self._checked = self._done = self._stopping = False

    def __repr__(self) -> str:
        state = "done" if self._done else "checked" if self._checked else "waiting"
        return f"Move({self.link}, {sum(map(len, self.units))} units, {self.num_bytes} bytes, {state} {self.error})"

    @property
    def checked(self) -> bool:
        """Of a LOAD: all of its records are good and its layers arrive now, or are there. A step that calls
        `wait_layer` before it reads each layer may be launched."""
        return self._checked and not self.error

    @property
    def done(self) -> bool:
        """Whether nothing will change any more. It may have failed."""
        return self._done

    @property
    def is_whole(self) -> bool:
        """Of a move that has ended: whether everything arrived."""
        return not self.error and not any(any(defects) for defects in self.defects)

    @property
    def stopping(self) -> bool:
        """Whether it was asked to end early."""
        return self._stopping

    def has_layer(self, layer: int) -> bool:
        """Of a LOAD: whether the bytes of one layer are there."""
        return layer in self._arrived

    def stop(self) -> None:
        """Ask a FETCH, a LOOK, an ARCHIVE or a FORGET to end early: what has not begun is not done, and says so. It
        ends as any other."""
        self._stopping = True

    def wait_layer(self, layer: int) -> None:
        """Wait until the bytes of one layer are there. Raises MoveFailed if they will not come."""
        if self.drive is not None and not self._done and layer not in self._arrived:
            self.drive(layer)
        with self._changed:
            self._changed.wait_for(lambda: self._done or layer in self._arrived)
        if self._done and not self.is_whole:
            raise MoveFailed(self.error or f"a {self.link} was given up: {self.first_defect()}.")

    def first_defect(self) -> str:
        """The first thing that is wrong with a unit, or nothing."""
        return next((defect for defects in self.defects for defect in defects if defect), GOOD)

    # -- for movers

    def announce_checked(self) -> None:
        """All records are good."""
        self._checked = True

    def announce_layer(self, layer: int) -> None:
        """The bytes of one layer are there."""
        with self._changed:
            self._arrived.add(layer)
            self._changed.notify_all()

    def end(self, error: str = "") -> None:
        """Nothing will change any more. With an error, every unit has failed."""
        with self._changed:
            self.error = error
            if error:
                self.defects = tuple((FAILED,) * len(units) for units in self.units)
            elif not self.defects:
                self.defects = tuple((GOOD,) * len(units) for units in self.units)
            self.drive = None
            self._done = True
            self._changed.notify_all()


class Copies(Protocol):
    """What a mover does to bytes it does not understand: frames of the device, and records of the same frames on the
    host. Calls from different threads never name the same frame."""

    def layers(self) -> tuple[int, ...]:
        """In the order in which a forward pass reads them."""

    def bytes_of(self, group: int, /) -> int:
        """Of one record, header and payload."""

    def rows(self, group: int, /) -> npt.NDArray[np.uint8]:
        """The host's records, uint8 `[frames + 1, stride]`; a record is the first `bytes_of(group)` of its row."""

    def to_host(self, group: int, device: Ids, host: Ids, /) -> None:
        """Copy whole frames; returns when the bytes are there."""

    def to_device(self, group: int, device: Ids, host: Ids, layer: int | None, /) -> None:
        """Copy one layer of frames, or all of them; returns when the bytes are there. Nothing is copied where the group
        has nothing of the layer."""

    def seal(self, group: int, host: Ids, keys: Sequence[bytes], /) -> None:
        """Write the headers of records whose payload is there: these are the frames of these pages."""

    def defects(self, group: int, host: Ids, keys: Sequence[bytes], /) -> list[str]:
        """What is wrong with records that should be the frames of these pages; "" where nothing is."""

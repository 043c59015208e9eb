"""Receiver: the state machine of a decode engine that receives pages, without I/O, threads or clocks.

    ask    ends once: refused, released, deadline, silent or lost peer
    part   NEW --want--> WANTED --Sent--> SENT
                         WANTED --Gone--> GONE
                         WANTED --cancel, or the ask ends--> CANCELLING --Sent, Gone or proof--> SENT or GONE

The frames of a part belong to the peer until the part is SENT or GONE. Time alone never ends CANCELLING: a stopped peer
may still write. It ends with the peer's word, with `shut` of the connector, or with proof that the peer writes no more:
its connection was closed (`closed`), or it has connected again, which it does only after its writes have ended
(`connected`). An ask ends in any case, and its request is computed locally.

Every method returns effects, which the owner carries out in order. Calls must not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from quire.spec.ids import Ids
from quire.transfer.messages import MOST_PARTS, Answer, Ask, Cancel, Refused, Release, Send, Sent, Want
from quire.transfer.messages import tag_of as tag_of_part


class PartState(Enum):
    """How far a part is."""

    NEW = "new"
    WANTED = "wanted"
    CANCELLING = "cancelling"
    SENT = "sent"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class ReceivedPart:
    """Pages of an ask, and frames that the peer may write. Any thread may read it; only the receiver changes it."""

    ask: int
    number: int
    state: PartState = PartState.NEW
    reason: str = ""  # why it is GONE or CANCELLING

    @property
    def tag(self) -> int:
        """Its tag at the connector."""
        return tag_of_part(self.ask, self.number)

    @property
    def may_reuse(self) -> bool:
        """Whether no byte can arrive in its frames any more."""
        return self.state in (PartState.SENT, PartState.GONE)


@dataclass(slots=True, eq=False)
class OpenAsk:
    """A prompt that a peer computes."""

    peer: str
    ends_at: float
    has_ended: bool = False
    is_released: bool = False  # its parts are cancelled, and the peer was told
    parts: list[ReceivedPart] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shut:
    """Effect: shut the tag of the part at the connector; if that returns True, call `Receiver.shut`."""

    part: ReceivedPart


@dataclass(frozen=True, slots=True)
class Ended:
    """Effect: the ask has ended, and not through `release`. Its request continues with the pages that have arrived.
    `cause` is "deadline", "silent", "closed", "unreachable", "removed" or the code of the refusal."""

    ask: int
    cause: str
    reason: str


Effect = Send | Shut | Ended
Effects = list[Effect]


class Receiver:
    """All asks of one engine, at all peers. `now` is of any clock that never goes back."""

    def __init__(self) -> None:
        self.asks: dict[int, OpenAsk] = {}  # ascending; those that have ended remain until their parts are over
        self._next = 1

    def ask(
        self, peer: str, *, seconds: float, scope: bytes, adapter: str, salt: str, prompt: bytes, now: float
    ) -> tuple[int, Effects]:
        """Ask a connected peer for the pages of a prompt. Returns the id of the ask, which ends after `seconds`."""
        ask, self._next = self._next, self._next + 1
        self.asks[ask] = OpenAsk(peer, now + seconds)
        oldest, _ = next(self._asks_of(peer))
        return ask, [Send(peer, Ask(ask, oldest, seconds, scope, adapter, salt, prompt))]

    def part(self, ask: int) -> ReceivedPart:
        """A new part. Open its `tag` at the connector before `want`. It is GONE if the ask has ended."""
        asked = self.asks.get(ask)
        if asked is None or asked.has_ended:
            return ReceivedPart(ask, 0, PartState.GONE, "the ask has ended")
        assert len(asked.parts) < MOST_PARTS
        asked.parts.append(ReceivedPart(ask, len(asked.parts)))
        return asked.parts[-1]

    def want(self, part: ReceivedPart, places: Sequence[Ids], target: bytes) -> Effects:
        """Let the peer write these pages (page numbers by group, int32) to `target`. Nothing, if the part is GONE."""
        if part.state is not PartState.NEW:
            return []
        part.state = PartState.WANTED
        encoded = tuple(group.tobytes() for group in places)
        return [Send(self.asks[part.ask].peer, Want(part.ask, part.number, encoded, target))]

    def cancel(self, part: ReceivedPart, reason: str = "cancelled") -> Effects:
        """The part is not wanted any more. It is over when `may_reuse` is true."""
        if part.state is PartState.WANTED:
            peer = self.asks[part.ask].peer
            return [*self._cancel(part, reason), Send(peer, Cancel(part.ask, part.number))]
        if part.state is PartState.NEW:
            self._over(part, PartState.GONE, reason)
        return []

    def release(self, ask: int) -> Effects:
        """The request has what it needs, or has ended. Parts that have not arrived are cancelled."""
        asked = self.asks.get(ask)
        return [] if asked is None else self._release(ask, asked, "released")

    def receive(self, peer: str, message: Answer) -> Effects:
        """A message of a peer. One about an ask of another peer, or about what is over, changes nothing."""
        asked = self.asks.get(message.ask)
        if asked is None or asked.peer != peer:
            return []
        if isinstance(message, Refused):
            return self._end(message.ask, asked, message.code, message.reason)
        if message.part < len(asked.parts):
            part = asked.parts[message.part]
            if part.state in (PartState.WANTED, PartState.CANCELLING):
                if isinstance(message, Sent):
                    self._over(part, PartState.SENT, "")
                else:
                    self._over(part, PartState.GONE, message.reason)
        return []

    def shut(self, part: ReceivedPart) -> Effects:
        """The connector has shut the tag of a cancelled part: no byte can arrive under it any more."""
        if part.state is PartState.CANCELLING:
            self._over(part, PartState.GONE, part.reason)
        return []

    def silent(self, peer: str) -> Effects:
        """The peer is connected and does not answer: its asks end. Its parts are over when it says so, or is gone."""
        effects: Effects = []
        for ask, asked in self._asks_of(peer):
            effects += self._end(ask, asked, "silent", "the peer does not answer")
            effects += self._release(ask, asked, "the peer does not answer")
        return effects

    def closed(self, peer: str) -> Effects:
        """The connection was closed: the peer has ended, or its writes have ended."""
        return self._lost(peer, "closed", "the peer is gone", proven=True)

    def connected(self, peer: str) -> Effects:
        """The peer has connected, perhaps again: nothing is written any more of what was asked for before."""
        return self._lost(peer, "closed", "the peer was not reachable for a time", proven=True)

    def unreachable(self, peer: str) -> Effects:
        """The connection broke, which does not prove that the peer writes no more."""
        return self._lost(peer, "unreachable", "the peer is not reachable", proven=False)

    def left(self, peer: str) -> Effects:
        """The peer is asked no more, and was told to end its writes: they have when it closes the connection."""
        return self._lost(peer, "removed", "the peer was removed", proven=False)

    def tick(self, now: float) -> Effects:
        """Ask ends at their deadlines."""
        effects: Effects = []
        for ask, asked in [each for each in self.asks.items() if now >= each[1].ends_at]:
            effects += self._end(ask, asked, "deadline", "the peer is too slow")
            effects += self._release(ask, asked, "the peer is too slow")
        return effects

    # -- edits

    def _asks_of(self, peer: str) -> Iterator[tuple[int, OpenAsk]]:
        return iter([(ask, asked) for ask, asked in self.asks.items() if asked.peer == peer])

    def _lost(self, peer: str, cause: str, reason: str, *, proven: bool) -> Effects:
        effects: Effects = []
        for ask, asked in self._asks_of(peer):
            effects += self._end(ask, asked, cause, reason)
            asked.is_released = True  # a message would not arrive
            for part in asked.parts:
                if part.state is PartState.WANTED:
                    effects += self._cancel(part, reason)
                if part.state is PartState.CANCELLING and proven:
                    self._over(part, PartState.GONE, reason)
            self._drop_if_over(ask, asked)
        return effects

    def _end(self, ask: int, asked: OpenAsk, cause: str, reason: str) -> Effects:
        """No part is added any more. The parts that the peer has continue."""
        if asked.has_ended:
            return []
        asked.has_ended = True
        for part in asked.parts:
            if part.state is PartState.NEW:
                self._over(part, PartState.GONE, reason)
        self._drop_if_over(ask, asked)
        return [Ended(ask, cause, reason)]

    def _release(self, ask: int, asked: OpenAsk, reason: str) -> Effects:
        if asked.is_released:
            return []
        asked.is_released = True
        self._end(ask, asked, "", reason)  # without its effect: the caller reports the end, or began it
        effects: Effects = [effect for part in asked.parts for effect in self._cancel(part, reason)]
        self._drop_if_over(ask, asked)
        return [*effects, Send(asked.peer, Release(ask))]

    def _cancel(self, part: ReceivedPart, reason: str) -> Effects:
        if part.state is not PartState.WANTED:
            return []
        part.state, part.reason = PartState.CANCELLING, reason
        return [Shut(part)]

    def _over(self, part: ReceivedPart, state: PartState, reason: str) -> None:
        part.state, part.reason = state, reason
        self._drop_if_over(part.ask, self.asks[part.ask])

    def _drop_if_over(self, ask: int, asked: OpenAsk) -> None:
        if asked.has_ended and all(part.may_reuse for part in asked.parts):
            self.asks.pop(ask, None)

"""Sender: the state machine of a prefill engine that computes prompts for peers, without I/O, threads or clocks.

    ask    ends once: refused, released, deadline, lost
    part   WAITING --ready--> WRITING --landed--> WRITTEN
           WAITING --cancel, unavailable, or the ask ends--> GONE
                              WRITING --failed--> GONE

A write that has begun cannot be cancelled: `Sent` or `Gone` follows when it has ended, and not before. The pages of
an ask are held until the ask and all its writes have ended. A write that does not end in time is ended by a disconnect.
A part that was cancelled before it was known, and every part of an ask that has ended, is answered `Gone` and never
written.

Every method returns effects, which the owner carries out in order. Calls must not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from quire.transfer.messages import MOST_REASON, Ask, Cancel, Gone, Refused, Release, Request, Send, Sent, Want

MARGIN_S = 1.0
"""Asks are held longer than the decode engine waits, by this."""

DRAIN_S = 5.0
"""Time for the writes of an ask that has ended."""


class WriteState(Enum):
    """How far a part is."""

    WAITING = "waiting"
    WRITING = "writing"
    WRITTEN = "written"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Wanted:
    """A part of an ask. `want` is None if it was cancelled before it was known."""

    want: Want | None
    state: WriteState = WriteState.WAITING


@dataclass(slots=True, eq=False)
class ServedAsk:
    """A prompt that is computed for a peer."""

    ends_at: float  # deadline of the ask; once that has ended, of its writes
    has_ended: bool = False
    parts: dict[int, Wanted] = field(default_factory=dict)

    @property
    def writes(self) -> bool:
        """Whether a write is in flight."""
        return any(part.state is WriteState.WRITING for part in self.parts.values())


@dataclass(slots=True, eq=False)
class AskingPeer:
    """A connected decode engine. Asks below `oldest`, and those in `ended`, have ended."""

    asks: dict[int, ServedAsk] = field(default_factory=dict)
    oldest: int = 0
    ended: set[int] = field(default_factory=set)
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class StartPrompt:
    """Effect: queue an internal request for this prompt, and hold its pages on the host until `Drop`. The owner calls
    `refuse` if that fails."""

    peer: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class StopPrompt:
    """Effect: abort the internal request, if it runs. `Drop` follows, at once or when writes have ended."""

    peer: str
    ask: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Effect: write the pages. The owner calls `landed` or `failed` exactly once, also if the write cannot begin."""

    peer: str
    want: Want


@dataclass(frozen=True, slots=True)
class Drop:
    """Effect: release the holds of this ask; nothing reads its pages any more. Once for each `StartPrompt`."""

    peer: str
    ask: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Effect: disconnect the peer at the connector, so that its writes end. Connect it again for the next one."""

    peer: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Effect: nothing is written to this lost peer any more, so that it may connect again (`Control.drained`)."""

    peer: str


Effect = Send | StartPrompt | StopPrompt | Begin | Drop | Disconnect | Drained
Effects = list[Effect]


class Sender:
    """All asks of all peers of one engine. `now` is of any clock that never goes back."""

    def __init__(self, margin_s: float = MARGIN_S, drain_s: float = DRAIN_S) -> None:
        self.clients: dict[str, AskingPeer] = {}
        self._margin_s = margin_s
        self._drain_s = drain_s

    # -- messages and connections

    def receive(self, peer: str, message: Request, now: float) -> Effects:
        """A message of a peer."""
        client = self.clients.setdefault(peer, AskingPeer())
        if client.is_lost:
            return []
        asked = client.asks.get(message.ask)
        if isinstance(message, Ask):
            return self._asked(peer, client, message, now)
        if asked is None:  # ended, or messages came out of order: then it ends before it begins
            self._remember(client, message.ask)
            return [] if isinstance(message, Release) else [Send(peer, Gone(message.ask, message.part, "ended"))]
        if isinstance(message, Release):
            return self._end(peer, message.ask, asked, now, "released")
        if isinstance(message, Want):
            return self._wanted(peer, message, asked)
        part = asked.parts.setdefault(message.part, Wanted(None))
        if part.state is WriteState.WAITING:
            part.state = WriteState.GONE
        return self._answer(peer, message, part)

    def lost(self, peer: str, now: float) -> Effects:
        """The connection is closed or broken. `Drained` follows when no write to the peer is in flight."""
        client = self.clients.setdefault(peer, AskingPeer())
        client.is_lost = True
        effects: Effects = []
        for ask, asked in list(client.asks.items()):
            effects += [each for each in self._end(peer, ask, asked, now, "lost") if not isinstance(each, Send)]
        if client.asks:
            effects.append(Disconnect(peer))
        return [*effects, *self._drained(peer, client)]

    def tick(self, now: float) -> Effects:
        """End asks at their deadlines, and disconnect peers whose writes do not end."""
        effects: Effects = []
        for peer, ask, asked in self._asks():
            if now < asked.ends_at:
                continue
            if asked.has_ended:
                asked.ends_at = now + self._drain_s
                effects.append(Disconnect(peer))
            else:
                effects += self._refused(peer, ask, asked, now, "deadline", "the prompt was not computed in time")
        return effects

    # -- the engine's progress; about an ask or part that is over, these do nothing

    def refuse(self, peer: str, ask: int, now: float, code: str, reason: str) -> Effects:
        """The prompt is not admitted, or its request failed. Writes that have begun continue."""
        asked = self._find(peer, ask)
        if asked is None or asked.has_ended:
            return []
        return [each for each in self._refused(peer, ask, asked, now, code, reason) if not isinstance(each, StopPrompt)]

    def waiting(self) -> list[tuple[str, Want]]:
        """Parts that are not written yet, in order: the owner calls `ready` or `unavailable` when it can say which."""
        return [
            (peer, part.want)
            for peer, _, asked in self._asks()
            for part in asked.parts.values()
            if part.state is WriteState.WAITING and part.want is not None
        ]

    def is_open(self, peer: str, ask: int) -> bool:
        """Whether an ask has not ended."""
        asked = self._find(peer, ask)
        return asked is not None and not asked.has_ended

    def ready(self, peer: str, want: Want) -> Effects:
        """All pages of the part are on the host, and stay there until `Drop`."""
        part = self._part(peer, want)
        if part is None or part.state is not WriteState.WAITING:
            return []
        part.state = WriteState.WRITING
        return [Begin(peer, want)]

    def unavailable(self, peer: str, want: Want, reason: str) -> Effects:
        """Pages of the part will not be on the host."""
        part = self._part(peer, want)
        if part is None or part.state is not WriteState.WAITING:
            return []
        part.state = WriteState.GONE
        return self._answer(peer, want, part, reason)

    def landed(self, peer: str, want: Want) -> Effects:
        """The write has ended: all bytes are in the target."""
        return self._written(peer, want, WriteState.WRITTEN, "")

    def failed(self, peer: str, want: Want, reason: str) -> Effects:
        """The write has ended, or did not begin: nothing is read or written any more."""
        return self._written(peer, want, WriteState.GONE, reason)

    def end_all(self, now: float, code: str, reason: str) -> Effects:
        """The pages of all asks are of no use any more (new weights), or the engine stops."""
        live = [each for each in self._asks() if not each[2].has_ended]
        return [effect for each in live for effect in self._refused(*each, now, code, reason)]

    # -- edits

    def _asks(self) -> Iterator[tuple[str, int, ServedAsk]]:
        return iter([(peer, ask, each) for peer, of in self.clients.items() for ask, each in of.asks.items()])

    def _find(self, peer: str, ask: int) -> ServedAsk | None:
        client = self.clients.get(peer)
        return None if client is None else client.asks.get(ask)

    def _part(self, peer: str, want: Want) -> Wanted | None:
        asked = self._find(peer, want.ask)
        return None if asked is None else asked.parts.get(want.part)

    def _asked(self, peer: str, client: AskingPeer, message: Ask, now: float) -> Effects:
        effects: Effects = []
        if message.oldest > client.oldest:
            client.oldest = message.oldest
            client.ended = {ask for ask in client.ended if ask >= client.oldest}
        for ask, asked in list(client.asks.items()):
            if ask < client.oldest:
                effects += self._end(peer, ask, asked, now, "released")
        if message.ask < client.oldest or message.ask in client.ended:
            effects.append(Send(peer, Refused(message.ask, "ended", "the ask has ended")))
        elif message.ask not in client.asks:
            client.asks[message.ask] = ServedAsk(now + message.seconds + self._margin_s)
            effects.append(StartPrompt(peer, message))
        return effects

    def _wanted(self, peer: str, want: Want, asked: ServedAsk) -> Effects:
        part = asked.parts.get(want.part)
        if part is None:
            state = WriteState.GONE if asked.has_ended else WriteState.WAITING
            part = asked.parts[want.part] = Wanted(want, state)
        return self._answer(peer, want, part)

    def _answer(self, peer: str, message: Want | Cancel, part: Wanted, reason: str = "cancelled") -> Effects:
        """What the peer is told of a part: nothing before it is over."""
        if part.state is WriteState.WRITTEN:
            return [Send(peer, Sent(message.ask, message.part))]
        return (
            [Send(peer, Gone(message.ask, message.part, reason[:MOST_REASON]))] if part.state is WriteState.GONE else []
        )

    def _written(self, peer: str, want: Want, state: WriteState, reason: str) -> Effects:
        client, part = self.clients[peer], self._part(peer, want)
        assert part is not None and part.state is WriteState.WRITING, "a write ends once"
        part.state = state
        answers = [] if client.is_lost else self._answer(peer, want, part, reason)
        return [*answers, *self._settle(peer, client, want.ask), *self._drained(peer, client)]

    def _refused(self, peer: str, ask: int, asked: ServedAsk, now: float, code: str, reason: str) -> Effects:
        return [Send(peer, Refused(ask, code, reason[:MOST_REASON])), *self._end(peer, ask, asked, now, reason)]

    def _end(self, peer: str, ask: int, asked: ServedAsk, now: float, reason: str) -> Effects:
        if asked.has_ended:
            return []
        asked.has_ended = True
        effects: Effects = [StopPrompt(peer, ask)]
        asked.ends_at = now + self._drain_s
        for number, part in asked.parts.items():
            if part.state is WriteState.WAITING:
                part.state = WriteState.GONE
                effects.append(Send(peer, Gone(ask, number, reason[:MOST_REASON])))
        return [*effects, *self._settle(peer, self.clients[peer], ask)]

    def _settle(self, peer: str, client: AskingPeer, ask: int) -> Effects:
        """Release the holds of an ask that has ended once its last write has."""
        asked = client.asks[ask]
        if not asked.has_ended or asked.writes:
            return []
        del client.asks[ask]
        self._remember(client, ask)
        return [Drop(peer, ask)]

    def _remember(self, client: AskingPeer, ask: int) -> None:
        if ask >= client.oldest:
            client.ended.add(ask)

    def _drained(self, peer: str, client: AskingPeer) -> Effects:
        if not client.is_lost or client.asks:
            return []
        del self.clients[peer]
        return [Drained(peer)]

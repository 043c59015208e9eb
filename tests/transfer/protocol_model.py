"""Both state machines and a wire between them, explored breadth first: every order of what can happen, within bounds.

The wire reorders, duplicates and breaks. Either side may be killed, or stopped and continued, at any point. The
receiver may remove its peer, which closes the connection after its writes, and add it again. A write is in flight from
`Begin` until the sender's machine was told that it ended, and may touch its target at any time before. In each state:

- no write in flight has a target that may be reused, and its pages are held;
- a part is SENT only if all its bytes have landed;
- no ask ends at the sender's deadline while the receiver still waits;
- if no more fault happens, time ends every ask and part, and releases every hold, except the parts of a peer that ended
  after the connection to it had broken;
- if the other side does nothing more, time ends every ask of the receiver, and every hold of the sender.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.transfer import receiving, sending
from quire.transfer.messages import Answer, Ask, Gone, Message, Refused, Release, Request, Send, Sent, Want
from quire.transfer.receiving import Ended, PartState, ReceivedPart, Receiver, Shut
from quire.transfer.sending import AskingPeer, Begin, Disconnect, Drained, Drop, Sender, StartPrompt, StopPrompt, Wanted

FAULTS = ("duplicates", "breaks", "kills", "stops")
PREFILL, DECODE = "prefill", "decode"
SECONDS = MARGIN = DRAIN = 1.0  # the sender's deadlines are one and two later than the receiver's
FAIR = ("deliver", "notice", "computed", "ready", "landed", "continue", "connect")

Place = tuple[int, int]  # ask and part
Action = tuple[Any, ...]


@dataclass(frozen=True)
class Bounds:
    """What is explored. `fails`: requests and writes may fail. `shuts`: the connector's `shut` returns True, and the
    bytes of shut tags are dropped. `at_once`: an ask may begin before the last one has ended."""

    asks: int = 1
    parts: int = 1
    duplicates: int = 0
    breaks: int = 0
    kills: int = 0
    stops: int = 0
    ends: int = 0
    leaves: int = 0
    fails: bool = True
    at_once: bool = True
    shuts: bool = False


class World:
    """One joint state."""

    def __init__(self, bounds: Bounds) -> None:
        self.shuts, self.fails, self.at_once = bounds.shuts, bounds.fails, bounds.at_once
        self.asks_left = bounds.asks
        self.most_parts = bounds.parts
        self.left = {name: getattr(bounds, name) for name in (*FAULTS, "ends", "leaves")}
        self.receiver, self.sender = Receiver(), Sender(MARGIN, DRAIN)
        self.parts: dict[Place, ReceivedPart] = {}
        self.to: dict[str, dict[Message, int]] = {PREFILL: {}, DECODE: {}}
        self.writes: dict[Place, bool] = {}  # in flight; True: disconnected, and about to fail
        self.wants: dict[Place, Want] = {}
        self.landed: frozenset[Place] = frozenset()
        self.closed_tags: frozenset[Place] = frozenset()
        self.requests: dict[int, str] = {}  # held by the sender: running or computed
        self.over: frozenset[int] = frozenset()  # asks that have ended for the receiver's owner
        self.now = 0.0
        self.dead = self.stopped = ""
        self.is_up = True
        self.knows: frozenset[str] = frozenset()  # sides that noticed the loss of the connection
        self.is_drained = False
        self.is_leaving = False  # the receiver has removed its peer, which has not closed the connection
        self.is_broken = False  # for the receiver, which has noticed a break and no connection since

    def copy(self) -> World:
        made = World.__new__(World)
        made.__dict__.update(self.__dict__)
        made.left = self.left.copy()
        made.to = {side: messages.copy() for side, messages in self.to.items()}
        for name in ("writes", "wants", "requests"):
            setattr(made, name, getattr(self, name).copy())
        made.parts = {
            at: ReceivedPart(part.ask, part.number, part.state, part.reason) for at, part in self.parts.items()
        }
        made.receiver = Receiver()
        made.receiver._next = self.receiver._next
        made.receiver.asks = {
            ask: receiving.OpenAsk(
                each.peer,
                each.ends_at,
                each.has_ended,
                each.is_released,
                [made.parts[ask, number] for number in range(len(each.parts))],
            )
            for ask, each in self.receiver.asks.items()
        }
        made.sender = Sender(MARGIN, DRAIN)
        made.sender.clients = {
            peer: AskingPeer(
                {
                    ask: sending.ServedAsk(
                        asked.ends_at,
                        asked.has_ended,
                        {number: Wanted(part.want, part.state) for number, part in asked.parts.items()},
                    )
                    for ask, asked in client.asks.items()
                },
                client.oldest,
                client.ended.copy(),
                client.is_lost,
            )
            for peer, client in self.sender.clients.items()
        }
        return made

    def key(self) -> object:
        """Equal for states with an equal future: times count from now."""
        return self.of_receiver(), self.of_sender(), *self._between()

    def of_receiver(self) -> object:
        left = self._left
        asks = ((ask, left(each.ends_at), each.has_ended, each.is_released) for ask, each in self.receiver.asks.items())
        parts = tuple((at, part.state) for at, part in self.parts.items())
        return tuple(asks), parts, self.over, self.asks_left

    def of_sender(self) -> object:
        clients = (
            (client.oldest, frozenset(client.ended), client.is_lost, frozenset(map(self._of_ask, client.asks.items())))
            for client in self.sender.clients.values()
        )
        return tuple(clients), frozenset(self.requests.items()), frozenset(self.writes.items())

    def _of_ask(self, item: tuple[int, sending.ServedAsk]) -> object:
        parts = frozenset((number, part.want is None, part.state) for number, part in item[1].parts.items())
        return item[0], self._left(item[1].ends_at), item[1].has_ended, parts

    def _left(self, ends_at: float) -> float:
        return max(0.0, ends_at - self.now)

    def _between(self) -> tuple[object, ...]:
        wire = tuple(frozenset(messages.items()) for messages in self.to.values())
        place = self.dead, self.stopped, self.is_up, self.knows, self.is_drained, self.is_broken, self.is_leaving
        return wire, self.landed, self.closed_tags, place, tuple(self.left.values())

    def runs(self, side: str) -> bool:
        return side not in (self.dead, self.stopped)

    @property
    def may_ask(self) -> bool:
        """Whether the receiver has a peer."""
        return self.is_up and not self.is_leaving

    # -- what can happen

    def actions(self) -> Iterator[Action]:
        decode, prefill = self.runs(DECODE), self.runs(PREFILL)
        for side, runs in ((DECODE, decode), (PREFILL, prefill)):
            if runs and side not in self.knows:
                yield from (("deliver", side, message) for message in self.to[side])
                if not self.is_up or (self.is_leaving and (side == PREFILL or self.is_drained)):
                    yield ("notice", side)
        if decode:
            if self.may_ask and self.left["leaves"]:
                yield ("leave",)
            if self.may_ask and self.asks_left and (self.at_once or self.over.issuperset(self.receiver.asks)):
                yield ("ask",)
            for ask, asked in self.receiver.asks.items():
                if not asked.has_ended and len(asked.parts) < self.most_parts:
                    yield ("want", ask)
                if ask not in self.over:
                    yield ("release", ask)
            for at, part in self.parts.items():
                if part.state is PartState.WANTED:
                    yield ("cancel", at)
        if prefill:
            for ask, request in self.requests.items():
                if request == "running" and self.fails:
                    yield ("computed", ask)
                    yield ("refuse", ask)
            for _, want in self.sender.waiting():
                if self.requests.get(want.ask) in ("running", "computed"):
                    yield ("ready", want)
                if self.requests.get(want.ask) == "computed":
                    yield ("unavailable", want)
            for at, cut in self.writes.items():
                if not cut and self.dead != DECODE:
                    yield ("landed", at)
                if cut or self.fails:
                    yield ("failed", at)
        if self.receiver.asks or any(client.asks for client in self.sender.clients.values()):
            yield ("time",)
        if self.left["duplicates"]:
            yield from (("duplicate", side, message) for side in self.to for message in self.to[side])
        if self.left["breaks"] and self.is_up:
            yield ("break",)
        if self.left["kills"] and not self.dead:
            yield from (("kill", side) for side in (DECODE, PREFILL))
        if self.left["stops"] and not self.stopped:
            yield from (("stop", side) for side in (DECODE, PREFILL) if side != self.dead)
        if self.stopped:
            yield ("continue",)
            if self.stopped == PREFILL and self.may_ask and decode:
                yield ("silent",)
        if self.left["ends"] and prefill:
            yield ("end all",)
        if self.knows == {DECODE, PREFILL} and self.is_drained and decode and prefill:
            yield ("connect",)

    def do(self, action: Action) -> None:
        name, *rest = action
        getattr(self, "do_" + name.replace(" ", "_"))(*rest)

    def do_deliver(self, side: str, message: Any) -> None:
        self._take(side, message)
        if side == PREFILL:
            self._sent(self.sender.receive(DECODE, message, self.now))
        else:
            self._received(self.receiver.receive(PREFILL, message))

    def do_notice(self, side: str) -> None:
        self.knows |= {side}
        self.to[side].clear()
        if side == PREFILL:
            self._sent(self.sender.lost(DECODE, self.now))
        elif self.dead == PREFILL or self.is_drained:
            self._received(self.receiver.closed(PREFILL))
        else:
            self.is_broken = True
            self._received(self.receiver.unreachable(PREFILL))

    def do_connect(self) -> None:
        self.is_up, self.knows = True, frozenset()
        self.is_drained = self.is_broken = self.is_leaving = False
        self._received(self.receiver.connected(PREFILL))

    def do_leave(self) -> None:
        """What was sent before may still arrive."""
        self.left["leaves"] -= 1
        self.is_leaving = True
        self._received(self.receiver.left(PREFILL))

    def do_ask(self) -> None:
        self.asks_left -= 1
        _, effects = self.receiver.ask(
            PREFILL, seconds=SECONDS, scope=b"s" * 16, adapter="", salt="", prompt=b"abcd", now=self.now
        )
        self._received(effects)

    def do_want(self, ask: int) -> None:
        part = self.receiver.part(ask)
        self.parts[ask, part.number] = part
        self._received(self.receiver.want(part, [], b""))

    def do_cancel(self, at: Place) -> None:
        self._received(self.receiver.cancel(self.parts[at]))

    def do_release(self, ask: int) -> None:
        self.over |= {ask}
        self._received(self.receiver.release(ask))

    def do_silent(self) -> None:
        self._received(self.receiver.silent(PREFILL))

    def do_computed(self, ask: int) -> None:
        self.requests[ask] = "computed"

    def do_refuse(self, ask: int) -> None:
        self.requests[ask] = "refused"
        self._sent(self.sender.refuse(DECODE, ask, self.now, "full", "no room"))

    def do_ready(self, want: Want) -> None:
        self._sent(self.sender.ready(DECODE, want))

    def do_unavailable(self, want: Want) -> None:
        self._sent(self.sender.unavailable(DECODE, want, "evicted"))

    def do_landed(self, at: Place) -> None:
        del self.writes[at]
        self.landed |= {at}
        self._sent(self.sender.landed(DECODE, self.wants[at]))

    def do_failed(self, at: Place) -> None:
        del self.writes[at]
        self._sent(self.sender.failed(DECODE, self.wants[at], "broken"))

    def do_end_all(self) -> None:
        self.left["ends"] -= 1
        self._sent(self.sender.end_all(self.now, "weights", "new weights"))

    def do_time(self) -> None:
        self.now += 1.0
        self._tick()

    def do_duplicate(self, side: str, message: Message) -> None:
        self.left["duplicates"] -= 1
        self.to[side][message] += 1

    def do_break(self) -> None:
        self.left["breaks"] -= 1
        self.is_up = False
        self.to = {PREFILL: {}, DECODE: {}}

    def do_kill(self, side: str) -> None:
        """What it has sent may still arrive. Its writes end with it."""
        self.left["kills"] -= 1
        self.dead, self.is_up = side, False
        self.stopped = "" if self.stopped == side else self.stopped
        self.to[side].clear()
        if side == PREFILL:
            self.writes.clear()
            self.requests.clear()

    def do_stop(self, side: str) -> None:
        self.left["stops"] -= 1
        self.stopped = side

    def do_continue(self) -> None:
        self.stopped = ""
        self._tick()

    # -- effects

    def _tick(self) -> None:
        if self.runs(PREFILL):
            self._sent(self.sender.tick(self.now))
        if self.runs(DECODE):
            self._received(self.receiver.tick(self.now))

    def _take(self, side: str, message: Message) -> None:
        count = self.to[side].pop(message)
        if count > 1:
            self.to[side][message] = count - 1

    def _send(self, side: str, message: Message) -> None:
        if not self.is_up or (self.is_leaving and (side == PREFILL or PREFILL in self.knows)):
            return
        self.to[side][message] = self.to[side].get(message, 0) + 1

    def _received(self, effects: receiving.Effects) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                assert isinstance(effect.message, Request)
                self._send(PREFILL, effect.message)
            elif isinstance(effect, Shut):
                if self.shuts:
                    self.closed_tags |= {(effect.part.ask, effect.part.number)}
                    self._received(self.receiver.shut(effect.part))
            else:
                assert isinstance(effect, Ended)
                assert effect.ask not in self.over, "an ask ended twice"
                self.over |= {effect.ask}
        for at, part in self.parts.items():
            assert part.state is not PartState.SENT or at in self.landed, "a part is said to be sent, and has no bytes"

    def _sent(self, effects: sending.Effects) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                assert isinstance(effect.message, Answer)
                if isinstance(effect.message, Refused) and effect.message.code == "deadline" and self.is_up:
                    waits = effect.message.ask not in self.over and self.runs(DECODE)
                    assert not waits, "an ask ended while the peer waits for it"
                self._send(DECODE, effect.message)
            elif isinstance(effect, StartPrompt):
                assert effect.ask.ask not in self.requests, "an ask began twice"
                self.requests[effect.ask.ask] = "running"
            elif isinstance(effect, StopPrompt):
                assert self.requests[effect.ask] in ("running", "computed"), "it is stopped or has failed already"
                self.requests[effect.ask] = "stopped"
            elif isinstance(effect, Begin):
                at = effect.want.ask, effect.want.part
                assert at not in self.writes and at not in self.landed, "a part is written twice"
                self.writes[at], self.wants[at] = False, effect.want
            elif isinstance(effect, Drop):
                assert self.requests.pop(effect.ask, "") in ("stopped", "refused", "computed"), "a hold released early"
            elif isinstance(effect, Disconnect):
                self.writes = dict.fromkeys(self.writes, True)
            else:
                assert isinstance(effect, Drained)
                assert PREFILL in self.knows and not self.writes, "drained, and still written"
                self.is_drained = True

    # -- what must hold

    def check(self) -> None:
        for at in self.writes:
            assert not self.parts[at].may_reuse or at in self.closed_tags, "bytes land in frames that are reused"
            assert at[0] in self.requests, "pages are read that are not held"

    def next_fair(self) -> Action:
        """What happens next if there are no more faults and everything does its part."""
        for action in self.actions():
            name = action[0]
            if name in FAIR or (name == "failed" and self.writes[action[1]]):
                return action
        return ("time",)

    def is_over(self) -> bool:
        """Whether both sides have ended all; a dead one has. Frames of a peer that ended after the connection broke are
        held: nothing proves that it writes no more."""
        if self.dead == PREFILL and self.is_broken and not self.shuts:
            return all(ask in self.over for ask in self.receiver.asks)
        if self.dead != DECODE and (self.receiver.asks or not all(part.may_reuse for part in self.parts.values())):
            return False
        asks = any(client.asks for client in self.sender.clients.values())
        return self.dead == PREFILL or not (asks or self.requests or self.writes)


class Ends:
    """Checks that time ends all; remembers which states were checked."""

    def __init__(self) -> None:
        self._known: set[object] = set()

    def check(self, world: World) -> None:
        together = world.copy()
        together.left = dict.fromkeys(together.left, 0)
        self._follow(together, World.key, World.is_over, World.next_fair, "an ask, a part or a hold never ends")
        if world.dead != DECODE:
            alone = self._alone(world, PREFILL)
            self._follow(
                alone,
                World.of_receiver,
                lambda alone: all(ask in alone.over for ask in alone.receiver.asks),
                lambda alone: ("time",),
                "a request waits for ever for a stopped peer",
            )
        if world.dead != PREFILL:
            alone = self._alone(world, DECODE)
            self._follow(
                alone,
                World.of_sender,
                lambda alone: not alone.requests,
                lambda alone: next((("failed", at) for at, cut in alone.writes.items() if cut), ("time",)),
                "pages are held for ever for a stopped peer",
            )

    def _alone(self, world: World, stopped: str) -> World:
        alone = world.copy()
        alone.stopped, alone.is_up = stopped, False
        return alone

    def _follow(
        self,
        world: World,
        key_of: Callable[[World], object],
        is_over: Callable[[World], bool],
        following: Callable[[World], Action],
        what: str,
    ) -> None:
        passed: set[object] = set()
        while (key := (what, key_of(world))) not in self._known and not is_over(world):
            assert key not in passed, what
            passed.add(key)
            world.do(following(world))
            world.check()
        self._known |= {*passed, key}


def explore(bounds: Bounds, *, most: int = 2_000_000) -> Counter[str]:
    """All states within bounds. Returns how often what happened, and the number of states. Raises AssertionError with
    the shortest way to a state that breaks a rule."""
    first = World(bounds)
    queue = deque([(first, first.key())])
    came: dict[object, tuple[object, Action] | None] = {queue[0][1]: None}
    happened: Counter[str] = Counter()
    ends = Ends()
    while queue:
        world, key = queue.popleft()
        for action in world.actions():
            made = world.copy()
            try:
                made.do(action)
                made.check()
                after = made.key()
                if after in came:
                    continue
                ends.check(made)
            except AssertionError as error:
                raise AssertionError(f"{error}: after {[*_way(came, key), action]}") from error
            came[after] = key, action
            queue.append((made, after))
            happened[_name(action)] += 1
            assert len(came) < most, f"more than {most} states"
    happened["states"] = len(came)
    return happened


def _name(action: Action) -> str:
    words = (
        type(each).__name__ if isinstance(each, Ask | Want | Release | Sent | Gone | Message) else each
        for each in action
    )
    return " ".join(word for word in words if isinstance(word, str))


def _way(came: dict[object, tuple[object, Action] | None], key: object) -> list[Action]:
    way = []
    while (step := came[key]) is not None:
        key, action = step
        way.append(action)
    return way[::-1]

"""DecodeSide: prompts that other engines compute for this one. It opens host frames to them, and says what arrived."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from quire.errors import QuireError
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.tiers.transfer import Transfer
from quire.transfer.connector import Connector, Records
from quire.transfer.counts import ByPeer, ReceivedCounts
from quire.transfer.messages import MOST_NAME, Send
from quire.transfer.receiving import Effects, PartState, ReceivedPart, Receiver, Shut

logger = logging.getLogger(__name__)

_MOST_BEFORE = 16_384
"""Tokens that the preferred peer may have to compute more than the least busy one."""


_UNCONNECTED = "no prefill engine is connected"
_OFF = "no prefill engine that is connected computes prompts now"

_REASONS = {"deadline": "the peer is too slow", "damaged": "pages arrived damaged", "room": "there is no room here"}

_WARN_S = 30.0
"""Between two warnings of the same cause."""

_FIXES = {
    "unconnected": "look at `problems` in GET /v1/cache/statistics, and at --prefill-peers",
    "deadline": "the prefill engine is overloaded: add one, or raise --transfer-seconds",
    "silent": "see whether the prefill engine is stopped, or its machine overloaded",
    "closed": "the prefill engine has ended: see its log",
    "unreachable": "look at the network between the engines",
    "removed": "nothing: PUT /v1/cache/peers has removed the prefill engine",
    "connector": "see the log, and start this engine again",
    "role": "have it compute prompts again, with POST /v1/cache/role",
    "room": "give this engine more --host-memory",
    "unsent": "give the prefill engine more --host-memory, or look at the host of --transfer-listen here",
    "damaged": "bytes change on the way: look at quire_tier_corrupt_records_total, and at the memory of both machines",
}


def choose_peer(open_tokens: Mapping[str, int], first_page: Ids) -> str:
    """The peer that computed prompts with the same first page before, unless it has many more tokens to compute than
    another."""
    first = np.ascontiguousarray(first_page).tobytes()
    ranked = sorted(open_tokens, key=lambda peer: xxh3_64_intdigest(peer.encode() + first))
    most = min(open_tokens.values()) + _MOST_BEFORE
    return next(peer for peer in ranked if open_tokens[peer] <= most)


class DecodeSide:
    """All asks of one engine. `scope` gives the scope of a namespace (`quire.prefix.hashing.scope_of`). A request waits
    `seconds` for a peer. Prompts that lack less than `least_tokens` are not worth an ask. `clock` gives seconds, and
    `warn` reports prompts that are computed here after all."""

    def __init__(
        self,
        connector: Connector,
        host: Records,
        scope: Callable[[Namespace], bytes],
        send: Callable[[Send], object],
        *,
        num_groups: int,
        page_size: int,
        seconds: float,
        least_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self.receiver = Receiver()
        self.counts = ByPeer(ReceivedCounts, clock)
        self.seconds = seconds
        self.asks: dict[int, Asking] = {}
        self._connector = connector
        self._host = host
        self._scope = scope
        self._send = send
        self._num_groups = num_groups
        self._page_size = page_size
        self._least_tokens = least_tokens
        self._clock, self._warn = clock, warn
        self.is_on = True
        """Whether peers are asked."""
        self._parts: list[tuple[ReceivedPart, Transfer, float]] = []  # whose frames a peer may write, and since when
        self._refused: list[tuple[Transfer, str]] = []  # that no peer was told of, and why
        self.open_tokens: dict[str, int] = {}  # peers that answer, and tokens of their open asks
        self._off: set[str] = set()  # peers that compute no prompts now
        self._warned: dict[str, tuple[float, int]] = {}  # key: cause; when, and fallbacks since

    @property
    def is_busy(self) -> bool:
        """Whether asks or parts are open."""
        return bool(self.asks or self._parts or self._refused)

    @property
    def held_bytes(self) -> int:
        """Host memory that nothing here needs, and that peers may still write."""
        return sum(transfer.num_bytes for part, transfer, _ in self._parts if part.state is PartState.CANCELLING)

    @property
    def _can_ask(self) -> dict[str, int]:
        return {peer: tokens for peer, tokens in self.open_tokens.items() if peer not in self._off}

    def state(self, peer: str) -> str:
        """That of a connected prefill engine: connected, silent, or off while it computes no prompts."""
        return "silent" if peer not in self.open_tokens else "off" if peer in self._off else "connected"

    def ready(self, peer: str, *, is_ready: bool) -> None:
        """Whether a prefill engine answers from now on."""
        self.open_tokens.pop(peer, None)
        if is_ready:
            self.open_tokens[peer] = sum(asking.num_tokens for asking in self.asks.values() if asking.peer == peer)

    def serves(self, peer: str, *, is_on: bool) -> None:
        """Whether a prefill engine computes prompts from now on."""
        (self._off.discard if is_on else self._off.add)(peer)

    def ask(self, tokens: Ids, namespace: Namespace, num_missing: int) -> Asking | None:
        """See `PrefillPeers.ask`."""
        if not self.is_on or num_missing < self._least_tokens or len(namespace.salt) > MOST_NAME:
            return None
        can_ask = self._can_ask
        if not can_ask:
            self.fall_back("", *(("role", _OFF) if self.open_tokens else ("unconnected", _UNCONNECTED)))
            return None
        peer = choose_peer(can_ask, tokens[: self._page_size])
        now = self._clock()
        ask, effects = self.receiver.ask(
            peer,
            seconds=self.seconds,
            scope=self._scope(namespace),
            adapter=namespace.adapter,
            salt=namespace.salt,
            prompt=tokens.tobytes(),
            now=now,
        )
        self.open_tokens[peer] += num_missing
        self.counts.of(peer).asks += 1
        self.asks[ask] = Asking(self, ask, peer, self.counts.label(peer), self.seconds, num_missing, now)
        self.do(effects)
        return self.asks[ask]

    def settle(self) -> list[tuple[Transfer, str]]:
        """See `PrefillPeers.settle`."""
        self.do(self.receiver.tick(self._clock()))
        over = [each for each in self._parts if each[0].may_reuse]
        if over:
            self._parts = [each for each in self._parts if not each[0].may_reuse]
        now = self._clock()
        for part, transfer, since in over:
            self._connector.shut(part.tag)
            asking = self.asks.get(part.ask)
            if asking is None:
                continue
            if part.state is PartState.SENT:
                counts = self.counts.of(asking.peer)
                counts.bytes += transfer.num_bytes
                counts.part_seconds.observe(now - since)
            else:
                asking.falls_back("unsent", part.reason)
        refused, self._refused = self._refused, []
        ended = [(move, "" if part.state is PartState.SENT else part.reason or "gone") for part, move, _ in over]
        return refused + ended

    def abandon(self) -> list[tuple[Transfer, str]]:
        """All transfers that are left, after the connector was closed."""
        left, self._parts = self._parts, []
        refused, self._refused = self._refused, []
        return refused + [(transfer, "the engine ends") for _, transfer, _ in left]

    def end_all(self, cause: str, reason: str) -> None:
        """Nothing that was asked for is of use any more: prompts are computed here."""
        for asking in self.asks.values():
            asking.falls_back(cause, reason)
            self.do(self.receiver.release(asking.ask))

    def want(self, ask: int, transfer: Transfer, places: Sequence[np.ndarray]) -> None:
        """Open the host frames of a transfer to the peer of an ask."""
        part = self.receiver.part(ask)
        if part.may_reuse:
            self._refused.append((transfer, part.reason))
            return
        by_group: list[Ids] = [np.empty(0, dtype=np.int32)] * self._num_groups
        for units, at in zip(transfer.units, places, strict=True):
            by_group[units.group] = at.astype(np.int32)
        ordered = sorted(transfer.units, key=lambda units: units.group)
        spans = np.concatenate([self._host.spans(units.group, units.host) for units in ordered])
        try:
            target = self._connector.open(part.tag, spans)
        except QuireError as error:
            self.do(self.receiver.cancel(part, str(error)))
            self._refused.append((transfer, str(error)))
        else:
            self._parts.append((part, transfer, self._clock()))
            self.do(self.receiver.want(part, by_group, target))

    def release(self, asking: Asking, num_tokens: int) -> None:
        """The request needs no more of the ask; so many tokens have arrived whole."""
        counts = self.counts.of(asking.peer)
        counts.tokens += num_tokens
        counts.ask_seconds.observe(self._clock() - asking.since)
        if asking.peer in self.open_tokens:
            self.open_tokens[asking.peer] -= asking.num_tokens
        self.do(self.receiver.release(asking.ask))
        del self.asks[asking.ask]

    def why_local(self, num_missing: int) -> str:
        """See `PrefillPeers.why_local`."""
        if not self.is_on or self._can_ask or num_missing < self._least_tokens:
            return ""
        return _OFF if self.open_tokens else _UNCONNECTED

    def fall_back(self, peer: str, cause: str, reason: str) -> None:
        """Count a prompt that is computed here, and warn of it now and then."""
        self.counts.of(peer).fallbacks[cause] += 1
        now = self._clock()
        since, count = self._warned.get(cause, (-_WARN_S, 0))
        if now - since < _WARN_S:
            self._warned[cause] = since, count + 1
            return
        self._warned[cause] = now, 0
        more = f" (and {count} more like it)" if count else ""
        whose = f" that {label} was to compute" if (label := self.counts.label(peer)) else ""
        fix = _FIXES.get(cause, "the prefill engine refused it")
        self._warn(f"A prompt{whose} is computed here: {reason}{more}. What helps: {fix}.")

    def do(self, effects: Effects) -> None:
        """Carry out what the receiver says."""
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Shut):
                if self._connector.shut(effect.part.tag):
                    self.do(self.receiver.shut(effect.part))
            elif effect.ask in self.asks:
                self.asks[effect.ask].falls_back(effect.cause, effect.reason)


@dataclass(slots=True, eq=False)
class Asking:
    """A prompt that a peer computes. Its methods are those of `PrefillAsk`."""

    side: DecodeSide
    ask: int
    peer: str  # its name at the receiver and the connector
    label: str  # what operators call it
    seconds: float
    num_tokens: int
    since: float
    why: str = ""
    _is_stopped: bool = False

    @property
    def is_over(self) -> bool:
        asked = self.side.receiver.asks.get(self.ask)
        return asked is not None and asked.is_released

    def want(self, transfer: Transfer, places: Sequence[np.ndarray]) -> None:
        self.side.want(self.ask, transfer, places)

    def stop(self, cause: str = "") -> None:
        if cause:
            self.falls_back(cause, _REASONS[cause])
        self._is_stopped = True
        self.side.do(self.side.receiver.release(self.ask))

    def release(self, num_tokens: int) -> None:
        if num_tokens < self.num_tokens:
            self.falls_back("room", _REASONS["room"])
        self.side.release(self, num_tokens)

    def falls_back(self, cause: str, reason: str) -> None:
        """The rest of the prompt is computed here. The first cause counts, while the request waits."""
        if not self.why and not self._is_stopped:
            self.why = reason
            self.side.fall_back(self.peer, cause, reason)

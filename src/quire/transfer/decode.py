"""DecodeSide: prompts that other engines compute for this one. It opens host frames to them, and says what arrived."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_64_intdigest

from quire.errors import QuireError
from quire.memory.host_pool import HostPool
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.tiers.transfer import Transfer
from quire.transfer.connector import Connector
from quire.transfer.messages import MOST_NAME, Send
from quire.transfer.receiving import Effects, Part, PartState, Receiver, Shut

_MOST_BEFORE = 16_384
"""Tokens that the preferred peer may have to compute more than the least busy one."""


@dataclass(slots=True)
class PeerCounts:
    """What one prefill engine did for this one. `fallbacks` are asks that ended early, by cause; the rest of their
    prompts was computed here. `seconds` are from asks to their ends."""

    asks: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)


class DecodeSide:
    """All asks of one engine. `scope` gives the scope of a namespace (`quire.prefix.hashing.scope_of`). A request waits
    `seconds` for a peer. Prompts that lack less than `least_tokens` are not worth an ask."""

    def __init__(
        self,
        connector: Connector,
        host: HostPool,
        scope: Callable[[Namespace], bytes],
        send: Callable[[Send], object],
        *,
        num_groups: int,
        page_size: int,
        seconds: float,
        least_tokens: int,
    ) -> None:
        self.receiver = Receiver()
        self.counts: dict[str, PeerCounts] = {}
        self.seconds = seconds
        self.asks: dict[int, Asking] = {}
        self._connector = connector
        self._host = host
        self._scope = scope
        self._send = send
        self._num_groups = num_groups
        self._page_size = page_size
        self._least_tokens = least_tokens
        self._parts: list[tuple[Part, Transfer]] = []  # whose frames a peer may write
        self._refused: list[tuple[Transfer, str]] = []  # that no peer was told of, and why
        self._ready: dict[str, int] = {}  # peers that can be asked, and tokens of their open asks

    @property
    def is_busy(self) -> bool:
        """Whether asks or parts are open."""
        return bool(self.asks or self._parts or self._refused)

    @property
    def held_bytes(self) -> int:
        """Host memory that nothing here needs, and that peers may still write."""
        return sum(transfer.num_bytes for part, transfer in self._parts if part.state is PartState.CANCELLING)

    @property
    def peers(self) -> list[str]:
        """Prefill engines that can be asked now."""
        return list(self._ready)

    def ready(self, peer: str, *, is_ready: bool) -> None:
        """Whether a prefill engine can be asked from now on."""
        self._ready.pop(peer, None)
        if is_ready:
            self._ready[peer] = sum(asking.num_tokens for asking in self.asks.values() if asking.peer == peer)

    def ask(self, tokens: Ids, namespace: Namespace, num_missing: int) -> Asking | None:
        """See `PrefillPeers.ask`. The peer is that which computed prompts with the same first page before, unless it is
        much busier than another."""
        if not self._ready or num_missing < self._least_tokens or len(namespace.salt) > MOST_NAME:
            return None
        first = np.ascontiguousarray(tokens[: self._page_size]).tobytes()
        ranked = sorted(self._ready, key=lambda peer: xxh3_64_intdigest(peer.encode() + first))
        most = min(self._ready.values()) + _MOST_BEFORE
        peer = next(peer for peer in ranked if self._ready[peer] <= most)
        now = time.monotonic()
        ask, effects = self.receiver.ask(
            peer,
            seconds=self.seconds,
            scope=self._scope(namespace),
            adapter=namespace.adapter,
            salt=namespace.salt,
            prompt=tokens.tobytes(),
            now=now,
        )
        self._ready[peer] += num_missing
        self.counts.setdefault(peer, PeerCounts()).asks += 1
        self.asks[ask] = Asking(self, ask, peer, self.seconds, num_missing, now)
        self.do(effects)
        return self.asks[ask]

    def settle(self) -> list[tuple[Transfer, str]]:
        """See `PrefillPeers.settle`."""
        self.do(self.receiver.tick(time.monotonic()))
        over = [each for each in self._parts if each[0].may_reuse]
        if over:
            self._parts = [each for each in self._parts if not each[0].may_reuse]
        for part, transfer in over:
            self._connector.shut(part.tag)
            if part.state is PartState.SENT and part.ask in self.asks:
                self.counts[self.asks[part.ask].peer].received_bytes += transfer.num_bytes
        refused, self._refused = self._refused, []
        return refused + [(move, "" if part.state is PartState.SENT else part.reason or "gone") for part, move in over]

    def abandon(self) -> list[tuple[Transfer, str]]:
        """All transfers that are left, after the connector was closed."""
        left, self._parts = self._parts, []
        refused, self._refused = self._refused, []
        return refused + [(transfer, "the engine ends") for _, transfer in left]

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
            self._parts.append((part, transfer))
            self.do(self.receiver.want(part, by_group, target))

    def release(self, asking: Asking, num_tokens: int) -> None:
        """The request needs no more of the ask; so many tokens have arrived whole."""
        counts = self.counts[asking.peer]
        counts.received_tokens += num_tokens
        counts.seconds += time.monotonic() - asking.since
        if asking.peer in self._ready:
            self._ready[asking.peer] -= asking.num_tokens
        self.do(self.receiver.release(asking.ask))
        del self.asks[asking.ask]

    def do(self, effects: Effects) -> None:
        """Carry out what the receiver says."""
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Shut):
                if self._connector.shut(effect.part.tag):
                    self.do(self.receiver.shut(effect.part))
            elif effect.ask in self.asks:
                self.counts[self.asks[effect.ask].peer].fallbacks[effect.cause] += 1


@dataclass(slots=True, eq=False)
class Asking:
    """A prompt that a peer computes (`quire.tiers.prefill.PrefillAsk`)."""

    side: DecodeSide
    ask: int
    peer: str
    seconds: float
    num_tokens: int
    since: float

    @property
    def is_over(self) -> bool:
        """See `PrefillAsk.is_over`."""
        asked = self.side.receiver.asks.get(self.ask)
        return asked is not None and asked.is_released

    def want(self, transfer: Transfer, places: Sequence[np.ndarray]) -> None:
        """See `PrefillAsk.want`."""
        self.side.want(self.ask, transfer, places)

    def stop(self) -> None:
        """See `PrefillAsk.stop`."""
        self.side.do(self.side.receiver.release(self.ask))

    def release(self, num_tokens: int) -> None:
        """See `PrefillAsk.release`."""
        self.side.release(self, num_tokens)

"""TransferNode: the connections of an engine to others, and what it asks of them and does for them."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from quire.counters import Section, counter, gauge, labelled
from quire.errors import InvalidInput
from quire.loop import End, Loop, Part
from quire.memory.host_pool import HostPool
from quire.offload.tiering import Tiering
from quire.scheduler.request import Request as EngineRequest
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.tiers.prefill import PrefillPeers
from quire.tiers.transfer import Transfer
from quire.transfer.address import Address, format_address, parse_address, parse_peers
from quire.transfer.connectors.registry import open_connector
from quire.transfer.control import Arrived, Closed, Connected, Control, Event, Left, Silent, Speaks, Unreachable
from quire.transfer.counts import ReceivedCounts, SentCounts
from quire.transfer.decode import Asking, DecodeSide
from quire.transfer.handshake import Hello, Identity, Role
from quire.transfer.messages import Request, Send, Serves
from quire.transfer.prefill import Begins, PrefillSide

logger = logging.getLogger(__name__)


def _is_dialed(event: Event) -> bool:
    return not isinstance(event.message, Request) if isinstance(event, Arrived) else event.dialed


def _known(hello: Hello) -> str:
    return f"{hello.label} ({hello.peer})" if hello.label else hello.peer


def _why(event: Closed | Unreachable) -> str:
    return f": {event.reason}" if isinstance(event, Unreachable) else ""


@dataclass(frozen=True, kw_only=True)
class TransferCounters:
    """What engines did for each other, in all and by peer, and where connections are missing."""

    PREFIX: ClassVar = "transfer_"
    role: str
    connector: str
    address: str
    prefill_peers: list[dict[str, str]]
    decode_peers: list[dict[str, str]]
    problems: dict[str, str]
    failed_threads: dict[str, str]
    asks: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    fallbacks: int = 0
    sent_tokens: int = 0
    sent_bytes: int = 0
    connected_peers: dict[str, int] = gauge(
        "Engines that are connected, by what they do for this one.", "role", start=dict
    )
    held_bytes: int = gauge("Host memory that nothing here needs, and that a peer that stopped may still write.")
    received: dict[str, ReceivedCounts] = labelled("peer", ReceivedCounts)
    sent: dict[str, SentCounts] = labelled("peer", SentCounts)
    refused_connections: dict[str, int] = counter(
        "Connections that were refused, by reason: a field in which the engines differ, or what was wrong.",
        "reason",
        start=dict,
    )


class TransferNode(Part, PrefillPeers):
    """Engines that compute prompts for this one, and that it computes prompts for. The engine's thread calls it, and
    closes it before `host`. `identity` is what engines that exchange pages have in common, by weights `epoch`. Raises
    InvalidInput, ConnectorError, AddressInUse.

    `wake` is called, on another thread, when `settle` has something to do.
    """

    tiers: Tiering
    begin: Begins
    """Queues a request for another engine. The owner sets both before `attach`."""

    def __init__(
        self,
        identity: Callable[[int], Identity],
        host: HostPool,
        *,
        epoch: int,
        role: Role,
        secret: str,
        listen: str,
        peers: Sequence[str],
        connector: str,
        unauthenticated: bool,
        seconds: float,
        least_tokens: int,
        label: str,
        wake: Callable[[], None],
    ) -> None:
        self.role = role
        self._host = host
        self._identity, mine = identity, identity(epoch)
        self._page_size = mine.page_size
        self._num_groups = len(mine.layouts)
        self._seconds = seconds
        self._least_tokens = least_tokens
        self._wake = wake
        self._listen, self._peers = parse_address(listen), parse_peers(peers)
        self.asks = bool(peers)
        machine = re.sub("[^A-Za-z0-9._:-]", "-", socket.gethostname()[:40])
        name, start = f"{machine}.{os.getpid()}", int.from_bytes(os.urandom(8), "little") >> 1
        self._secret = secret.encode(errors="surrogateescape")  # any bytes of the environment
        self.connector = open_connector(
            connector,
            host.memory,
            name=f"{name}@{start:016x}",
            secret=self._secret,
            host=self._listen[0],
            unauthenticated=unauthenticated,
        )
        self._hello = Hello(name, start, role, mine, self.connector.kind, self.connector.address(), label)
        self._control: Control | None = None
        self._events: list[Event] = []
        self._others: dict[tuple[str, bool], dict[str, str]] = {}  # connected engines, by name and `dialed`
        self._is_closed = self._is_broken = False

    def attach(self, loop: Loop) -> None:
        """Connect."""
        try:
            self._control = control = Control(
                self._hello,
                self._secret,
                listen=self._listen if self.role != "decode" else None,
                peers=self._peers,
                wake=self._wake,
            )
        except BaseException:
            self.connector.close()
            raise

        def send(effect: Send) -> None:
            control.send(effect.peer, effect.message)

        self.decode = DecodeSide(
            self.connector,
            self._host,
            self.tiers.names.scope,
            send,
            num_groups=self._num_groups,
            page_size=self._page_size,
            seconds=self._seconds,
            least_tokens=self._least_tokens,
        )
        self._switch()
        self.prefill = PrefillSide(
            self.connector,
            self._host,
            self.tiers,
            send,
            control.drained,
            page_size=self._page_size,
            begin=self.begin,
            abort=loop.abort,
        )

    @property
    def address(self) -> Address | None:
        """Where it listens for decode engines."""
        return self._control.address if self._control is not None else None

    @property
    def is_due(self) -> bool:
        """Whether `settle` has something to do, now or soon."""
        assert self._control is not None
        self._events += self._control.events()
        return bool(self._events) or self.decode.is_busy or self.prefill.is_busy

    def before_schedule(self) -> None:
        """Process what decode engines have sent. This adds and aborts requests."""
        if not self._is_closed:
            self._process(dialed=False)
            self.prefill.settle()

    def ask(self, tokens: Ids, namespace: Namespace, num_missing: int) -> Asking | None:
        return self.decode.ask(tokens, namespace, num_missing)

    def why_local(self, num_missing: int) -> str:
        return self.decode.why_local(num_missing)

    def settle(self) -> list[tuple[Transfer, str]]:
        if self._is_closed:
            return self.decode.abandon()
        self._process(dialed=True)
        if self.connector.problem and not self._is_broken:
            self._is_broken = True
            self.decode.is_on = False
            self.decode.end_all("connector", f"the connector has failed: {self.connector.problem}")
            self.prefill.serve(is_on=False)
        return self.decode.settle()

    def _process(self, *, dialed: bool) -> None:
        """Process the events of connections that this engine dialed, or of those that it accepted."""
        assert self._control is not None
        events, self._events = [*self._events, *self._control.events()], []
        for event in events:
            if _is_dialed(event) is dialed:
                self._happened(event)
            else:
                self._events.append(event)

    def _happened(self, event: Event) -> None:
        decode, prefill = self.decode, self.prefill
        if isinstance(event, Connected):
            self._others[event.peer, event.dialed] = {
                "name": event.hello.label or event.address,
                "address": event.address,
            }
        elif isinstance(event, Closed | Unreachable | Left):
            self._others.pop((event.peer, event.dialed), None)
        match event:
            case Arrived(peer, message):
                if isinstance(message, Request):
                    prefill.asked(peer, message)
                elif isinstance(message, Serves):
                    decode.serves(peer, is_on=message.is_on)
                else:
                    decode.do(decode.receiver.receive(peer, message))
            case Connected(peer, dialed, hello, address) if dialed:
                decode.do(decode.receiver.connected(peer))
                decode.counts.connected(peer, hello.label or address)
                decode.ready(peer, is_ready=True)
                logger.info("Connected to prefill engine %s at %s.", _known(hello), address)
            case Connected(peer, _, hello, address):
                prefill.connected(peer, hello.address, hello.label or address)
                logger.info("Decode engine %s has connected, from %s.", _known(hello), address)
            case Closed(peer, dialed) | Unreachable(peer, dialed) if not dialed:
                logger.info("Decode engine %s is gone%s.", peer, _why(event))
                prefill.lost(peer)
            case Silent(peer, dialed) | Speaks(peer, dialed) if not dialed:
                pass  # asks have deadlines
            case Closed(peer):
                self._lost(event)
                prefill.disconnect(peer)
                decode.do(decode.receiver.closed(peer))
            case Unreachable(peer):
                self._lost(event)
                decode.do(decode.receiver.unreachable(peer))
            case Left(peer):
                logger.info("Prefill engine %s is no peer any more.", decode.counts.label(peer) or peer)
                decode.ready(peer, is_ready=False)
                decode.counts.lost(peer)
                decode.do(decode.receiver.left(peer))
            case Silent(peer):
                logger.warning("Prefill engine %s does not answer.", decode.counts.label(peer) or peer)
                decode.ready(peer, is_ready=False)
                decode.do(decode.receiver.silent(peer))
            case Speaks(peer):
                logger.info("Prefill engine %s answers again.", decode.counts.label(peer) or peer)
                decode.ready(peer, is_ready=True)

    def _lost(self, event: Closed | Unreachable) -> None:
        """A prefill engine is gone."""
        self.decode.ready(event.peer, is_ready=False)
        self.decode.serves(event.peer, is_on=True)
        counts = self.decode.counts
        if counts.lost(event.peer):
            label = counts.label(event.peer)
            logger.warning("Prefill engine %s is gone%s. Prompts are computed here or elsewhere.", label, _why(event))

    def ended(self, request: EngineRequest, end: End, error: Exception | None) -> None:
        if request.request_id in self.prefill.ids:
            self.prefill.ended(request.request_id, str(error) if error is not None else "")

    def model_changed(self, epoch: int) -> None:
        """The weights have changed: nothing that was asked for before is of use."""
        assert self._control is not None
        self._control.set_identity(self._identity(epoch))
        self.prefill.end_all("weights", "the weights have changed")

    def set_role(self, role: Role) -> None:
        """Have another role from now on. As decode it refuses prompts of peers; what it has asked for arrives in any
        role. Raises InvalidInput if it was not started with what the role needs; nothing has changed then."""
        assert self._control is not None
        if role != "decode" and self.address is None:
            raise InvalidInput(
                "this engine was started as decode, and listens to no other engine.", fix="start it with --role both."
            )
        self.role = role
        self._control.set_role(role)
        self._switch()
        self.prefill.serve(is_on=role != "decode" and not self._is_broken)

    def set_prefill_peers(self, peers: Sequence[str]) -> list[str]:
        """Have the engines at these addresses compute prompts from now on, and no others; returns the addresses. New
        ones are dialed on another thread. What was asked of removed ones is computed here, as all prompts are without
        peers. Raises InvalidInput for addresses that cannot be peers; nothing has changed then."""
        assert self._control is not None
        found = parse_peers(peers)
        if found and self.role == "prefill":
            raise InvalidInput(
                "an engine with role prefill computes its own prompts.",
                fix="give it another role: POST /v1/cache/role.",
            )
        if self.address in found:
            raise InvalidInput("an engine is no peer of itself.", fix="leave out the address of this engine.")
        if found and self._listen[0] in ("0.0.0.0", "::"):
            raise InvalidInput(
                "this engine was started with a --transfer-listen that names no host to send pages to.",
                fix="start it with an address of this machine that its peers reach.",
            )
        self._peers = found
        self.asks = bool(found)
        self._control.set_peers(found)
        self._switch()
        return [format_address(address) for address in found]

    def _switch(self) -> None:
        """Ask peers, or do not."""
        self.decode.is_on = self.asks and self.role != "prefill" and not self._is_broken

    def counters(self) -> list[Section]:
        """Counters since the start, in all and by peer, and where connections are missing."""
        assert self._control is not None
        asked = [{**of, "state": self.decode.state(peer)} for (peer, dialed), of in self._others.items() if dialed]
        served = [of for (_, dialed), of in self._others.items() if not dialed]
        connected = sum(peer["state"] == "connected" for peer in asked)
        threads = (("control", self._control), ("connector", self.connector))
        counted = TransferCounters(
            role=self.role,
            connector=self._hello.connector,
            address=format_address(self.address) if self.address is not None else "",
            prefill_peers=asked,
            decode_peers=served,
            connected_peers={"prefill": connected, "decode": len(served)},
            problems={format_address(address): why for address, why in self._control.problems().items()},
            failed_threads={name: each.problem for name, each in threads if each.problem},
            refused_connections=dict(self._control.refused),
            held_bytes=self.decode.held_bytes,
            **self.decode.counts.totals(),
            **self.prefill.counts.totals(),
            received=self.decode.counts.by_label(),
            sent=self.prefill.counts.by_label(),
        )
        return [("transfer", counted)]

    def close(self, wait_s: float = 1.0) -> None:
        """End the writes of this engine, then its connections: peers take their end as a proof that it writes no more.
        Asks of this engine end with it."""
        if self._control is None or self._is_closed:
            self.connector.close()
            return
        self.prefill.end_all("closing", "the engine ends")
        until = time.monotonic() + wait_s
        while self.prefill.is_busy and time.monotonic() < until:
            self.prefill.settle()
            time.sleep(0.005)
        self._is_closed = True
        self.connector.close()
        self._control.close()

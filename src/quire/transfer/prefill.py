"""PrefillSide: prompts that this engine computes for others. It queues them, and writes their pages from the host."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.errors import QuireError
from quire.offload.tiering import Tiering
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.transfer.connector import Connector, Progress, Records, Write
from quire.transfer.counts import ByPeer, SentCounts
from quire.transfer.messages import Ask, Request, Send, Serves, Want, tag_of
from quire.transfer.sending import Begin, Disconnect, Drained, Drop, Effects, Sender, StartPrompt, StopPrompt

logger = logging.getLogger(__name__)

Begins = Callable[[str, Ids, Namespace], None]
"""Queues a request with this id that computes this prompt. Raises QuireError if it can never run."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that this engine computes for another, whose pages are read on the host. `reads` are host frames that
    writes read, by part and group."""

    pages: Tiering
    namespace: Namespace
    tokens: Ids
    is_done: bool = False  # its request has ended
    reads: dict[int, list[Ids]] = field(default_factory=dict)
    _is_saved: bool = False  # once more after that

    def read(self, places: Sequence[Ids]) -> list[Ids] | None:
        """See `Tiering.read`."""
        return self.pages.read(self.namespace, self.tokens, places)

    def may_arrive(self, places: Sequence[Ids]) -> bool:
        """Whether pages that `read` does not find will be on the host: they are computed or saved, or saved again."""
        if not self.is_done or self.pages.is_saving(self.namespace, self.tokens, places):
            return True
        was_saved, self._is_saved = self._is_saved, True
        return not was_saved and self.pages.save_prompt(self.namespace, self.tokens)


@dataclass(slots=True, eq=False)
class _PartWrite:
    peer: str
    want: Want
    write: Write
    num_tokens: int
    num_bytes: int
    since: float
    is_again: bool  # after a failure


class PrefillSide:
    """All asks of other engines. `begin` and `abort` are the engine's; ids of its requests for others are in `ids`.
    `clock` gives seconds."""

    def __init__(
        self,
        connector: Connector,
        host: Records,
        tiers: Tiering,
        send: Callable[[Send], object],
        drained: Callable[[str], None],
        *,
        page_size: int,
        begin: Begins,
        abort: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sender = Sender()
        self.is_on = True
        """Whether asks are accepted; see `serve`."""
        self.counts = ByPeer(SentCounts, clock)
        self.ids: dict[str, tuple[str, int]] = {}
        """Requests of this engine, by id: for which ask."""
        self._connector = connector
        self._host = host
        self._tiers, self._scope, self._num_groups = tiers, tiers.names.scope, len(tiers.hosts)
        self._send = send
        self._tell_drained = drained
        self._page_size = page_size
        self._begin = begin
        self._abort = abort
        self._clock = clock
        self._addresses: dict[str, bytes] = {}
        self._prompts: dict[tuple[str, int], _Prompt] = {}
        self._writes: list[_PartWrite] = []
        self._seen = -1

    @property
    def is_busy(self) -> bool:
        """Whether asks are open or writes in flight."""
        return bool(self.sender.clients and self._prompts) or bool(self._writes)

    def connected(self, peer: str, address: bytes, label: str) -> None:
        """A decode engine has connected; its connector has this address."""
        self.counts.connected(peer, label)
        self._addresses[peer] = address
        self._connect(peer)
        if not self.is_on:  # since its handshake
            self._send(Send(peer, Serves(is_on=False)))

    def serve(self, *, is_on: bool) -> None:
        """Accept asks from now on, or end and refuse them."""
        self.is_on = is_on
        for peer in self._addresses:
            self._send(Send(peer, Serves(is_on)))
        if not is_on:
            self.end_all("role", "this engine computes no prompts for others any more")

    def _connect(self, peer: str) -> None:
        try:
            self._connector.connect(peer, self._addresses[peer])
        except QuireError as error:  # its parts fail, one by one
            self.counts.of(peer).failures["connect"] += 1
            logger.warning("Pages cannot be sent to %s: %s", self.counts.label(peer), error)

    def disconnect(self, peer: str) -> None:
        """End all writes to a peer. It is connected again if it is a decode engine that is there."""
        self._connector.disconnect(peer)
        if peer in self._addresses:
            self._connect(peer)

    def lost(self, peer: str) -> None:
        """The connection to a decode engine is lost."""
        self._addresses.pop(peer, None)
        self.counts.lost(peer)
        self._do(self.sender.lost(peer, self._clock()))

    def asked(self, peer: str, message: Request) -> None:
        """A message of a decode engine."""
        self._seen = -1  # pages that it wants may be on the host already
        self._do(self.sender.receive(peer, message, self._clock()))

    def ended(self, request_id: str, error: str = "") -> None:
        """A request of `ids` has ended."""
        peer, ask = self.ids.pop(request_id)
        prompt = self._prompts.get((peer, ask))
        if prompt is not None:
            prompt.is_done = True
        if error:
            self._do(self.sender.refuse(peer, ask, self._clock(), "failed", error))

    def end_all(self, code: str, reason: str) -> None:
        """No ask is of use any more."""
        self._do(self.sender.end_all(self._clock(), code, reason))

    def settle(self) -> None:
        """Begin writes whose pages are on the host, and process those that have ended."""
        if not self.sender.clients:
            return
        now = self._clock()
        self._do(self.sender.tick(now))
        ended = [each for each in self._writes if each.write.poll() is not Progress.PENDING]
        if ended:
            self._writes = [each for each in self._writes if each not in ended]
        for each in ended:
            counts = self.counts.of(each.peer)
            counts.write_seconds.observe(now - each.since)
            if each.write.poll() is Progress.LANDED:
                counts.tokens += each.num_tokens
                counts.bytes += each.num_bytes
                self._end_reading(each)
                self._do(self.sender.landed(each.peer, each.want))
                continue
            counts.failures["write"] += 1
            if not each.is_again and self.sender.is_open(each.peer, each.want.ask):
                self._write(each.peer, each.want, is_again=True)  # retried once: the frames are still held
            else:
                self._end_reading(each)
                self._do(self.sender.failed(each.peer, each.want, each.write.error))
        saved = self._tiers.counters.saved_frames
        if saved != self._seen or any(prompt.is_done for prompt in self._prompts.values()):
            self._seen = saved
            computing: set[tuple[str, int]] = set()  # asks whose later parts are not computed either
            for peer, want in self.sender.waiting():
                if (peer, want.ask) not in computing and self._try(peer, want):
                    computing.add((peer, want.ask))

    def _try(self, peer: str, want: Want) -> bool:
        """Begin to write a part if its pages are on the host, or answer that they will not be. Returns whether they are
        still to be computed."""
        prompt, places = self._prompts[peer, want.ask], want.by_group()
        last = len(prompt.tokens) // self._page_size
        is_ascending = all((np.diff(at, prepend=-1, append=last) > 0).all() for at in places)
        if len(places) != self._num_groups or not is_ascending:
            self._do(self.sender.unavailable(peer, want, "it names pages that the prompt does not have, or one twice"))
            return False
        frames = prompt.read(places)
        if frames is not None:
            prompt.reads[want.part] = frames
            self._do(self.sender.ready(peer, want))
            return False
        if prompt.may_arrive(places):
            return not prompt.is_done
        self.counts.of(peer).failures["no room"] += 1
        self._do(self.sender.unavailable(peer, want, "the pages are not in host memory, which is full"))
        return False

    def _end_reading(self, writing: _PartWrite) -> None:
        """Nothing reads the frames of a part any more, whose ask may continue."""
        self._tiers.end_reading(self._prompts[writing.peer, writing.want.ask].reads.pop(writing.want.part))

    # -- what the sender says

    def _do(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case StartPrompt(peer, ask):
                    self._start(peer, ask)
                case StopPrompt(peer, ask):
                    self._abort(_id(peer, ask))
                case Begin(peer, want):
                    self._write(peer, want)
                case Drop(peer, ask):
                    prompt = self._prompts.pop((peer, ask))
                    for frames in prompt.reads.values():
                        self._tiers.end_reading(frames)
                case Disconnect(peer):
                    self.disconnect(peer)
                case Drained(peer):
                    self._connector.disconnect(peer)
                    self._tell_drained(peer)

    def _start(self, peer: str, ask: Ask) -> None:
        namespace, tokens, name = Namespace(ask.adapter, ask.salt), ask.tokens(), _id(peer, ask.ask)
        self.counts.of(peer).asks += 1
        self._prompts[peer, ask.ask] = _Prompt(self._tiers, namespace, tokens)
        now = self._clock()
        if not self.is_on:
            reason = "this engine computes no prompts for others now"
            self._do(self.sender.refuse(peer, ask.ask, now, "role", reason))
            return
        if self._scope(namespace) != ask.scope:
            reason = "this engine has other weights, or another namespace of that name"
            self._do(self.sender.refuse(peer, ask.ask, now, "scope", reason))
            return
        try:
            self.ids[name] = peer, ask.ask
            self._begin(name, tokens, namespace)
        except QuireError as error:
            del self.ids[name]
            self._do(self.sender.refuse(peer, ask.ask, now, error.code, str(error)))

    def _write(self, peer: str, want: Want, *, is_again: bool = False) -> None:
        frames = self._prompts[peer, want.ask].reads[want.part]
        spans = np.concatenate([self._host.spans(group, each) for group, each in enumerate(frames)])
        try:
            write = self._connector.write(peer, tag_of(want.ask, want.part), spans, want.target)
        except QuireError as error:
            write = Write.failed(str(error))
        num_tokens = max(map(len, frames)) * self._page_size
        num_bytes = int(spans[:, 1].sum())
        self._writes.append(_PartWrite(peer, want, write, num_tokens, num_bytes, self._clock(), is_again))


def _id(peer: str, ask: int) -> str:
    return f"prefill-{peer}-{ask}"

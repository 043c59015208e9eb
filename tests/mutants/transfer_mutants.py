"""Mistakes of engines that send pages to each other: frames reused too early, holds dropped or kept, words not sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quire.transfer import handshake
from quire.transfer.control import Control
from quire.transfer.handshake import Hello
from quire.transfer.messages import Cancel, Gone, Release, Send
from quire.transfer.receiving import PartState as Received
from quire.transfer.receiving import ReceivedPart, Receiver
from quire.transfer.sending import (
    AskingPeer,
    Disconnect,
    Drained,
    Drop,
    Sender,
    ServedAsk,
    Wanted,
    WriteState,
)
from tests.mutants.mutants import Patch, mutant


def _filter(patch: Patch, machine: type, method: str, keeps: Callable[[Any], bool]) -> None:
    """Leave out effects of a method."""
    real = getattr(machine, method)
    patch.setattr(machine, method, lambda *given, **more: [each for each in real(*given, **more) if keeps(each)])


def _is_answer(effect: Any) -> bool:
    return isinstance(effect, Send)


# -- the side that receives


@mutant("transfers", "a peer that cannot be reached still writes, into frames that are another request's by then")
def frames_are_reused_before_the_peer_has_drained(patch: Patch) -> None:
    patch.setattr(Receiver, "unreachable", lambda self, peer: self._lost(peer, "unreachable", "", proven=True))


def _over_with(patch: Patch, method: str) -> None:
    real = getattr(Receiver, method)

    def at_once(self: Receiver, *given: Any) -> Any:
        effects = real(self, *given)
        for part in [part for asked in self.asks.values() for part in asked.parts]:
            if part.state is Received.CANCELLING:
                self._over(part, Received.GONE, "")
        return effects

    patch.setattr(Receiver, method, at_once)


@mutant(
    "transfers", "at the deadline frames are reused at once, and the late writer overwrites the next prompt in them"
)
def a_late_writer_meets_reused_pages(patch: Patch) -> None:
    _over_with(patch, "tick")


@mutant("transfers", "a request is aborted, its frames are reused, and the write in flight lands in them")
def an_abort_frees_frames_at_once(patch: Patch) -> None:
    _over_with(patch, "release")


@mutant("transfers", "a stopped peer that continues writes into frames that were reused when it fell silent")
def silence_is_taken_for_death(patch: Patch) -> None:
    _over_with(patch, "silent")


@mutant("removals", "a removed peer still writes into frames that were reused")
def removal_is_taken_for_an_end(patch: Patch) -> None:
    patch.setattr(Receiver, "left", lambda self, peer: self._lost(peer, "removed", "", proven=True))


@mutant("transfers", "a request waits for ever for a prompt that its peer does not compute")
def the_wait_has_no_deadline(patch: Patch) -> None:
    patch.setattr(Receiver, "tick", lambda self, now: [])


@mutant("transfers", "the frames of a peer that was killed are never used again")
def frames_of_a_dead_peer_leak(patch: Patch) -> None:
    patch.setattr(Receiver, "closed", lambda self, peer: self._lost(peer, "closed", "", proven=False))


@mutant("transfers", "a part that was refused counts as arrived, and its frames hold an older prompt")
def gone_is_read_as_sent(patch: Patch) -> None:
    real = Receiver._over

    def over(self: Receiver, part: ReceivedPart, state: Received, reason: str) -> None:
        real(self, part, Received.SENT if state is Received.GONE else state, reason)

    patch.setattr(Receiver, "_over", over)


@mutant("transfer parts", "a word of the process before the restart ends a part that its successor still writes")
def a_stale_epoch_is_believed(patch: Patch) -> None:
    real = Receiver.receive

    def receive(self: Receiver, peer: str, message: Any) -> Any:
        asked = self.asks.get(message.ask)
        return real(self, peer if asked is None else asked.peer, message)

    patch.setattr(Receiver, "receive", receive)


@mutant("transfer parts", "the prefill engine is not told that a request has its pages, and holds them to the deadline")
def the_release_is_not_sent(patch: Patch) -> None:
    _filter(patch, Receiver, "release", lambda each: not (_is_answer(each) and isinstance(each.message, Release)))


# -- the side that sends


@mutant("transfers", "the word that pages have arrived is lost, and the frames of the request are never used again")
def the_acknowledgement_is_lost(patch: Patch) -> None:
    _filter(patch, Sender, "landed", lambda each: not _is_answer(each))


@mutant("transfers", "a write that could not begin is never reported, and the frames of the request are lost")
def a_failed_write_is_not_notified(patch: Patch) -> None:
    _filter(patch, Sender, "failed", lambda each: not _is_answer(each))


@mutant("transfers", "parts that were not begun when their request was aborted are never answered")
def a_cancel_leaks(patch: Patch) -> None:
    _filter(patch, Sender, "_end", lambda each: not _is_answer(each))


@mutant("transfers", "the pages of a prompt are freed while the other engine still waits for them")
def the_lease_is_shorter_than_the_wait(patch: Patch) -> None:
    real = Sender._asked

    def asked(self: Sender, peer: str, client: AskingPeer, message: Any, now: float) -> Any:
        effects = real(self, peer, client, message, now)
        if message.ask in client.asks:
            client.asks[message.ask].ends_at = now + message.seconds
        return effects

    patch.setattr(Sender, "_asked", asked)


@mutant("transfers", "a part is wanted that was cancelled before it was known, and is written into reused frames")
def a_want_after_its_cancel_is_written(patch: Patch) -> None:
    real = Sender.receive

    def receive(self: Sender, peer: str, message: Any, now: float) -> Any:
        asked = self._find(peer, message.ask)
        if isinstance(message, Cancel) and asked is not None and message.part not in asked.parts:
            return [Send(peer, Gone(message.ask, message.part, "cancelled"))]
        return real(self, peer, message, now)

    patch.setattr(Sender, "receive", receive)


@mutant("transfers", "a cancelled part is answered while it is written, and the rest of it lands in reused frames")
def a_running_write_counts_as_cancelled(patch: Patch) -> None:
    real = Sender.receive

    def receive(self: Sender, peer: str, message: Any, now: float) -> Any:
        asked = self._find(peer, message.ask)
        part = asked.parts.get(message.part) if asked is not None and isinstance(message, Cancel) else None
        if part is not None and part.state is WriteState.WRITING:
            return [Send(peer, Gone(message.ask, message.part, "cancelled"))]
        return real(self, peer, message, now)

    patch.setattr(Sender, "receive", receive)


@mutant("transfers", "a note that arrives twice lets a part be written twice, the second time over another prompt")
def a_duplicate_note_writes_again(patch: Patch) -> None:
    real = Sender._wanted

    def wanted(self: Sender, peer: str, want: Any, asked: ServedAsk) -> Any:
        if not asked.has_ended:
            asked.parts[want.part] = Wanted(want)
        return real(self, peer, want, asked)

    patch.setattr(Sender, "_wanted", wanted)


@mutant("transfers", "an ask that has ended begins again when its messages come late, and writes into reused frames")
def ended_asks_are_not_remembered(patch: Patch) -> None:
    patch.setattr(Sender, "_remember", lambda self, client, ask: None)


@mutant("transfers", "pages are evicted while a peer still reads them, and it gets those of another prompt")
def holds_are_dropped_under_a_running_write(patch: Patch) -> None:
    real = Sender._end

    def end(self: Sender, peer: str, ask: int, asked: ServedAsk, *rest: Any) -> Any:
        effects = real(self, peer, ask, asked, *rest)
        return [*effects, Drop(peer, ask)] if asked.writes else effects

    patch.setattr(Sender, "_end", end)


@mutant("transfers", "the pages of a request that was aborted during its last write are held for ever")
def the_last_write_releases_nothing(patch: Patch) -> None:
    for method in ("landed", "failed"):
        _filter(patch, Sender, method, lambda each: not isinstance(each, Drop))


@mutant("transfers", "a peer that was lost connects again while its old pages are still written")
def a_lost_peer_is_back_before_the_drain(patch: Patch) -> None:
    real = Sender.lost

    def lost(self: Sender, peer: str, now: float) -> Any:
        return [*(each for each in real(self, peer, now) if not isinstance(each, Drained)), Drained(peer)]

    patch.setattr(Sender, "lost", lost)


@mutant("transfers", "a hung peer never errors: its write stays in flight, and the pages are held for ever")
def a_hung_write_is_never_ended(patch: Patch) -> None:
    _filter(patch, Sender, "tick", lambda each: not isinstance(each, Disconnect))


# -- connections


@mutant("transfer peers", "pages of the old weights are served as those of the new ones")
def another_weights_epoch_is_accepted(patch: Patch) -> None:
    patch.setattr(handshake, "_FIXES", {name: fix for name, fix in handshake._FIXES.items() if name != "weights_epoch"})


@mutant("transfer peers", "groups are compared by their number, and a state is read as a window")
def layouts_are_only_counted(patch: Patch) -> None:
    real = handshake.Identity.compare

    def compare(self: handshake.Identity, theirs: handshake.Identity) -> None:
        same = len(self.layouts) == len(theirs.layouts)
        real(self, msgspec.structs.replace(theirs, layouts=self.layouts) if same else theirs)

    patch.setattr(handshake.Identity, "compare", compare)


@mutant("transfer peers", "a restarted engine has the name of the one before, and answers what that was asked")
def a_restart_is_the_same_peer(patch: Patch) -> None:
    patch.setattr(Hello, "peer", property(lambda self: self.name))


@mutant("transfer peers", "a stranger sends back the proof that it was sent, and is a peer")
def a_reflected_proof_is_accepted(patch: Patch) -> None:
    real = handshake._hmac
    patch.setattr(handshake, "_hmac", lambda secret, protocol, role, *rest: real(secret, protocol, b"", *rest))


@mutant("transfer peers", "a connection is closed while its owner still writes, and the peer takes that for a proof")
def a_lost_connection_is_closed_before_the_drain(patch: Patch) -> None:
    real = Control._lose

    def lose(self: Control, link: Any, event: Any) -> None:
        real(self, link, event)
        link.socket.close()

    patch.setattr(Control, "_lose", lose)


@mutant("removals", "a removed peer is hung up on, which is taken for its word that it writes no more")
def a_removed_peer_is_hung_up_on(patch: Patch) -> None:
    patch.setattr(Control, "_leave", lambda self, link: self._loop.drop(link, EOFError()))


@mutant("removals", "what a removed peer was asked for is waited for until it has ended")
def a_removal_ends_no_ask(patch: Patch) -> None:
    patch.setattr(Receiver, "left", lambda self, peer: [])

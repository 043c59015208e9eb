"""Mutants of an engine's two sides of a transfer: what they do with frames, pages, requests and counters."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.offload.prefetch import Piece, Prefetch
from quire.offload.prefetcher import Prefetcher
from quire.offload.tiering import Tiering
from quire.spec.events import Namespace
from quire.tiers.executor import TransferExecutor
from quire.transfer import decode
from quire.transfer.decode import Asking, DecodeSide
from quire.transfer.messages import Want
from quire.transfer.node import TransferNode
from quire.transfer.prefill import PrefillSide
from quire.transfer.receiving import Ended, PartState, ReceivedPart, Receiver
from tests.mutants.mutants import Patch, mutant
from tests.transfer.memory_connector import MemoryConnector

# -- the decode side


@mutant("spoiled pages", "what a peer has written is taken for good, and a later request reads another prompt's pages")
def arrived_pages_are_not_checked(patch: Patch) -> None:
    def check(self: TransferExecutor, transfer: Any, batch: Any) -> None:
        transfer.moved_bytes += sum(record.num_bytes for record in batch.good())

    patch.setattr(TransferExecutor, "_check_pages", check)


@mutant("late writes", "frames are reused at the deadline, and a late write lands in another prompt's pages")
def frames_are_handed_back_at_the_deadline(patch: Patch) -> None:
    patch.setattr(
        ReceivedPart,
        "may_reuse",
        property(lambda part: part.state in (PartState.SENT, PartState.GONE, PartState.CANCELLING)),
    )

    def over(self: Receiver, part: ReceivedPart, state: PartState, reason: str) -> None:
        part.state, part.reason = state, reason
        if part.ask in self.asks:  # it is over before its parts are
            self._drop_if_over(part.ask, self.asks[part.ask])

    patch.setattr(Receiver, "_over", over)


@mutant("cuts", "tags are never shut: a part that has ended may still be written, and its tag is kept for ever")
def tags_are_never_shut(patch: Patch) -> None:
    patch.setattr(MemoryConnector, "shut", lambda self, tag: True)


@mutant("held frames", "a peer that never answers keeps cached pages of its prompt on the device")
def a_prefetch_of_a_stopped_peer_holds_its_path(patch: Patch) -> None:
    def stop_prefetch(self: Prefetcher, prefetch: Prefetch) -> None:
        prefetch.num_waiting -= 1
        if not prefetch.num_waiting:
            prefetch.stop()
            if prefetch.done:
                self._release(prefetch)

    patch.setattr(Prefetcher, "stop_prefetch", stop_prefetch)


@mutant("held frames", "operators do not see the memory that a stopped peer keeps")
def held_frames_are_not_counted(patch: Patch) -> None:
    patch.setattr(DecodeSide, "held_bytes", property(lambda self: 0))


@mutant("silence", "a request waits its whole deadline for a peer that is known to be silent")
def a_request_waits_for_proof(patch: Patch) -> None:
    patch.setattr(Asking, "is_over", property(lambda self: False))


@mutant("aborts", "a prompt is computed to its end for a request that was aborted")
def a_stop_is_not_sent(patch: Patch) -> None:
    patch.setattr(DecodeSide, "release", _released_without_a_word)
    patch.setattr(Asking, "stop", lambda self, *cause: None)


def _released_without_a_word(self: DecodeSide, asking: Asking, num_tokens: int) -> None:
    self.asks.pop(asking.ask)


@mutant("new weights", "prompts that are computed here because a peer refused them are counted nowhere")
def fallbacks_are_not_counted(patch: Patch) -> None:
    real = DecodeSide.do
    patch.setattr(
        DecodeSide, "do", lambda self, effects: real(self, [each for each in effects if not isinstance(each, Ended)])
    )


@mutant("weights", "pages of a peer count as fetched from storage, which does not have them")
def pages_of_a_peer_count_as_stored(patch: Patch) -> None:
    real = Prefetch._bind

    def bind(self: Prefetch, piece: Piece, *given: Any) -> None:
        piece.is_stored = True
        real(self, piece, *given)

    patch.setattr(Prefetch, "_bind", bind)


@mutant("salts", "one request with a long salt breaks the connection, and with it the prompts of all others")
def a_salt_of_any_length_is_sent(patch: Patch) -> None:
    patch.setattr(decode, "MOST_NAME", 1 << 30)


# -- the prefill side


@mutant("cuts", "host frames that were sent are never free again")
def reads_never_end(patch: Patch) -> None:
    patch.setattr(Tiering, "end_reading", lambda self, frames: None)


@mutant("weights", "a prompt is computed with other weights than those of the engine that asks")
def scopes_are_not_compared(patch: Patch) -> None:
    real = PrefillSide._start

    def start(self: PrefillSide, peer: str, ask: Any) -> None:
        scope = self._tiers.names.scope(Namespace(ask.adapter, ask.salt))
        real(self, peer, msgspec.structs.replace(ask, scope=scope))

    patch.setattr(PrefillSide, "_start", start)


@mutant("new weights", "asks continue over a change of weights, and wait for pages that never come")
def a_change_of_weights_ends_no_ask(patch: Patch) -> None:
    real = PrefillSide.end_all
    patch.setattr(
        PrefillSide, "end_all", lambda self, code, reason: None if code == "weights" else real(self, code, reason)
    )


@mutant("wrong wants", "a peer names page -1 and gets the last page, or one outside, which ends the engine")
def places_are_not_checked(patch: Patch) -> None:
    real = PrefillSide._try

    def attempt(self: PrefillSide, peer: str, want: Want) -> None:
        inside = tuple((abs(at) % 8).tobytes() for at in want.by_group())
        real(self, peer, msgspec.structs.replace(want, places=inside))

    patch.setattr(PrefillSide, "_try", attempt)


@mutant("chains", "engines that name each other ask each other for the same prompt, in a circle")
def a_prompt_for_a_peer_is_asked_for_again(patch: Patch) -> None:
    real = Prefetcher.prefetch
    patch.setattr(
        Prefetcher, "prefetch", lambda self, tokens, namespace, *, may_ask=True: real(self, tokens, namespace)
    )


@mutant("served", "what a peer says is processed while a step is being made, whose requests it then aborts")
def peers_are_served_inside_a_step(patch: Patch) -> None:
    real = TransferNode.settle

    def settle(self: TransferNode) -> Any:
        self.before_schedule()
        return real(self)

    patch.setattr(TransferNode, "settle", settle)

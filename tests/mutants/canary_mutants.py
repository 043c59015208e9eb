"""Mistakes with the canary: damage that is not found, found where there is none, or used again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quire.cache.audit import Auditor
from quire.cache.groups import DamagedPages
from quire.canary import budget as budgets
from quire.canary import canary as canary_module
from quire.canary import chain as chains
from quire.canary import digest
from quire.canary.budget import Budget
from quire.canary.canary import Canary
from quire.canary.chain import Words
from quire.canary.containment import Containment
from quire.canary.digest import FrameDigests
from quire.canary.stamps import Stamps
from quire.canary.writes import Longs, Writes
from quire.memory.residency import Column, State
from quire.spec.ids import Bools, Ids
from tests.mutants.mutants import Patch, mutant


@mutant("canary", "requests are computed again because a page got the frame of one that was evicted")
def a_stamp_outlives_its_frame(patch: Patch) -> None:
    real = Column.unbind

    def unbind(column: Column, pages: Ids) -> Ids:
        marks = column.state[pages] & np.uint8(int(State.WATCHED | State.STAMPED))
        frames = real(column, pages)
        column.state[pages] |= marks
        return frames

    patch.setattr(Column, "unbind", unbind)


@mutant("canary", "a digest that arrives late becomes the stamp of the page that has the frame by then")
def tickets_are_not_compared(patch: Patch) -> None:
    def are(stamps: Stamps, pages: Ids, tickets: Longs, state: State) -> Bools:
        found: Bools = stamps.column.has(pages, State.WATCHED)
        return found

    patch.setattr(Stamps, "_are", are)


@mutant("canary", "a bit that flips in the last layer changes tokens for as long as the prefix is cached")
def the_first_layer_is_enough(patch: Patch) -> None:
    real = FrameDigests.__init__

    def init(digests: FrameDigests, *given: Any, **named: Any) -> None:
        real(digests, *given, **named)
        digests._words = [(words[:1], weights[:1]) for words, weights in digests._words]

    patch.setattr(FrameDigests, "__init__", init)


@mutant("canary", "pages are compared with a copy of the pool at start: all are damaged, or none ever is")
def digests_are_of_a_copy(patch: Patch) -> None:
    real = digest._as_words
    patch.setattr(digest, "_as_words", lambda entry: real(entry.contiguous()))


@mutant("canary", "a page keeps what its frame had before, where the device left out a write")
def pages_are_not_marked(patch: Patch) -> None:
    patch.setattr(FrameDigests, "mark", lambda digests, frames: None)


@mutant("canary", "a token's key and value went to another slot, and the page is served without them")
def plans_of_steps_are_not_compared(patch: Patch) -> None:
    patch.setattr(Writes, "are_whole", lambda writes, frames, first, serials: np.ones(len(frames), dtype=np.bool_))


@mutant("canary", "a request writes to a page that others read, and the report blames memory")
def writes_to_cached_pages_are_not_seen(patch: Patch) -> None:
    patch.setattr(Stamps, "overwritten", lambda stamps, frames, turns: frames[:0])


@mutant("canary", "under load nothing is looked at again that no request begins on")
def nothing_is_swept(patch: Patch) -> None:
    patch.setattr(Canary, "_pieces", lambda canary: iter(()))


@mutant("canary", "requests that cache their pages in one step get each other's: hits are reported as wrong prefixes")
def pages_of_a_step_are_of_its_first_request(patch: Patch) -> None:
    def of_the_first(before: Words, tokens: Ids, firsts: Words) -> Words:
        return chains.next_chains(before, np.broadcast_to(tokens[:1], tokens.shape), firsts)

    patch.setattr(canary_module, "next_chains", of_the_first)


@mutant("canary", "a page that a step caches beside others is said to be written by another request")
def owners_of_a_step_are_mixed(patch: Patch) -> None:
    real = Canary._watched

    def watched(canary: Canary, pages: Ids, new: Ids, owners: Longs) -> None:
        real(canary, pages, new, owners[::-1])

    patch.setattr(Canary, "_watched", watched)


@mutant("audits", "two requests write to one frame, and the audit sees each of their pages in another piece")
def pieces_forget_the_frames_of_others(patch: Patch) -> None:
    patch.setattr(Auditor, "used", lambda auditor, group: iter(("",)))


@mutant("audits", "two prompts read the same page, and the audit of a busy server sees the edges in different slices")
def edges_of_other_slices_are_not_compared(patch: Patch) -> None:
    patch.setattr(Auditor, "_twice", lambda auditor, pages, before, numbers: iter(()))


@mutant("canary budget", "a budget of 1 % takes 2 % of short steps")
def what_steps_need_is_free(patch: Patch) -> None:
    patch.setattr(Budget, "beside", lambda budget, seconds: None)


@mutant("canary budget", "with short steps all that is earned goes to them, and no page is ever looked at again")
def steps_take_everything(patch: Patch) -> None:
    patch.setattr(budgets, "_MOST_BESIDE", 1.0)


@mutant("canary", "a page that is only in a branch of the tree is never looked at again")
def the_sweep_follows_first_children(patch: Patch) -> None:
    def pieces(canary: Canary) -> Iterator[Ids]:
        for root in canary._tree.all_roots():
            node = root
            while node.children:
                node = next(iter(node.children.values()))
                yield node.pages.copy()

    patch.setattr(Canary, "_pieces", pieces)


@mutant("canary", "a frame with a broken bit serves the next page too")
def damaged_frames_are_free_again(patch: Patch) -> None:
    patch.setattr(Containment, "_quarantine", lambda containment, group, page, frame: None)


@mutant("canary", "a retained prefix with a damaged page is computed again by each request until the retention expires")
def retentions_hold_damaged_pages(patch: Patch) -> None:
    patch.setattr(DamagedPages, "release_holds", lambda damaged: None)


@mutant("canary", "a request goes on that has read a damaged page in the middle of its prefix")
def readers_are_those_that_end_there(patch: Patch) -> None:
    def readers(containment: Containment, pages: list[int]) -> list[Any]:
        rows = containment._parts.rows
        return [kv for kv in rows.live.values() if int(rows.pages[kv.row, max(0, kv.lease.num_pages - 1)]) in pages]

    patch.setattr(Containment, "readers", readers)


@mutant("canary chains", "a page of one tenant passes for another tenant's")
def the_namespace_is_not_in_the_chain(patch: Patch) -> None:
    patch.setattr(chains, "seed_of", lambda namespace: 7)


@mutant("canary chains", "two pages of a prefix that are exchanged look right")
def positions_are_not_in_the_chain(patch: Patch) -> None:
    real = chains.chain

    def chain(before: int, tokens: Ids, first: int, page_size: int) -> Any:
        return np.concatenate(
            [
                real(before, tokens[at : at + page_size], 0, page_size)
                for at in range(0, len(tokens) // page_size * page_size, page_size)
            ]
            or [real(0, tokens[:0], 0, 1)]
        )

    patch.setattr(chains, "chain", chain)

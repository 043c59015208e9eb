"""Mistakes of tiers: bytes that are not there yet, not there any more, another page's, or damaged without notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from quire.cache.groups import DamagedPages
from quire.cache.hold import Hold, Holds, Reason
from quire.cache.request_kv import RequestKV
from quire.memory import record
from quire.memory.allocator import PageIdFrames
from quire.memory.residency import Residency, State
from quire.offload import archiver as archiving
from quire.offload import offloading
from quire.offload.archiver import Archiver
from quire.offload.host_groups import HostGroup, PageIdGroup
from quire.offload.prefetch import Prefetch, RequestedPrefix
from quire.offload.prefetcher import Prefetcher
from quire.offload.tier_settings import LinkCounters, TierCounters
from quire.offload.tiering import Tiering
from quire.prefix import hashing, page_names
from quire.prefix.node import pages_to
from quire.prefix.page_names import PageNames
from quire.prefix.placement import NodeTiers
from quire.settings.fields import WritePolicy
from quire.spec.events import Namespace, PagesRemoved
from quire.spec.ids import Ids, Tier
from quire.tiers import executor
from quire.tiers.executor import TransferExecutor
from quire.tiers.store import Answer
from quire.tiers.transfer import GOOD, Lane, Transfer
from tests.fuzz.host_records import HostRecords
from tests.mutants import field
from tests.mutants.registry import Patch, mutant

# -- what is on its way


@mutant("tiers", field.FREED_EARLY)
def a_frame_is_reused_while_it_is_saved(patch: Patch) -> None:
    """A frame is handed out again while its bytes are still being copied to the host, which keeps another page's."""
    real = Tiering._submit

    def submit(tiers: Tiering, lane: Lane, *what: Any) -> Any:
        move = real(tiers, lane, *what)
        if move is not None and lane is Lane.SAVE:
            hold = tiers.moving[move].hold
            root = tiers._tree.root(hold.path.node.namespace)
            tiers._holds.change(hold, hold.frames, lease=tiers._tree.pin(root))
        return move

    patch.setattr(Tiering, "_submit", submit)


@mutant("tiers", field.FREED_EARLY)
def a_host_frame_is_reused_while_it_is_archived(patch: Patch) -> None:
    """A host frame is handed out again while the store still reads it, and another page is stored in its place."""
    patch.setattr(HostGroup, "begin_reading", lambda host, frames: None)
    patch.setattr(HostGroup, "end_reading", lambda host, frames: None)


@mutant("tiers", field.FREED_EARLY)
def write_back_does_not_wait(patch: Patch) -> None:
    """A page leaves the device before its copy is made."""
    real = Tiering.write_back

    def write_back(tiers: Tiering, node: Any) -> int:
        if tiers.settings.write is not WritePolicy.BACK or tiers._tree.num_copies(node) == node.num_pages:
            return int(real(tiers, node))
        pages = pages_to(node)
        if tiers.save(node, pages, ends=(len(pages),), first=node.depth, evicts=True) is None:
            return tiers._tree.num_copies(node)
        return int(node.num_pages)

    patch.setattr(Tiering, "write_back", write_back)


@mutant("tiers", field.AHEAD)
def a_load_is_ready_before_its_check(patch: Patch) -> None:
    """A step is launched on a prefix that was asked for and has not come."""
    patch.setattr(RequestKV, "is_ready", property(lambda kv: not kv.has_failed))


@mutant("tiers", field.AHEAD)
def an_arriving_page_is_there(patch: Patch) -> None:
    """A second request begins on a page that the first one is still loading, and does not wait for it."""
    patch.setattr(Tiering, "loads_of", lambda tiers, pages: [])


@mutant("tiers", field.STALE)
def what_is_below_is_not_loaded(patch: Patch) -> None:
    """A page that has left the device is read where it was."""
    patch.setattr(Tiering, "missing", lambda tiers, pages: [pages[:0] for _ in tiers._groups])


# -- what is damaged


@mutant("tiers", field.DAMAGED)
def loads_are_not_checked(patch: Patch) -> None:
    """What memory has lost meanwhile is loaded and read."""
    real = TransferExecutor._load

    def load(executor: TransferExecutor, move: Transfer) -> Any:
        copies = executor._copies
        patched = Patch()
        patched.setattr(copies, "defects", lambda group, host, keys: [GOOD] * len(keys))
        work = real(executor, move)
        try:
            next(work)
        finally:
            patched.undo()
        yield
        yield from work

    patch.setattr(TransferExecutor, "_load", load)


@mutant("tiers", field.DAMAGED)
def fetches_are_not_checked(patch: Patch) -> None:
    """What a store returns is taken for what was asked for."""
    real = executor._Batch.check

    def check(batch: Any, copies: Any, transfer: Transfer) -> Any:
        return [] if transfer.lane is Lane.FETCH else real(batch, copies, transfer)

    patch.setattr(executor._Batch, "check", check)


@mutant("tiers", field.SHORT)
def the_end_of_a_record_is_not_covered(patch: Patch) -> None:
    """The last 16 bytes of a record, where the scales are, are in no digest."""
    real = xxhash.xxh3_128_digest
    patch.setattr(record, "xxh3_128_digest", lambda payload, seed: real(payload[:-16], seed))


@mutant("tiers", field.DAMAGED)
def pages_are_cached_behind_damaged_ones(patch: Patch) -> None:
    """A request that has computed a damaged page again goes on with the damaged one."""
    patch.setattr(DamagedPages, "have_frames", lambda damaged, pages: False)


@mutant("tiers", field.TWICE)
def a_failed_load_frees_its_frames_twice(patch: Patch) -> None:
    """When a load fails, host frames are given back that are their pages' still."""
    real = Tiering._loaded

    def loaded(tiers: Tiering, move: Transfer) -> None:
        parts = tiers.moving[move].parts
        real(tiers, move)
        if not move.is_whole:
            for part in parts:
                tiers.hosts[part.group].untake_for(part.host)

    patch.setattr(Tiering, "_loaded", loaded)


@mutant("tiers", field.DEAD)
def damage_is_not_counted(patch: Patch) -> None:
    """Damaged records are noticed, and not reported."""
    patch.setattr(TierCounters, "corrupt", lambda counters, tier, defects: None)


@mutant("tiers", field.DEAD)
def moves_are_not_counted(patch: Patch) -> None:
    """The metrics of a tier stay at zero."""
    patch.setattr(LinkCounters, "add", lambda counters, move: None)


# -- what is stored


@mutant("tiers", field.PARTIAL)
def part_of_a_page_is_stored(patch: Patch) -> None:
    """A page is stored in one group, and in another one not."""

    def complete(store: Any, batch: Any, mine: Any) -> None:
        ok = [not each.defect for each in mine]
        for each, good, answer in zip(mine, ok, store.complete([each.key for each in mine], ok), strict=True):
            if good and answer is not Answer.HIT:
                each.defect = "store"
        for each in batch.records:
            each.page = each.page if each.defect else -1

    patch.setattr(TransferExecutor, "_complete", staticmethod(complete))


@mutant("tiers", field.VISIBLE)
def a_failed_store_is_visible(patch: Patch) -> None:
    """Records that the store did not take are made visible all the same."""

    def complete(store: Any, batch: Any, mine: Any) -> None:
        store.complete([each.key for each in mine], [True] * len(mine))

    patch.setattr(TransferExecutor, "_complete", staticmethod(complete))


@mutant("tiers", field.PARTIAL)
def a_page_is_stored_without_the_one_before(patch: Patch) -> None:
    """Pages are stored that no lookup finds, since those before them are not stored."""
    real = archiving.transfer_of

    def make(link: Lane, parts: Any, *args: Any) -> Transfer:
        if link is Lane.ARCHIVE:
            for part in parts:
                if len(part.pages) > 1:
                    part.pages, part.at, part.host = part.pages[1:], part.at[1:], part.host[1:]
        return real(link, parts, *args)

    patch.setattr(archiving, "transfer_of", make)


@mutant("tiers", field.DEAD)
def what_a_full_link_refused_is_not_stored(patch: Patch) -> None:
    """What the link to storage had no room for is never tried again."""

    def undo(archiver: Archiver, batch: Any) -> None:
        for part in batch.parts:
            archiver._stored[part.group].unmark(part.pages, State.RESIDENT)

    patch.setattr(Archiver, "_undo", undo)


@mutant("tiers", field.PARTIAL)
def what_is_read_in_part_is_taken_for_granted(patch: Patch) -> None:
    """A prefix is resumed on its keys and values, though the state that goes with them is in no tier."""
    patch.setattr(offloading, "resume_point", lambda groups, pages, hosts=(): (len(pages), ""))


@mutant("tiers", field.KEY)
def keys_do_not_cover_the_salt(patch: Patch) -> None:
    """Two tenants with the same prompt find each other's pages in storage."""
    real = hashing.namespace_seed
    patch.setattr(page_names, "_seed_of", lambda namespace, identity: real(Namespace(), identity))


@mutant("tiers", field.KEY)
def all_namespaces_share_a_scope(patch: Patch) -> None:
    """A flush of one tenant removes the pages of all, and a list of one has the pages of all."""
    real = PageNames.scope
    patch.setattr(PageNames, "scope", lambda names, namespace: real(names, Namespace()))


@mutant("tiers", field.KEY)
def keys_do_not_cover_what_came_before(patch: Patch) -> None:
    """A page is found wherever its tokens stand."""
    real = hashing.chain_pages

    def chain(parent: bytes, tokens: bytes, page_bytes: int) -> Any:
        return tuple(
            key
            for at in range(0, len(tokens) - page_bytes + 1, page_bytes)
            for key in real(bytes(32), tokens[at : at + page_bytes], page_bytes)
        )

    patch.setattr(hashing, "chain_pages", chain)


@mutant("tiers", field.OFF_BY_ONE)
def what_a_cached_page_lacks_is_its_neighbours(patch: Patch) -> None:
    """A window or a state that comes from storage to a page that is cached is that of the page before it."""
    real = RequestedPrefix.keys

    def keys(prefix: RequestedPrefix, places: Any) -> Any:
        return real(prefix, np.where((places < prefix.known) & (places > 0), places - 1, places))

    patch.setattr(RequestedPrefix, "keys", keys)


@mutant("tiers", field.DEAD)
def storage_is_asked_behind_cached_pages_only(patch: Patch) -> None:
    """Once its window or state has gone, a cached prefix is computed again for ever, though storage has all of it."""
    real = RequestedPrefix.answered

    def answered(prefix: RequestedPrefix, answers: Any) -> None:
        real(prefix, answers)
        for stored in prefix._stored:
            stored[: prefix.known] = False

    patch.setattr(RequestedPrefix, "answered", answered)


@mutant("tiers", field.STALE)
def a_flush_leaves_the_store(patch: Patch) -> None:
    """What was flushed comes back from storage."""
    patch.setattr(Tiering, "delete_stored", lambda tiers, namespace: None)


# -- what keeps what


@mutant("tiers", field.EVICTED)
def copies_of_leased_paths_are_evicted(patch: Patch) -> None:
    """The copy of a page goes while it is being loaded."""

    def may_lose_copies(where: NodeTiers, node: Any) -> bool:
        return bool(where.num_copies(node)) and not any(map(where.num_copies, node.children.values()))

    patch.setattr(NodeTiers, "_may_lose_copies", may_lose_copies)


@mutant("tiers", field.PINS)
def a_prefetch_keeps_its_prefix_for_ever(patch: Patch) -> None:
    """What a request has read ahead on is never given back."""

    def release(prefetcher: Prefetcher, found: Prefetch) -> None:
        prefetcher._holding.pop(found, None)
        found.hold.released = True

    patch.setattr(Prefetcher, "_release", release)


@mutant("tiers", field.PINS)
def a_prefetch_keeps_its_frames_for_ever(patch: Patch) -> None:
    """Windows and states on the host that a request has counted on are never given up again."""
    real = Holds.release

    def release(holds: Holds, hold: Hold) -> None:
        if hold.reason is Reason.READ_AHEAD:
            hold.frames = ()
        real(holds, hold)

    patch.setattr(Holds, "release", release)


@mutant("tiers", field.EVENTS)
def removed_on_the_first_of_two_copies(patch: Patch) -> None:
    """Routers are told that a page has left the device when only its copy on the host is gone."""
    real = PageNames.tell

    def tell(names: PageNames, event: Any, node: Any, start: int, stop: int, tier: Tier) -> None:
        real(names, event, node, start, stop, Tier.DEVICE if event is PagesRemoved else tier)

    patch.setattr(PageNames, "tell", tell)


# -- records that the device reads in place


@mutant("tiers", field.FREED_EARLY)
def a_page_id_is_allocated_while_its_record_is_read(patch: Patch) -> None:
    """Latents in host memory are overwritten by another page while the store still reads them."""
    patch.setattr(PageIdGroup, "free_ids", lambda group, pages: pages)


@mutant("tiers", field.STALE)
def records_in_place_are_not_sealed(patch: Patch) -> None:
    """A save of latents that are in host memory already does nothing, so that no check can tell whose they are."""
    real = HostRecords.seal

    def seal(records: HostRecords, group: int, host: Ids, keys: Sequence[bytes]) -> None:
        if group != records.hosted:
            real(records, group, host, keys)

    patch.setattr(HostRecords, "seal", seal)


@mutant("tiers", field.DAMAGED)
def records_in_place_are_not_checked(patch: Patch) -> None:
    """A load skips what it need not copy, and damaged latents are read."""
    real = Tiering.missing

    def missing(tiers: Tiering, pages: Ids) -> list[Ids]:
        found = real(tiers, pages)
        for group in tiers._groups:
            if group.frames.are_page_ids and len(found[group.index]):
                group.restore(found[group.index])
                found[group.index] = pages[:0]
        return found

    patch.setattr(Tiering, "missing", missing)


@mutant("tiers", field.STALE)
def latents_are_the_anchor(patch: Patch) -> None:
    """A page whose latents are in host memory counts as being on the device, where its index keys are not."""
    real = Residency.__init__

    def init(table: Residency, *what: Any) -> None:
        real(table, *what)
        for on_host in what[4]:
            table.anchor_group = on_host
            table._anchors = {tier: table.of(tier, on_host) for tier in table._anchors}

    patch.setattr(Residency, "__init__", init)
    patch.setattr(PageIdFrames, "drop", lambda frames, pages: None)

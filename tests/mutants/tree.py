"""Mistakes of the prefix tree: pins, matching, views, events."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.prefix import hashing, match, page_names, radix_cache
from quire.prefix.match import Insertion
from quire.prefix.node import Levels, common_pages
from quire.prefix.page_names import PageNames
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace, PagesRemoved
from tests.mutants import field
from tests.mutants.registry import Patch, mutant


@mutant("cache", field.PINS)
def split_loses_leases(patch: Patch) -> None:
    """A prefix in use loses its pin when another request cuts its edge, and is evicted under it."""
    real = RadixCache._split

    def split(tree: RadixCache, node: Any, at: int) -> Any:
        upper = real(tree, node, at)
        upper.held = upper.level = 0
        return upper

    patch.setattr(RadixCache, "_split", split)


@mutant("cache", field.PINS)
def release_unpins_only_the_node(patch: Patch) -> None:
    """Pins on shared ancestors are never released, and the pool fills with unused pages."""
    real = Levels.release

    def release(levels: Levels, node: Any) -> None:
        parent, node.parent = node.parent, None
        real(levels, node)
        node.parent = parent

    patch.setattr(Levels, "release", release)


@mutant("cache", field.EVICTED)
def evict_ignores_leases(patch: Patch) -> None:
    """A running request reads pages that were evicted and given to another."""
    real = RadixCache.evict

    def evict(tree: RadixCache, num_pages: int, cause: str = "") -> Any:
        held = [(node, node.level) for node in tree.nodes()]
        for node, _ in held:
            node.level = 0
            tree.offer(node)
        victims = real(tree, num_pages, cause)
        for node, level in held:
            node.level = level
        return victims

    patch.setattr(RadixCache, "evict", evict)


@mutant("cache", field.LEAK)
def duplicates_leak(patch: Patch) -> None:
    """Two requests compute the same prefix, and one copy is lost for good."""
    real = RadixCache.insert

    def insert(tree: RadixCache, *args: Any) -> Insertion:
        found = real(tree, *args)
        return Insertion(found.pages, found.duplicates[:0])

    patch.setattr(RadixCache, "insert", insert)


@mutant("cache", field.STALE)
def duplicates_freed_but_still_in_the_row(patch: Patch) -> None:
    """The duplicate is freed and the request goes on reading it."""
    real = RadixCache.insert

    def insert(tree: RadixCache, lease: Any, tokens: Any, pages: Any) -> Insertion:
        found = real(tree, lease, tokens, pages)
        return Insertion(pages.copy(), found.duplicates)

    patch.setattr(RadixCache, "insert", insert)


@mutant("cache", field.VIEW)
def duplicates_are_a_view(patch: Patch) -> None:
    """The pages freed as duplicates are a view of a row that was rewritten: the tree's are freed instead."""

    class View(np.ndarray):
        def copy(self, order: Any = "C") -> Any:
            return self

    real = RadixCache.insert

    def insert(tree: RadixCache, lease: Any, tokens: Any, pages: Any) -> Insertion:
        found = real(tree, lease, tokens, pages)
        return Insertion(found.pages, found.duplicates.view(View))

    patch.setattr(RadixCache, "insert", insert)


@mutant("cache", field.KEY)
def match_ignores_the_namespace(patch: Patch) -> None:
    """One tenant's pages answer another's prompt."""
    real = RadixCache.match

    def match(tree: RadixCache, namespace: Namespace, tokens: Any) -> Any:
        found = [real(tree, other, tokens) for other in (namespace, *tree.roots)]
        return max(found, key=lambda match: match.num_pages)

    patch.setattr(RadixCache, "match", match)


@mutant("cache", field.KEY)
def adapter_and_salt_are_one_field(patch: Patch) -> None:
    """An adapter called like another tenant's salt shares its pages."""

    def joined(namespace: Namespace) -> Namespace:
        return Namespace(namespace.adapter + namespace.salt)

    real_match, real_root = RadixCache.match, RadixCache.root
    patch.setattr(RadixCache, "match", lambda tree, ns, tokens: real_match(tree, joined(ns), tokens))
    patch.setattr(RadixCache, "root", lambda tree, ns: real_root(tree, joined(ns)))


@mutant("cache", field.OFF_BY_ONE)
def match_is_not_page_aligned(patch: Patch) -> None:
    """A page that differs in its last tokens is taken for a match."""

    def common(data: bytes, at: int, key: bytes, unit: int) -> int:
        tokens = common_pages(data, at, key, 4)
        return min(len(key), (len(data) - at) // unit * unit, -(-tokens // unit) * unit)

    patch.setattr(match, "common_pages", common)
    patch.setattr(radix_cache, "common_pages", common)


@mutant("cache", field.EVICTED)
def outdated_hit_is_used(patch: Patch) -> None:
    """A hit taken before an eviction is used after it."""
    patch.setattr(RadixCache, "version", property(lambda tree: 0, lambda tree, value: None), raising=False)


@mutant("cache", field.OFF_BY_ONE)
def evict_takes_one_too_many(patch: Patch) -> None:
    """More is evicted than was needed."""
    real = RadixCache.evict
    patch.setattr(RadixCache, "evict", lambda tree, num_pages, cause="": real(tree, num_pages + (num_pages > 0), cause))


@mutant("cache", field.EVENTS)
def removals_are_not_told(patch: Patch) -> None:
    """Routers are never told that a page is gone."""
    real = PageNames.tell

    def tell(names: PageNames, event: Any, *edge: Any) -> None:
        if event is not PagesRemoved:
            real(names, event, *edge)

    patch.setattr(PageNames, "tell", tell)


@mutant("cache", field.EVENTS)
def removals_name_the_whole_edge(patch: Patch) -> None:
    """Routers are told that a whole edge is gone when only its tail was evicted."""
    real, halves = RadixCache._cut, hashing.cut_hashes

    def cut(tree: RadixCache, node: Any, keep: int, eviction: Any) -> bytes:
        whole = node.hashes
        within = Patch()
        within.setattr(page_names, "cut_hashes", lambda hashes, at: (halves(hashes, at)[0], whole))
        within.setattr(radix_cache, "cut_hashes", lambda hashes, at: (halves(hashes, at)[0], whole))
        try:
            return real(tree, node, keep, eviction)
        finally:
            within.undo()

    patch.setattr(RadixCache, "_cut", cut)


@mutant("cache", field.EVENTS)
def split_keeps_all_hashes_below(patch: Patch) -> None:
    """After a split, hashes chain from the wrong parent."""
    real = RadixCache._split

    def split(tree: RadixCache, node: Any, at: int) -> Any:
        hashes = node.hashes
        upper = real(tree, node, at)
        upper.hashes = hashes
        return upper

    patch.setattr(RadixCache, "_split", split)


@mutant("cache", field.KEY)
def hashes_ignore_the_namespace(patch: Patch) -> None:
    """Two tenants' pages have one hash, and a router sends a prompt to pages that it may not read."""
    real: Any = vars(page_names)["namespace_seed"]
    patch.setattr(page_names, "_seed_of", lambda namespace, identity=b"": real(Namespace(), identity))

"""Mutants: historical mistakes, injected into the production code to show that the checks notice them."""

from __future__ import annotations

from tests.mutants import allocator, cache, drafts, scheduler, states, tiers, tree, windows
from tests.mutants.registry import MUTANTS, Mutant, Patch, find, injected, mutant

__all__ = [
    "MUTANTS",
    "Mutant",
    "Patch",
    "allocator",
    "cache",
    "drafts",
    "find",
    "injected",
    "mutant",
    "scheduler",
    "states",
    "tiers",
    "tree",
    "windows",
]

"""Backends that store records outside the process: one per file, all behind `quire.tiers.store.Store`."""

"""Prefix sharing: one radix tree for every kind of memory, reach, leases, eviction order, content keys."""

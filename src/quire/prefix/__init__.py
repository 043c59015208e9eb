"""Prefix sharing: one radix tree for all groups, reach, leases, eviction order, content keys."""

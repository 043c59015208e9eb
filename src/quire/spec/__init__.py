"""Frozen vocabulary: ids, layouts, groups, models, events. No behaviour, no torch."""

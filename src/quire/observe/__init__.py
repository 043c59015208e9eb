"""Metrics, events and explanations."""

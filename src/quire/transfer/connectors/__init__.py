"""Implementations of the connector port."""

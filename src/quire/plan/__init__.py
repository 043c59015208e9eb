"""Arithmetic: bytes to pages and back. No torch."""

"""Engines on one machine or many, which Ray Serve starts, replaces and counts."""

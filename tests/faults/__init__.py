"""Processes of a server that are killed, stopped and ended at any moment, under load: `python -m tests.faults`."""

"""The command line. Nothing here imports torch before a command needs it."""

from __future__ import annotations

from quire.cli.app import main

__all__ = ["main"]

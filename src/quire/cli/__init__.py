"""The command line. Nothing here imports torch before a command needs it. An engine's process imports this package as
its parent's main module, and has no use for the commands."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `quire` script."""
    from quire.cli.app import app

    app()


__all__ = ["main"]

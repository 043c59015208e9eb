"""The command line. Nothing here imports torch before a command needs it. An engine's process imports this package as
its parent's main module, and has no use for the commands."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `quire` script."""
    from quire.garbage import kept_imports

    try:
        with kept_imports():
            from quire.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(f"The commands need {error.name}, which is not installed: pip install typer rich") from None

    app()


__all__ = ["main"]

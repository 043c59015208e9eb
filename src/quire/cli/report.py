"""How commands end badly: a short panel (or a JSON object) on stderr and an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from quire.errors import QuireError

EXIT_DEFECT = 1
EXIT_INTERRUPTED = 130


@contextmanager
def reported(*, as_json: bool, debug: bool = False) -> Iterator[None]:
    """Run a command's body; whatever it raises becomes a message and an exit code. `debug` shows the traceback too."""
    try:
        yield
    except typer.Exit:
        raise
    except BrokenPipeError:  # the reader of our output has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it at exit
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        known = error if isinstance(error, QuireError) else _defect(error)
        show_error(known, as_json=as_json)
        raise typer.Exit(known.exit_code) from None


def _defect(error: Exception) -> QuireError:
    defect = QuireError(
        f"{type(error).__name__}: {error}", fix="this is a defect of Quire; --debug shows where, please report it."
    )
    defect.exit_code = EXIT_DEFECT
    return defect


def show_error(error: QuireError, *, as_json: bool) -> None:
    """Print what failed, what would help and the code to search for."""
    if as_json:
        body = {"message": error.message, "fix": error.fix, "code": error.code, "exit_code": error.exit_code}
        print(json.dumps({"error": body}), file=sys.stderr)
        return
    text = Text(error.message)
    if error.fix:
        text.append("\n\nFix: ", style="bold green")
        text.append(error.fix)
    Console(stderr=True).print(Panel(text, title=f"[bold]{error.code}[/bold]", title_align="left", border_style="red"))

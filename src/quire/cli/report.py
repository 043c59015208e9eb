"""The output of commands: tables for people, JSON for machines, and a panel with an exit code for errors."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.panel import Panel
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from quire.errors import InvalidInput, QuireError
from quire.settings.setting import Settings, setting

EXIT_DEFECT = 1
EXIT_INTERRUPTED = 130


_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class Terminal(Console):
    """The console of reports, which show names of others: no `str` is markup, and control characters are left out."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(highlight=False, markup=False, stderr=stderr)

    def on_broken_pipe(self) -> None:
        """The reader has closed it, so nothing more is shown. Of a report that is the end, which `reported` knows."""
        self.quiet = True
        if not self.stderr:
            raise BrokenPipeError

    def status(self, status: RenderableType, **more: Any) -> Status:
        """What goes on, as a `with` block."""
        return super().status(Text(status) if isinstance(status, str) else status, **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Its segments. Those that are the terminal's own controls stay."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else _CONTROLS.sub("", text), style, control)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a command: `data` as JSON, or the output of `shown` for people; and the exit code. `pictures` are
    parts of a page, beside that (`quire.cli.report_page`)."""

    data: Any
    shown: Callable[[], Iterable[RenderableType]]
    exit_code: int = 0
    pictures: Callable[[], Iterable[Mapping[str, Any]]] = tuple

    def print(self, *, as_json: bool) -> None:
        """Print it on the standard output. Raises typer.Exit with an exit code that is not 0."""
        if as_json:
            print(json.dumps(self.data))
        else:
            console = Terminal()
            for part in self.shown():
                console.print(part)
        if self.exit_code:
            raise typer.Exit(self.exit_code)


class PageOutput(Settings):
    """The output of a command whose report can be a page."""

    html: Path | None = setting(
        None, "Write the report as a page too: one file, which loads nothing.", group="Output", metavar="FILE"
    )


class ListedOutput(Settings):
    """The output of a command that takes names."""

    names: bool = setting(False, "Print the names that can be given.", group="Output", option="--list")


def drafts_remark(found: Mapping[str, Any]) -> str:
    """What speculation brought (`Speculator.statistics`), and why it is off if it is."""
    said = (
        f"{found['accepted_tokens']:,} of {found['draft_tokens']:,} drafts accepted, "
        f"{found['tokens_per_step']:.2f} tokens of a request in a step"
    )
    if found.get("is_off"):
        cost, brings = found["draft_cost"], found["draft_brings"]
        each = f"a draft costs {cost:.2f} tokens and brings {brings:.2f}"
        said += f"; off now, because {each}" if cost >= brings else f"; off now: so far drafts lost time ({each})"
    return said


def plain_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    left: Collection[str] | None = None,
    wraps: Collection[str] = (),
    title: str = "",
) -> Table:
    """A table without lines. The columns of `left`, or else the first one, are aligned on the left, the others on the
    right. Only those of `wraps` break lines where there is too little room. With a title, columns are closer."""
    gap = 1 if title else 2
    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, padding=(0, gap, 0, 0), pad_edge=False
    )
    for name in columns:
        is_left = name in (columns[:1] if left is None else left)
        table.add_column(
            name,
            justify="left" if is_left else "right",
            no_wrap=name not in wraps,
            overflow="fold" if name in wraps else "ellipsis",
        )
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def cell(value: Any) -> str | Text:
    """A value of a table: thousands apart, yes and no, a dash for nothing."""
    if isinstance(value, str | Text):
        return value
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.10g}" if isinstance(value, float) else f"{value:,}"


def named_rows(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Names in bold, and a text beside each, without markup."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, text in rows:
        table.add_row(name, Text(text) if isinstance(text, str) else text)
    return table


def panel(content: RenderableType, title: str | Text, style: str = "none") -> Panel:
    """A frame as wide as its content. A title that is a `str` is in bold."""
    named = Text(title, "bold") if isinstance(title, str) else title
    return Panel(content, title=named, title_align="left", border_style=style, expand=False)


@contextmanager
def reported(*, as_json: bool, debug: bool = False) -> Iterator[None]:
    """Run a command's body; an exception becomes a message and an exit code. `debug` shows the traceback too."""
    try:
        yield
    except typer.Exit:
        raise
    except BrokenPipeError:  # the reader of the output has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it at exit
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        known = error if isinstance(error, QuireError) else _of_system(error) or _defect(error)
        _show_error(known, as_json=as_json)
        raise typer.Exit(known.exit_code) from None


def _of_system(error: Exception) -> QuireError | None:
    """What the system refused; None if it was not that."""
    if not isinstance(error, OSError):
        return None
    if error.filename is not None:
        return InvalidInput(f"{error.strerror} ('{error.filename}').", fix="check the path and who may use it.")
    if error.errno != errno.ENOSPC:
        return None
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as above: it cannot take what is left
    return InvalidInput(f"{error.strerror}.", fix="make room on the disk of the output.")


def _defect(error: Exception) -> QuireError:
    defect = QuireError(
        f"{type(error).__name__}: {error}", fix="this is a defect of Quire; --debug shows where, please report it."
    )
    defect.exit_code = EXIT_DEFECT
    return defect


def _show_error(error: QuireError, *, as_json: bool) -> None:
    """What failed, what would help and the code to search for."""
    if as_json:
        print(error.to_json(), file=sys.stderr)
        return
    text = Text(error.message)
    if error.fix:
        text.append("\n\nFix: ", style="bold green")
        text.append(error.fix)
    Terminal(stderr=True).print(Panel(text, title=Text(error.code, "bold"), title_align="left", border_style="red"))

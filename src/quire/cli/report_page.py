"""A report as a page: one file with the parts of the server's page in it, which loads nothing.

What a report shows on a terminal becomes headings, tables and paragraphs, below its pictures. The file has it as JSON,
and scripts that make text nodes of it: nothing in it is markup, and its policy allows these scripts alone.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from hashlib import sha256
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import quire
from quire.cli.report import Report
from quire.errors import InvalidInput

_FILES = Path(quire.__file__).parent / "serve" / "static"
_MODULES = ("dom.js", "charts.js", "parts.js", "report.js")
"""Those of a report, each behind the ones that it imports."""

_IMPORT = re.compile(r'^import (\{.*?\}) from "\./(.+?)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*? |class |const )(\w+))", re.MULTILINE)
_STYLES = {"dim": "hint", "yellow": "bad", "red": "bad", "green": "good"}


def write_page(report: Report, path: Path, title: str) -> None:
    """Write the report there. Raises InvalidInput where no file can be written."""
    try:
        path.write_text(page_of(report, title), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"the page cannot be written: {error}.", fix="give --html a file in a folder.") from None


def page_of(report: Report, title: str) -> str:
    """The file."""
    told = list(chain.from_iterable(map(_told, report.shown())))
    lead = int(bool(told) and told[0]["kind"] != "table")  # what it is of stands before the pictures
    parts = [*told[:lead], *report.pictures(), *told[lead:]]
    # No text can end the element that holds it.
    found = json.dumps({"parts": parts}).replace("<", "\\u003c")
    scripts = (_read("uplot.js"), "const modules = {};\n" + "".join(map(_module, _MODULES)))
    hashes = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'; form-action 'none'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{_read("uplot.css")}{_read("style.css")}</style>
</head>
<body>
<header><h1>Quire <span>{escape(title)}</span></h1></header>
<main><section id="parts" aria-label="Report"></section></main>
<script id="report" type="application/json">{found}</script>
<script>{scripts[0]}</script>
<script type="module">{scripts[1]}</script>
</body>
</html>
"""


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _module(name: str) -> str:
    """A module as a function of its own, whose exports are in `modules`."""
    text = _read(name)
    exported = ", ".join(_EXPORT.findall(text))
    text = _EXPORT.sub("", _IMPORT.sub(r'const \1 = modules["\2"];', text))
    return f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();\n'


def _told(shown: RenderableType) -> Iterator[dict[str, Any]]:
    """The parts of what a terminal shows."""
    if isinstance(shown, Panel):
        yield {"kind": "heading", "text": _cell(shown.title or "")}
        yield from _told(shown.renderable)
    elif isinstance(shown, Group):
        yield from chain.from_iterable(map(_told, shown.renderables))
    elif isinstance(shown, Table):
        rows = zip(*([_cell(each) for each in column.cells] for column in shown.columns), strict=True)
        heads = [_cell(column.header) for column in shown.columns]
        yield {"kind": "table", "label": _cell(shown.title or ""), "heads": heads, "rows": list(rows)}
    elif text := _cell(shown).strip():
        style = str(shown.style) if isinstance(shown, Text) else ""
        yield from ({"kind": "text", "text": each, "style": _STYLES.get(style)} for each in text.splitlines() if each)


def _cell(shown: RenderableType) -> str:
    return shown.plain if isinstance(shown, Text) else str(shown)


# -- pictures


def bar(label: str, parts: Iterable[tuple[str, int, str]]) -> dict[str, Any]:
    """Counts of tokens beside each other: name, count and colour (`--c-...` of style.css) of each."""
    shown = [{"name": name, "value": value, "color": color} for name, value, color in parts]
    return {"kind": "bar", "label": label, "parts": shown}


def chart(label: str, across: str, x: Iterable[float], series: Iterable[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Lines over seconds, or over few numbers of anything else. A series has a name, a colour and values."""
    return {"kind": "chart", "label": label, "across": across, "x": list(x), "series": list(series), **more}

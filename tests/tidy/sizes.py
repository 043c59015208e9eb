"""Compares the table of docs/decisions/034-the-size-of-the-cache.md with the packages: `python -m tests.tidy.sizes`.

Prints each row with the lines of today, and those without blank lines, comments and docstrings; exits with 1 where the
column "now" differs.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/decisions/034-the-size-of-the-cache.md"
PACKAGES = ("memory", "prefix", "cache", "offload", "tiers")


def size(path: Path) -> tuple[int, int]:
    """Lines of a file, and those with code."""
    text = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)
    code = {line for token in tokens if token.type not in layout for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(text.splitlines()), len(code)


def sizes() -> dict[str, tuple[int, int]]:
    """By the names of the table's rows."""
    files = {name: sorted((ROOT / "src/quire" / name).rglob("*.py")) for name in PACKAGES}
    stores = [path for path in files["tiers"] if "stores" in path.parts]
    files |= {"tiers": [path for path in files["tiers"] if path not in stores], "stores": stores}
    found = {name: [size(path) for path in paths] for name, paths in files.items()}
    totals = {name: (sum(lines for lines, _ in each), sum(code for _, code in each)) for name, each in found.items()}
    return totals | {"all": (sum(lines for lines, _ in totals.values()), sum(code for _, code in totals.values()))}


def main() -> int:
    differs = False
    text = TABLE.read_text(encoding="utf-8")
    for name, (lines, code) in sizes().items():
        row = re.search(rf"^\| `?{name}\b[^|]*\| [\d,]+ \| ([\d,]+) \| ([\d,]+) \|", text, re.MULTILINE)
        assert row, f"the table has no row for {name}"
        stated = tuple(int(number.replace(",", "")) for number in row.groups())
        differs |= stated != (lines, code)
        print(f"{name:8} {lines:6,} lines, {code:6,} of code; the table says {stated[0]:,} and {stated[1]:,}")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())

"""What a program can check of words: names with several meanings, and remarks that begin without their noun."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.tidy.features import SOURCE

_NO_NOUN = re.compile(r"(of|by|it|the same)\b", re.IGNORECASE)


def repeated_names() -> dict[str, list[str]]:
    """Classes of one name at the top of several modules, with these modules."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path.relative_to(SOURCE).as_posix())
    return {name: modules for name, modules in sorted(found.items()) if len(modules) > 1}


def without_noun() -> list[str]:
    """Comments and docstrings that begin with "of", "by", "it" or "the same", as `file:line: text`."""
    return [
        f"{path.relative_to(SOURCE)}:{line}: {text}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in remarks(path.read_text())
        if _NO_NOUN.match(text)
    ]


def remarks(text: str) -> Iterator[tuple[int, str]]:
    """Comments and docstrings, those of attributes too, with the lines where they begin."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()
    lines, before = text.splitlines(), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        is_whole_line = not lines[line - 1][:column].strip()
        if not (is_whole_line and before == line - 1):  # else it goes on with the comment above
            yield line, token.string.lstrip("#: ")
        before = line if is_whole_line else 0


def main() -> None:
    """List both."""
    for name, modules in repeated_names().items():
        print(f"{name}: {', '.join(modules)}")
    print(*without_noun(), sep="\n")


if __name__ == "__main__":
    main()

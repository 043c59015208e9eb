"""MkDocs hooks: documents outside docs/ become pages, and links that work in the repository work on the site too.

A link to a Python file leads to a page that shows it, a link to any other file to a copy of it. The reference of Python
gets the docstrings of the public names.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md"}
PAGES |= {name: name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")}
PAGES |= {name: name for name in ("examples/README.md", "bench/README.md", "training/README.md")}
"""Documents outside docs/, and where they are on the site."""

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?!https?:|mailto:|#)([^)#\s]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents outside docs/, and what any document links to that is none."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    documents = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if file.abs_src_path)]
    documents = [path for path in documents if (ROOT / path).is_file()]
    for document in documents:
        text = _FENCE.sub("", (ROOT / document).read_text(encoding="utf-8"))
        for link in _LINK.finditer(text):
            _add(files, config, _repository_path(document, link[2]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between places in the repository into links between places on the site."""
    uri = page.file.src_uri
    sources = {site: path for path, site in PAGES.items()}
    document = sources.get(uri, f"docs/{uri}")

    def replaced(link: re.Match[str]) -> str:
        target = _site_uri(_repository_path(document, link[2]))
        return link[1] + os.path.relpath(target, PurePosixPath(uri).parent).replace(os.sep, "/") + link[3]

    parts = _FENCE.split(markdown)
    if uri.startswith("source/"):
        return markdown
    parts[::2] = [_LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts) + (_docstrings() if uri == "reference/python.md" else "")


def _repository_path(document: str, link: str) -> str:
    return os.path.normpath(PurePosixPath(document).parent / link).replace(os.sep, "/")


def _site_uri(path: str) -> str:
    """Where a file or folder of the repository is on the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    is_shown = path.endswith(".py") or (ROOT / path).is_dir()
    return f"source/{path}.md" if is_shown else f"source/{path}"


def _add(files: Files, config: MkDocsConfig, path: str) -> None:
    """Adds a file or folder of the repository, unless it is there. What does not exist is left to MkDocs' warning."""
    uri, found = _site_uri(path), ROOT / path
    if uri in files.src_uris or path.startswith("docs/") or not found.exists():
        return
    if found.is_dir():
        listed = sorted(each.name for each in found.iterdir() if each.is_file())
        places = [os.path.relpath(_site_uri(f"{path}/{name}"), PurePosixPath(uri).parent) for name in listed]
        names = "\n".join(f"- [{name}]({place})" for name, place in zip(listed, places, strict=True))
        files.append(File.generated(config, uri, content=f"# {path}\n\n{names}\n"))
        for name in listed:
            _add(files, config, f"{path}/{name}")
    elif path.endswith(".py"):
        text = found.read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=f"# {path}\n\n````python\n{text}````\n"))
    else:
        files.append(File.generated(config, uri, abs_src_path=str(found)))


def _docstrings() -> str:
    """A directive of mkdocstrings for each public name."""
    names = re.findall(r" as (\w+)$", (ROOT / "src/quire/__init__.pyi").read_text(encoding="utf-8"), re.MULTILINE)
    parts = [f"::: quire.{name}\n" for name in sorted(names)]
    return "\n\n## Docstrings\n\n" + "\n".join(parts)

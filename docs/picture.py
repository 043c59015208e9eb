"""Draws docs/images/demo.svg, the picture of the README: draws what the first scene of `make demo` prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent / "images" / "demo.svg"
WIDTH = 92


def main() -> None:
    """Takes half a minute."""
    command = [sys.executable, "-m", "examples.demo", "--scene", "plain"]
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print("[bold]$ make demo[/bold]", highlight=False)
    for line in re.sub(r"\x1b\[(?![\d;]*m)[\d;?]*[A-Za-z]|\r", "", done.stdout).splitlines():
        if line.strip() and not re.search(r"\d of \d: ", line):  # not the lines that show progress
            console.print(Text.from_ansi(line))
    drawn = console.export_svg(title="make demo", unique_id="demo")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # no fonts from elsewhere
    PICTURE.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", encoding="utf-8")
    print(f"Drawn into {PICTURE}")


if __name__ == "__main__":
    main()

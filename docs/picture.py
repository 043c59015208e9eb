"""Draws docs/images/demo.svg, the picture of the README: runs `quire demo --edition plain` and draws what it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

from quire.cli.demo_view import print_serving
from rich.console import Console

PICTURE = Path(__file__).parent / "images" / "demo.svg"


def main() -> None:
    """A server with a small pool, eight conversations and a request that is too large: half a minute."""
    command = [sys.executable, "-m", "quire", "demo", "--edition", "plain", "--json"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    console = Console(record=True, width=92, file=StringIO(), force_terminal=True)
    console.print("[bold]$ quire demo --edition plain[/bold]", highlight=False)
    print_serving(console, found | {"answers": found["answers"][:1]})
    drawn = console.export_svg(title="quire demo", unique_id="demo")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # no fonts from elsewhere
    PICTURE.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", encoding="utf-8")
    print(f"Drawn into {PICTURE}")


if __name__ == "__main__":
    main()

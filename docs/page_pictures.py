"""Draws docs/images/page.png, the page of a real server after half a minute of requests, and docs/images/strip.png.

The strip is of a prompt that was on the device, on the host and evicted in part. It needs chromium and playwright:
`apt-get install chromium`, `pip install -e '.[clients]'`.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from PIL import Image
from playwright.sync_api import FloatRect, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
SECONDS = 30
_MORE_SECONDS = 120
_KINDS = {"device", "host", "evicted"}
WIDTH = 1000
_COLORS = 128  # a third of the bytes
_SERVER = ("--port", "0", "--json", "--kv-memory", "5MiB", "--host-memory", "5MiB", "--load", "always")
_TEXT = (Path(__file__).parent / "style.md").read_text(encoding="utf-8")


def main() -> None:
    """Takes a minute, and more on a busy machine."""
    command = [sys.executable, "-m", "quire", "serve", *_SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        try:
            with ThreadPoolExecutor(4) as clients, sync_playwright() as playwright:
                until = time.monotonic() + SECONDS
                talking = [clients.submit(talk, url, number, until) for number in range(4)]
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": WIDTH, "height": 900})
                page.goto(url)
                page.wait_for_timeout(1000 * (SECONDS - 4))
                page.screenshot(path=IMAGES / "page.png", full_page=True, clip=shown(page))
                draw_strip(page, max(each.result() for each in talking)[1])
                browser.close()
            for name in ("page.png", "strip.png"):
                Image.open(IMAGES / name).convert("RGB").quantize(_COLORS).save(IMAGES / name, optimize=True)
        finally:
            server.terminate()


def talk(url: str, number: int, until: float) -> tuple[int, str]:
    """Conversations, each turn longer than the one before, until one had a prompt that was on the device, on the host
    and evicted in part, or two of these. Returns how many, and the request."""
    chance, found = random.Random(number), (0, "")
    while time.monotonic() < until + (found[0] < len(_KINDS)) * _MORE_SECONDS:
        start = chance.randrange(0, 6) * 400
        said = _TEXT[:600] + _TEXT[start : start + 400]
        for _ in range(3):
            answer = ask(url, {"prompt": said, "max_tokens": 24, "cache_salt": f"tenant-{number % 2}", "explain": True})
            kinds = {each.get("tier", each["cause"]) for each in answer["choices"][0]["explanation"]["reasons"]}
            found = max(found, (len(kinds & _KINDS), answer["id"]))
            said += answer["choices"][0]["text"] + _TEXT[start + 400 : start + 500]
    return found


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One completion."""
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def shown(page: Page) -> FloatRect:
    """All above the chart of memory."""
    box = page.locator("#memory .charts").bounding_box()
    assert box is not None
    return {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + page.evaluate("scrollY")}


def draw_strip(page: Page, request_id: str) -> None:
    """The prompt of a request."""
    page.fill("#explain-id", request_id)
    page.keyboard.press("Enter")
    page.wait_for_selector("#explained .strip")
    page.locator("#explained").screenshot(path=IMAGES / "strip.png")


if __name__ == "__main__":
    main()

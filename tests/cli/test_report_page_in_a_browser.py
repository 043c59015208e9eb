"""Reports as pages in Debian's chromium, without a network: what is drawn, and what axe says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.cli.report import Report
from quire.cli.report_page import bar, chart, page_of
from tests.cli.conftest import Run
from tests.serve.test_page_in_a_browser import HOSTILE, browser

__all__ = ["browser"]
COMMANDS = {
    "sweep": ("replay", "chat", "--limit", 8, "--pool-tokens", "4k,1/2,16k"),
    "pool": ("replay", "sessions", "--limit", 40),
    "plan": ("plan", "llama-3.1-8b", "--gpu", "h100-80gb"),
    "contexts": ("plan", "llama-3.1-8b", "--gpu", "h100-80gb", "--sweep", "context"),
    "causes": ("explain", "sessions", "--limit", 60),
    "roles": ("replay", "chat", "--limit", 8, "--prefill", 1),
    "strip": ("explain", "sessions", "s27.0", "--limit", 60),
}
DRAWN = {
    "sweep": (7, 0),
    "pool": (2, 2),
    "plan": (0, 2),
    "contexts": (2, 0),
    "causes": (0, 1),
    "roles": (0, 2),
    "strip": (0, 1),
}
"""Charts and bars."""


def opened(browser: Any, path: Path, wrong: list[str], width: int = 1440, scheme: str = "light") -> Any:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    page.on("request", lambda each: each.url.startswith("file:") or wrong.append(each.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda each: wrong.append(each.text))
    page.goto(f"file://{path}")
    return page


@pytest.mark.parametrize("name", COMMANDS)
def test_a_report_is_drawn_and_axe_finds_nothing_serious(browser: Any, run: Run, tmp_path: Path, name: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="it comes with the extra clients")
    path, wrong = tmp_path / "page.html", list[str]()
    assert run(*COMMANDS[name], "--html", path).exit_code == 0
    for width, scheme in ((1440, "light"), (390, "dark")):
        page = opened(browser, path, wrong, width, scheme)
        page.wait_for_function("([n]) => document.querySelectorAll('canvas').length === n", arg=[DRAWN[name][0]])
        assert page.locator(".bar").count() == DRAWN[name][1] and page.locator("tbody tr").count() > 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = axe.Axe().run(page).response["violations"]
        bad = [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]
        assert bad == []
        page.context.close()
    assert wrong == []


def test_a_value_stays_until_it_changes(browser: Any, tmp_path: Path) -> None:
    """Where nothing happens for a while, the line is level: half-way to the next point nothing is drawn between."""
    series = [{"name": "held", "color": "host", "values": [0, 0, 100, 100], "fills": True}]
    pictures = [chart("pool", "seconds", [0, 1, 60, 61], series, unit=" %", most=100)]
    path, wrong = tmp_path / "page.html", list[str]()
    path.write_text(page_of(Report(None, lambda: ["a"], pictures=lambda: pictures), "a"))
    page = opened(browser, path, wrong)
    page.wait_for_selector("canvas")
    inked = page.evaluate("""() => {
        const canvas = document.querySelector("canvas"), plot = canvas.parentElement.querySelector(".u-over");
        const scale = canvas.width / canvas.clientWidth;
        const at = plot.getBoundingClientRect(), all = canvas.getBoundingClientRect();
        const column = canvas.getContext("2d").getImageData(
            (at.x - all.x + at.width * 0.93) * scale, (at.y - all.y) * scale, 1, at.height * scale).data;
        return [...column.keys()].filter((each) => each % 4 === 3 && column[each] > 80).length / (at.height * scale);
    }""")
    assert inked < 0.2 and wrong == []


def test_names_are_no_markup(browser: Any, tmp_path: Path) -> None:
    series = [{"name": HOSTILE, "color": "host striped", "values": [1, 2]}]
    pictures = [bar(HOSTILE, [(HOSTILE, 3, "new striped")]), chart(HOSTILE, "seconds", [0, 1], series)]
    path, wrong = tmp_path / "page.html", list[str]()
    path.write_text(page_of(Report(None, lambda: [HOSTILE], pictures=lambda: pictures), HOSTILE))
    page = opened(browser, path, wrong)
    page.wait_for_selector("canvas")
    assert page.inner_text("main").count(HOSTILE) >= 4 and page.title() == HOSTILE
    assert page.evaluate("window.harmed") is None and page.locator("img").count() == 0
    assert wrong == []

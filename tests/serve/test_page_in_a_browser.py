"""The page in Debian's chromium, on real servers: its figures, prompts, keys, faults, and what axe says of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.routing.live_router import LiveRouter
from tests.serve.apart import apart, ask, at_rest, prompt
from tests.serve.live_server import LiveServer

sync_api = pytest.importorskip("playwright.sync_api", reason="it comes with the extra clients")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no chromium is installed: apt-get install chromium", allow_module_level=True)

HOSTILE = '<img src=x onerror="window.harmed=1">\'"&'
NO_ANSWER = "Failed to load resource"  # with a status that is an error
SECONDS = 20_000  # of a wait, in milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open the page of a server. At the end nothing has left the host, and no script has failed."""
    pages: list[Any] = []
    wrong: list[str] = []

    def open_page(live: LiveServer, width: int = 1440, scheme: str = "light") -> Any:
        page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        page.set_default_timeout(SECONDS)
        url = live.summary["url"] + "/"
        page.on("request", lambda each: each.url.startswith(url) or wrong.append(each.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda each: each.type == "error" and NO_ANSWER not in each.text and wrong.append(each.text))
        page.goto(url)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[LiveServer]:
    """A server with a host tier, a small pool and a name that is markup."""
    options = ("--kv-memory", "100KiB", "--host-memory", "40KiB", "--served-model-name", HOSTILE)
    options += ("--canary", "off")  # it looks at pages while nothing else happens
    with LiveServer.quire("--model", str(tiny_model), *options) as server:
        yield server


def complete(live: LiveServer, prompt: str, **more: Any) -> str:
    headers = {"X-Request-Id": "<b>own</b>"}
    status, answer = live.request("/v1/completions", {"prompt": prompt, "max_tokens": 4, **more}, headers=headers)
    assert status == 200, answer
    return str(answer["id"])


def says(page: Any, place: str, text: str) -> None:
    """Wait until a place has the text."""
    page.wait_for_function("([id, text]) => document.getElementById(id).textContent.includes(text)", arg=[place, text])


def samples(live: LiveServer) -> dict[tuple[str, ...], float]:
    """By name and labels, without the model's."""
    found = {}
    for family in text_string_to_metric_families(live.request("/metrics")[1]):
        for sample in family.samples:
            labels = sorted(f"{name}={value}" for name, value in sample.labels.items() if name != "model_name")
            found[(sample.name, *labels)] = sample.value
    return found


def figures_at_rest(live: LiveServer, page: Any, last: str) -> set[str]:
    """The names of the page's figures, which are those of `/metrics` once the `last` request is shown."""
    live.wait_idle()
    page.locator(f'[data-id="{last}"]').wait_for()
    page.wait_for_timeout(2500)  # two more events: nothing moves any more
    expected = samples(live)
    shown = page.evaluate(FIGURES)
    assert len(shown) >= 20
    for name, labels, value, text in shown:
        key = (name, *sorted(filter(None, labels.split(";"))))
        assert value == expected[key], key
        assert re.sub(r"\D", "", text) == str(int(value)), "the text says the same"
    return {name for name, *_ in shown}


FIGURES = """() => [...document.querySelectorAll("[data-metric]")].map((each) =>
    [each.dataset.metric, each.dataset.labels ?? "", Number(each.dataset.value), each.textContent])"""


def test_figures_are_those_of_metrics_at_rest(live: LiveServer, opened: Callable[..., Any]) -> None:
    page = opened(live)
    for number in range(9):
        last = complete(live, f"{number % 3} is the beginning of a prompt of several pages")
    assert {"quire_frames", "quire_prompt_tokens_by_cause_total"} <= figures_at_rest(live, page, last)
    assert page.locator(".pool small").first.inner_text().strip().startswith("24 frames, as planned; ")


def test_memory_that_can_be_resized_has_a_mark_at_its_least_size(tiny_model: Path, opened: Callable[..., Any]) -> None:
    options = ("--kv-memory", "100KiB..400KiB", "--dtype", "float32", "--canary", "off")
    with LiveServer.quire("--model", str(tiny_model), *options) as live:
        least = live.statistics()["groups"]["full"]["least_frames"]
        total = live.statistics()["frames"]["full"]["total"]
        last = complete(live, "a")
        page = opened(live)
        place = page.locator("#pools .mark").evaluate("mark => parseFloat(mark.style.left)")
        assert 0 < least < total and place == pytest.approx(100 * least / total, abs=0.01)
        assert f"the least {least} frames" in page.locator("#pools .bar").get_attribute("aria-label")
        assert live.request("/v1/cache/resize", {"device_bytes": 100 << 10})[0] == 200
        page.wait_for_selector(f'#pools [data-labels*="state=released"][data-value="{total - least}"]')
        assert "quire_frames" in figures_at_rest(live, page, last)


def test_an_arena_is_one_bar_with_the_planned_share_of_each_group(opened: Callable[..., Any]) -> None:
    options = ("--arena", "--kv-memory", "4MiB", "--dtype", "float32", "--canary", "off")
    with LiveServer.quire("--model", "quire-bundled-window", *options) as live:
        for number in range(3):
            last = complete(live, f"{number} is the beginning of a prompt " * 9)
        page = opened(live)
        assert "quire_frames" in figures_at_rest(live, page, last)
        found = live.statistics()
        groups, arena = found["groups"], found["arena"]
        places = page.locator("#pools .mark").evaluate_all("marks => marks.map((each) => parseFloat(each.style.left))")
        low, high = ([each for name, each in groups.items() if (name == arena["upper"]) == upper] for upper in (0, 1))
        shares = [each["planned_frames"] * each["bytes_per_frame"] / arena["bytes"] for each in (*low, *high)]
        assert places == pytest.approx([100 * shares[0], 100 - 100 * shares[1]], abs=0.01)
        grown = page.locator("#pools .bar span").evaluate_all("all => all.map((each) => Number(each.style.flexGrow))")
        assert len(grown) >= 3 and sum(grown) == pytest.approx(arena["bytes"])
        said = page.locator("#pools .bar").get_attribute("aria-label")
        for name, each in groups.items():
            assert f"planned for {name} {each['planned_frames']:,} frames" in said and f"{name}, cached" in said


def test_a_prompt_that_was_evicted_says_for_whom(live: LiveServer, opened: Callable[..., Any]) -> None:
    prompt = "What is evicted is computed once more. " * 4
    complete(live, prompt)
    evictors = [complete(live, chr(65 + number) * 300) for number in range(4)]
    again = complete(live, prompt)
    page = opened(live)
    page.locator(f'[data-id="{again}"]').click()
    says(page, "explained", "evicted")
    said = page.locator("#explained").inner_text()
    by = next(each for each in evictors if each in said)
    assert page.locator("#explained .strip span").count() >= 2
    page.get_by_label(re.compile(f"Explain {by}")).last.click()
    says(page, "explained", by)
    page.fill("#explain-id", "unknown")
    page.keyboard.press("Enter")
    says(page, "explained", "no explanation of request 'unknown'")


def test_a_strip_shows_from_which_tier_each_page_came(tiny_model: Path, opened: Callable[..., Any]) -> None:
    options = ("--model", str(tiny_model), "--kv-memory", "100KiB", "--host-memory", "1MiB", "--load", "always")
    with LiveServer.quire(*options, "--eviction", "lru") as live:
        body = "What makes room stays in host memory. " * 4
        complete(live, body)
        complete(live, "a" * 300)
        again = complete(live, body + "And it goes on.")
        _, answer = live.request(f"/v1/cache/explain/{again}")
        reasons = answer["explanations"][0]["reasons"]
        page = opened(live)
        page.locator(f'[data-id="{again}"]').click()
        says(page, "explained", "host hit")
        spans = (
            "() => [...document.querySelectorAll('.strip span')].map((each) => [each.className, each.style.flexGrow])"
        )
        kinds = [f"c-{each.get('tier', each['cause'])}".replace("page", "new striped") for each in reasons]
        assert "c-host" in kinds
        sizes = [str(each["tokens"]) for each in reasons]
        assert page.evaluate(spans) == [list(pair) for pair in zip(kinds, sizes, strict=True)]


def test_texts_are_shown_beside_a_strip_as_texts(tiny_model: Path, opened: Callable[..., Any]) -> None:
    with LiveServer.quire("--model", str(tiny_model), "--admin-key", "operator", "--kept-texts", "1MiB") as live:
        headers = {"Authorization": "Bearer operator"}
        _, answer = live.request("/v1/completions", {"prompt": HOSTILE, "max_tokens": 1}, headers=headers)
        page = opened(live)
        page.fill("#key-text", "operator")
        page.keyboard.press("Enter")
        page.locator(f'[data-id="{answer["id"]}"]').click()
        says(page, "explained", HOSTILE)
        assert page.locator("#explained pre").inner_text() == HOSTILE and page.locator("pre img").count() == 0


def test_the_tree_and_another_plan_are_told(live: LiveServer, opened: Callable[..., Any]) -> None:
    complete(live, "This one has no salt. " * 3)
    opening = "All of these begin with one prefix of a few pages, and go on. "
    for number in range(3):
        complete(live, opening + f"{number} " * 20, cache_salt=HOSTILE)
    page = opened(live)
    page.click("#tree-ask")
    page.wait_for_selector("#tree-told .branch")
    status, tree = live.request("/v1/cache/tree")
    assert status == 200 and page.locator("#tree-told .branch").count() == len(tree["branches"])
    assert {"without a salt", "salt "} <= {each["name"][:14].rstrip("0123456789abcdef") for each in tree["namespaces"]}
    first = page.locator("#tree-told table").last.locator("tbody tr").first
    assert first.locator("td").first.inner_text() == str(max(each["pages"] for each in tree["branches"]))
    page.select_option("#tree-order", "hits")
    says(page, "tree-told", "most hits first")
    hits = page.locator("#tree-told table").last.locator("tbody tr td:nth-of-type(4)").all_inner_texts()
    assert [int(each) for each in hits] == sorted((each["hits"] for each in tree["branches"]), reverse=True)
    page.fill("[name=kv_memory]", "1MiB")
    page.fill("[name=page_size]", "8")
    page.keyboard.press("Enter")
    says(page, "plan-if-told", "It fits.")
    _, plan = live.request("/v1/cache/plan?kv_memory=1MiB&page_size=8")
    assert f"{plan['max_total_num_tokens']:,}" in page.locator("#plan-if-told").inner_text()
    page.fill("[name=kv_memory]", HOSTILE)
    page.keyboard.press("Enter")
    says(page, "plan-if-told", "is not a size")
    assert page.evaluate("window.harmed") is None


def test_a_router_asks_all_and_the_page_shows_its_server(live: LiveServer, opened: Callable[..., Any]) -> None:
    complete(live, "What all servers are asked for")
    with LiveRouter([live, live]) as router:
        page = opened(router)
        page.select_option("#server-name", "decode-1")
        page.wait_for_selector("#requests button")
        for name, said in (("audit", "All is well"), ("retained", "tokens are retained"), ("tree-told", "edges")):
            page.click(f"#{name.removesuffix('-told')}-ask")
            says(page, name, said)
            assert page.locator(f"#{name}").inner_text().count(said) == 1


def test_tenants_have_what_they_were_promised(tiny_model: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:
    keys, tenants = tmp_path / "keys", tmp_path / "tenants.json"
    keys.write_text("ann key-of-ann\nbob key-of-bob\n")
    keys.chmod(0o600)
    tenants.write_text(
        json.dumps({HOSTILE: {"keys": ["ann"], "floor": "25%"}, "noisy": {"keys": ["bob"], "ceiling": "75%"}})
    )
    options = ("--kv-memory", "100KiB", "--tenants", str(tenants), "--api-keys", str(keys), "--canary", "off")
    with LiveServer.quire("--model", str(tiny_model), *options, "--admin-key", "key-of-admin") as live:
        for key in ("ann", "bob", "bob"):
            headers = {"Authorization": f"Bearer key-of-{key}"}
            status, answer = live.request("/v1/completions", {"prompt": "a" * 60, "max_tokens": 2}, headers=headers)
            assert status == 200, answer
        admin = {"Authorization": "Bearer key-of-admin"}
        page = opened(live)
        page.fill("#key-text", "key-of-admin")
        page.keyboard.press("Enter")
        page.locator(f'[data-id="{answer["id"]}"]').wait_for()
        page.wait_for_timeout(2500)
        found = live.request("/v1/cache/statistics", headers=admin)[1]["tenants"]
        bars = [each.get_attribute("aria-label") for each in page.locator("#tenants .bar").all()]
        assert [each.split(":")[0] for each in bars] == ["default", HOSTILE.split(":")[0], "noisy"]
        places = page.locator("#tenants .mark").evaluate_all("all => all.map((each) => parseFloat(each.style.left))")
        assert places == pytest.approx([25, 75], abs=0.1) and "floor" in bars[1] and "ceiling" in bars[2]
        shown = [
            (labels, value)
            for name, labels, value, _ in page.evaluate(FIGURES)
            if name == "quire_tenant_hit_tokens_total"
        ]
        assert shown == [(f"tenant={name}", each["hit_tokens"]) for name, each in found.items()] and shown[2][1] > 0
        page.click("#tree-ask")
        says(page, "tree-told", "Pages by tenant")
        rows = page.locator("#tree-told table", has_text="in use by").first.locator("tbody tr").all_inner_texts()
        assert sorted(tuple(row.split("\t")[:2]) for row in rows) == [("ann", HOSTILE), ("bob", "noisy")]
        assert page.evaluate("window.harmed") is None


def test_what_held_memory_when_it_was_short(live: LiveServer, opened: Callable[..., Any]) -> None:
    request_id = complete(live, "Eight answers have no room beside each other.", n=8, max_tokens=100, ignore_eos=True)
    [*_, last] = live.request("/v1/cache/history")[1]["shortages"]
    page = opened(live)
    page.click("#short-ask")
    says(page, "short", last["why"])
    row = page.locator("#short table").last.locator("tbody tr").first.inner_text()
    assert last["holds"] in row and f"{last['requests'][0]['request']}: {last['requests'][0]['pages']} pages" in row
    assert request_id in row
    used = page.locator("#short table").first.locator("tbody tr").first.locator("td").first.inner_text()
    assert 0 < int(used) <= live.statistics()["frames"]["full"]["total"]


def test_peers_and_the_store_say_how_they_are(tiny_model: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:
    storage = ("--storage", str(tmp_path / HOSTILE.replace("/", "")), "--storage-size", "32MiB")
    with apart(tiny_model, "tcp", *storage) as (prefill, [decode], port):
        ask(decode, prompt(1))
        found = at_rest(decode)["transfer"]["received"][f"127.0.0.1:{port}"]
        assert found["tokens"] > 0
        page, theirs = opened(decode), opened(prefill)
        says(page, "moves-body", "computes prompts for this one")
        row = page.locator("#moves-body table", has_text="what it does").locator("tbody tr td").all_inner_texts()
        assert row[0] == f"127.0.0.1:{port}" and row[2:5] == ["connected", str(found["asks"]), str(found["tokens"])]
        says(theirs, "moves-body", "asks this one")
        says(page, "moves-body", HOSTILE.replace("/", ""))
        says(page, "moves-body", "It answers.")
        prefill.close()
        says(page, "moves-body", "None is connected.")
        page.wait_for_selector("#moves-body .bad")


def test_names_are_no_markup(live: LiveServer, opened: Callable[..., Any]) -> None:
    complete(live, "a")
    page = opened(live)
    page.wait_for_selector("#requests button")
    assert HOSTILE in page.locator("#model").inner_text() and HOSTILE in page.title()
    assert "<b>own</b>" in page.locator("#requests button").first.get_attribute("title")
    page.fill("#explain-id", HOSTILE)
    page.click("#explain button")
    says(page, "explained", HOSTILE)
    assert page.evaluate("window.harmed") is None and page.locator("main img, main td b").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_nothing_serious(live: LiveServer, opened: Callable[..., Any], width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="it comes with the extra clients")
    complete(live, "What is looked at by axe")
    page = opened(live, width, scheme)
    page.locator("#requests button").first.click()
    says(page, "explained", "tokens")
    for name in ("audit", "retained", "short"):
        page.click(f"#{name}-ask")
        page.wait_for_selector(f"#{name} :is(p, table)")
    page.click("#tree-ask")
    page.wait_for_selector("#tree-told p")
    page.click("#plan-if button")
    page.wait_for_selector("#plan-if-told p")
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.keyboard.press("Home")
    assert page.locator("#audit").inner_text().startswith("All is well")


def test_a_key_is_asked_for_and_kept_in_memory_alone(opened: Callable[..., Any]) -> None:
    with LiveServer.echo(api_key="client", admin_key="operator") as live:
        page = opened(live)
        for key, said in (("", "asks for a key"), ("wrong", "is wrong"), ("client", "not the operator's")):
            if key:
                page.fill("#key-text", key)
                page.keyboard.press("Enter")
            says(page, "key-why", said)
            assert page.locator("#sections").is_hidden()
        page.fill("#key-text", "operator")
        page.keyboard.press("Enter")
        says(page, "state", "works")
        assert page.locator("#key").is_hidden() and page.input_value("#key-text") == ""
        kept = "[location.href, document.cookie, JSON.stringify({...localStorage, ...sessionStorage})]"
        assert "operator" not in str(page.evaluate(kept))


def test_a_section_that_cannot_be_shown_is_named_and_comes_back(browser: Any) -> None:
    """The others are shown, the console has the error, and the stream is not asked for anew."""

    def breaking(route: Any) -> None:
        head = "export function showMoves({ tiers, transfer }, token) {"
        text = route.fetch().text()
        assert head in text
        route.fulfill(body=text.replace(head, f"{head} if (window.breaks) null.links;"), content_type="text/javascript")

    page, told, asked = browser.new_page(), list[str](), list[str]()
    page.set_default_timeout(SECONDS)
    page.on("console", lambda each: told.append(each.text))
    page.on("request", lambda each: each.url.endswith("/v1/cache/live") and asked.append(each.url))
    page.route("**/static/moves.js", breaking)
    with LiveServer.echo() as live:
        page.goto(live.summary["url"] + "/")
        says(page, "state", "works")
        page.evaluate("window.breaks = true")
        says(page, "state", "Moves: this cannot be shown.")
        _, answer = live.request("/v1/completions", {"prompt": "x", "max_tokens": 2})
        page.locator(f'[data-id="{answer["id"]}"]').wait_for()
        page.evaluate("window.breaks = false")
        says(page, "state", "works")
        assert len(asked) == 1 and any("TypeError" in each for each in told)
    page.close()


def test_attempts_that_fail_leave_no_stream_open(browser: Any) -> None:
    page, asked, ended = browser.new_page(), list[Any](), list[Any]()
    page.set_default_timeout(SECONDS)
    for event, seen in (("request", asked), ("requestfailed", ended), ("requestfinished", ended)):
        page.on(event, lambda each, seen=seen: each.url.endswith("/v1/cache/live") and seen.append(each))
    with LiveServer.echo() as live, LiveRouter([live]) as router:
        page.route("**/health", lambda route: route.abort())
        page.goto(router.summary["url"] + "/")
        says(page, "state", "does not answer")
        while len(asked) < 3:
            page.wait_for_timeout(200)
        assert len(asked) - len(ended) <= 1, "a browser has six connections for a host"
        page.unroute("**/health")
        says(page, "state", "works")
    page.close()


def test_behind_a_router_it_says_whose_figures_it_shows(opened: Callable[..., Any]) -> None:
    with LiveServer.echo() as one, LiveServer.echo() as two, LiveRouter([one, two]) as router:
        page = opened(router)
        says(page, "state", "works")
        options = page.locator("#server-name option").all_inner_texts()
        assert options == [f"decode-{at} · {each.summary['url']}" for at, each in enumerate((one, two))]
        for at, each in ((0, one), (1, two)):
            _, answer = each.request("/v1/completions", {"prompt": "x", "max_tokens": 2 + at})
            page.select_option("#server-name", f"decode-{at}")
            page.wait_for_selector(f'[data-id="{answer["id"]}"]')
            assert page.locator("#requests tbody tr").count() == 1
            assert page.input_value("#server-name") == f"decode-{at}"
        two.close()
        says(page, "state", "does not answer")
        page.select_option("#server-name", "decode-0")
        says(page, "state", "works")


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_engine_that_dies_and_comes_back(opened: Callable[..., Any], restarts: int) -> None:
    with LiveServer.echo(max_restarts=restarts) as live:
        page = opened(live)
        says(page, "state", "works")
        assert live.request("/v1/completions", {"prompt": "crash", "max_tokens": 4})[0] == 503
        if not restarts:
            says(page, "state", "the engine stopped after an error")
            return
        page.wait_for_selector('[data-metric=quire_engine_restarts_total][data-value="1"]')
        says(page, "state", "works")
        live.close()
        says(page, "state", "does not answer")

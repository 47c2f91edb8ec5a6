"""The page in a headless Chromium: it sorts, toggles, hovers, fits a phone and asks nobody."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from report_helpers import write, write_run, write_sweep

from tc.report.__main__ import main

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium"),
]
WIDE = "'<pre style=width:900px>wide</pre>'"
IMAGE = "'<img src=x onerror=document.title=1>'"
HOSTILE = "</script><script>document.title='gone'</script><img src=x onerror=document.title='gone'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Root, as in a container, may not have Chromium's own sandbox.
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@dataclass
class Opened:
    """A page, and what it said and asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


def open_page(browser: Any, path: Path, width: int = 1200, **options: Any) -> Opened:
    opened = Opened(browser.new_page(viewport={"width": width, "height": 800}, **options))
    opened.page.on("console", lambda message: opened.said.append(message.text))
    opened.page.on("pageerror", lambda error: opened.said.append(str(error)))
    opened.page.on("request", lambda request: opened.asked.append(request.url))
    opened.page.goto(path.resolve().as_uri())
    opened.page.wait_for_selector("body[data-ready]", state="attached")
    return opened


def report(runs: Path, out: Path) -> Path:
    assert main([str(runs), "--output", str(out), "--format", "html"]) == 0
    return out / "report.html"


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three inits and two seeds, a failed run, a sweep, a damaged folder and a hostile name."""
    folder = tmp_path_factory.mktemp("some")
    runs = folder / "runs"
    jobs = []
    for number, init in enumerate(("copy_only", "full", "phase1")):
        for seed in (0, 1):
            path = runs / f"{init}-{seed}"
            write_run(path, 9.0 + 100 * number + seed, init__name=init, seed=seed)
            jobs.append((path, [f"init={init}", f"seed={seed}"]))
    write_run(runs / HOSTILE.replace("/", "\u2215"), None, init__name=HOSTILE)
    write_run(runs / "broken")
    write(runs / "broken" / "metrics.json", "{")
    jobs.append((runs / "never", ["init=full", "seed=9"]))
    write_sweep(runs, jobs)
    return report(runs, folder / "out")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    for number in range(200):
        own = {"policy__keep": [number // 4]}
        run = folder / "runs" / f"run-{number:03d}"
        write_run(run, 20.0 + number, layers=32, points=60, seed=number % 4, **own)
    return report(folder / "runs", folder / "out")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    write_run(folder / "runs" / "only")
    return report(folder / "runs", folder / "out")


def column(page: Any, section: str, number: int) -> list[str]:
    cells = page.locator(f"#{section} tbody tr td:nth-child({number})")
    return cells.all_inner_texts()


def heading(page: Any, section: str, name: str) -> Any:
    return page.locator(f"#{section} thead button", has_text=re.compile(f"^{re.escape(name)}$"))


def test_nothing_is_said_and_nobody_is_asked(browser: Any, some: Path) -> None:
    opened = open_page(browser, some)
    assert opened.said == []
    assert opened.asked == [some.resolve().as_uri()]
    # The control: an address in the page is refused by its policy, and that is seen here.
    opened.page.evaluate("new Image().src = 'http://127.0.0.1:9/x.png'")
    opened.page.wait_for_timeout(100)
    assert any("Content Security Policy" in text for text in opened.said)


def test_hostile_names_do_not_run(browser: Any, some: Path) -> None:
    opened = open_page(browser, some)
    assert opened.page.title() != "gone"
    assert opened.page.locator("img").count() == 0
    assert HOSTILE in opened.page.locator("#runs").inner_text()
    # The control: a handler that did come in would be stopped by the policy.
    opened.page.evaluate(f"document.body.insertAdjacentHTML('beforeend', {IMAGE})")
    opened.page.wait_for_timeout(100)
    assert opened.page.title() != "1"


def test_a_heading_sorts_by_value(browser: Any, some: Path) -> None:
    page = open_page(browser, some).page
    names = [
        h.split("\n")[0].strip() for h in page.locator("#summary thead button").all_inner_texts()
    ]
    number = names.index("student") + 1
    heading(page, "summary", "student").click()
    up = column(page, "summary", number)
    # As text 109.50 and 209.50 would come before 9.50.
    assert [cell.split(" ")[0] for cell in up] == ["9.50", "109.50", "209.50", ""]
    head = page.locator("#summary th", has_text=re.compile("^student$"))
    assert head.get_attribute("aria-sort") == "ascending"
    heading(page, "summary", "student").press("Enter")
    down = column(page, "summary", number)
    # What has no value stays last.
    assert [cell.split(" ")[0] for cell in down] == ["209.50", "109.50", "9.50", ""]
    assert head.get_attribute("aria-sort") == "descending"


def test_a_group_is_hidden_and_shown(browser: Any, some: Path) -> None:
    page = open_page(browser, some).page
    lines = page.locator("figure.chart").first.locator("path.line")
    assert lines.count() == 6
    button = page.locator(".legend button", has_text="init=full")
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    assert lines.count() == 4
    page.get_by_text("hide all").click()
    assert lines.count() == 0
    assert "all lines are hidden" in page.locator("figure.chart").first.inner_text()
    page.get_by_text("show all").click()
    assert lines.count() == 6


def test_a_line_tells_its_run_and_values(browser: Any, some: Path) -> None:
    page = open_page(browser, some).page
    chart = page.locator("figure.chart svg").first
    chart.scroll_into_view_if_needed()
    tip = page.locator("#tip")
    assert tip.is_hidden()
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "copy_only-0" in tip.inner_text() and "512 training tokens" in tip.inner_text()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.3)
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 30)
    assert re.search(r"phase1-[01]\n[\d,]+ training tokens: [\d.]+ x teacher", tip.inner_text())
    page.mouse.move(2, 2)
    assert tip.is_hidden()


def test_heat_maps_by_quantity_and_run(browser: Any, some: Path) -> None:
    page = open_page(browser, some).page
    cells = page.locator("#layers svg rect")
    assert cells.count() == 7 * 4
    page.get_by_label("Quantity", exact=True).select_option(label="Half-life")
    page.get_by_label("Rows", exact=True).select_option(
        label="full-1, from its beginning to its end"
    )
    assert cells.count() == (2 + 6) * 4
    cells.nth(1).hover()
    tip = page.locator("#tip").inner_text()
    assert tip == "full-1\ninit, layer 1: Half-life 2"


def test_runs_are_filtered_and_compared(browser: Any, some: Path) -> None:
    page = open_page(browser, some).page
    page.get_by_label("First run").select_option(label="copy_only-0")
    page.get_by_label("Second run").select_option(label="full-1")
    assert page.locator("#compared tbody tr").all_inner_texts() == [
        "init.name\tcopy_only\tfull",
        "seed\t0\t1",
    ]


def test_the_sweep_and_the_damaged_folder_are_told(browser: Any, some: Path) -> None:
    page = open_page(browser, some).page
    assert "6 done, 1 missing" in page.locator("#sweeps").inner_text()
    assert page.locator("#sweeps pre").inner_text() == "python run.py init=full seed=9"
    warning = page.locator(".warn").inner_text()
    assert "1 folder cannot be read" in warning and "broken" in warning


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["one", "some", "many"])
def test_a_phone_needs_no_sideways_scroll(
    browser: Any, which: str, scheme: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = request.getfixturevalue(which)
    opened = open_page(browser, path, 375, color_scheme=scheme)
    width = "document.documentElement.scrollWidth"
    assert opened.page.evaluate(width) == 375
    assert opened.said == []
    picture = tmp_path / "page.png"
    opened.page.screenshot(path=picture)
    assert picture.stat().st_size > 5_000
    # The control: something wider than the screen is seen.
    opened.page.evaluate(f"document.body.insertAdjacentHTML('beforeend', {WIDE})")
    assert opened.page.evaluate(width) > 375


CONTRAST = """() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const nodes = [...document.querySelectorAll('p, td, h2, a, .state, button, summary')];
  return Math.min(...nodes.map((node) => {
    const ink = light(getComputedStyle(node).color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser: Any, some: Path, scheme: str) -> None:
    assert open_page(browser, some, color_scheme=scheme).page.evaluate(CONTRAST) >= 4.5


def test_two_hundred_runs_stay_quick(browser: Any, many: Path) -> None:
    opened = open_page(browser, many)
    page = opened.page
    assert opened.said == []
    ready = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    assert page.evaluate(ready) < 15_000
    assert page.locator("#runs tbody tr").count() == 200
    page.get_by_label("filter runs").fill("run-19")
    assert page.locator("#runs tbody tr:visible").count() == 10
    heading(page, "runs", "run").click()
    heading(page, "runs", "run").click()
    assert column(page, "runs", 1)[0] == "run-199"


def test_a_single_run_has_its_layers_apart(browser: Any, one: Path) -> None:
    page = open_page(browser, one).page
    titles = page.locator("figcaption").all_inner_texts()
    assert "Alignment, layer by layer" in titles
    assert page.locator(".legend").count() == 0
    assert page.locator("#layers svg rect").count() == 2 * 4

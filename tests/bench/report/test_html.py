"""The report in headless Chromium, opened as a file: charts, tables, details, widths, markup that stays text."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.analysis import metrics
from bench.report import html, leaderboard
from bench.report.collect import Record
from tests.helpers.sample_rows import both

pytestmark = pytest.mark.browser
webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("needs chromium and chromedriver on PATH", allow_module_level=True)

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

TABLED, ALONE = 500, 2  # runs in tables of many, and runs whose setting no other run has
ROWS = TABLED + ALONE
MARKUP = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script> & done"
METHODS = {
    "suffix": ("speculative.suffix.SuffixDecoding", "EXACT"),
    "eagle": ("speculative.eagle.Eagle", "EXACT"),
    "calm": ("early_exit.calm.Calm", "RELAXED"),
    "nat": ("non_autoregressive.nat.Nat", "INDEPENDENT_MODEL"),
}
CONFIG = """
method: {name: eagle, _target_: methods.speculative.eagle.Eagle, depth: 4}
model: {name: smollm2}
dataset: {name: jsonl, path: .../prompts.jsonl}
sampling: {temperature: 0.0, top_k: 0, top_p: 1.0}
measure: {name: default}
hardware: {name: auto}
max_new_tokens: 64
"""
COSTS = {
    "model": {"name": "m"}, "hardware": "A CPU", "dtype": "bfloat16", "threads": 2,
    "peaks": {"sum": {"best": 4e10}, "matmul": {"best": 8e11}},
    "points": [
        {"batch": batch, "context": 128, "nodes": nodes, "seconds": 0.01, "flops": 3e8 * nodes * batch, "bytes": 3e8}
        for batch in (1, 4) for nodes in (1, 2, 4)
    ],
}  # fmt: skip


def record(folder: Path, number: int) -> Record:
    """A run of its own speed; every tenth is INVALID, and faster than all others. Some runs of one table are own."""
    method = list(METHODS)[number % len(METHODS)]
    target, guarantee = METHODS[method]
    summary: dict[str, Any] = json.loads(json.dumps(SUMMARY)) | {
        "run_id": f"run-{number}", "method": method, "model": "m", "model_revision": "1", "guarantee": guarantee,
        "dataset": "mtbench" if number < 350 else "gsm8k", "dataset_revision": {"content": "c"}, "dtype": "bfloat16",
        "hardware": "A CPU", "threads": 2 if number < TABLED else number, "batch_size": 1 if number % 3 else 8,
        "max_new_tokens": 64, "sampling": {"temperature": 0.0}, "ttft_s": {"mean": 0.0123456789},
        "agreement": {"exact": 0.993713163064833, "near_tie": 0.01, "reason": MARKUP},
        "quality": {"exact_match": 40 + number % 7} if number >= 350 else {},
        "verdict": {
            "valid": number % 10 != 0, "reasons": [] if number % 10 else [MARKUP], "warnings": [], "inconclusive": [],
        },
        "degeneration": {"method": {}, "baseline": {"longest_loop": 9.0}}, "ranking": {"text_loss": 0.1},
    }  # fmt: skip
    summary["agreement"] |= {"mean_logprob": -1.0, "baseline": {"mean_logprob": -1.0}}
    value = 1 + (number * 37 % ROWS) / ROWS + (0 if number % 10 else 5)
    summary["speedup"]["headline"] |= {"value": value, "low": value - 0.1, "high": value + 0.1}
    summary["speedup"]["novel"] |= {"value": 1 + (value - 1) / 2, "n": 9}
    summary["baseline"]["quality"] = {"exact_match": 43.0}
    manifest = {"method": {"name": method, "_target_": f"methods.{target}"}, "status": "finished", "note": MARKUP}
    own = number >= 350 and number % 6 == 0
    return Record(folder / f"run-{number}", manifest, summary, "own" if own else "reference")


PAIRS = [sample for i in range(4) for sample in both(f"{i}/1", {"ms": [9] * 5}, {"ms": [9, 8, 6], "tokens": [1, 2, 2]})]
SUMMARY = metrics.summarise(PAIRS, guarantee="EXACT", n_bootstrap=100)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 502 runs, some with samples that are markup, and of a cost record."""
    folder = tmp_path_factory.mktemp("results")
    lines = "".join(json.dumps(asdict(sample) | {"text": MARKUP}) + "\n" for sample in PAIRS)
    made = [record(folder, number) for number in range(ROWS)]
    for each in made[:20]:
        each.path.mkdir()
        (each.path / "samples.jsonl").write_text(lines)
        (each.path / "config.yaml").write_text(CONFIG)
    (folder / "costs" / "m").mkdir(parents=True)
    (folder / "costs" / "m" / "summary.json").write_text(json.dumps(COSTS))
    file = folder / "report.html"
    file.write_text(html.render(leaderboard.groups(made), [f"run-x: failed, {MARKUP}"]), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1500,1100"):
        options.add_argument(word)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def opened(driver: Any, page: Path) -> None:
    """Open the page and wait until it has unpacked its rows."""
    driver.get(page.as_uri())
    WebDriverWait(driver, 30).until(lambda _: count(driver) and driver.find_elements(By.CSS_SELECTOR, "svg.chart"))


@pytest.fixture
def browser(chromium: Any, page: Path) -> Iterator[Any]:
    """The page, freshly opened; nothing may have been logged when a test ends."""
    opened(chromium, page)
    yield chromium
    assert chromium.get_log("browser") == []
    assert chromium.title == html.TITLE, "a text of a record ran as a script"


def shown(browser: Any, column: str = "method") -> list[str]:
    """A column of the visible runs of the first table that is shown."""
    return browser.execute_script(
        """const table = document.querySelector("section.group:not([hidden]) table");
        const place = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === arguments[0]);
        const rows = [...table.querySelectorAll("tr.run")].filter((row) => !row.hidden);
        return rows.map((row) => row.cells[place].textContent.trim());""",
        column,
    )


def heading(browser: Any, name: str, inside: str = "section.group:not([hidden])") -> Any:
    """The button of a column, of the first table that is shown."""
    buttons = browser.find_element(By.CSS_SELECTOR, inside).find_elements(By.CSS_SELECTOR, "th button")
    return next(button for button in buttons if button.text == name)


def choose(browser: Any, name: str, value: str) -> None:
    (option,) = browser.find_elements(By.XPATH, f"//select[@name='{name}']/option[.='{value}']")
    option.click()


def count(browser: Any) -> str:
    return browser.find_element(By.ID, "count").text


def figures(browser: Any) -> dict[str, int]:
    """Marks by title of each chart that is shown."""
    return browser.execute_script(
        """const shown = [...document.querySelectorAll("figure")].filter((figure) => !figure.hidden);
        const marks = (figure) => figure.querySelectorAll("svg [aria-label=dot] path, svg [aria-label=dot] circle");
        const title = (figure) => figure.querySelector("h3").textContent;
        return Object.fromEntries(shown.map((figure) => [title(figure), marks(figure).length]));"""
    )


def test_it_opens_in_under_three_seconds(browser: Any, page: Path) -> None:
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})  # another process may have the machine
    opened(browser, page)
    assert browser.current_url.startswith("file://") and count(browser) == f"{ROWS} of {ROWS} runs shown"
    metrics = {m["name"]: m["value"] for m in browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
    assert 0 < metrics["TaskDuration"] < 3, metrics
    assert page.stat().st_size < 1e6


def test_rows_are_in_the_page_once_they_are_shown(browser: Any, page: Path) -> None:
    """Of a long table the first rows, and more on demand, in the order of all rows."""
    static = page.read_text(encoding="utf-8").count('<tr class="run')
    assert 0 < static <= html._STATIC and static < ROWS

    def rest() -> Any:
        return browser.find_element(By.CSS_SELECTOR, "section.group details[open] .rest")

    choose(browser, "dataset", "mtbench")
    choose(browser, "batch", "1")
    assert len(shown(browser)) == html.STEP and rest().text.startswith("The first 100 of 233 runs.")
    heading(browser, "novel").click()
    WebDriverWait(browser, 5).until(lambda _: "INVALID" not in shown(browser, "result"))
    best = max(float(value[:-1]) for value in shown(browser, "novel"))
    rest().find_element(By.XPATH, "button[1]").click()
    WebDriverWait(browser, 5).until(lambda _: len(shown(browser)) == 2 * html.STEP)
    assert browser.switch_to.active_element.text == "show 33 more"
    rest().find_element(By.XPATH, "button[1]").click()
    WebDriverWait(browser, 5).until(lambda _: len(shown(browser)) == 233)
    assert not browser.find_elements(By.CSS_SELECTOR, ".rest")
    ranked = [
        float(v[:-1]) for v, rank in zip(shown(browser, "novel"), shown(browser, "rank"), strict=True) if rank != "-"
    ]
    assert ranked == sorted(ranked, reverse=True) and ranked[0] == best
    assert len({row.get_attribute("id") for row in browser.find_elements(By.CSS_SELECTOR, "tr.run")}) == 233


def test_a_link_leads_to_a_run_that_is_not_in_the_page_yet(browser: Any) -> None:
    shown_ids = {row.get_attribute("id") for row in browser.find_elements(By.CSS_SELECTOR, "tr.run")}
    missing = next(f"run-{number}" for number in range(ROWS) if f"run-{number}" not in shown_ids)
    browser.execute_script("location.hash = arguments[0]", missing)
    row = WebDriverWait(browser, 5).until(lambda _: browser.find_element(By.CSS_SELECTOR, f"tr.target#{missing}"))
    assert row.is_displayed()


def test_without_scripts_the_first_rows_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<noscript>") == 1 and "out=page.md" in text
    assert text.index('<tr class="run') < text.index("application/gzip")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 900, 1400])
def test_it_fits_every_screen(browser: Any, page: Path, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 400}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    opened(browser, page)
    wide, drawn, dark, requests = browser.execute_script(
        """const brightness = (colour) => colour.match(/\\d+/g).slice(0, 3).reduce((sum, x) => sum + Number(x), 0);
        const style = getComputedStyle(document.body);
        document.querySelectorAll("section.group > details").forEach((fold) => { fold.open = true; });
        return [document.documentElement.scrollWidth, document.querySelectorAll("svg.chart").length,
          brightness(style.backgroundColor) < brightness(style.color),
          performance.getEntriesByType("resource").length];"""
    )
    assert wide <= width and drawn >= 4 and requests == 0
    assert dark is (scheme == "dark")
    if width == 1400:
        (result, *_) = browser.find_elements(By.CSS_SELECTOR, "th.c-result")
        assert result.rect["x"] + result.rect["width"] <= width, "the verdict is cut off"
    if width != 900:
        _save(browser, f"report-{width}-{scheme}.png")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def _save(browser: Any, name: str) -> None:
    """A picture for people, where they ask for it."""
    if folder := os.environ.get("DECODEBENCH_ARTIFACTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        assert browser.save_screenshot(str(Path(folder) / name))


def test_charts_of_speed_quality_and_machine_link_to_their_runs(browser: Any) -> None:
    drawn = figures(browser)
    assert drawn["Quality against speed"] - 1 > drawn["Speed-up"] > 10, "those that lost quality have no rank"
    assert drawn["Speed-up on novel text"] == drawn["Quality against speed"] - 1, "the baseline is a mark, too"
    assert drawn["Speed-up over batch size"] > 4 and drawn["Roofline"] == len(COSTS["points"])
    captions = [caption.text for caption in browser.find_elements(By.CSS_SELECTOR, "figure:not([hidden]) figcaption")]
    assert captions and all(caption.split(":")[0].startswith(("own", "reference")) for caption in captions)
    link = browser.find_element(By.CSS_SELECTOR, "figure:not([hidden]) svg a")
    row = browser.execute_script("return arguments[0].href.baseVal", link)[1:]
    browser.execute_script("document.querySelectorAll('section.group > details').forEach((f) => { f.open = false; })")
    browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", link)
    WebDriverWait(browser, 5).until(lambda _: browser.find_element(By.ID, row).is_displayed())


def test_own_runs_come_first_and_single_runs_share_a_table(browser: Any) -> None:
    summaries = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "section.group > details > summary")]
    assert len(summaries) == 5 and "own and reference" in summaries[0]
    assert summaries[-1] == f"Settings with a single run, reference {ALONE} runs"
    assert not any("own" in summary for summary in summaries[1:-1])
    marked = browser.find_elements(By.CSS_SELECTOR, "section.group:first-of-type .own")
    assert 0 < len(marked) == len(browser.find_elements(By.CSS_SELECTOR, ".own"))
    tiles = browser.find_element(By.CLASS_NAME, "tiles").text
    assert f"{ROWS}" in tiles and "A CPU" in tiles and f"{len(marked)} own" in tiles
    browser.find_element(By.CSS_SELECTOR, "nav summary").click()
    links = browser.find_elements(By.CSS_SELECTOR, "nav a")
    assert len(links) == len(summaries)
    links[-1].click()
    last = browser.find_elements(By.CSS_SELECTOR, "section.group table")[-1]
    WebDriverWait(browser, 5).until(lambda _: last.is_displayed())


def test_columns_can_be_chosen(browser: Any) -> None:
    def visible() -> list[str]:
        heads = browser.find_elements(By.CSS_SELECTOR, "section.group:first-of-type th")
        return [head.text for head in heads if head.is_displayed()]

    assert "method" in visible() and "memory" not in visible() and "guarantee" in visible()
    browser.find_element(By.CSS_SELECTOR, ".columns summary").click()
    for name in ("memory", "guarantee"):
        browser.find_element(By.CSS_SELECTOR, f".columns input[value={name}]").click()
    assert "memory" in visible() and "guarantee" not in visible()


def test_columns_sort_both_ways_and_invalid_runs_stay_last(browser: Any) -> None:
    for direction, sign in (("descending", -1), ("ascending", 1)):
        heading(browser, "speed-up").click()
        values, results = [float(cell[:-1]) for cell in shown(browser, "speed-up")], shown(browser, "result")
        valid = results.count("VALID")
        assert 0 < valid < len(results) and results == ["VALID"] * valid + ["INVALID"] * (len(results) - valid)
        ranked = sum(rank != "-" for rank in shown(browser, "rank"))
        assert 0 < ranked < valid and all(reason for reason in shown(browser, "not ranked")[ranked:valid])
        for part in (values[:ranked], values[ranked:valid]):
            assert part == sorted(part, key=lambda value: sign * value)
        assert max(values[:valid]) < min(values[valid:]), "the INVALID ones are the fastest here"
        assert set(shown(browser, "rank")[valid:]) == {"-"}
        sort = heading(browser, "speed-up").find_element(By.XPATH, "..").get_attribute("aria-sort")
        assert sort == direction
    heading(browser, "method").click()
    names = shown(browser)[:ranked]
    assert names == sorted(names)
    others = browser.find_elements(By.CSS_SELECTOR, "section.group:first-of-type th[aria-sort]:not([aria-sort=none])")
    assert [other.text for other in others] == ["method"]


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [("family", "early exit", 125), ("guarantee", "RELAXED", 125), ("batch", "8", 168), ("source", "own", 25)],
)
def test_filters(browser: Any, name: str, value: str, kept: int) -> None:
    choose(browser, name, value)
    assert count(browser) == f"{kept} of {ROWS} runs shown"
    if name == "guarantee":
        assert set(shown(browser, name)) == {value}
    assert 0 < figures(browser)["Speed-up"] <= kept
    browser.find_element(By.CSS_SELECTOR, "form button[type=reset]").click()
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert count(browser) == f"{ROWS} of {ROWS} runs shown"


def test_words_and_the_invalid_ones_can_be_left_out(browser: Any) -> None:
    browser.find_element(By.NAME, "invalid").click()
    assert count(browser).startswith("451 of") and "INVALID" not in shown(browser, "result")
    browser.find_element(By.NAME, "text").send_keys("run-499 nat")
    assert count(browser).startswith("1 of") and [run.split()[0] for run in shown(browser, "run")] == ["499"]
    browser.find_element(By.NAME, "text").send_keys(" nothing-like-it")
    assert count(browser).startswith("0 of")
    assert not [s for s in browser.find_elements(By.CSS_SELECTOR, "section.group") if s.is_displayed()]


def test_a_run_opens_to_its_command_agreement_samples_and_manifest(browser: Any) -> None:
    browser.find_element(By.NAME, "text").send_keys("run-13 eagle")
    row = next(r for r in browser.find_elements(By.CSS_SELECTOR, "tr.run") if r.is_displayed())
    button = row.find_element(By.CLASS_NAME, "more")
    assert button.get_attribute("aria-expanded") == "false"
    button.click()
    details = browser.find_element(By.ID, button.get_attribute("aria-controls"))
    assert button.get_attribute("aria-expanded") == "true" and details.is_displayed()
    WebDriverWait(browser, 5).until(lambda _: details.find_elements(By.TAG_NAME, "summary"))
    for fold in details.find_elements(By.TAG_NAME, "summary"):
        fold.click()
    command = "python -m bench method=eagle dataset=jsonl method.depth=4 dataset.path=prompts.jsonl max_new_tokens=64"
    command += " method.top_k=10 method.nodes=59 method.confidence=0.0 method.costs=null"  # not stored: of the class
    for text in (command, "near-ties\n1.00 %", "99.37 %", "mean 12.3 ms", "baseline, 5 tokens", "finished", MARKUP):
        assert text in details.text, text
    assert "0.993713" not in details.text and "{" not in details.text, "raw data"
    assert not details.find_elements(By.CSS_SELECTOR, "img, script, b"), "markup of a record became elements"
    browser.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    for copier, copied in ((details, command), (row, "run-13")):
        copy = copier.find_element(By.CLASS_NAME, "copy")
        copy.click()
        WebDriverWait(browser, 5).until(lambda _, button=copy: button.text == "copied")
        assert browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == copied
    heading(browser, "speed-up").click()
    assert row.find_element(By.XPATH, "following-sibling::tr[1]").get_attribute("id") == details.get_attribute("id")
    button.click()
    assert not details.is_displayed() and button.get_attribute("aria-expanded") == "false"
    button.click()
    browser.find_element(By.NAME, "text").send_keys("9999")
    assert not browser.find_elements(By.CSS_SELECTOR, "tr.detail"), "details go with their run"


def test_all_of_it_by_keyboard(browser: Any) -> None:
    def press(*keys: str) -> Any:
        for key in keys:
            browser.switch_to.active_element.send_keys(key)
        return browser.switch_to.active_element

    assert press(Keys.TAB).tag_name == "a", "the best run"
    while (focused := press(Keys.TAB)).get_attribute("name") != "family":
        assert focused.tag_name in ("a", "summary")
    reached = [press(Keys.TAB) for _ in range(10)]
    names = [element.get_attribute("name") or element.text for element in reached]
    assert names == [
        "guarantee",
        "dataset",
        "model",
        "batch",
        "hardware",
        "source",
        "text",
        "invalid",
        "all runs",
        "columns",
    ]
    while (focused := press(Keys.TAB)).tag_name == "select":
        assert focused.find_element(By.XPATH, "..").get_attribute("class") == "choose"
    assert focused.tag_name == "summary", focused.get_attribute("outerHTML")[:300]
    assert press(Keys.TAB).get_attribute("role") == "region"
    assert press(Keys.TAB).text == "method"
    assert press(Keys.ENTER).find_element(By.XPATH, "..").get_attribute("aria-sort") == "ascending"
    while not (focused := press(Keys.TAB)).get_attribute("aria-expanded"):
        assert focused.tag_name == "button"
    assert focused.get_attribute("aria-label").startswith("details of ")
    focused.send_keys(Keys.SPACE)
    assert browser.find_element(By.ID, focused.get_attribute("aria-controls")).is_displayed()


def test_screen_readers_are_told_what_is_what(browser: Any) -> None:
    unnamed = browser.execute_script(
        """const named = (e) => (e.ariaLabel || e.textContent || e.labels?.[0]?.textContent || "").trim();
        const all = [...document.querySelectorAll("button, select, input, [role], table caption")];
        return all.filter((e) => !named(e)).map((e) => e.outerHTML);"""
    )
    assert unnamed == []
    assert browser.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"
    tables = browser.find_elements(By.TAG_NAME, "table")
    assert tables and all(len(table.find_elements(By.CSS_SELECTOR, "caption")) == 1 for table in tables)
    assert not browser.find_elements(By.CSS_SELECTOR, "section.group th:not([scope=col])")


def test_nothing_of_a_record_can_run(browser: Any, page: Path) -> None:
    assert MARKUP not in page.read_text(encoding="utf-8")
    assert not browser.find_elements(By.CSS_SELECTOR, "img, iframe, object, [onerror]")
    assert len(browser.find_elements(By.CSS_SELECTOR, "script:not([type])")) == len(html._SCRIPTS)


def test_the_policy_stops_what_would_slip_through(chromium: Any, page: Path, tmp_path: Path) -> None:
    """Were markup to get into the page in spite of all, no script of its own would run."""
    bad = tmp_path / "bad.html"
    bad.write_text(page.read_text(encoding="utf-8").replace("<main ", f"{MARKUP}<main "), encoding="utf-8")
    opened(chromium, bad)
    assert chromium.title == html.TITLE and count(chromium).startswith(f"{ROWS} of")
    assert any("Content Security Policy" in row["message"] for row in chromium.get_log("browser"))

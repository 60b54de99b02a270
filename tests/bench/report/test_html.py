"""The report in headless Chromium, opened as a file: sorting, filters, details, keyboard, markup that stays text."""

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

ROWS = 500
MARKUP = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script> & done"
METHODS = {
    "suffix": ("speculative.suffix.SuffixDecoding", "EXACT"),
    "eagle": ("speculative.eagle.Eagle", "EXACT"),
    "calm": ("early_exit.calm.Calm", "RELAXED"),
    "nat": ("non_autoregressive.nat.Nat", "INDEPENDENT_MODEL"),
}


def record(folder: Path, number: int) -> Record:
    """A run of its own speed; every tenth is INVALID, and faster than all others."""
    method = list(METHODS)[number % len(METHODS)]
    target, guarantee = METHODS[method]
    summary: dict[str, Any] = json.loads(json.dumps(SUMMARY)) | {
        "run_id": f"run-{number}", "method": method, "model": "m", "model_revision": "1", "guarantee": guarantee,
        "dataset": "mtbench" if number < 350 else "gsm8k", "dataset_revision": {"content": "c"}, "dtype": "bfloat16",
        "hardware": "A CPU", "threads": 2, "batch_size": 1 if number % 3 else 8, "max_new_tokens": 64,
        "sampling": {"temperature": 0.0}, "agreement": {"exact": 0.99, "near_tie": 0.01, "reason": MARKUP},
        "verdict": {"valid": number % 10 != 0, "reasons": [] if number % 10 else [MARKUP], "warnings": []},
    }  # fmt: skip
    value = 1 + (number * 37 % ROWS) / ROWS + (0 if number % 10 else 5)
    summary["speedup"]["total"] |= {"value": value, "low": value - 0.1, "high": value + 0.1}
    manifest = {"method": {"name": method, "_target_": f"methods.{target}"}, "status": "finished", "note": MARKUP}
    return Record(folder / f"run-{number}", manifest | {"argv": ["bench", "method=<b>"]}, summary)


PAIRS = [sample for i in range(4) for sample in both(f"{i}/1", {"ms": [9] * 5}, {"ms": [9, 8, 6], "tokens": [1, 2, 2]})]
SUMMARY = metrics.summarise(PAIRS, guarantee="EXACT", n_bootstrap=100)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 500 runs, with samples that are markup."""
    folder = tmp_path_factory.mktemp("results")
    lines = "".join(json.dumps(asdict(sample) | {"text": MARKUP}) + "\n" for sample in PAIRS)
    made = [record(folder, number) for number in range(ROWS)]
    for each in made[:20]:
        each.path.mkdir()
        (each.path / "samples.jsonl").write_text(lines)
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


@pytest.fixture
def browser(chromium: Any, page: Path) -> Iterator[Any]:
    """The page, freshly opened; nothing may have been logged when a test ends."""
    chromium.get(page.as_uri())
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


def test_it_opens_in_under_two_seconds(browser: Any, page: Path) -> None:
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})  # another process may have the machine
    browser.get(page.as_uri())
    assert browser.current_url.startswith("file://") and count(browser) == f"{ROWS} of {ROWS} runs shown"
    metrics = {m["name"]: m["value"] for m in browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
    assert 0 < metrics["TaskDuration"] < 2, metrics
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0, "it fetches something"


def test_a_picture_for_people_to_look_at(browser: Any, tmp_path: Path) -> None:
    folder = Path(os.environ.get("DECODEBENCH_ARTIFACTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    browser.find_element(By.CSS_SELECTOR, "tr.run button").click()
    assert browser.save_screenshot(str(folder / "report.png")) and (folder / "report.png").stat().st_size > 10_000


def test_columns_sort_both_ways_and_invalid_runs_stay_last(browser: Any) -> None:
    for direction, sign in (("descending", -1), ("ascending", 1)):
        heading(browser, "speed-up").click()
        values, results = [float(cell[:-1]) for cell in shown(browser, "speed-up")], shown(browser, "result")
        valid = results.count("VALID")
        assert 0 < valid < len(results) and results == ["VALID"] * valid + ["INVALID"] * (len(results) - valid)
        assert values[:valid] == sorted(values[:valid], key=lambda value: sign * value)
        assert max(values[:valid]) < min(values[valid:]), "the INVALID ones are the fastest here"
        assert set(shown(browser, "rank")[valid:]) == {"-"}
        sort = heading(browser, "speed-up").find_element(By.XPATH, "..").get_attribute("aria-sort")
        assert sort == direction
    heading(browser, "method").click()
    names = shown(browser)[:valid]
    assert names == sorted(names)
    others = browser.find_elements(By.CSS_SELECTOR, "section.group:first-of-type th[aria-sort]:not([aria-sort=none])")
    assert [other.text for other in others] == ["method"]


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [("family", "early exit", 125), ("guarantee", "RELAXED", 125), ("batch", "8", 167), ("dataset", "gsm8k", 150)],
)
def test_filters(browser: Any, name: str, value: str, kept: int) -> None:
    choose(browser, name, value)
    assert count(browser) == f"{kept} of {ROWS} runs shown"
    if name in ("family", "guarantee"):
        assert set(shown(browser, name)) == {value}
    dots = browser.execute_script(
        "return document.querySelectorAll('section.group:not([hidden]) [data-run]:not(.gone)').length"
    )
    assert 0 < dots <= 2 * kept
    browser.find_element(By.CSS_SELECTOR, "form button[type=reset]").click()
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert count(browser) == f"{ROWS} of {ROWS} runs shown"


def test_words_and_the_invalid_ones_can_be_left_out(browser: Any) -> None:
    browser.find_element(By.NAME, "invalid").click()
    assert count(browser).startswith("450 of") and "INVALID" not in shown(browser, "result")
    browser.find_element(By.NAME, "text").send_keys("run-499 nat")
    assert count(browser).startswith("1 of") and shown(browser, "run") == ["run-499"]
    browser.find_element(By.NAME, "text").send_keys(" nothing-like-it")
    assert count(browser).startswith("0 of")
    assert not [s for s in browser.find_elements(By.CSS_SELECTOR, "section.group") if s.is_displayed()]


def test_a_run_opens_to_its_manifest_agreement_and_samples(browser: Any) -> None:
    browser.find_element(By.NAME, "text").send_keys("run-13 eagle")
    row = next(r for r in browser.find_elements(By.CSS_SELECTOR, "tr.run") if r.is_displayed())
    button = row.find_element(By.TAG_NAME, "button")
    assert button.get_attribute("aria-expanded") == "false"
    button.click()
    details = browser.find_element(By.ID, button.get_attribute("aria-controls"))
    assert button.get_attribute("aria-expanded") == "true" and details.is_displayed()
    for text in (
        "python -m bench method=<b>",
        "near_tie",
        "0.01",
        '"status": "finished"',
        "baseline, 5 tokens",
        MARKUP,
    ):
        assert text in details.text, text
    assert not details.find_elements(By.CSS_SELECTOR, "img, script, b"), "markup of a record became elements"
    heading(browser, "speed-up").click()
    assert row.find_element(By.XPATH, "following-sibling::tr[1]").get_attribute("id") == details.get_attribute("id")
    button.click()
    assert not details.is_displayed() and button.get_attribute("aria-expanded") == "false"
    button.click()
    browser.find_element(By.NAME, "text").send_keys("9999")
    assert not details.is_displayed(), "details go with their run"


def test_all_of_it_by_keyboard(browser: Any) -> None:
    def press(*keys: str) -> Any:
        for key in keys:
            browser.switch_to.active_element.send_keys(key)
        return browser.switch_to.active_element

    assert press(Keys.TAB).get_attribute("name") == "family"
    reached = [press(Keys.TAB) for _ in range(8)]
    names = [element.get_attribute("name") or element.text for element in reached]
    assert names == ["guarantee", "dataset", "model", "batch", "hardware", "text", "invalid", "all runs"]
    region = press(Keys.TAB)
    assert region.get_attribute("role") == "region" and region.get_attribute("aria-label").startswith("gsm8k")
    assert press(Keys.TAB).text == "rank"
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
    assert not browser.find_elements(By.CSS_SELECTOR, "th:not([scope=col])")


def test_nothing_of_a_record_can_run(browser: Any, page: Path) -> None:
    assert MARKUP not in page.read_text(encoding="utf-8")
    assert not browser.find_elements(By.CSS_SELECTOR, "img, iframe, object, [onerror]")
    assert len(browser.find_elements(By.CSS_SELECTOR, "script:not([type])")) == 1


def test_the_policy_stops_what_would_slip_through(chromium: Any, page: Path, tmp_path: Path) -> None:
    """Were markup to get into the page in spite of all, no script of its own would run."""
    bad = tmp_path / "bad.html"
    bad.write_text(page.read_text(encoding="utf-8").replace("<main>", f"<main>{MARKUP}"), encoding="utf-8")
    chromium.get(bad.as_uri())
    assert chromium.title == html.TITLE and count(chromium).startswith(f"{ROWS} of")
    assert any("Content Security Policy" in row["message"] for row in chromium.get_log("browser"))

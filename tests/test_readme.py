"""The README tells the truth: its tables come from the committed records, its commands exist and compose."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bench import cli, preflight, readme, sweep
from bench.lossless import __main__ as lossless

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"<!-- (?:table|leaderboard|lossless).*?<!-- end -->", "", TEXT, flags=re.DOTALL)
COMMANDS = [line.strip().split("  #")[0].strip() for line in PROSE.splitlines() if line.startswith("    ")]


def test_tables_come_from_the_records():
    assert readme.written(TEXT, ROOT / "results") == TEXT, "run: python -m bench.readme"
    assert "no record yet" not in TEXT


def test_results_come_from_the_records():
    text = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert readme.results_page(ROOT / "results") == text, "run: python -m bench.readme"
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
    anchors = {
        re.sub(r"[^\w\- ]", "", line[3:].lower()).replace(" ", "-") for line in text.splitlines() if line[:3] == "## "
    }
    assert anchors >= set(re.findall(r"\]\(#([^)]+)\)", text))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python -m bench ")])
def test_bench_commands_compose(command, capsys, tmp_path):
    words = shlex.split(command)[3:]
    if words[0] in ("list", "show", "doctor", "validate"):
        assert cli.main([str(ROOT / "results") if word == "results" else word for word in words]) in (0, 1)
    elif words[0] in ("compare", "collect", "report"):
        out = [f"out={tmp_path / 'report.html'}"] if words[0] == "report" else []
        assert cli.main([*words, f"paths.results={ROOT / 'results'}", *out]) == 0
    elif "-m" in words or words[0].startswith("sweep="):
        _, rest = sweep.read_words([word for word in words if word != "-m"])
        assert preflight.compose_sweep(rest)
    else:
        assert preflight.compose(words).method["name"]
    assert "Unknown" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python -m bench.lossless")])
def test_lossless_commands_compose(command):
    _, _, overrides = lossless.split(shlex.split(command)[3:])
    assert preflight.compose(overrides)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split()[1] for command in COMMANDS if command.startswith("make ")]
    assert {"bench", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        if not link.startswith("http"):
            assert (ROOT / link).exists(), link

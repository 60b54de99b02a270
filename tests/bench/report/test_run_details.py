"""What the page shows of a run: text for readers, and a command that can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.analysis import metrics
from bench.report import run_details
from bench.report.collect import Record
from bench.report.leaderboard import Row
from tests.helpers.sample_rows import both

PAIRS = [sample for i in range(4) for sample in both(f"{i}/1", {"ms": [9] * 5}, {"ms": [9, 8, 6], "tokens": [1, 2, 2]})]
CONFIG = """
method: {name: prompt_lookup, gamma: 5}
model: {name: smollm2}
dataset: {name: jsonl, path: ".../my prompts.jsonl"}
sampling: {temperature: 0.0, top_k: 0, top_p: 1.0}
measure: {name: default}
hardware: {name: auto}
"""


def details(folder: Path, manifest: dict[str, Any], **changes: Any) -> dict[str, Any]:
    summary = metrics.summarise(PAIRS, guarantee="EXACT", n_bootstrap=100) | changes
    return run_details.details(Row(Record(folder, manifest, summary), summary, "speculative", "", 1))


def test_the_command_is_the_run_s_own_and_has_no_censored_path(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    found = details(tmp_path, {"argv": ["bench", "-m", "method=glob(*)"]})["command"]
    assert found.startswith("python -m bench method=prompt_lookup dataset=jsonl")
    assert "method.gamma=5" in found and "my prompts.jsonl" in found and "..." not in found and "glob" not in found


@pytest.mark.parametrize("text", [None, "- a list", "{", "method: {name: removed}", "method: 1"])
def test_what_cannot_be_repeated_has_no_command(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    assert details(tmp_path, {})["command"] is None


def test_numbers_are_for_readers(tmp_path: Path) -> None:
    found = details(
        tmp_path,
        {"seconds": {"loop": 1234.5678, "timed": 0.123456789}, "done": True, "error": None, "shares": [0.5] * 20},
        agreement={"exact": 0.993713163064833, "n_violations": 0},
        acceptance_rate=0.123456789,
        quality={"bleu": 30.123456},
        baseline=metrics.summarise(PAIRS, guarantee="EXACT", n_bootstrap=100)["baseline"] | {"quality": {"bleu": 31.0}},
    )
    assert ("identical to the target", "99.37 %") in found["agreement"]
    assert ("acceptance", "0.1235") in found["numbers"] and ("BLEU", "30.12 (baseline 31.00)") in found["numbers"]
    facts = dict(found["manifest"])
    assert facts["seconds.loop"] == "1,235" and facts["seconds.timed"] == "0.1235"
    assert facts["done"] == "yes" and facts["error"] == "-" and facts["shares"].endswith("0.5, ... 8 more")

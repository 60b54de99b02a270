"""Records of the same or of a similar run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.config import compose
from bench.records import lookup

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
EAGLE = ["method=eagle", "dataset=mtbench", "measure=quick"]


@pytest.mark.parametrize(
    "change", [[], ["max_new_tokens=64"], ["dataset.limit=3", "hardware=cpu_fp32", "measure.repeats=2"]]
)
def test_prompts_tokens_and_machine_may_differ(change: list[str]) -> None:
    found = lookup.similar(REFERENCE, compose.compose([*EAGLE, *change]))
    assert found and all(path.name.startswith("eagle-mtbench-smollm2-") for path in found)


@pytest.mark.parametrize(
    "change",
    [
        ["method.depth=4"],
        ["sampling=sample", "sampling.top_k=7"],
        ["batch_size=2"],
        ["batch_size=4", "measure.refill=true"],
    ],
)
def test_what_is_measured_may_not(change: list[str]) -> None:
    assert lookup.similar(REFERENCE, compose.compose([*EAGLE, *change])) == []


def test_the_closest_is_first() -> None:
    words = ["method=nat", "model=multi30k_4_4", "dataset=multi30k", "max_new_tokens=80"]
    first, *others = lookup.similar(REFERENCE, compose.compose([*words, "batch_size=32"]))
    assert (
        lookup.find(REFERENCE, compose.compose([*words, "batch_size=32"]), lookup.resolved(_manifest(first))) == first
    )
    assert all(_manifest(other)["batch_size"] == 32 for other in others)


def _manifest(folder: Path) -> dict[str, Any]:
    return next(entry.manifest for entry in lookup.entries(REFERENCE) if entry.path == folder)

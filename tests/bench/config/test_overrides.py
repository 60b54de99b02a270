"""A configuration becomes a command line that composes it again."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from bench.config import compose, identity, overrides
from bench.records import lookup

REFERENCE = Path(__file__).parents[3] / "results" / "reference"


@pytest.mark.parametrize(
    "words",
    [
        ["method=eagle", "dataset=mtbench", "measure=quick"],
        ["method=suffix", "model=hf", "model.name=Qwen/Qwen3-0.6B", "dataset=demo", "max_new_tokens=17"],
        ["method=prompt_lookup", "dataset=jsonl", "dataset.path='my prompts, first.jsonl'", "measure=full"],
        ["method=speculative_sampling", "method.draft_model=random", "sampling=sample", "sampling.temperature=0.7"],
        ["method=calm", "method.exits=[4,8]", "batch_size=4", "hardware=cpu_fp32", "hardware.threads=1"],
        ["method=medusa", "measure=quick", "dataset.limit=null", "max_new_tokens=128", "seed=3", "max_context=512"],
    ],
)
def test_words_compose_what_they_were_made_of(words: list[str]) -> None:
    cfg = compose.compose(words)
    found = overrides.words(cfg.to_dict())
    assert compose.compose(found) == cfg
    assert len(found) <= len(words)


def test_records_get_the_command_that_repeats_them() -> None:
    entries = {entry.path.name.rpartition("-")[0]: entry for entry in lookup.entries(REFERENCE)}  # one of each kind
    for entry in list(entries.values())[::4]:
        cfg = compose.compose(overrides.words(entry.config))
        assert identity.strip(cfg.to_dict()) == entry.settings, entry.path.name


def test_another_method_takes_the_place_without_its_settings() -> None:
    cfg = compose.compose(["method=eagle", "method.depth=3", "model=random", "dataset.limit=2"])
    text = overrides.command(cfg.to_dict(), "-m", method="glob(*)")
    assert shlex.split(text) == ["python", "-m", "bench", "-m", "method=glob(*)", "model=random", "dataset.limit=2"]

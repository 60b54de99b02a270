"""Committed records that tests work on, chosen by what they hold rather than by the order of a folder."""

from __future__ import annotations

from pathlib import Path

from bench.records import run_folder

REFERENCE = Path(__file__).parents[2] / "results" / "reference"


def with_samples(pattern: str) -> Path:
    """The first run in the order of names that kept its samples and has a column of memory.

    Args:
        pattern: of the folder's name, such as ``suffix-mtbench-*``.
    """
    for folder in sorted(REFERENCE.glob(pattern)):
        if (folder / run_folder.PACKED).is_file() and '"memory"' in (folder / "summary.json").read_text():
            return folder
    raise FileNotFoundError(f"no record {pattern} in results/reference kept its samples; commit one with them")
